"""Truncated importance weights between the policy as the rollout computed it and as the trainer computes it.

The two differ in dtype, kernels and order of additions, so what was drawn came from a slightly different distribution
than the one that is differentiated. Where the ratio of the update is taken against the trainer's own
log-probabilities, the rest of the difference is a weight on the advantage: π_trainer / π_rollout, truncated, because
a product of many ratios has a long tail (Yao et al. 2025; truncation: Ionides 2008).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from psearch_jax.config import AlgorithmConfig
from psearch_jax.errors import UserError
from psearch_jax.learning.aggregation import segment_totals
from psearch_jax.learning.batches import Batch

LEVELS = ("none", "token", "sequence")
#: Beyond e^±20 a ratio says no more than that it is an outlier, and its exponential may overflow.
LARGEST_LOG = 20.0


def correction_weights(
    config: AlgorithmConfig, own_RxL: Float[Array, "R L"], batch: Batch
) -> Float[Array, "R L"]:
    """What each token's advantage is multiplied with; no gradient flows through it.

    "token": π_trainer / π_rollout of the token. "sequence": the product of these over the policy tokens of its
    episode. A ratio outside [`correction_low`, `correction_high`] (0: no such bound) counts 0, others at most
    `correction_cap` (0: no cap). The mean of the loss is still over all tokens, those that count 0 included.

    Args:
      own_RxL: the trainer's log-probabilities. `batch.old_logprobs_RxL` holds the rollout's.
    """
    level = config.correction
    if level not in LEVELS:
        raise UserError(f"algorithm.correction is {level!r}; use one of {', '.join(LEVELS)}.")
    if level == "none":
        return jnp.ones_like(own_RxL)
    log_RxL = jnp.where(batch.weights_RxL > 0, own_RxL - batch.old_logprobs_RxL, 0.0)
    if level == "sequence":
        log_RxL = segment_totals(log_RxL, batch.segments_RxL)
    ratio_RxL = jnp.exp(jnp.clip(log_RxL, -LARGEST_LOG, LARGEST_LOG))
    weights_RxL = ratio_RxL
    if config.correction_cap > 0:
        weights_RxL = jnp.minimum(weights_RxL, config.correction_cap)
    if config.correction_low > 0:
        weights_RxL = jnp.where(ratio_RxL < config.correction_low, 0.0, weights_RxL)
    if config.correction_high > 0:
        weights_RxL = jnp.where(ratio_RxL > config.correction_high, 0.0, weights_RxL)
    return jax.lax.stop_gradient(weights_RxL)
