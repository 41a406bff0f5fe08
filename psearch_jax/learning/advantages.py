"""From rewards to advantages. Pure functions on the host, in float64 inside and float32 outside.

Shape suffixes: G groups, M members that answered the same question, L tokens of an episode.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float

from psearch_jax.errors import UserError

SMALLEST_SPREAD = (
    1e-6  # added to the standard deviation, and the spread below which a group says nothing
)

#: Advantages that one number an episode suffices for; the others (`gae`) are one a token.
OUTCOME = ("grpo", "rloo", "reinforce")


def outcome_advantages(
    name: str, rewards_GxM: Float[np.ndarray, "G M"], *, normalize_std: bool = True
) -> Float[np.ndarray, "G M"]:
    """The advantage of each episode, by the name that `algorithm.advantage` has.

    Raises:
      UserError: a name that is not in `OUTCOME`.
    """
    if name == "grpo":
        return group_advantages(rewards_GxM, normalize_std=normalize_std)
    if name == "rloo":
        return leave_one_out_advantages(rewards_GxM)
    if name == "reinforce":
        return batch_advantages(rewards_GxM, normalize_std=normalize_std)
    raise UserError(f"algorithm.advantage is {name!r}; use one of {', '.join(OUTCOME)} or gae.")


def group_advantages(
    rewards_GxM: Float[np.ndarray, "G M"], *, normalize_std: bool = True
) -> Float[np.ndarray, "G M"]:
    """GRPO (Shao et al. 2024): reward minus the mean of its group, divided by (sample std + 1e-6).

    Args:
      rewards_GxM: G groups of M members that answered the same question.
      normalize_std: False leaves the division out (Dr. GRPO, Liu et al. 2025).

    Returns:
      float32 advantages. A group without spread, or of one member, gets exactly 0: rounding in the mean
      of equal rewards must not be blown up by a division by almost nothing.
    """
    rewards_GxM = np.asarray(rewards_GxM, np.float64)
    centred_GxM = rewards_GxM - rewards_GxM.mean(axis=1, keepdims=True)
    centred_GxM[zero_spread(rewards_GxM)] = 0.0
    if normalize_std and rewards_GxM.shape[1] > 1:
        std_Gx1 = rewards_GxM.std(axis=1, ddof=1, keepdims=True)
        centred_GxM = centred_GxM / (std_Gx1 + SMALLEST_SPREAD)
    return centred_GxM.astype(np.float32)


def leave_one_out_advantages(rewards_GxM: Float[np.ndarray, "G M"]) -> Float[np.ndarray, "G M"]:
    """RLOO (Kool et al. 2019; Ahmadian et al. 2024): reward minus the mean of the OTHER members of its group.

    Unlike the mean of all, that baseline does not depend on the episode, so the gradient is unbiased.
    Exactly 0 in a group without spread, or of one member.
    """
    members = rewards_GxM.shape[1]
    centred_GxM = group_advantages(rewards_GxM, normalize_std=False)
    return centred_GxM * np.float32(members / max(1, members - 1))


def batch_advantages(
    rewards_GxM: Float[np.ndarray, "G M"], *, normalize_std: bool = True
) -> Float[np.ndarray, "G M"]:
    """REINFORCE with the batch for a baseline: reward minus the mean of all episodes, divided by (their sample
    std + 1e-6) if asked. Groups play no part. Exactly 0 where all rewards are equal."""
    flat_1xN = np.asarray(rewards_GxM, np.float64).reshape(1, -1)
    return group_advantages(flat_1xN, normalize_std=normalize_std).reshape(rewards_GxM.shape)


def zero_spread(rewards_GxM: Float[np.ndarray, "G M"]) -> np.ndarray:
    """Which groups have equal rewards throughout, bool [G]; they teach nothing."""
    return np.ptp(rewards_GxM, axis=1) <= SMALLEST_SPREAD


def generalized_advantages(
    rewards_L: Float[np.ndarray, " L"],
    values_L: Float[np.ndarray, " L"],
    policy_L: Bool[np.ndarray, " L"],
    *,
    gamma: float,
    gae_lambda: float,
) -> tuple[Float[np.ndarray, " L"], Float[np.ndarray, " L"]]:
    """GAE (Schulman et al. 2016) in which γ and λ step from one policy token to the next policy token.

    What the environment wrote in between is neither an action nor time that passes: it is skipped, so that an
    episode is worth the same however long its observations are.

    Args:
      rewards_L: reward of each token; only those of policy tokens count.
      values_L: the critic's value before each token was chosen; only those of policy tokens are read.
      policy_L: which tokens the policy wrote.

    Returns:
      float32 advantages, and returns (advantage + value), both 0 where the policy did not write.
    """
    advantages_L = np.zeros(len(rewards_L), np.float32)
    returns_L = np.zeros(len(rewards_L), np.float32)
    advantage = value_after = 0.0
    for t in np.flatnonzero(policy_L)[::-1].tolist():
        surprise = float(rewards_L[t]) + gamma * value_after - float(values_L[t])
        advantage = surprise + gamma * gae_lambda * advantage
        value_after = float(values_L[t])
        advantages_L[t], returns_L[t] = advantage, advantage + value_after
    return advantages_L, returns_L


def whiten(
    advantages: list[Float[np.ndarray, "..."]], policy: list[Bool[np.ndarray, "..."]]
) -> list[Float[np.ndarray, "..."]]:
    """Advantages a token minus their mean over the policy tokens of all episodes, divided by (sample std + 1e-6).

    Tokens that the policy did not write neither count nor change. Without spread: 0.
    """
    every_N = np.concatenate([a[p] for a, p in zip(advantages, policy, strict=True)] or [[]])
    if len(every_N) < 2:
        return [np.zeros_like(a) for a in advantages]
    mean, std = every_N.mean(dtype=np.float64), every_N.std(ddof=1, dtype=np.float64)
    if np.ptp(every_N) <= SMALLEST_SPREAD:
        std = np.inf
    return [
        np.where(p, (a - mean) / (std + SMALLEST_SPREAD), 0.0).astype(np.float32)
        for a, p in zip(advantages, policy, strict=True)
    ]
