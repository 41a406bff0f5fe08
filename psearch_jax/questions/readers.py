"""Readers of question files and data sets: rows in, questions and a list of what was wrong out.

A bad row costs nothing but itself: it is named and counted, and the others are read. Ids are unique by construction:
the data set's name, a colon, the row's id; an id that comes again with another question is numbered.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from psearch_jax.errors import UserError
from psearch_jax.questions.question import Question
from psearch_jax.questions.rows import question_of

#: (place, row, or what is wrong with it).
Row = tuple[str, Mapping[str, Any] | str]
_NAMED = 5  # problems that are spelled out


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something wrong with a row; `lost`: it is not among the questions, `torn`: it is not even a row."""

    place: str
    what: str
    lost: bool = True
    torn: bool = False


@dataclass(kw_only=True)
class Loaded:
    """Questions and what was wrong with their rows."""

    questions: list[Question] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    @property
    def lost(self) -> int:
        """How many rows are not among the questions."""
        return sum(problem.lost for problem in self.problems)

    @property
    def torn(self) -> int:
        """How many lines could not be read as rows."""
        return sum(problem.torn for problem in self.problems)

    def report(self) -> str:
        """One line: how many questions, how many rows were left out or mended, and the first of them by name."""
        text = f"{len(self.questions):,} questions"
        if not self.problems:
            return text
        named = "; ".join(f"{p.place}: {p.what}" for p in self.problems[:_NAMED])
        more = len(self.problems) - _NAMED
        return (
            f"{text}; {self.lost} rows left out, {len(self.problems) - self.lost} mended: {named}"
            + (f"; and {more} more" if more > 0 else "")
        )

    def counts(self) -> dict[str, Any]:
        """The same for a results file."""
        return {
            "questions": len(self.questions),
            "rows_left_out": self.lost,
            "rows_mended": len(self.problems) - self.lost,
            "named": [f"{p.place}: {p.what}" for p in self.problems[:50]],
        }


def read_rows(rows: Iterable[Row], dataset: str, *, kind: str = "single") -> Loaded:
    """Questions of rows.

    Args:
      rows: with their places.
      dataset: its name, which ids begin with.
      kind: of questions whose row says nothing of it.
    """
    loaded = Loaded()
    seen: dict[str, tuple[str, Question]] = {}
    for number, (place, row) in enumerate(rows, 1):
        notes: list[str] = []
        try:
            if isinstance(row, str):
                raise ValueError(row)
            question = question_of(row, dataset=dataset, number=number, kind=kind, notes=notes)
        except (ValueError, RecursionError) as error:
            torn = isinstance(row, str)
            loaded.problems.append(Problem(place=place, what=str(error), torn=torn))
            continue
        loaded.problems += [Problem(place=place, what=note, lost=False) for note in notes]
        _take(question, place, seen, loaded)
    return loaded


def _take(
    question: Question, place: str, seen: dict[str, tuple[str, Question]], loaded: Loaded
) -> None:
    """Add a question, under an id that is its own."""
    given, number = question.id, 1
    while question.id in seen:
        earlier, other = seen[question.id]
        if (other.text, other.golden_answers) == (question.text, question.golden_answers):
            what = f"the question {given!r} was there before ({earlier})"
            loaded.problems.append(Problem(place=place, what=what))
            return
        number += 1
        question = replace(question, id=f"{given}~{number}")
    if number > 1:
        what = (
            f"the id {given!r} was used before ({seen[given][0]}); this one is {question.id!r} now"
        )
        loaded.problems.append(Problem(place=place, what=what, lost=False))
    seen[question.id] = (place, question)
    loaded.questions.append(question)


def merge(parts: Sequence[Loaded]) -> Loaded:
    """Several data sets as one, ids unique over all of them."""
    if len(parts) == 1:
        return parts[0]
    whole, seen = Loaded(), dict[str, tuple[str, Question]]()
    for part in parts:
        whole.problems += part.problems
        for question in part.questions:
            _take(question, question.dataset, seen, whole)
    return whole


def subset(questions: Sequence[Question], count: int) -> list[Question]:
    """`count` questions of each data set, in their order, chosen by a hash of their ids: the same ones on every
    machine and in whatever order the file is, and a smaller subset lies within a larger one."""
    if not count:
        return list(questions)

    def draw(question: Question) -> bytes:
        return hashlib.sha256(f"subset:{question.id}".encode()).digest()

    kept: set[str] = set()
    for dataset in dict.fromkeys(question.dataset for question in questions):
        own = [question for question in questions if question.dataset == dataset]
        kept |= {question.id for question in sorted(own, key=draw)[:count]}
    return [question for question in questions if question.id in kept]


# -- files


def jsonl_rows(path: Path) -> Iterator[Row]:
    """The rows of a JSONL file, with file and line."""
    try:
        stream = path.open("rb")
    except OSError as error:
        raise UserError(
            f"The question file {path} cannot be read ({error.strerror}); check the path."
        ) from error
    with stream:
        for number, line in enumerate(stream, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield f"{path.name}, line {number}", _parse(line)


def _parse(line: bytes) -> Mapping[str, Any] | str:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return "not UTF-8 text"
    except json.JSONDecodeError as error:
        return f"not JSON ({error.msg} at column {error.colno})"
    except RecursionError:
        return "not JSON (nested too deep)"
    return row if isinstance(row, dict) else "not a JSON object"


def parquet_rows(path: Path) -> Iterator[Row]:
    """The rows of a Parquet file, with file and row number from 1."""
    import pyarrow
    from pyarrow import parquet

    try:
        number = 0
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path.name}, row {number}", row
    except (OSError, pyarrow.ArrowException) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"The question file {path} cannot be read ({reason}); it must be a Parquet file."
        ) from error


def file_rows(path: Path) -> Iterator[Row]:
    """By the file's ending: .jsonl (or .json with a row a line), .parquet."""
    return parquet_rows(path) if path.suffix == ".parquet" else jsonl_rows(path)


def read_flashrag(path: str | Path, *, strict: bool = True) -> list[Question]:
    """Read one file of FlashRAG rows: `{"id", "question", "golden_answers", "metadata"}`.

    Raises:
      UserError: a file that cannot be read or holds no questions; with `strict`, any bad or repeated row.
    """
    path = Path(path)
    loaded = read_rows(file_rows(path), path.stem)
    if strict and loaded.problems:
        first = loaded.problems[0]
        raise UserError(
            f"{path.parent / first.place}: {first.what}; mend or remove the row"
            + (f" ({len(loaded.problems)} in all)." if len(loaded.problems) > 1 else ".")
        )
    if not loaded.questions:
        raise UserError(f"The question file {path} holds no questions; give a file with rows.")
    return loaded.questions
