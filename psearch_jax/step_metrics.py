"""What a training step says about its episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from psearch_jax.config import ProtocolConfig
from psearch_jax.rewards.answers import exact_match
from psearch_jax.rewards.composition import Reward
from psearch_jax.rewards.decomposition import distinct_queries
from psearch_jax.rollout.episode import Episode, Role
from psearch_jax.rollout.protocol import well_formed


def describe(
    protocol: ProtocolConfig, episodes: Sequence[Episode], rewards: Sequence[Reward]
) -> dict[str, Any]:
    """Means over episodes, and some of them by question kind. Everything is read from policy turns.

    Returns:
      reward, parts (of the reward), em, turns, searches, subqueries, distinct_queries, search_rate (share of
      episodes that search), decomposed (share whose first search sends two or more queries), invalid (share of
      turns that neither search nor answer), well_formed, answered, failed_searches (count), surprisal (mean
      −log-probability of sampled tokens in nats, an unbiased estimate of the entropy at the sampling
      temperature), lengths (policy, observation, all tokens of an episode, and the longest), kinds.
    """
    pairs = list(zip(episodes, rewards, strict=True))
    kinds = sorted({episode.question.kind for episode in episodes})
    turns = [turn for episode in episodes for turn in episode.turns]
    policy_tokens = sum(episode.count(Role.POLICY) for episode in episodes)
    drawn = sum(sum(episode.logprobs) for episode in episodes)

    def mean(value: Callable[[Episode], float]) -> float:
        return float(np.mean([value(episode) for episode in episodes]))

    parts = {name: _mean([reward.parts[name] for reward in rewards]) for name in rewards[0].parts}
    return {
        "reward": _mean([reward.total for reward in rewards]),
        "parts": parts,
        "em": mean(_em),
        "turns": mean(lambda episode: len(episode.turns)),
        "searches": mean(lambda episode: len(episode.searches)),
        "subqueries": mean(lambda episode: episode.subqueries),
        "distinct_queries": mean(distinct_queries),
        "search_rate": mean(lambda episode: bool(episode.searches)),
        "decomposed": mean(_decomposed),
        "invalid": _mean([turn.kind in ("invalid", "none") for turn in turns]),
        "well_formed": mean(lambda episode: well_formed(protocol, episode)),
        "answered": mean(lambda episode: episode.answer is not None),
        "failed_searches": sum(turn.failed for turn in turns),
        "surprisal": -drawn / max(1, policy_tokens),
        "lengths": {
            "policy": policy_tokens / len(episodes),
            "observation": mean(lambda episode: episode.count(Role.OBSERVATION)),
            "total": mean(lambda episode: len(episode.ids)),
            "longest": max(len(episode.ids) for episode in episodes),
        },
        "kinds": {
            kind: _of_kind([pair for pair in pairs if pair[0].question.kind == kind])
            for kind in kinds
        },
    }


def _of_kind(pairs: Sequence[tuple[Episode, Reward]]) -> dict[str, float]:
    return {
        "episodes": len(pairs),
        "reward": _mean([reward.total for _, reward in pairs]),
        "em": _mean([_em(episode) for episode, _ in pairs]),
        "turns": _mean([len(episode.turns) for episode, _ in pairs]),
        "decomposed": _mean([_decomposed(episode) for episode, _ in pairs]),
    }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def _em(episode: Episode) -> float:
    return float(exact_match(episode.answer, episode.question.golden_answers))


def _decomposed(episode: Episode) -> float:
    return float(bool(episode.searches) and len(episode.searches[0].queries) >= 2)
