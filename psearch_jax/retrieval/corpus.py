"""Corpora: FlashRAG passages, read strictly and written atomically."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from psearch_jax.errors import UserError
from psearch_jax.retrieval.corpus_files import RawRow, iter_raw_rows
from psearch_jax.retrieval.passages import Passage


@dataclass
class BadRows:
    """Rows that are no passages: how many are passed over before the next one is an error, and what was wrong."""

    allowed: int = 0
    problems: list[str] = field(default_factory=list)


def iter_corpus(
    path: str | Path, bad: BadRows | None = None, *, check_ids: bool = True
) -> Iterator[Passage]:
    """Yield the passages of a corpus one by one, in file order; the kinds of file: `corpus_files`.

    A row is `{"id", "contents"}` (contents = the title in quotes, a line break, the text) or
    `{"id", "title", "text"}`; `contents` wins where a row has both. Blank lines are passed over.

    Args:
      bad: collects the rows that are no passages; default: none is allowed.
      check_ids: remember every id, in memory, and refuse the second use of one.

    Raises:
      UserError: the file cannot be read, or one row too many is no passage; names the file and the row.
    """
    path = Path(path)
    bad = bad if bad is not None else BadRows()
    first_use: dict[str, str] = {}
    for where, row in iter_raw_rows(path):
        try:
            passage = _parse_row(row)
            if check_ids:
                earlier = first_use.setdefault(passage.id, where)
                if earlier != where:
                    raise ValueError(
                        f"the id {passage.id!r} was used in {earlier}; "
                        "give every passage an id of its own"
                    )
        except ValueError as error:
            bad.problems.append(f"{where}: {error}")
            if len(bad.problems) > bad.allowed:
                beyond = f", beyond the {bad.allowed} allowed" if bad.allowed else ""
                raise UserError(
                    f"{path}, {where}{beyond}: {error}; mend or remove the {where.split()[0]}, "
                    "or allow a number of bad ones (--skip-bad)."
                ) from error
            continue
        yield passage


def read_corpus(path: str | Path) -> list[Passage]:
    """All passages of a corpus (see `iter_corpus`); a file without any is a UserError."""
    passages = list(iter_corpus(path))
    if not passages:
        raise UserError(f"The corpus {path} holds no passages; give a file with one a line.")
    return passages


def _parse_row(raw: RawRow) -> Passage:
    """One passage; ValueError says what is wrong with the row."""
    row: Any = raw
    if isinstance(raw, bytes):
        try:
            row = json.loads(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"byte {error.start} is not UTF-8") from error
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError("not a JSON object") from error
    if not isinstance(row, dict):
        raise ValueError(f"a JSON object was expected, not {type(row).__name__}")
    if "id" not in row:
        raise ValueError('the key "id" is missing')
    if isinstance(row["id"], bool) or not isinstance(row["id"], str | int):
        raise ValueError(f'"id" must be a string or a whole number, not {row["id"]!r}')
    identifier = str(row["id"])
    if row.get("contents") is not None:
        passage = Passage.from_contents(identifier, _string(row, "contents"))
    elif "text" in row:
        title = _string(row, "title") if row.get("title") is not None else ""
        passage = Passage(identifier, title, _string(row, "text"))
    else:
        raise ValueError('neither "contents" nor "text" is there')
    if not passage.text.strip():
        raise ValueError("the passage has no text")
    try:
        f"{identifier}{passage.title}{passage.text}".encode()
    except UnicodeEncodeError as error:
        raise ValueError("half of a surrogate pair stands alone") from error
    return passage


def _string(row: dict[str, Any], key: str) -> str:
    if not isinstance(row[key], str):
        raise ValueError(f'"{key}" must be a string, not {row[key]!r}')
    return row[key]


def write_corpus(path: str | Path, passages: Iterable[Passage]) -> None:
    """Write passages as `{"id", "contents"}` lines (UTF-8); the file appears whole or not at all.

    Raises:
      ValueError: a passage would not be read back as it is (a line break or stray quotes in its title).
      UserError: the file cannot be written.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w", encoding="utf-8", newline="\n") as stream:
            for passage in passages:
                if Passage.from_contents(passage.id, passage.contents) != passage:
                    raise ValueError(f"passage {passage.id!r} has a title that breaks its contents")
                row = {"id": passage.id, "contents": passage.contents}
                stream.write(json.dumps(row, ensure_ascii=False) + "\n")
        os.replace(partial, path)
    except OSError as error:
        raise UserError(
            f"The corpus {path} cannot be written ({error.strerror}); "
            "free some space or choose another place."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def corpus_fingerprint(passages: Sequence[Passage]) -> str:
    """SHA-256 (hex) over ids, titles, texts and their order; lengths keep the fields apart."""
    digest = CorpusDigest()
    for passage in passages:
        digest.add(passage)
    return digest.hexdigest()


class CorpusDigest:
    """`corpus_fingerprint` of passages that come one by one."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, passage: Passage) -> None:
        """The next passage."""
        fields = [part.encode() for part in (passage.id, passage.title, passage.text)]
        lengths = " ".join(str(len(part)) for part in fields).encode() + b"\n"
        self._digest.update(lengths + b"".join(fields))

    def hexdigest(self) -> str:
        """Of all so far."""
        return self._digest.hexdigest()
