"""What a loss is the mean over, and sums over the sequences that are packed into a row.

A sequence lies within one row and a row within one micro-batch, so that a sum over a sequence is never cut, and every
denominator is of the whole batch: packing, padding, micro-batches and devices change nothing (law 10).
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from psearch_jax.errors import UserError
from psearch_jax.learning.batches import Batch, Sequence

#: "token_mean": every policy token of the batch counts alike (DAPO). "sequence_mean": every episode counts alike, and
#: so does every policy token within it (GRPO as published). "fixed_length": as if every episode had that many policy
#: tokens, so that a token counts alike whatever the others' lengths are (Dr. GRPO).
AGGREGATIONS = ("token_mean", "sequence_mean", "fixed_length")


def segment_totals(
    x_RxL: Float[Array, "R L"], segments_RxL: Int[Array, "R L"]
) -> Float[Array, "R L"]:
    """For each token the sum over the tokens of its own segment of its own row."""
    L = x_RxL.shape[1]

    def of_row(x_L: Array, segments_L: Array) -> Array:
        return jax.ops.segment_sum(x_L, segments_L, num_segments=L + 1)[segments_L]

    return jax.vmap(of_row)(x_RxL, segments_RxL)


def segment_means(
    x_RxL: Float[Array, "R L"], weights_RxL: Float[Array, "R L"], segments_RxL: Int[Array, "R L"]
) -> Float[Array, "R L"]:
    """For each token the weighted mean over its segment; 0 where the segment has no weight. Where a token has no
    weight, x may be anything, infinity included."""
    counted_RxL = jnp.where(weights_RxL > 0, x_RxL * weights_RxL, 0.0)
    count_RxL = segment_totals(weights_RxL, segments_RxL)
    return segment_totals(counted_RxL, segments_RxL) / jnp.where(count_RxL > 0, count_RxL, 1.0)


def token_shares(aggregation: str, batch: Batch) -> Float[Array, "R L"]:
    """How much each token counts: a loss is the sum of share × loss of a token, divided by `denominator`.

    Raises:
      UserError: an aggregation that is not known.
    """
    if aggregation not in AGGREGATIONS:
        raise UserError(
            f"algorithm.aggregation is {aggregation!r}; use one of {', '.join(AGGREGATIONS)}."
        )
    if aggregation != "sequence_mean":
        return batch.weights_RxL
    count_RxL = segment_totals(batch.weights_RxL, batch.segments_RxL)
    return batch.weights_RxL / jnp.where(count_RxL > 0, count_RxL, 1.0)


def denominator(aggregation: str, batch: Batch, fixed_length: int = 0) -> Float[Array, ""]:
    """What the loss of a whole batch is divided by; at least a trifle, so that an empty batch has loss 0."""
    if aggregation == "token_mean":
        return jnp.maximum(jnp.sum(batch.weights_RxL), 1e-9)
    before_RxL = jnp.roll(batch.segments_RxL, 1, axis=1).at[:, 0].set(0)
    first_RxL = (batch.segments_RxL > 0) & (batch.segments_RxL != before_RxL)
    count_RxL = segment_totals(batch.weights_RxL, batch.segments_RxL)
    sequences = jnp.sum((first_RxL & (count_RxL > 0)).astype(jnp.float32))
    return jnp.maximum(sequences, 1e-9) * (fixed_length if aggregation == "fixed_length" else 1)


def denominator_of(aggregation: str, sequences: Many[Sequence], fixed_length: int = 0) -> float:
    """`denominator` of sequences that are not packed, some of which may be left out of the batch later."""
    counts = [float(np.sum(sequence.weights)) for sequence in sequences]
    if aggregation == "token_mean":
        return max(sum(counts), 1.0)
    number = max(1.0, float(sum(count > 0 for count in counts)))
    return number * (fixed_length if aggregation == "fixed_length" else 1)
