"""From played and judged episodes to what is trained on: token sequences with their advantages.

Pure functions on the host. What they need of forward passes (the KL to the reference, a critic's values) is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from psearch_jax.config import AlgorithmConfig, Config
from psearch_jax.learning.advantages import (
    generalized_advantages,
    outcome_advantages,
    whiten,
)
from psearch_jax.learning.aggregation import denominator_of
from psearch_jax.learning.batches import Batch, Sequence, from_episode, pack, split
from psearch_jax.learning.objective import kl_in_loss, shares_trunk
from psearch_jax.learning.selection import cut_off, overlong_penalties
from psearch_jax.rollout.episode import Episode

#: Bad batches that are kept for a look; later ones are only counted.
KEPT_BAD_BATCHES = 4


def to_sequence(config: AlgorithmConfig, episode: Episode) -> Sequence:
    """The training view of an episode, without an advantage yet; no token counts where it is filtered out."""
    sequence = from_episode(episode, 0.0)
    if config.overlong_filter and cut_off(episode):
        return replace(sequence, weights=np.zeros(len(episode.ids), np.float32))
    return sequence


def shaped_rewards(
    config: AlgorithmConfig,
    rewards_GxM: Float[np.ndarray, "G M"],
    groups: Many[Many[Episode]],
    context: int,
) -> Float[np.ndarray, "G M"]:
    """Rewards less what episodes pay for coming near the end of the context."""
    if not config.overlong_buffer:
        return rewards_GxM
    lengths = [len(episode.ids) for group in groups for episode in group]
    penalties_N = overlong_penalties(
        lengths, limit=context, buffer=config.overlong_buffer, penalty=config.overlong_penalty
    )
    return rewards_GxM - penalties_N.reshape(rewards_GxM.shape)


def give_advantages(
    config: AlgorithmConfig,
    rewards_GxM: Float[np.ndarray, "G M"],
    sequences: Many[Sequence],
    *,
    divergences: Many[np.ndarray] | None = None,
    kl_coefficient: float = 0.0,
    values: Many[np.ndarray] | None = None,
) -> tuple[list[Sequence], list[np.ndarray]]:
    """The sequences with their advantages, and with `gae` the returns that the critic learns.

    Args:
      sequences: of the episodes, group after group.
      divergences: estimated KL of each token where it is a part of the reward. An advantage that is one number an
        episode has the sum over its policy tokens taken off its reward; with `gae` each token pays its own.
      values: the critic's, of each token, for `gae`.
    """
    if divergences is None:
        divergences = [np.zeros(len(sequence.ids)) for sequence in sequences]
    policy = [np.asarray(sequence.weights) > 0 for sequence in sequences]
    costs = [kl_coefficient * np.where(p, d, 0.0) for p, d in zip(policy, divergences, strict=True)]
    if config.advantage != "gae":
        paid_GxM = np.array([cost.sum() for cost in costs]).reshape(rewards_GxM.shape)
        advantages_GxM = outcome_advantages(
            config.advantage, rewards_GxM - paid_GxM, normalize_std=config.normalize_std
        )
        pairs = zip(sequences, advantages_GxM.reshape(-1).tolist(), strict=True)
        return [replace(sequence, advantages=advantage) for sequence, advantage in pairs], []
    assert values is not None, "gae needs the critic's values"
    advantages, returns = [], []
    for reward, cost, value, p in zip(rewards_GxM.reshape(-1), costs, values, policy, strict=True):
        rewards_L = -cost
        if p.any():
            rewards_L[np.flatnonzero(p)[-1]] += reward
        a, r = generalized_advantages(
            rewards_L, value, p, gamma=config.gamma, gae_lambda=config.gae_lambda
        )
        advantages.append(a)
        returns.append(r)
    if config.normalize_std:
        advantages = whiten(advantages, policy)
    return [replace(s, advantages=a) for s, a in zip(sequences, advantages, strict=True)], returns


def worth_computing(config: AlgorithmConfig, sequence: Sequence) -> bool:
    """Whether the gradient of a sequence can be anything but 0: without an advantage and without terms that act on
    every token it is 0, and the sequence is left out of the computation (not out of the mean)."""
    if kl_in_loss(config) or config.entropy_coefficient > 0 or shares_trunk(config):
        return bool(np.any(sequence.weights))
    return bool(np.any(np.asarray(sequence.advantages) != 0.0))


def minibatches(
    config: AlgorithmConfig, sequences: Many[Sequence], rows: int, at_least: int
) -> tuple[list[Batch], float]:
    """The minibatches of a step, and what each one's loss is divided by (denominators of all sequences, so that
    those that are left out of the computation stay in the mean).

    Args:
      rows: of all minibatches together; enough for the longest episodes there can be (law 6).
      at_least: where no sequence is worth computing, so many are scored all the same, for the gap to the rollout
        (law 9).
    """
    counted = [sequence for sequence in sequences if np.any(sequence.weights)]
    kept = [sequence for sequence in counted if worth_computing(config, sequence)]
    batch = pack(kept or counted[:at_least], config.row_length, rows)
    whole = denominator_of(config.aggregation, sequences, config.fixed_length)
    return split(batch, config.minibatches), whole / config.minibatches


#: Metrics of an update that are means over its scored tokens.
TOKEN_MEANS = (
    *("ratio", "clip_fraction", "approx_kl", "entropy", "kl", "correction", "masked"),
    *("value", "value_clip_fraction", "critic_loss", "critic_value"),
    "critic_value_clip_fraction",
)


def merge_metrics(learned: Many[Mapping[str, Any]]) -> dict[str, float]:
    """Metrics of a step from those of its updates. Means over tokens stay means over all tokens, however few are in
    a minibatch; counts are added up; the gap to the rollout is the first minibatch's alone (law 9)."""
    weights = np.array([metrics["weight"] for metrics in learned], np.float64)
    result = {}
    for name in learned[0]:
        values = np.array([metrics[name] for metrics in learned], np.float64)
        if name in TOKEN_MEANS:
            result[name] = float(np.average(values, weights=weights if weights.any() else None))
        elif name in ("weight", "tokens"):
            result[name] = float(np.sum(values))
        else:
            result[name] = float(values[0] if name in ("gap", "gap_max") else np.mean(values))
    return result


def keep_bad_batch(directory: Path, step: int, batch: Any) -> None:
    """Write a batch that was not finite to `bad_batches/` of a run directory, if there are fewer than a few."""
    if jax.process_index() != 0:
        return
    folder = directory / "bad_batches"
    folder.mkdir(parents=True, exist_ok=True)
    kept = len(list(folder.glob("*.npz")))
    if kept < KEPT_BAD_BATCHES:
        arrays: dict[str, Any] = {k: np.asarray(v) for k, v in batch._asdict().items()}
        np.savez_compressed(folder / f"step-{step}-{kept}.npz", **arrays)


def batch_rows(config: Config, shards: int) -> int:
    """Rows of a step's batch over `shards` row shards: room for the longest episodes there can be, in whole
    micro-batches of every minibatch.

    So every step has the same shape (law 6), and micro-batches that stay empty are stepped over.
    """
    algorithm = config.algorithm
    episodes = config.trainer.questions_per_step * config.trainer.group_size
    needed = -(-episodes // max(1, algorithm.row_length // config.rollout.context))
    multiple = algorithm.minibatches * -(-algorithm.micro_rows // shards) * shards
    return -(-needed // multiple) * multiple
