"""Log-probabilities in chunks, and the losses made from them. Pure functions, everything in float32.

Shape suffixes: R rows, L tokens of a row, C columns of a chunk, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


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
) -> TokenScores:
    """Log-probability (and entropy) of every predicted token; logits exist for `chunk` tokens at a time.

    The predicted positions of each row are moved to its front, a scan goes over groups of columns of all
    rows, and groups without a predicted position cost nothing. The backward pass recomputes the logits
    of one group at a time (law 8). Rows stay rows, so a batch sharded over them needs no communication.

    Args:
      hidden_RxLxD: hidden states after the final norm; position t − 1 predicts token t.
      unembedding_DxV: column v scores token v.
      predicted_RxL: the tokens to score. False at the first column.
      temperature: logits are divided by it before the softmax; > 0.
      chunk: tokens (over all rows) whose logits are in memory at one time.
      entropy: "none" (zeros), "metric" (no gradient flows through it) or "loss".
    """
    R, L, _ = hidden_RxLxD.shape
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
            hidden_RxCxD,
            unembedding_DxV.astype(hidden_RxCxD.dtype),
            preferred_element_type=jnp.float32,
        )
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
) -> Surrogate:
    """−min(ρA, clip(ρ, 1 − low, 1 + high)A) with ρ = π/π_old (PPO, Schulman et al. 2017; two clips: DAPO)."""
    ratio_RxL = jnp.exp(logprobs_RxL - old_logprobs_RxL)
    bounded_RxL = jnp.clip(ratio_RxL, 1.0 - clip_low, 1.0 + clip_high)
    free_RxL, held_RxL = ratio_RxL * advantages_RxL, bounded_RxL * advantages_RxL
    return Surrogate(-jnp.minimum(free_RxL, held_RxL), ratio_RxL, held_RxL < free_RxL)


def kl_k3(
    logprobs_RxL: Float[Array, "R L"], reference_RxL: Float[Array, "R L"]
) -> Float[Array, "R L"]:
    """Schulman's k3 estimate of KL(π ‖ π_ref) from samples of π: e^d − d − 1 with d = log π_ref − log π; ≥ 0."""
    difference_RxL = reference_RxL - logprobs_RxL
    return jnp.expm1(difference_RxL) - difference_RxL
