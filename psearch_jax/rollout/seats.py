"""A live episode in its slot, and the events that a live view is given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from psearch_jax.config import ProtocolConfig, SamplingConfig
from psearch_jax.rollout.episode import Episode, Request, Role, Turn
from psearch_jax.rollout.programs import RowInputs

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that has just been appended or decided.

    `kind`: "policy" (text of newly drawn tokens), "search" (text: the queries, one a line), "observation" or
    "end" (text: the reason). `ids` are the tokens of "policy" and "observation" events.
    """

    request: Request
    kind: str
    text: str
    ids: tuple[int, ...] = ()


@dataclass(kw_only=True, eq=False)
class Seat:
    """A live episode. `state`: "decoding", "searching" or "appending" (its `pending` tokens).

    `index` is the place of its request in the rollout, `slot` that of its rows in the cache.
    """

    request: Request
    index: int
    slot: int
    sampling: SamplingConfig
    episode: Episode = field(init=False)
    state: str = "decoding"
    pending: list[int] = field(default_factory=list)  # known tokens that are not in the cache yet
    turn_start: int = 0
    shown: int = 0  # characters of this turn's text that events have carried

    def __post_init__(self) -> None:
        request = self.request
        self.episode = Episode(
            question=request.question, group=request.group, member=request.member
        )
        self.extend(request.prompt_ids, Role.PROMPT)

    @property
    def length(self) -> int:
        """Tokens of the episode so far."""
        return len(self.episode.ids)

    @property
    def drawn(self) -> int:
        """Tokens of the current turn."""
        return self.length - self.turn_start

    def limit(self, protocol: ProtocolConfig, context: int) -> int:
        """Tokens that the episode may have in all, its prompt included."""
        budget = protocol.response_tokens
        return min(context, len(self.request.prompt_ids) + budget) if budget else context

    def room(self, protocol: ProtocolConfig, context: int) -> int:
        """Tokens that this turn may still get."""
        return min(protocol.turn_tokens - self.drawn, self.limit(protocol, context) - self.length)

    def fill(
        self, inputs: RowInputs, row: int, slot: int, protocol: ProtocolConfig, context: int
    ) -> None:
        """Write what a decoding block must know into a row of its inputs; `slot` counts over all processes."""
        inputs.slot_R[row] = slot
        inputs.active_R[row] = True
        inputs.length_R[row] = self.length
        inputs.room_R[row] = self.room(protocol, context)
        inputs.group_R[row] = self.request.group
        inputs.member_R[row] = self.request.member
        inputs.temperature_R[row] = self.sampling.temperature
        inputs.top_k_R[row] = self.sampling.top_k
        inputs.top_p_R[row] = self.sampling.top_p

    def extend(
        self, ids: Sequence[int], role: Role, logprobs: Sequence[float] | None = None
    ) -> None:
        """Append tokens with their role (law 1). What is not the policy's begins a new turn."""
        episode = self.episode
        episode.ids.extend(ids)
        episode.roles.extend([int(role)] * len(ids))
        episode.logprobs.extend([0.0] * len(ids) if logprobs is None else logprobs)
        if role != Role.POLICY:
            self.turn_start, self.shown = len(episode.ids), 0

    def end_turn(self, kind: str, text: str, **found: Any) -> None:
        """Record the turn that has just ended."""
        self.episode.turns.append(
            Turn(kind=kind, start=self.turn_start, stop=self.length, text=text, **found)
        )


@dataclass(frozen=True, kw_only=True)
class Runs:
    """How slots are cut over devices: into `pieces` runs of equal length. Nothing is copied from run to run."""

    slots: int
    pieces: int

    def run_of(self, slot: int) -> int:
        """The run that a slot belongs to."""
        return slot * self.pieces // self.slots

    def choose(
        self,
        empty: list[int],
        prompt: tuple[int, ...],
        sources: Mapping[tuple[int, tuple[int, ...]], int],
    ) -> int:
        """Take an empty slot off the list: where the prompt is at hand (`sources` has (run, prompt)), else in the
        emptiest run; the first of equals."""
        room = Counter(map(self.run_of, empty))
        best = min(
            empty,
            key=lambda slot: (
                (self.run_of(slot), prompt) not in sources,
                -room[self.run_of(slot)],
                slot,
            ),
        )
        empty.remove(best)
        return best

    def deal(
        self, items: Sequence[Item], rows: int, slot_of: Callable[[Item], int]
    ) -> list[tuple[int, Item]]:
        """As many items as one call of `rows` rows takes, in order, each with its row: the rows of a call come in one
        stretch a run."""
        share = rows // self.pieces
        dealt: Counter[int] = Counter()
        placed = []
        for item in items:
            run = self.run_of(slot_of(item))
            if dealt[run] < share:
                placed.append((run * share + dealt[run], item))
                dealt[run] += 1
        return placed
