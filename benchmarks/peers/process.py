"""Another implementation in a process and a virtual environment of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).resolve().parent

#: Environment → what is installed there. Libraries that we use, too, have our versions (constraints.txt).
REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "tunix": ("google-tunix==0.1.7", "jax", "jaxlib", "flax", "optax"),
    "transformers": ("torch", "transformers"),
}


class PeerError(RuntimeError):
    """A peer failed; the message holds its traceback."""


def pinned(names: Sequence[str], constraints: str) -> list[str]:
    """The names with the versions of a constraints file; one that has a version keeps it.

    Raises:
      KeyError: a name without a version that the file does not have either.
    """
    versions = dict(line.split("==") for line in constraints.split() if line.count("==") == 1)
    return [name if "==" in name else f"{name}=={versions[name]}" for name in names]


def environment(name: str, *, root: Path = ROOT) -> Path:
    """The interpreter of a peer's virtual environment under runs/peers/, made on first use (minutes, a gigabyte)."""
    wanted = pinned(REQUIREMENTS[name], (root / "constraints.txt").read_text(encoding="utf-8"))
    folder = root / "runs" / "peers" / name
    stamp = folder / "installed.txt"
    python = folder / "bin" / "python"
    if not stamp.exists() or stamp.read_text(encoding="utf-8").split() != wanted:
        print(f"making {folder.relative_to(root)}: {' '.join(wanted)}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *wanted], check=True, stdout=sys.stderr)
        stamp.write_text("\n".join(wanted) + "\n", encoding="utf-8")
    return python


class Peer:
    """A peer's script, running. `call` is synchronous: while one computes, nobody else does."""

    def __init__(self, python: Path | str, script: Path, log: Path) -> None:
        """`log` is where the peer's error stream goes."""
        # A peer finds none of our packages, and is not slowed by a setting that was meant for others.
        hidden = {"OMP_NUM_THREADS"} | ({"PYTHONPATH"} if str(python) != sys.executable else set())
        env = {name: value for name, value in os.environ.items() if name not in hidden}
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [str(python), str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                encoding="utf-8",
                env=env,
            )

    def call(self, name: str, **arguments: Any) -> tuple[Any, float]:
        """(result, seconds that the peer spent in the call itself: without the pipe and without JSON).

        Raises:
          PeerError: the call failed, or the process is gone.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):  # its end is told below
            self._process.stdin.write(json.dumps({"call": name, **arguments}) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            end = self._log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise PeerError(f"{name}: the process ended. The last lines of {self._log}:\n{end}")
        reply = json.loads(line)
        if "error" in reply:
            raise PeerError(f"{name}: {reply['error']}")
        return reply["result"], reply["seconds"]

    def close(self) -> None:
        """Let the process end."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_peer(name: str, script: str) -> Peer:
    """A script of this folder in the environment `name` (empty: our own)."""
    python = environment(name) if name else Path(sys.executable)
    stamp = time.strftime("%H%M%S")
    return Peer(python, SCRIPTS / script, ROOT / "runs" / "peers" / f"{script}.{stamp}.log")
