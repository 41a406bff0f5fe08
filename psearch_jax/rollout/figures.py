"""What a rollout has cost: tokens forwarded, steps, seconds. Read by benchmarks and by the metrics of a step."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax

#: Where the seconds of a rollout go: device calls (of which the loop waits for the end), and waiting for results with
#: nothing else to do. What is left of the total is the host's own work.
PHASES = ("prefill", "append", "decode", "search")


@dataclass(kw_only=True)
class Figures:
    """Counters of one rollout. `rows`: of a decoding block; `slots`: live episodes at most."""

    slots: int
    rows: int
    forwarded: Counter[str] = field(
        default_factory=lambda: Counter(prompt=0, policy=0, observation=0)
    )
    counts: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Add the time inside to a phase."""
        began = time.perf_counter()
        try:
            with jax.profiler.TraceAnnotation(phase):  # a name in `psearch train --profile`
                yield
        finally:
            self.seconds[phase] += time.perf_counter() - began

    @property
    def block_seconds(self) -> float:
        """Mean time of a decoding block so far."""
        return self.seconds["decode"] / max(self.counts["blocks"], 1)

    def decoded(self, *, drawn: int, steps: int, busy: bool) -> None:
        """A block has drawn tokens; `busy` while episodes wait for a slot."""
        self.forwarded["policy"] += drawn
        self.counts.update(blocks=1, steps=steps)
        if busy:
            self.counts.update(busy_steps=steps, busy_drawn=drawn)

    def record(
        self, *, episodes: int, tokens: int, compiled: int, search: Mapping[str, int]
    ) -> dict[str, Any]:
        """`Engine.stats`.

        episodes, episode_tokens: finished. forwarded: real tokens that went through the model, by role;
        forwarded_over_episode_tokens: their sum over the tokens of the episodes. occupancy: tokens drawn over
        steps × rows; occupancy_busy: of the steps while episodes waited for a slot (None without any). compiled:
        programs. search: counts of `SearchCounts`. seconds: PHASES, "host" and "total"; host_share: host over total.
        """
        seconds = {name: self.seconds[name] for name in PHASES}
        total = self.seconds["total"]
        seconds["host"] = total - sum(seconds.values())
        steps, busy = self.counts["steps"], self.counts["busy_steps"]
        return {
            "episodes": episodes,
            "episode_tokens": tokens,
            "slots": self.slots,
            "decode_rows": self.rows,
            "forwarded": dict(self.forwarded),
            "forwarded_over_episode_tokens": self.forwarded.total() / max(tokens, 1),
            "decode_steps": steps,
            "decode_blocks": self.counts["blocks"],
            "append_calls": self.counts["append_calls"],
            "append_positions": self.counts["append_positions"],
            "occupancy": self.forwarded["policy"] / max(steps * self.rows, 1),
            "occupancy_busy": self.counts["busy_drawn"] / (busy * self.rows) if busy else None,
            "compiled": compiled,
            "search": dict(search),
            "host_share": seconds["host"] / total if total else 0.0,
            "seconds": {**seconds, "total": total},
        }
