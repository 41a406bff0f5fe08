"""What a run directory says about its run: configuration, code version, command and seeds (law 11)."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psearch_jax
from psearch_jax.config import Config
from psearch_jax.config_files import config_hash, flatten, to_yaml
from psearch_jax.errors import UserError

#: Packages whose version can change a number.
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "scann", "tokenizers")


def save_run_record(
    config: Config,
    directory: str | Path,
    command: Sequence[str] | None = None,
    origins: Mapping[str, str] | None = None,
) -> None:
    """Write `config.yaml` (replaced whole) and add a line to `run.jsonl` (one line a start).

    Args:
      config: the resolved configuration; `config.yaml` can be given to any command again.
      directory: the run directory; made if it is not there.
      command: what was typed; default `sys.argv`.
      origins: where each value came from, written beside it.

    Raises:
      UserError: the directory cannot be written.
    """
    directory = Path(directory)
    flat = flatten(config)
    record: dict[str, Any] = {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv if command is None else command),
        "config_hash": config_hash(config),
        "code_version": code_version(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "seeds": {key: value for key, value in flat.items() if key.endswith("seed")},
        "config": flat,  # `config.yaml` has the newest only
    }
    temporary = directory / ".config.yaml.new"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        temporary.write_text(to_yaml(config, origins), encoding="utf-8")
        os.replace(temporary, directory / "config.yaml")
        with (directory / "run.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    except OSError as error:
        raise UserError(f"cannot write the run directory {directory}: {error.strerror}") from error


def code_version() -> str:
    """`git describe` of the checkout this package lies in, else the version of the package."""
    here = Path(psearch_jax.__file__).resolve().parents[1]
    if (here / ".git").exists():
        command = ["git", "-C", str(here), "describe", "--always", "--tags", "--dirty"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
            return done.stdout.strip()
        except (OSError, subprocess.SubprocessError):
            pass  # no git, or no commit yet
    return psearch_jax.__version__


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
