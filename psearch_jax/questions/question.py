"""A question and its gold answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Question kinds. *parallelizable*: its sub-queries do not depend on each other; *bridge*: the second
#: query needs the first answer; *mixed*: both; *single*: one query answers it.
KINDS = ("parallelizable", "bridge", "mixed", "single", "unknown")


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question.

    Attributes:
      id: unique over everything that is loaded together (readers prefix the source's name).
      text: the question as the user asks it.
      golden_answers: accepted answers, never empty.
      kind: one of `KINDS`.
      metadata: whatever the data set says besides; the embedded world stores `needs` (the ids of the
        passages that hold the facts, one list a hop) and `unseen` (its entities occur in no training question);
        `gold_titles` are the titles of the passages that hold the facts, where the data set names them.
      dataset: where it comes from; results are counted by it.
    """

    id: str
    text: str
    golden_answers: tuple[str, ...]
    kind: str = "unknown"
    metadata: Mapping[str, Any] = field(default_factory=dict)
    dataset: str = ""


def question_row(question: Question) -> dict[str, Any]:
    """The FlashRAG row of a question."""
    return {
        "id": question.id,
        "question": question.text,
        "golden_answers": list(question.golden_answers),
        "metadata": dict(question.metadata),
    }
