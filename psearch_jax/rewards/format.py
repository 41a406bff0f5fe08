"""The format part of a reward."""

from __future__ import annotations

from psearch_jax.config import ProtocolConfig
from psearch_jax.rollout.episode import Episode
from psearch_jax.rollout.protocol import well_formed


def format_bonus(
    protocol: ProtocolConfig, episode: Episode, *, right: bool, weight: float
) -> float:
    """ParallelSearch's r_f: −weight if right but badly formatted, +weight if wrong but well formatted, else 0."""
    valid = well_formed(protocol, episode)
    if right == valid:
        return 0.0
    return weight if valid else -weight
