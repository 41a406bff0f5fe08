"""Everything that a resumed run needs, saved and restored (law 13).

Orbax writes the arrays; this file adds what a killed run needs besides. A checkpoint is a directory
named by its step:

    <directory>/<step>/arrays/         Orbax (OCDBT + Zarr), one entry a leaf
    <directory>/<step>/extras.json     what the caller wants back: data position, configuration hash, …
    <directory>/<step>/manifest.json   leaf shapes and dtypes, size and CRC-32 of every other file

It is written under a name that begins with a dot and then renamed, so a directory with a number for a
name is complete. It is read only after all its checksums agree; one that is damaged is set aside as
`<step>.damaged` and the one before it is taken.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import warnings
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

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
    """

    def __init__(self, directory: str | Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise UserError(f"cannot keep {keep} checkpoints: keep at least 1")
        self.directory = Path(directory).absolute()
        self.keep = keep

    def steps(self) -> list[int]:
        """The steps that are there, oldest first."""
        if not self.directory.is_dir():
            return []
        return sorted(int(p.name) for p in self.directory.iterdir() if p.name.isdecimal())

    def save(self, step: int, state: Any, extras: Mapping[str, Any] | None = None) -> Path:
        """Write `state` (a pytree of arrays) and `extras` (JSON) as checkpoint `step`.

        Returns when it is on disk. A checkpoint of the same step is replaced; older ones beyond
        `keep` are deleted.

        Raises:
          UserError: the disk is full or the directory cannot be written; nothing half-written stays.
        """
        final = self.directory / str(step)
        temporary = self.directory / f".new-{step}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._clear_leftovers()
            temporary.mkdir()
            leaves = _named_leaves(state)
            with ocp.StandardCheckpointer() as writer:
                writer.save(temporary / ARRAYS, {k: _storable(v) for k, v in leaves.items()})
            _write_json(temporary / EXTRAS, dict(extras or {}))
            manifest = {
                "step": step,
                "leaves": {name: _describe(leaf) for name, leaf in leaves.items()},
                "files": {str(p.relative_to(temporary)): _digest(p) for p in _files(temporary)},
            }
            _write_json(temporary / MANIFEST, manifest)
            if final.exists():
                final.rename(self.directory / f".old-{step}")
            temporary.rename(final)
            _sync_directory(self.directory)
            for old in self.steps()[: -self.keep]:
                shutil.rmtree(self.directory / str(old))
            shutil.rmtree(self.directory / f".old-{step}", ignore_errors=True)
        except Exception as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise _as_user_error(error, self.directory) from error
        return final

    def restore_latest(self, like: Any) -> Restored | None:
        """The newest checkpoint that is whole, or None where there is none at all.

        Damaged ones are set aside with a warning. See `restore` for `like`.

        Raises:
          UserError: there are checkpoints, but each one is damaged, or the newest whole one does not fit.
        """
        self._put_back()
        steps = self.steps()
        for step in reversed(steps):
            try:
                return self.restore(step, like)
            except DamagedCheckpoint as error:
                path = self.directory / str(step)
                warnings.warn(f"skipping checkpoint {path}: {error}", stacklevel=2)
                shutil.rmtree(f"{path}.damaged", ignore_errors=True)
                if path.exists():  # another process may have set it aside already
                    path.rename(f"{path}.damaged")
        if steps:
            raise UserError(
                f"every checkpoint in {self.directory} is damaged: delete the directory to start anew"
            )
        return None

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
        path = self.directory / str(step)
        manifest = verified_manifest(path)
        wanted = _named_leaves(like)
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
