"""Tensors that lie in files: known by their headers, read in pieces, written one after another.

Nothing here holds more than a piece of one tensor in host memory, and nothing is ever unpickled.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from psearch_jax.errors import UserError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

#: The types that parameters may be stored as, by their names in safetensors headers.
FLOATS: dict[str, Any] = {"F32": np.float32, "BF16": jnp.bfloat16, "F16": np.float16}
PICKLES = (".bin", ".pt", ".pth", ".ckpt")

#: Where a piece of a tensor lies: a slice with start and stop for each dimension.
Index = tuple[slice, ...]


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor that was not read yet. `read` fetches a piece in the dtype that it is stored as.

    dtype: a name of safetensors ("F32", "BF16", "I8", …).
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[Index], np.ndarray]


def in_memory(tensor: np.ndarray) -> StoredTensor:
    """A tensor that is there already, behind the same interface."""
    names = {np.dtype(dtype): name for name, dtype in FLOATS.items()}
    dtype = names.get(tensor.dtype, str(tensor.dtype))
    return StoredTensor(shape=tensor.shape, dtype=dtype, read=tensor.__getitem__)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """An open safetensors file; its header was checked against its length."""
    try:
        with safe_open(path, framework="numpy") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} cannot be read as safetensors ({error}); it is missing or cut short, fetch it again."
        ) from error


def _reader(path: Path, name: str) -> Callable[[Index], np.ndarray]:
    def read(index: Index) -> np.ndarray:
        # Opened anew for each piece: the library maps the file, and mapped pages that were read count as
        # this process's memory until the file is closed.
        with _opened(path) as handle:
            return handle.get_slice(name)[index]

    return read


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of a directory by name, from the headers of model.safetensors or of all shards.

    Raises:
      UserError: there are no safetensors, or a file is missing, cut short or not safetensors, or two hold
        the same tensor.
    """
    found: dict[str, StoredTensor] = {}
    for path in _weight_files(directory):
        with _opened(path) as handle:
            for name in handle.keys():  # noqa: SIM118 (not a mapping)
                if name in found:
                    raise UserError(
                        f"tensor {name} of {directory} is in two files, {path.name} the second; fetch them again."
                    )
                header = handle.get_slice(name)
                found[name] = StoredTensor(
                    shape=tuple(header.get_shape()),
                    dtype=header.get_dtype(),
                    read=_reader(path, name),
                )
    return found


def _weight_files(directory: Path) -> list[Path]:
    index = directory / INDEX_FILE
    if index.is_file():
        try:
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
            outside = [name for name in names if Path(name).name != name]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{index} is not a safetensors index ({error}); fetch it again."
            ) from error
        if outside or not names:
            raise UserError(
                f"{index} names {outside or 'no files'}, not files beside it; fetch it again."
            )
        return [directory / name for name in names]
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE]
    pickles = sorted(p.name for p in directory.glob("*") if p.suffix in PICKLES)
    if pickles:
        raise UserError(
            f"{directory} holds its weights as {pickles[0]}, a pickle, which can run code and is never read; "
            "convert it to safetensors (transformers: from_pretrained, then save_pretrained)."
        )
    raise UserError(
        f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}; name a directory with safetensors weights."
    )


def blocks(index: Index, itemsize: int, limit: int) -> Iterator[Index]:
    """Cut a piece along its first dimension into pieces of at most `limit` bytes (one row at least)."""
    if not index:
        yield index
        return
    first, *rest = index
    row = itemsize * math.prod(part.stop - part.start for part in rest)
    rows = max(1, limit // max(row, 1))
    for start in range(first.start, first.stop, rows):
        yield (slice(start, min(start + rows, first.stop)), *rest)


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """A tensor to be written: `fetch` makes it, when its turn comes, with this shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    fetch: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def split_shards(tensors: Sequence[Outgoing], max_bytes: int) -> list[list[Outgoing]]:
    """Tensors in order, cut into shards of at most max_bytes (a larger tensor has a shard of its own)."""
    shards: list[list[Outgoing]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def write_safetensors(path: Path, tensors: Sequence[Outgoing], *, writes: bool = True) -> None:
    """Write tensors of one dtype one after another (the library's `save_file` wants all of them at once).

    With `writes` off the tensors are fetched and dropped: in a multi-host run fetching is a matter of all
    processes, writing of one.
    """
    names = {np.dtype(dtype): name for name, dtype in FLOATS.items()}
    # transformers refuses a file that does not say its format.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": names[np.dtype(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins aligned
    with path.open("wb") if writes else open(os.devnull, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            value = np.ascontiguousarray(tensor.fetch())
            assert value.shape == tensor.shape and value.dtype == tensor.dtype, tensor.name
            file.write(value.reshape(-1).view(np.uint8).data)


def write_weights(
    directory: Path, tensors: Sequence[Outgoing], max_shard_bytes: int, *, writes: bool = True
) -> None:
    """Write model.safetensors, or shards with their index when the tensors are larger than max_shard_bytes."""
    shards = split_shards(tensors, max_shard_bytes)
    if len(shards) == 1:
        write_safetensors(directory / SINGLE_FILE, shards[0], writes=writes)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(directory / file, shard, writes=writes)
        weight_map |= {tensor.name: file for tensor in shard}
    if writes:
        total = sum(tensor.nbytes for tensor in tensors)
        write_json(
            directory / INDEX_FILE,
            {"metadata": {"total_size": total}, "weight_map": weight_map},
        )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; UserError when it is missing or not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing; name a Hugging Face model directory.") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); fetch it again.") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object; fetch it again.")
    return value


def write_json(path: Path, value: Any) -> None:
    """Write JSON under the final name only when whole."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(part, path)
