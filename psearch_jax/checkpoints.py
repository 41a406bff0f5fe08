"""Everything that a resumed run needs, saved and restored (law 13).

Orbax writes the arrays; this file adds what a killed run needs besides. A checkpoint is a directory
named by its step:

    <directory>/<step>/arrays/         Orbax (OCDBT + Zarr), one entry a leaf
    <directory>/<step>/extras.json     what the caller wants back: data position, configuration hash, …
    <directory>/<step>/manifest.json   leaf shapes and dtypes, score, size and CRC-32 of every other file

It is written under a name that begins with a dot and then renamed, so a directory with a number for a
name is complete. It is read only after all its checksums agree; one that is damaged is set aside as
`<step>.damaged` and the one before it is taken.

A save holds the caller up only while the arrays are copied to the host; a thread writes the rest. With several
processes each writes its own shards (the directory must be one that all of them see), and the first does what is
done once: names, manifest, deletions.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import warnings
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from psearch_jax import processes
from psearch_jax.errors import UserError

MANIFEST = "manifest.json"
EXTRAS = "extras.json"
ARRAYS = "arrays"


class DamagedCheckpoint(Exception):
    """A checkpoint whose files are missing, cut short or changed."""


@dataclass(frozen=True)
class Restored:
    """What came back: the step, a tree like the one asked for, and the extras."""

    step: int
    state: Any
    extras: dict[str, Any]


class Checkpointer:
    """Saves and restores pytrees of arrays under one directory.

    Args:
      directory: where the checkpoints lie; made at the first save.
      keep: how many of the newest to keep, at least 1.
      keep_best: also keep the one with the highest score.
      keep_every: also keep those whose step is a multiple of it; 0: none.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep: int = 2,
        keep_best: bool = False,
        keep_every: int = 0,
    ) -> None:
        if keep < 1:
            raise UserError(f"cannot keep {keep} checkpoints: keep at least 1")
        self.directory = Path(directory).absolute()
        self.keep, self.keep_best, self.keep_every = keep, keep_best, keep_every
        self.spare: int | None = None  # a step that is kept whatever the rules say
        self._writing: threading.Thread | None = None
        self._failure: BaseException | None = None

    def steps(self) -> list[int]:
        """The steps that are there, oldest first."""
        if not self.directory.is_dir():
            return []
        return sorted(int(p.name) for p in self.directory.iterdir() if p.name.isdecimal())

    def save(
        self,
        step: int,
        state: Any,
        extras: Mapping[str, Any] | None = None,
        *,
        score: float | None = None,
        wait: bool = True,
    ) -> Path:
        """Write `state` (a pytree of arrays) and `extras` (JSON) as checkpoint `step`.

        A checkpoint of the same step is replaced; older ones that none of the rules keeps are deleted.

        Args:
          score: how good it is, for `keep_best`.
          wait: return when it is on disk. Otherwise return as soon as the arrays are copied, after which their
            buffers may be donated; what then goes wrong is raised by the next `save`, `wait` or restore.

        Raises:
          UserError: the disk is full or the directory cannot be written; nothing half-written stays.
        """
        self.wait()
        temporary = self.directory / f".new-{step}"
        leaves = _named_leaves(state)
        manifest = {
            "step": step,
            "score": score,
            "leaves": {name: _describe(leaf) for name, leaf in leaves.items()},
        }
        writer = None
        try:
            if processes.is_first():
                self.directory.mkdir(parents=True, exist_ok=True)
                self._clear_leftovers()
                temporary.mkdir()
                _write_json(temporary / EXTRAS, dict(extras or {}))
            writer = ocp.StandardCheckpointer()
            writer.save(temporary / ARRAYS, {k: _storable(v) for k, v in leaves.items()})
        except Exception as error:
            if writer is not None:
                writer.close()
            self._give_up(temporary, error)
        # Not a daemon: a program that ends waits for its last checkpoint.
        self._writing = threading.Thread(
            target=self._finish, args=(writer, temporary, manifest), name="checkpoint"
        )
        self._writing.start()
        if wait:
            self.wait()
        return self.directory / str(step)

    def wait(self) -> None:
        """Return when what `save` began is on disk.

        Raises:
          UserError: as `save`.
        """
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _finish(self, writer: Any, temporary: Path, manifest: dict[str, Any]) -> None:
        """The second half of a save, in a thread of its own."""
        try:
            with writer:
                writer.wait_until_finished()  # of every process
            if processes.is_first():
                self._publish(temporary, manifest)
        except Exception as error:
            try:
                self._give_up(temporary, error)
            except Exception as explained:
                self._failure = explained
        except BaseException as error:
            self._failure = error

    def _publish(self, temporary: Path, manifest: dict[str, Any]) -> None:
        step = manifest["step"]
        files = {str(p.relative_to(temporary)): _digest(p) for p in _files(temporary)}
        _write_json(temporary / MANIFEST, manifest | {"files": files})
        final, old = self.directory / str(step), self.directory / f".old-{step}"
        if final.exists():
            final.rename(old)
        temporary.rename(final)
        _sync_directory(self.directory)
        for expired in self._expired():
            shutil.rmtree(self.directory / str(expired))
        shutil.rmtree(old, ignore_errors=True)

    def _expired(self) -> list[int]:
        """The steps that none of the rules keeps."""
        steps = self.steps()
        kept = {*steps[-self.keep :], self.spare}
        if self.keep_every:
            kept.update(step for step in steps if step % self.keep_every == 0)
        if self.keep_best:
            scores = {step: score for step in steps if (score := self.score(step)) is not None}
            kept.update(sorted(scores, key=lambda step: (scores[step], step))[-1:])
        return [step for step in steps if step not in kept]

    def score(self, step: int) -> float | None:
        """The score that a checkpoint was saved with, if any."""
        try:
            manifest = json.loads((self.directory / str(step) / MANIFEST).read_text("utf-8"))
            return manifest.get("score")
        except (OSError, ValueError, AttributeError):
            return None  # damaged; restoring says so

    def _give_up(self, temporary: Path, error: Exception) -> NoReturn:
        if processes.is_first():
            shutil.rmtree(temporary, ignore_errors=True)
        raise _as_user_error(error, self.directory) from error

    def drop_after(self, step: int) -> None:
        """Delete the checkpoints of later steps, the newest first."""
        self.wait()
        if not processes.is_first():
            return
        for later in reversed(self.steps()):
            if later > step:
                # Under a hidden name first: half a directory must not look like a checkpoint.
                hidden = self.directory / f".new-{later}"
                shutil.rmtree(hidden, ignore_errors=True)
                (self.directory / str(later)).rename(hidden)
                shutil.rmtree(hidden)

    def restore_latest(self, like: Any) -> Restored | None:
        """The newest checkpoint that is whole, or None where there is none at all.

        Damaged ones are set aside with a warning. See `restore` for `like`. With several processes the first one
        looks, and all restore what it found.

        Raises:
          UserError: there are checkpoints, but each one is damaged, or the newest whole one does not fit.
        """
        self.wait()
        while True:
            found = self._newest_whole() if processes.is_first() else ""
            found = processes.from_first(found)
            if not found:
                return None
            if found == "damaged":
                raise UserError(
                    f"every checkpoint in {self.directory} is damaged: delete the directory to start anew"
                )
            try:
                return self._read(int(found), like)
            except DamagedCheckpoint as error:  # its checksums agree, yet Orbax cannot read it
                if processes.count() > 1:
                    raise
                self._set_aside(int(found), error)

    def _newest_whole(self) -> str:
        """The newest step that is whole, "damaged" where none is, or nothing where there is no checkpoint."""
        self._put_back()
        steps = self.steps()
        for step in reversed(steps):
            try:
                verified_manifest(self.directory / str(step))
                return str(step)
            except DamagedCheckpoint as error:
                self._set_aside(step, error)
        there_was_one = bool(steps) or any(self.directory.glob("*.damaged"))
        return "damaged" if there_was_one else ""

    def _set_aside(self, step: int, error: Exception) -> None:
        path = self.directory / str(step)
        warnings.warn(f"skipping checkpoint {path}: {error}", stacklevel=3)
        shutil.rmtree(f"{path}.damaged", ignore_errors=True)
        path.rename(f"{path}.damaged")

    def restore(self, step: int, like: Any) -> Restored:
        """Checkpoint `step` as a tree like `like`.

        Args:
          like: a pytree of the wanted structure whose leaves are `jax.ShapeDtypeStruct` or arrays. The
            leaf's sharding says where the restored array lies (any mesh, whatever it was saved from);
            without one it lies on the first device. NumPy leaves come back as NumPy arrays.

        Raises:
          UserError: its leaves have other names, shapes or dtypes than those of `like`.
          DamagedCheckpoint: it cannot be read whole.
        """
        self.wait()
        verified_manifest(self.directory / str(step))
        return self._read(step, like)

    def _read(self, step: int, like: Any) -> Restored:
        """As `restore`, of a checkpoint whose checksums agree."""
        path = self.directory / str(step)
        wanted = _named_leaves(like)
        try:
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DamagedCheckpoint(f"its {MANIFEST} is unreadable") from error
        _check_fits(path, manifest["leaves"], {k: _describe(v) for k, v in wanted.items()})
        targets = {name: _target(leaf) for name, leaf in wanted.items()}
        try:
            with ocp.StandardCheckpointer() as reader:
                arrays = reader.restore(path / ARRAYS, targets)
            extras = json.loads((path / EXTRAS).read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError) as error:
            raise DamagedCheckpoint(str(error).splitlines()[0]) from error
        leaves = [_as_wanted(arrays[name], leaf) for name, leaf in wanted.items()]
        state = jax.tree.unflatten(jax.tree.structure(like), leaves)
        return Restored(step, state, extras)

    def _put_back(self) -> None:
        """Undo the first half of a replacement that was killed before its second half."""
        for path in self.directory.glob(".old-*"):
            final = self.directory / path.name.removeprefix(".old-")
            if not final.exists():
                path.rename(final)

    def _clear_leftovers(self) -> None:
        """Remove what a killed save left."""
        self._put_back()
        for pattern in (".new-*", ".old-*"):
            for path in self.directory.glob(pattern):
                shutil.rmtree(path)


