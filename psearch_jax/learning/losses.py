"""Log-probabilities in chunks, and the losses made from them. Pure functions, everything in float32.

Shape suffixes: R rows, L tokens of a row, C columns of a chunk, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from psearch_jax.learning.aggregation import segment_means
from psearch_jax.mesh import NOWHERE, Layout


class TokenScores(NamedTuple):
    """Per predicted token, aligned as in `Batch`; 0 where the token is not predicted."""

    logprobs_RxL: Float[Array, "R L"]  # natural logarithm, at the temperature asked for
    entropy_RxL: Float[Array, "R L"]  # of the distribution the token was drawn from, in nats


@jax.custom_vjp
def _permute(x_RxLxX, order_RxL, inverse_RxL):
    """Reorder along L. `inverse_RxL` undoes `order_RxL`: it makes the gradient a gather, too.

    (XLA on CPU runs the scatter that automatic differentiation would emit one row at a time.)
    """
    return jnp.take_along_axis(x_RxLxX, order_RxL[..., None], axis=1)


def _permute_forward(x_RxLxX, order_RxL, inverse_RxL):
    return _permute(x_RxLxX, order_RxL, inverse_RxL), inverse_RxL


def _permute_backward(inverse_RxL, grad_RxLxX):
    return jnp.take_along_axis(grad_RxLxX, inverse_RxL[..., None], axis=1), None, None


_permute.defvjp(_permute_forward, _permute_backward)


def token_scores(
    hidden_RxLxD: Float[Array, "R L D"],
    unembedding_DxV: Float[Array, "D V"],
    tokens_RxL: Int[Array, "R L"],
    predicted_RxL: Bool[Array, "R L"],
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
    entropy: str = "none",
    layout: Layout = NOWHERE,
) -> TokenScores:
    """Log-probability (and entropy) of every predicted token; logits exist for `chunk` tokens at a time.

    The predicted positions of each row are moved to its front, a scan goes over groups of columns of all
    rows, and groups without a predicted position cost nothing. The backward pass recomputes the logits
    of one group at a time (law 8). On a mesh each device scores its own part of the vocabulary (where the table lies
    anyway) for the rows of all devices that share the table: the hidden states of a group travel, the table does not.

    Args:
      hidden_RxLxD: hidden states after the final norm; position t − 1 predicts token t.
      unembedding_DxV: column v scores token v.
      predicted_RxL: the tokens to score. False at the first column.
      temperature: logits are divided by it before the softmax; > 0.
      chunk: tokens (over all rows) whose logits are in memory at one time.
      entropy: "none" (zeros), "metric" (no gradient flows through it) or "loss".
      layout: where the arrays lie.
    """
    R, L, _ = hidden_RxLxD.shape
    hidden_RxLxD = layout.constrain(hidden_RxLxD, "rows", None, None)
    # Brought into place once, in float32: its gradient is summed over the groups, too.
    unembedding_DxV = layout.constrain(unembedding_DxV, None, "vocab")
    # From "about token t" to "at the position that predicts it": one step to the left.
    targets_RxL = jnp.roll(tokens_RxL, -1, axis=1)
    active_RxL = jnp.roll(predicted_RxL.at[:, 0].set(False), -1, axis=1)
    order_RxL = jnp.argsort(jnp.logical_not(active_RxL), axis=1, stable=True)
    inverse_RxL = jnp.argsort(order_RxL, axis=1)

    C = max(1, min(L, chunk // R))
    N = -(-L // C)

    def chunks(x_RxLx):
        """[R, L, …] → [N, R, C, …], padded at the end of the rows."""
        x = jnp.pad(x_RxLx, [(0, 0), (0, N * C - L)] + [(0, 0)] * (x_RxLx.ndim - 2))
        return jnp.moveaxis(x.reshape(R, N, C, *x.shape[2:]), 1, 0)

    with jax.named_scope("token_scores"):
        hidden_NxRxCxD = chunks(_permute(hidden_RxLxD, order_RxL, inverse_RxL))
        targets_NxRxC = chunks(jnp.take_along_axis(targets_RxL, order_RxL, axis=1))
        active_NxRxC = chunks(jnp.take_along_axis(active_RxL, order_RxL, axis=1))

    def score(hidden_RxCxD, targets_RxC, active_RxC):
        logits_RxCxV = jnp.einsum(
            "rcd,dv->rcv",
            layout.constrain(hidden_RxCxD, "vocab_rows", None, None),
            layout.constrain(unembedding_DxV.astype(hidden_RxCxD.dtype), None, "vocab"),
            preferred_element_type=jnp.float32,
        )
        logits_RxCxV = layout.constrain(logits_RxCxV, "vocab_rows", None, "vocab")
        logits_RxCxV = logits_RxCxV / temperature if temperature != 1.0 else logits_RxCxV
        total_RxC = jax.nn.logsumexp(logits_RxCxV, axis=-1)
        chosen_RxC = jnp.sum(
            jnp.where(
                targets_RxC[..., None] == jnp.arange(logits_RxCxV.shape[-1]), logits_RxCxV, 0.0
            ),
            axis=-1,
        )
        logprobs_RxC = jnp.where(active_RxC, chosen_RxC - total_RxC, 0.0)
        if entropy == "none":
            return logprobs_RxC, jnp.zeros_like(logprobs_RxC)
        if entropy == "metric":
            logits_RxCxV, total_RxC = jax.lax.stop_gradient((logits_RxCxV, total_RxC))
        table_RxCxV = logits_RxCxV - total_RxC[..., None]
        entropy_RxC = -jnp.sum(jnp.exp(table_RxCxV) * table_RxCxV, axis=-1)
        return logprobs_RxC, jnp.where(active_RxC, entropy_RxC, 0.0)

    @jax.checkpoint
    def step(carry, inputs):
        hidden_RxCxD, targets_RxC, active_RxC = inputs
        zeros_RxC = jnp.zeros(active_RxC.shape, jnp.float32)
        scores = jax.lax.cond(
            jnp.any(active_RxC),
            score,
            lambda *_: (zeros_RxC, zeros_RxC),
            hidden_RxCxD,
            targets_RxC,
            active_RxC,
        )
        return carry, scores

    _, scores_NxRxC = jax.lax.scan(step, None, (hidden_NxRxCxD, targets_NxRxC, active_NxRxC))

    def back(x_NxRxC):
        x_RxL = jnp.moveaxis(x_NxRxC, 0, 1).reshape(R, N * C)[:, :L]
        x_RxL = _permute(x_RxL[..., None], inverse_RxL, order_RxL)[..., 0]
        return jnp.roll(x_RxL, 1, axis=1)

    return TokenScores(*(back(x) for x in scores_NxRxC))


def cross_entropy(
    logprobs_RxL: Float[Array, "R L"], weights_RxL: Float[Array, "R L"]
) -> Float[Array, ""]:
    """Weighted sum of −log p. Divide by the sum of weights of the whole batch for the mean."""
    return -jnp.sum(logprobs_RxL * weights_RxL)


class Surrogate(NamedTuple):
    """The clipped surrogate of each token and what is told about it."""

    loss_RxL: Float[Array, "R L"]
    ratio_RxL: Float[Array, "R L"]
    clipped_RxL: Bool[Array, "R L"]


def clipped_surrogate(
    logprobs_RxL: Float[Array, "R L"],
    old_logprobs_RxL: Float[Array, "R L"],
    advantages_RxL: Float[Array, "R L"],
    *,
    clip_low: float,
    clip_high: float,
    clip_dual: float = 0.0,
) -> Surrogate:
    """−min(ρA, clip(ρ, 1 − low, 1 + high)A) with ρ = π/π_old (PPO, Schulman et al. 2017; two clips: DAPO).

    clip_dual: where A < 0 the loss is at most −dual · A (Ye et al. 2020), so that a token that has become likely
    against a bad advantage does not dominate the batch; above 1 + high, or 0 for no such bound.
    """
    ratio_RxL = jnp.exp(logprobs_RxL - old_logprobs_RxL)
    return clipped(
        ratio_RxL, advantages_RxL, clip_low=clip_low, clip_high=clip_high, clip_dual=clip_dual
    )


def sequence_surrogate(
    logprobs_RxL: Float[Array, "R L"],
    old_logprobs_RxL: Float[Array, "R L"],
    advantages_RxL: Float[Array, "R L"],
    weights_RxL: Float[Array, "R L"],
    segments_RxL: Int[Array, "R L"],
    *,
    clip_low: float,
    clip_high: float,
    clip_dual: float = 0.0,
) -> Surrogate:
    """GSPO (Zheng et al. 2025): the clipped surrogate with one ratio for all policy tokens of a sequence, the
    geometric mean of theirs. Useful clips are a hundred times smaller than for single tokens."""
    log_RxL = segment_means(logprobs_RxL - old_logprobs_RxL, weights_RxL, segments_RxL)
    return clipped(
        jnp.exp(log_RxL),
        advantages_RxL,
        clip_low=clip_low,
        clip_high=clip_high,
        clip_dual=clip_dual,
    )


def clipped(
    ratio_RxL: Float[Array, "R L"],
    advantages_RxL: Float[Array, "R L"],
    *,
    clip_low: float,
    clip_high: float,
    clip_dual: float,
) -> Surrogate:
    """The clipped surrogate of ratios, whatever they are ratios of. What is clipped has no gradient."""
    bounded_RxL = jnp.clip(ratio_RxL, 1.0 - clip_low, 1.0 + clip_high)
    free_RxL, held_RxL = ratio_RxL * advantages_RxL, bounded_RxL * advantages_RxL
    if clip_dual <= 0:
        return Surrogate(-jnp.minimum(free_RxL, held_RxL), ratio_RxL, held_RxL < free_RxL)
    gain_RxL = jnp.minimum(free_RxL, held_RxL)
    floor_RxL = jnp.where(advantages_RxL < 0, clip_dual * advantages_RxL, -jnp.inf)
    clipped_RxL = (held_RxL < free_RxL) | (gain_RxL < floor_RxL)
    return Surrogate(-jnp.maximum(gain_RxL, floor_RxL), ratio_RxL, clipped_RxL)


def clipped_weight(
    logprobs_RxL: Float[Array, "R L"],
    old_logprobs_RxL: Float[Array, "R L"],
    advantages_RxL: Float[Array, "R L"],
    *,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """CISPO (MiniMax-M1, 2025): −clip(ρ, 1 − low, 1 + high) A log π, where no gradient flows through the weight.

    Clipping bounds what a token weighs and silences none. As published only the upper bound acts: low = 1.
    """
    ratio_RxL = jnp.exp(logprobs_RxL - old_logprobs_RxL)
    weight_RxL = jax.lax.stop_gradient(jnp.clip(ratio_RxL, 1.0 - clip_low, 1.0 + clip_high))
    loss_RxL = -weight_RxL * advantages_RxL * logprobs_RxL
    return Surrogate(loss_RxL, ratio_RxL, weight_RxL != ratio_RxL)


def value_loss(
    values_RxL: Float[Array, "R L"],
    old_values_RxL: Float[Array, "R L"],
    returns_RxL: Float[Array, "R L"],
    *,
    clip: float,
) -> tuple[Float[Array, "R L"], Bool[Array, "R L"]]:
    """½ max((V − R)², (V′ − R)²) with V′ = V held within `clip` of the value at the time of the rollout (PPO).

    clip: 0 for ½ (V − R)². Returns the loss and where it is the held value's, which has no gradient.
    """
    free_RxL = jnp.square(values_RxL - returns_RxL)
    if clip <= 0:
        return 0.5 * free_RxL, jnp.zeros(free_RxL.shape, bool)
    near_RxL = old_values_RxL + jnp.clip(values_RxL - old_values_RxL, -clip, clip)
    held_RxL = jnp.square(near_RxL - returns_RxL)
    return 0.5 * jnp.maximum(free_RxL, held_RxL), held_RxL > free_RxL


def kl_k3(
    logprobs_RxL: Float[Array, "R L"], reference_RxL: Float[Array, "R L"]
) -> Float[Array, "R L"]:
    """Schulman's k3 estimate of KL(π ‖ π_ref) from samples of π: e^d − d − 1 with d = log π_ref − log π; ≥ 0."""
    difference_RxL = reference_RxL - logprobs_RxL
    return jnp.expm1(difference_RxL) - difference_RxL
