"""Corpora: FlashRAG passages in JSONL files, read strictly and written atomically."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from psearch_jax.errors import UserError
from psearch_jax.retrieval.passages import Passage


def iter_corpus(path: str | Path) -> Iterator[Passage]:
    """Yield the passages of a JSONL file one by one, in file order.

    A line is `{"id", "contents"}` (contents = the title in quotes, a line break, the text) or
    `{"id", "title", "text"}`; `contents` wins where a line has both. Blank lines are passed over.

    Raises:
      UserError: the file cannot be read, or a line is no passage; names the file and the line.
    """
    path = Path(path)
    try:
        stream = path.open("rb")
    except OSError as error:
        raise UserError(
            f"The corpus {path} cannot be read ({error.strerror}); "
            "set retrieval.corpus to a .jsonl file of passages."
        ) from error
    first_line: dict[str, int] = {}
    with stream:
        for number, line in enumerate(stream, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                passage = _parse_line(line)
            except ValueError as error:
                raise UserError(
                    f"{path}, line {number}: {error}; mend or remove the line."
                ) from error
            earlier = first_line.setdefault(passage.id, number)
            if earlier != number:
                raise UserError(
                    f"{path}, line {number}: the id {passage.id!r} was used in line {earlier}; "
                    "give every passage an id of its own."
                )
            yield passage


def read_corpus(path: str | Path) -> list[Passage]:
    """All passages of a JSONL file (see `iter_corpus`); a file without any is a UserError."""
    passages = list(iter_corpus(path))
    if not passages:
        raise UserError(f"The corpus {path} holds no passages; give a file with one a line.")
    return passages


def _parse_line(line: bytes) -> Passage:
    """One passage; ValueError says what is wrong with the line."""
    try:
        row: Any = json.loads(line.decode("utf-8"))
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
    if "contents" in row:
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
    digest = hashlib.sha256()
    for passage in passages:
        fields = [part.encode() for part in (passage.id, passage.title, passage.text)]
        digest.update(" ".join(str(len(part)) for part in fields).encode() + b"\n")
        digest.update(b"".join(fields))
    return digest.hexdigest()
