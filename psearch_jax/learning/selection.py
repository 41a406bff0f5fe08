"""Which episodes are learned from: groups that say something, and what becomes of episodes that were cut off.

All of it is DAPO's (Yu et al. 2025): dynamic sampling, overlong filtering, soft overlong punishment.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
from jaxtyping import Bool, Float

from psearch_jax.rollout.episode import Episode

#: End reasons of an episode that a limit on tokens cut off before it was done.
CUT_OFF = ("budget", "context")


def questions_to_refill(flat_G: Bool[np.ndarray, " G"], wanted: int, rounds_left: int) -> int:
    """How many more questions to play so that `wanted` groups with spread come together.

    As many as are missing, `rounds_left` times at most: the policy may have learned (or lost) everything, and then
    no number of questions would do.

    Args:
      flat_G: which of the groups played so far have no spread.
    """
    missing = wanted - int(np.count_nonzero(~flat_G))
    return missing if rounds_left > 0 and missing > 0 else 0


def choose_groups(flat_G: Bool[np.ndarray, " G"], wanted: int) -> list[int]:
    """The groups to learn from, in the order in which they were played: those with spread, and where there are fewer
    than `wanted` of them the first of the others, too."""
    spread, flat = np.flatnonzero(~flat_G), np.flatnonzero(flat_G)
    chosen = [*spread[:wanted], *flat[: max(0, wanted - len(spread))]]
    return sorted(int(g) for g in chosen)


def cut_off(episode: Episode) -> bool:
    """Whether a limit on tokens ended the episode: its reward says nothing about where it was going."""
    return episode.end_reason in CUT_OFF


def overlong_penalties(
    lengths: Many[int], *, limit: int, buffer: int, penalty: float
) -> Float[np.ndarray, " N"]:
    """What is taken off each reward: nothing up to `limit` − `buffer` tokens, then in proportion, `penalty` at the
    limit."""
    over_N = np.asarray(lengths, np.float64) - (limit - buffer)
    return penalty * np.clip(over_N / buffer, 0.0, 1.0)
