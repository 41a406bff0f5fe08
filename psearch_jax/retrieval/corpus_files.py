"""What a corpus may be: JSONL (plain, gzip, zstd), Parquet, a dataset of the `datasets` library, saved or by name."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from psearch_jax.errors import UserError

GZIP, ZSTD, PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"
ROWS_AT_A_TIME = 4096  # of a table, decoded together
HUB = "hf:"

#: What a row is before it is read: a line of JSON, or the columns of a table's row.
RawRow = bytes | dict[str, Any]


def iter_raw_rows(path: Path) -> Iterator[tuple[str, RawRow]]:
    """Yield ("line 3" or "row 3" of …, raw row) of a corpus; what the file is shows in its first bytes.

    A directory is a Hugging Face dataset (`save_to_disk`) or holds Parquet files, read by name.
    hf:NAME[:CONFIG][@SPLIT] is what `datasets.load_dataset` finds, on the hub or in a directory; its split "train"
    unless another is named.

    Raises:
      UserError: the corpus cannot be opened, or breaks off; names the last row that was read.
    """
    where = "its beginning"
    try:
        for where, row in _rows(path):
            yield where, row
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0] or "it breaks off"
        raise UserError(
            f"The corpus {path} cannot be read beyond {where} ({reason}); "
            "set retrieval.corpus to a whole .jsonl (or .gz, .zst), .parquet or saved dataset."
        ) from error


def _rows(path: Path) -> Iterator[tuple[str, RawRow]]:
    if str(path).startswith(HUB):
        yield from _hub_rows(str(path))
        return
    if path.is_dir():
        yield from _directory_rows(path)
        return
    with path.open("rb") as stream:
        magic = stream.read(4)
        stream.seek(0)
        if magic == PARQUET:
            yield from _parquet_rows(path)
        elif magic.startswith(GZIP):
            with gzip.open(stream) as lines:
                yield from _lines(lines)
        elif magic == ZSTD:
            with pa.CompressedInputStream(pa.PythonFile(stream, "r"), "zstd") as lines:
                yield from _lines(_split(lines))
        else:
            yield from _lines(stream)


def _lines(lines: Iterable[bytes]) -> Iterator[tuple[str, bytes]]:
    for number, line in enumerate(lines, start=1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            yield f"line {number}", line


def _split(stream: Any, size: int = 1 << 20) -> Iterator[bytes]:
    """The lines of a stream that can only be read in blocks."""
    rest = b""
    while block := stream.read(size):
        *lines, rest = (rest + block).split(b"\n")
        yield from lines
    if rest:
        yield rest


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    with pq.ParquetFile(path) as file:
        names = [n for n in ("id", "title", "text", "contents") if n in file.schema_arrow.names]
        for batch in file.iter_batches(ROWS_AT_A_TIME, columns=names):
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}", row


def _directory_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if (path / "dataset_dict.json").is_file():
        splits = sorted(child.name for child in path.iterdir() if child.is_dir())
        raise UserError(
            f"The corpus {path} is a dataset of several splits; give one of them: "
            f"{', '.join(str(path / name) for name in splits)}."
        )
    if (path / "state.json").is_file():
        from datasets import load_from_disk

        yield from _dataset_rows(load_from_disk(str(path)))
        return
    files = sorted(path.glob("*.parquet"))
    if not files:
        raise UserError(
            f"The corpus {path} cannot be read: it is a directory without .parquet files and no saved dataset; "
            "set retrieval.corpus to a file or such a directory."
        )
    for file in files:
        for where, row in _parquet_rows(file):
            yield f"{where} of {file.name}", row


def _hub_rows(source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    import datasets

    rest, _, split = source.removeprefix(HUB).partition("@")
    name, _, config = rest.partition(":")
    try:
        dataset = datasets.load_dataset(name, config or None, split=split or "train")
    except Exception as error:  # it raises many kinds, for a typing error as for a lost connection
        first = str(error).strip().splitlines()[:1] or [""]
        raise UserError(
            f"The corpus {source} cannot be read ({type(error).__name__}: {first[0]}); "
            "check NAME, CONFIG and SPLIT of hf:NAME:CONFIG@SPLIT, or give a local file."
        ) from error
    yield from _dataset_rows(dataset)


def _dataset_rows(dataset: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for start in range(0, len(dataset), ROWS_AT_A_TIME):
        columns = dataset[start : start + ROWS_AT_A_TIME]
        for i, values in enumerate(zip(*columns.values(), strict=True)):
            yield f"row {start + i + 1}", dict(zip(columns, values, strict=True))
