"""Signs of a policy that falls apart, read from the metrics of each step.

GRPO on search tasks collapses sooner or later on all published models: entropy goes to nothing, the rollout's and the
trainer's log-probabilities part, episodes stop searching or write no actions, and the reward falls. The trainer then
goes back to the last good checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psearch_jax.config import CollapseConfig


class Detector:
    """Counts steps in a row that show a sign, and knows the checkpoint to return to.

    `state` is plain JSON and all that it remembers; it belongs into every checkpoint.
    """

    def __init__(self, config: CollapseConfig) -> None:
        self.config = config
        self.state: dict[str, Any] = {
            "streak": 0,
            "recent": [],  # rewards of the last `window` steps
            "best": None,  # their best mean so far
            "good": None,  # the step of the last good checkpoint
            "newest": None,  # that of the last one, good or not yet
            "returns": [],  # to good checkpoints
        }

    @property
    def good(self) -> int | None:
        """The step of the last good checkpoint. A step's metrics are of the policy before its update: a checkpoint is
        good once the step after it shows no sign; the first one is in any case."""
        return self.state["good"]

    @property
    def returns(self) -> list[dict[str, Any]]:
        """Of each return the step it was `at`, the step it went `to`, and the `sign`."""
        return self.state["returns"]

    @property
    def rate_scale(self) -> float:
        """What is left of the learning rate."""
        return self.config.rate_factor ** len(self.returns)

    def see(self, metrics: Mapping[str, Any]) -> str:
        """Take in a step's metrics; what the collapse shows by, or "" where there is none (yet)."""
        window, best = self.config.window, self.state["best"]
        shown = signs(self.config, metrics, best)
        recent = [*self.state["recent"], float(metrics["reward"])][-window:]
        if len(recent) == window:
            mean = sum(recent) / window
            best = mean if best is None else max(best, mean)
        streak = self.state["streak"] + 1 if shown else 0
        self.state |= {"streak": streak, "recent": recent, "best": best}
        if not shown:
            self.state["good"] = self.state["newest"]
        return " and ".join(shown) if streak >= window else ""

    def saves(self, step: int) -> None:
        """A checkpoint of that step is about to be written."""
        self.state["newest"] = step
        if self.good is None:
            self.state["good"] = step

    def take_up(self, state: dict[str, Any], returns: list[dict[str, Any]] | None = None) -> None:
        """Go on from a checkpoint's state, after `returns` where these are more than it knows of."""
        self.state = dict(state)
        if returns is not None:
            self.state["returns"] = returns


def signs(config: CollapseConfig, metrics: Mapping[str, Any], best: float | None) -> list[str]:
    """What a step shows, a few words each.

    Args:
      metrics: of the step: reward, entropy, gap, search_rate, invalid.
      best: the best mean reward so far; None before there is one.
    """
    shown = []
    for name, bound, low in (
        ("entropy", config.entropy_below, True),
        ("gap", config.gap_above, False),
        ("search_rate", config.search_rate_below, True),
        ("invalid", config.invalid_above, False),
    ):
        value = float(metrics[name])
        if bound and (value < bound if low else value > bound):
            shown.append(f"{name} {value:.3g} is {'below' if low else 'above'} {bound:g}")
    reward = float(metrics["reward"])
    if config.reward_drop and best is not None and reward < best - config.reward_drop:
        shown.append(f"reward {reward:.3g} is more than {config.reward_drop:g} below {best:.3g}")
    return shown
