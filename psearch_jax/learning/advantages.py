"""From rewards to advantages."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

SMALLEST_SPREAD = (
    1e-6  # added to the standard deviation, and the spread below which a group says nothing
)


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


def zero_spread(rewards_GxM: Float[np.ndarray, "G M"]) -> np.ndarray:
    """Which groups have equal rewards throughout, bool [G]; they teach nothing."""
    return np.ptp(rewards_GxM, axis=1) <= SMALLEST_SPREAD
