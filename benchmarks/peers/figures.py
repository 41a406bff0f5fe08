"""Figures of a benchmark: medians and ranges, what compiled, and a search that is slow on purpose."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from psearch_jax.retrieval.passages import Hit
from psearch_jax.rollout.environment import Backend


@dataclass(frozen=True)
class Slow:
    """A backend that takes `seconds` longer for every call."""

    backend: Backend
    seconds: float

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        time.sleep(self.seconds)
        return self.backend.search(queries, k)


class Compiled:
    """Counts everything that JAX compiles, the engine's programs or not."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration: float, **_: Any) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def speedups(lines: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Our episodes/s over each peer's, repetition by repetition (same questions in each)."""
    ours = [line["episodes_per_second"] for line in lines["ours"]]
    return {
        f"speedup_over_{name}": spread(
            [a / b["episodes_per_second"] for a, b in zip(ours, values, strict=True)]
        )
        for name, values in lines.items()
        if name != "ours"
    }


def summary(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures of the issue: medians; everything else under `details`."""
    flat = {
        key: value["median"] if isinstance(value, dict) and "median" in value else value
        for key, value in figures.items()
        if key != "details"
    }
    ranges = {key: value for key, value in figures.items() if isinstance(value, dict)}
    return flat | {"details": ranges.pop("details", {}) | {"ranges": ranges}}
