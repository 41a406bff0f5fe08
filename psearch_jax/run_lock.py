"""One run a directory: a second one is refused while the first lives.

The operating system holds the lock for the process and lets it go when that ends, however it ends; so after
`kill -9` nothing has to be cleared up.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from psearch_jax.errors import UserError

LOCK_FILE = ".lock"


@contextmanager
def held(directory: str | Path) -> Iterator[None]:
    """Hold a run directory; it is made if it is not there.

    Raises:
      UserError: a living process has it, or it cannot be written.
    """
    path = Path(directory) / LOCK_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(
            f"cannot write the run directory {directory}: {error.strerror}; name another with "
            "run_directory=…"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"the run directory {directory} is in use by {_holder(path)}; wait for it, stop it, or "
                "name another with run_directory=…"
            ) from error
        os.ftruncate(descriptor, 0)
        os.write(
            descriptor, json.dumps({"process": os.getpid(), "host": socket.gethostname()}).encode()
        )
        yield
    finally:
        os.close(descriptor)


def in_use(directory: str | Path) -> bool | None:
    """Whether a living process holds a run directory; None where there is no lock (results alone)."""
    try:
        descriptor = os.open(Path(directory) / LOCK_FILE, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(descriptor)
    return False


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        return f"process {holder['process']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
