"""How a part of an evaluation is played: episodes of the policy, or a baseline's calls; and what that cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from jaxtyping import Array

from psearch_jax.config import ProtocolConfig, SamplingConfig
from psearch_jax.evaluation.baselines import desk_of
from psearch_jax.evaluation.records import episode_facts, spelling
from psearch_jax.evaluation.scripts import Desk, Script, play_scripts
from psearch_jax.questions.question import Question
from psearch_jax.rollout.engine import Engine
from psearch_jax.rollout.episode import Episode, Request
from psearch_jax.rollout.protocol import well_formed

#: (question number, sample number) of the episodes of a part.
Part: TypeAlias = Sequence[tuple[int, int]]
#: Plays a part and gives the `episode_facts` of each with its place in the part, when it has ended.
Play: TypeAlias = Callable[[Part, Callable[[int, dict[str, Any]], None]], None]


def episode_player(
    engine: Engine,
    params: Any,
    questions: Sequence[Question],
    texts: Sequence[str],
    key: Array,
    sampling: SamplingConfig,
    protocol: ProtocolConfig,
    use: EngineUse,
) -> Play:
    """Episodes of the policy."""
    decode = spelling(engine.decode_text)

    def play(part: Part, ended: Callable[[int, dict[str, Any]], None]) -> None:
        requests = [
            Request(
                question=questions[group],
                prompt_ids=engine.encode(texts[group]),
                group=group,
                member=member,
            )
            for group, member in part
        ]

        def on_end(place: int, episode: Episode) -> None:
            facts = episode_facts(
                episode,
                decode=decode,
                well_formed=lambda played: well_formed(protocol, played),
            )
            ended(place, facts)

        engine.rollout(
            params,
            requests,
            key=key,
            sampling=sampling,
            protocol=protocol,
            on_end=use.beside(on_end),
        )
        use.add(engine.stats)

    return play


def script_player(
    engine: Engine,
    params: Any,
    questions: Sequence[Question],
    script: Callable[[Desk, Question], Script],
    key: Array,
    sampling: SamplingConfig,
    use: EngineUse,
) -> Play:
    """A baseline's calls."""
    desk = desk_of(engine)

    def play(part: Part, ended: Callable[[int, dict[str, Any]], None]) -> None:
        scripts = [
            (questions[group], script(desk, questions[group]), group, member)
            for group, member in part
        ]
        play_scripts(
            engine,
            params,
            scripts,
            key=key,
            sampling=sampling,
            on_rollout=use.add,
            on_end=ended,
        )

    return play


class EngineUse:
    """What evaluating cost: the engine's figures added up over its rollouts, and the time outside it."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.rollouts = self.room = self.drawn = 0
        self.inside = self.scoring = 0.0

    def add(self, stats: Mapping[str, Any]) -> None:
        """The figures of one more rollout (`Engine.stats`)."""
        self.rollouts += 1
        self.room += stats["decode_steps"] * stats["decode_rows"]
        self.drawn += stats["forwarded"]["policy"]
        self.inside += stats["seconds"]["total"]

    def beside(self, function: Callable[..., None]) -> Callable[..., None]:
        """The function, its seconds taken off the engine's: it is called in the middle of a rollout."""

        def timed(*arguments: Any) -> None:
            began = time.monotonic()
            function(*arguments)
            self.scoring += time.monotonic() - began

        return timed

    def figures(self) -> dict[str, Any]:
        """Occupancy: rows of decoding blocks that drew a token, of all their rows in all steps, the emptying ends of
        the chunks included."""
        seconds = time.monotonic() - self.began
        return {
            "rollouts": self.rollouts,
            "occupancy": self.drawn / self.room if self.room else None,
            "seconds": round(seconds, 3),
            "outside_share": max(0.0, 1 - (self.inside - self.scoring) / seconds)
            if self.rollouts
            else None,
        }
