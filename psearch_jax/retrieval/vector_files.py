"""Vectors on their way to disk: written in order, whole blocks at a time, and taken up again after a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from psearch_jax.retrieval.embedding import Embedder, Progress, choose_lengths, distinct_texts

BLOCK = 2048  # rows embedded between two saves
LENGTHS_FROM = 16 * BLOCK  # texts that the padded lengths are chosen by
HEADER = 128  # bytes of the header of a .npy file, by its format a multiple of 64

#: A block of rows, in order.
Blocks = Iterator[Float[np.ndarray, "R E"]]


class VectorFile:
    """A .npy matrix that grows by blocks. `rows` are on disk for good; what a killed process wrote beyond is cut off.

    Plain writes, not a map: pages of a map would count as memory of the process.
    """

    def __init__(self, path: Path, count: int, dims: int, dtype: str) -> None:
        """Take up `path` (with `path`.done beside it), or begin it."""
        self._done = path.with_name(path.name + ".done")
        self._row_bytes = dims * np.dtype(dtype).itemsize
        self._count, self._dtype = count, dtype
        shape = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (count, dims)}
        header = str(shape).encode().ljust(HEADER - 11) + b"\n"
        header = np.lib.format.magic(1, 0) + len(header).to_bytes(2, "little") + header
        self.rows = 0
        if self._done.is_file() and path.is_file():
            with path.open("rb") as stream:
                if stream.read(HEADER) == header:
                    self.rows = int(self._done.read_text())
        self._stream = path.open("r+b" if self.rows else "wb")
        if not self.rows:
            self._stream.write(header)
        self._stream.truncate(HEADER + self.rows * self._row_bytes)
        self._stream.seek(0, os.SEEK_END)

    def append(self, block_RxE: Float[np.ndarray, "R E"]) -> None:
        """Write a block and wait until it is on disk."""
        self._stream.write(np.ascontiguousarray(block_RxE, self._dtype).tobytes())
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self.rows += len(block_RxE)
        partial = self._done.with_name(self._done.name + ".partial")
        partial.write_text(str(self.rows))
        os.replace(partial, self._done)

    def close(self) -> None:
        """Close; a complete matrix needs its note no longer."""
        self._stream.close()
        if self.rows == self._count:
            self._done.unlink(missing_ok=True)


def write_vectors(
    path: Path,
    blocks: Callable[[int], Blocks],
    count: int,
    dims: int,
    dtype: str,
    progress: Progress | None = None,
) -> None:
    """Make `path`, a matrix [count, dims], from `blocks(first row)`.

    Raises:
      ValueError: other than `count` rows came.
    """
    if path.is_file() and not path.with_name(path.name + ".done").exists():
        return  # complete: its note is gone
    file = VectorFile(path, count, dims, dtype)
    try:
        for block in blocks(file.rows):
            file.append(block)
            if progress is not None:
                progress(file.rows, count)
    finally:
        file.close()
    if file.rows != count:
        raise ValueError(f"{file.rows} vectors came for {count} passages")


def embedded_blocks(
    texts: Callable[[int, int], Sequence[str]], count: int, embedder: Embedder, state: Path
) -> Callable[[int], Blocks]:
    """Unit vectors of the passages `texts(start, stop)`, block by block.

    The padded lengths are chosen once, by the first texts, and kept in `state` with the tokens that were computed:
    a build that goes on pads as before, so it gives the same vectors.
    """

    def blocks(first: int) -> Blocks:
        kept = json.loads(state.read_text()) if first and state.is_file() else {}
        if not kept:
            sample = embedder.plan(texts(0, min(count, LENGTHS_FROM))).token_ids
            lengths = choose_lengths([len(ids) for ids in sample])
            kept = {"lengths": sorted({*lengths, embedder.max_tokens}), "tokens": 0, "computed": 0}
        for start in range(first, count, BLOCK):
            distinct, inverse_R = distinct_texts(texts(start, min(start + BLOCK, count)))
            plan = embedder.plan(distinct, kept["lengths"])
            vectors = np.empty((len(distinct), embedder.dims), np.float32)
            for positions, batch_vectors in embedder.run(plan):
                vectors[list(positions)] = batch_vectors
            kept["tokens"] += sum(map(len, plan.token_ids))
            kept["computed"] += sum(batch.rows * batch.length for batch in plan.batches)
            state.write_text(json.dumps(kept))
            yield vectors[inverse_R]

    return blocks


def padding(state: Path) -> float:
    """The share of computed tokens that were padding."""
    kept = json.loads(state.read_text())
    return 1 - kept["tokens"] / kept["computed"] if kept["computed"] else 0.0
