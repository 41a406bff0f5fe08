"""Rewards by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from psearch_jax.config import ProtocolConfig, RewardConfig
from psearch_jax.errors import UserError
from psearch_jax.questions.question import Question
from psearch_jax.rewards.answers import exact_match
from psearch_jax.rewards.decomposition import gated_parts, parallel_search_parts
from psearch_jax.rollout.episode import Episode


@dataclass(frozen=True)
class Reward:
    """What an episode earned: the sum, and the parts that it is the sum of."""

    total: float
    parts: dict[str, float]


def _exact_match(
    config: RewardConfig, protocol: ProtocolConfig, episodes: Sequence[Episode], question: Question
) -> list[dict[str, float]]:
    """Search-R1's reward: 1 for an exact match, else 0."""
    return [
        {"em": float(exact_match(episode.answer, question.golden_answers))} for episode in episodes
    ]


def _parallel_search(
    config: RewardConfig, protocol: ProtocolConfig, episodes: Sequence[Episode], question: Question
) -> list[dict[str, float]]:
    return [parallel_search_parts(config, protocol, episode, question) for episode in episodes]


def _gated(
    config: RewardConfig, protocol: ProtocolConfig, episodes: Sequence[Episode], question: Question
) -> list[dict[str, float]]:
    return gated_parts(config, episodes, question)


REWARDS: dict[str, Callable[..., list[dict[str, float]]]] = {
    "exact_match": _exact_match,
    "parallel_search": _parallel_search,
    "gated": _gated,
}


def score_group(
    config: RewardConfig,
    protocol: ProtocolConfig,
    episodes: Sequence[Episode],
    question: Question,
) -> list[Reward]:
    """Judge the episodes of one group, all about `question`. Reads policy turns only (law 2).

    Raises:
      UserError: `config.name` is not the name of a reward.
    """
    if config.name not in REWARDS:
        raise UserError(f"reward.name is {config.name!r}; use one of {', '.join(sorted(REWARDS))}.")
    parts = REWARDS[config.name](config, protocol, episodes, question)
    return [Reward(sum(of_one.values()), of_one) for of_one in parts]
