"""Readers of question files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from psearch_jax.errors import UserError
from psearch_jax.questions.question import KINDS, Question

#: HotpotQA's and 2Wiki's `metadata.type` → question kind.
TYPES = {
    "comparison": "parallelizable",
    "bridge": "bridge",
    "inference": "bridge",
    "compositional": "bridge",
    "bridge_comparison": "mixed",
}


def kind_of(metadata: dict[str, Any]) -> str:
    """`metadata.kind` if it is one of ours, else by `metadata.type`, else "single" (no type: one hop)."""
    if metadata.get("kind") in KINDS:
        return metadata["kind"]
    return TYPES.get(str(metadata.get("type", "")), "unknown" if "type" in metadata else "single")


def question_row(question: Question) -> dict[str, Any]:
    """The FlashRAG row of a question."""
    return {
        "id": question.id,
        "question": question.text,
        "golden_answers": list(question.golden_answers),
        "metadata": dict(question.metadata),
    }


def read_flashrag(path: str | Path) -> list[Question]:
    """Read FlashRAG JSONL: `{"id", "question", "golden_answers", "metadata"}` a line.

    Ids are made unique by construction: the file's stem, a colon, the row's id. A bad or repeated row is an error
    that names the file and the line.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(
            f"The question file {path} cannot be read ({error.strerror}); check the path."
        ) from error
    questions: list[Question] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        question = _parse(path, number, line)
        if question.id in seen:
            raise UserError(
                f"{path}, line {number}: the id {question.id!r} was used in line {seen[question.id]}; "
                "make ids unique."
            )
        seen[question.id] = number
        questions.append(question)
    if not questions:
        raise UserError(f"The question file {path} holds no questions; give a file with rows.")
    return questions


def _parse(path: Path, number: int, line: bytes) -> Question:
    def bad(what: str) -> UserError:
        return UserError(f"{path}, line {number}: {what}; mend or remove the line.")

    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise bad("not UTF-8 text") from error
    except json.JSONDecodeError as error:
        raise bad(f"not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(row, dict):
        raise bad("not a JSON object")
    text, answers = row.get("question"), row.get("golden_answers")
    if not isinstance(text, str) or not text.strip():
        raise bad('"question" is missing or empty')
    if isinstance(answers, str):
        answers = [answers]
    if not isinstance(answers, list) or not answers or None in answers:
        raise bad('"golden_answers" is not a list with at least one answer')
    metadata = row.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise bad('"metadata" is not an object')
    return Question(
        id=f"{path.stem}:{row.get('id', number)}",
        text=text,
        golden_answers=tuple(str(answer) for answer in answers),
        kind=kind_of(metadata),
        metadata=metadata,
    )
