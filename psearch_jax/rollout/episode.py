"""What was played: tokens with the roles they got when they were appended, and the turns."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from psearch_jax.questions.question import Question
from psearch_jax.retrieval.passages import Hit


class Role(IntEnum):
    """Who wrote a token. Set when the token is appended, never guessed afterwards (law 1)."""

    PROMPT = 0
    POLICY = 1
    OBSERVATION = 2


@dataclass(frozen=True, kw_only=True)
class Request:
    """One episode to be played: members of a group share `prompt_ids` (and its prefill)."""

    question: Question
    prompt_ids: tuple[int, ...]
    group: int
    member: int


@dataclass(kw_only=True)
class Turn:
    """One generation turn: policy tokens `start:stop` of the episode and what came of them.

    `kind` is "search", "answer", "invalid" (neither could be read) or "none" (cut off by a budget).
    `hits` has one list for every query; `failed` counts queries whose search failed after retries.
    """

    kind: str
    start: int
    stop: int
    text: str
    queries: tuple[str, ...] = ()
    hits: tuple[tuple[Hit, ...], ...] = ()
    answer: str | None = None
    failed: int = 0


@dataclass(kw_only=True)
class Episode:
    """A played episode. `ids`, `roles` and `logprobs` have equal length.

    `logprobs` are natural logarithms on the sampled support and temperature for policy tokens, 0.0 elsewhere.
    `end_reason`: "answer", "end" (end token), "turns", "budget" (turn token budget), "context" (sequence full).
    """

    question: Question
    group: int
    member: int
    ids: list[int] = field(default_factory=list)
    roles: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    end_reason: str = ""

    @property
    def answer(self) -> str | None:
        """The answer read from the last policy turn, or None."""
        return self.turns[-1].answer if self.turns else None

    @property
    def searches(self) -> list[Turn]:
        """The turns that searched."""
        return [turn for turn in self.turns if turn.kind == "search"]

    @property
    def subqueries(self) -> int:
        """Sub-queries sent, over all search turns."""
        return sum(len(turn.queries) for turn in self.searches)

    def count(self, role: Role) -> int:
        """How many tokens have this role."""
        return sum(1 for r in self.roles if r == role)
