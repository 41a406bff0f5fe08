"""Passages in an Arrow file that is mapped, not read: what is not looked at takes no memory."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import overload

import numpy as np
import pyarrow as pa

from psearch_jax.errors import UserError
from psearch_jax.retrieval.corpus import CorpusDigest
from psearch_jax.retrieval.passages import Passage

ROWS = 8192  # of a record batch; all but the last one have as many
SCHEMA = pa.schema([(name, pa.string()) for name in ("id", "title", "text")])


class PassageStore(Sequence[Passage]):
    """The passages of an Arrow file, by row."""

    def __init__(self, path: str | Path) -> None:
        """Map the file.

        Raises:
          UserError: it is missing, or not what `write_store` writes.
        """
        try:
            self._reader = pa.ipc.open_file(pa.memory_map(str(path)))
            batches = [self._reader.get_batch(i) for i in range(self._reader.num_record_batches)]
        except (OSError, pa.ArrowException) as error:
            raise UserError(
                f"The passages {path} cannot be read ({error}); build the index again."
            ) from error
        if self._reader.schema != SCHEMA or any(len(batch) != ROWS for batch in batches[:-1]):
            raise UserError(
                f"The passages {path} were not written by psearch_jax; build the index again."
            )
        self._columns = [[batch.column(i) for i in range(3)] for batch in batches]
        self._count = sum(map(len, batches))

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, row: int) -> Passage: ...
    @overload
    def __getitem__(self, row: slice) -> list[Passage]: ...
    def __getitem__(self, row: int | slice) -> Passage | list[Passage]:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(self._count))]
        row = int(row)
        if not 0 <= row < self._count:
            raise IndexError(f"row {row} of {self._count} passages")
        batch, inside = divmod(row, ROWS)
        return Passage(*(column[inside].as_py() for column in self._columns[batch]))

    def __iter__(self) -> Iterator[Passage]:
        for columns in self._columns:
            for values in zip(*(column.to_pylist() for column in columns), strict=True):
                yield Passage(*values)

    def ids(self) -> Iterator[str]:
        """The ids alone, in order."""
        for columns in self._columns:
            yield from columns[0].to_pylist()


def write_store(path: Path, passages: Iterable[Passage]) -> tuple[int, str]:
    """Write passages as they come; the file appears whole or not at all. Returns count and fingerprint.

    Memory: one record batch, and 8 bytes a passage for the search of ids that were used twice.

    Raises:
      UserError: an id was used twice.
      OSError: the file cannot be written.
    """
    digest = CorpusDigest()
    partial = path.with_name(path.name + ".partial")
    hashes: list[np.ndarray] = []
    count = 0
    with pa.OSFile(str(partial), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        rows: list[tuple[str, str, str]] = []

        def flush() -> None:
            columns = [list(column) for column in zip(*rows, strict=True)]
            writer.write_batch(pa.record_batch([pa.array(c, pa.string()) for c in columns], SCHEMA))
            hashes.append(np.fromiter((id_hash(row[0]) for row in rows), np.uint64, len(rows)))
            rows.clear()

        for passage in passages:
            digest.add(passage)
            rows.append((passage.id, passage.title, passage.text))
            count += 1
            if len(rows) == ROWS:
                flush()
        if rows:
            flush()
    if hashes:
        _refuse_twins(partial, np.concatenate(hashes))
    with partial.open("rb") as stream:
        os.fsync(stream.fileno())
    os.replace(partial, path)
    return count, digest.hexdigest()


def id_hash(identifier: str) -> int:
    """64 bits of an id."""
    return int.from_bytes(hashlib.blake2b(identifier.encode(), digest_size=8).digest())


def _refuse_twins(path: Path, hashes_N: np.ndarray) -> None:
    """UserError for the first id that stands twice; equal hashes are looked up, since different ids may share one."""
    values, counts = np.unique(hashes_N, return_counts=True)
    if len(values) == len(hashes_N):
        return
    store = PassageStore(path)
    seen: dict[str, int] = {}
    for row in np.flatnonzero(np.isin(hashes_N, values[counts > 1])).tolist():
        identifier = store[row].id
        if identifier in seen:
            raise UserError(
                f"The id {identifier!r} is that of passage {seen[identifier] + 1} and of passage {row + 1}; "
                "give every passage an id of its own."
            )
        seen[identifier] = row


class JoinedPassages(Sequence[Passage]):
    """Several stores as one, one after the other."""

    def __init__(self, stores: Sequence[Sequence[Passage]]) -> None:
        self._stores = stores
        self._ends = list(accumulate(map(len, stores)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, row: int) -> Passage: ...
    @overload
    def __getitem__(self, row: slice) -> list[Passage]: ...
    def __getitem__(self, row: int | slice) -> Passage | list[Passage]:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(len(self)))]
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)} passages")
        store = bisect_right(self._ends, row)
        return self._stores[store][row - (self._ends[store - 1] if store else 0)]