def _named_leaves(tree: Any) -> dict[str, Any]:
    """Leaf name → leaf, in tree order. Names do not depend on the classes of the containers."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in pairs}
    if len(named) != len(pairs):
        raise ValueError("two leaves of the tree have the same name")
    return named


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _storable(leaf: Any) -> jax.Array | np.ndarray:
    if _is_key(leaf):
        return jax.random.key_data(leaf)
    return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)


def _describe(leaf: Any) -> list[Any]:
    if not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    return [list(leaf.shape), str(leaf.dtype)]


def _target(leaf: Any) -> Any:
    """What Orbax is asked for: the shape and dtype as stored, and the place where it shall lie."""
    if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        return np.asarray(leaf)
    stored = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    sharding = leaf.sharding
    if sharding is None or _is_key(leaf):
        sharding = SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=sharding)


def _as_wanted(array: Any, leaf: Any) -> Any:
    if _is_key(leaf):
        key = jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))
        return key if leaf.sharding is None else jax.device_put(key, leaf.sharding)
    return array


def _check_fits(path: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    differing = [k for k in {**saved, **wanted} if saved.get(k) != wanted.get(k)]
    if not differing:
        return
    name = differing[0]

    def show(entry: Any) -> str:
        return "absent" if entry is None else f"{entry[1]}{tuple(entry[0])}"

    raise UserError(
        f"checkpoint {path} is of another model or optimiser: {len(differing)} array(s) differ, first "
        f"{name!r}, which is {show(saved.get(name))} there and {show(wanted.get(name))} here; use the "
        f"configuration it was made with, or another run_directory"
    )


def verified_manifest(path: Path) -> dict[str, Any]:
    """The manifest, after every file that it names was found unchanged."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        for name, digest in manifest["files"].items():
            if _digest(path / name) != digest:
                raise DamagedCheckpoint(f"{name} was changed or cut short")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"its {MANIFEST} or a file named there is unreadable") from error
    return manifest


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_file())


def _digest(path: Path) -> list[int]:
    """[size in bytes, CRC-32]: finds damage, is no defence against an attacker."""
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return [size, crc]


def _write_json(path: Path, value: Any) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=False, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _as_user_error(error: Exception, directory: Path) -> Exception:
    """A full disk or a forbidden directory becomes a sentence; anything else stays what it is."""
    cause: BaseException | None = error
    while cause is not None:  # tensorstore reports errno in the text of a ValueError
        code = cause.errno if isinstance(cause, OSError) else None
        if code in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(cause):
            return UserError(
                f"no space left for a checkpoint in {directory}: free some and run again"
            )
        if code in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.EEXIST):
            return UserError(f"cannot write checkpoints to {directory}: {os.strerror(code)}")
        cause = cause.__cause__ or cause.__context__
    return error
