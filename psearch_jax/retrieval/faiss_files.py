"""FAISS's flat indexes, read without FAISS: a header, then the vectors one after the other.

The format, little-endian: four letters (`IxFI` inner product, `IxF2` squared distance, `IxFl` either), int32
dimensions, int64 vectors, two int64 that are unused, one byte "trained", int32 metric (0 inner product, 1 L2), int64
float32 numbers that follow, the numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from psearch_jax.errors import UserError
from psearch_jax.retrieval.vector_files import BLOCK, Blocks

HEADER = struct.Struct("<4siqqqBi")
LETTERS = (b"IxFI", b"IxF2", b"IxFl")
#: How far from one the length of a vector may be: released ones were rounded to float16.
TOLERANCE = 0.02


@dataclass(frozen=True, kw_only=True)
class FlatFile:
    """A flat index: where its vectors begin, and how many of which size there are."""

    path: Path
    start: int
    count: int
    dims: int

    def blocks(self, first: int) -> Blocks:
        """Unit vectors from row `first` on, a few thousand at a time; so much is in memory.

        Raises:
          UserError: a vector that is not finite, or not of about unit length.
        """
        with self.path.open("rb") as stream:
            stream.seek(self.start + first * self.dims * 4)
            for row in range(first, self.count, BLOCK):
                rows = min(BLOCK, self.count - row)
                block = np.fromfile(stream, "<f4", rows * self.dims).reshape(rows, self.dims)
                yield self._unit(block, row)

    def _unit(self, block: np.ndarray, first: int) -> np.ndarray:
        norms = np.linalg.norm(block.astype(np.float64), axis=1)
        wrong = np.flatnonzero(~(np.abs(norms - 1) <= TOLERANCE))
        if len(wrong):
            raise UserError(
                f"{self.path}: vector {first + wrong[0]} has the length {norms[wrong[0]]:.4g}, and an index here "
                "compares unit vectors; build the index from the corpus instead (psearch index build)."
            )
        return (block / norms[:, None]).astype(np.float32)


def read_flat(path: str | Path) -> FlatFile:
    """The header of a flat index, checked against the size of the file.

    Raises:
      UserError: it cannot be read, is another kind of index or no index, or breaks off.
    """
    path = Path(path)
    try:
        with path.open("rb") as stream:
            head = stream.read(HEADER.size + 8)
        size = path.stat().st_size
    except OSError as error:
        raise UserError(
            f"The FAISS index {path} cannot be read ({error.strerror}); give a flat one."
        ) from error
    if len(head) < HEADER.size + 8 or head[:4] not in LETTERS:
        raise UserError(
            f"{path} begins with {head[:4]!r} and is no flat FAISS index ({', '.join(map(bytes.decode, LETTERS))}); "
            "import one that holds its vectors (IndexFlatIP), or build from the corpus (psearch index build)."
        )
    _, dims, count, _, _, _, metric = HEADER.unpack(head[: HEADER.size])
    (numbers,) = struct.unpack("<q", head[HEADER.size :])
    expected = HEADER.size + 8 + 4 * dims * count
    if metric not in (0, 1) or dims < 1 or count < 1 or numbers != dims * count or size != expected:
        raise UserError(
            f"{path} is damaged: it tells of {count} vectors of {dims} numbers, metric {metric}, which makes "
            f"{expected} bytes, and has {size}; copy it again."
        )
    return FlatFile(path=path, start=HEADER.size + 8, count=count, dims=dims)


def matching_blocks(file: FlatFile, passages: int, dims: int) -> Callable[[int], Blocks]:
    """The blocks of a file that fits a corpus and an encoder.

    Raises:
      UserError: it has another number of vectors than there are passages, or of another size.
    """
    if file.count != passages:
        raise UserError(
            f"{file.path} has {file.count} vectors and the corpus {passages} passages: they are not of one another; "
            "give the corpus that was embedded, in its order."
        )
    if file.dims != dims:
        raise UserError(
            f"{file.path} has vectors of {file.dims} numbers and the encoder makes {dims}; "
            "give the encoder that made them (--encoder)."
        )
    return file.blocks
