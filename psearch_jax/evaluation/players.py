"""How a part of an evaluation is played: episodes of the policy, or a baseline's calls; and what that cost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from jaxtyping import Array

from psearch_jax.config import ProtocolConfig, SamplingConfig
from psearch_jax.evaluation.baselines import desk_of
from psearch_jax.evaluation.records import episode_facts, spelling
from psearch_jax.evaluation.scripts import Desk, Script, play_scripts
from psearch_jax.metrics_log import write_atomically
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
    """What evaluating cost: the engine's figures added up over its rollouts, and the time outside it.

    Kept beside the lines, so that an evaluation that went on has the figures of all its parts, and one that had
    nothing left to play those of when it was played. What a kill cut off is missing from them.
    """

    def __init__(self, path: Path) -> None:
        """`path`: of the lines."""
        self.began = time.monotonic()
        self.path = path.with_suffix(".engine.json")
        self.sums = dict.fromkeys(
            ("rollouts", "room", "drawn", "inside", "scoring", "seconds"), 0.0
        )
        if path.exists():
            try:
                kept = json.loads(self.path.read_text(encoding="utf-8"))
                self.sums |= {name: float(kept[name]) for name in self.sums}
            except (OSError, ValueError, TypeError, LookupError):
                pass  # figures about the evaluation, not results of it
        self.played = False

    def add(self, stats: Mapping[str, Any]) -> None:
        """The figures of one more rollout (`Engine.stats`)."""
        self.played = True
        self.sums["rollouts"] += 1
        self.sums["room"] += stats["decode_steps"] * stats["decode_rows"]
        self.sums["drawn"] += stats["forwarded"]["policy"]
        self.sums["inside"] += stats["seconds"]["total"]

    def beside(self, function: Callable[..., None]) -> Callable[..., None]:
        """The function, its seconds taken off the engine's: it is called in the middle of a rollout."""

        def timed(*arguments: Any) -> None:
            began = time.monotonic()
            function(*arguments)
            self.sums["scoring"] += time.monotonic() - began

        return timed

    def keep(self) -> None:
        """Write the sums, if anything was played."""
        if self.played:
            self.sums["seconds"] += time.monotonic() - self.began
            self.began, self.played = time.monotonic(), False
            write_atomically(self.path, json.dumps(self.sums) + "\n")

    def figures(self) -> dict[str, Any]:
        """Occupancy: rows of decoding blocks that drew a token, of all their rows in all steps, the emptying ends of
        the chunks included. Outside share: of the seconds, those that the engine did not need."""
        sums = self.sums
        inside = sums["inside"] - sums["scoring"]
        return {
            "rollouts": int(sums["rollouts"]),
            "occupancy": sums["drawn"] / sums["room"] if sums["room"] else None,
            "seconds": round(sums["seconds"], 3),
            "outside_share": max(0.0, 1 - inside / sums["seconds"]) if sums["seconds"] else None,
        }
