"""Dual clip, the sequence-level ratio, clipped weights and the value loss, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from psearch_jax.learning.losses import (
    clipped_surrogate,
    clipped_weight,
    sequence_surrogate,
    value_loss,
)

ZERO = jnp.zeros((1, 1))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (5.0, -2.0, 6.0, True),  # held at 3 · 2
        (2.5, -2.0, 5.0, False),  # below the bound nothing changes
        (0.5, -2.0, 1.6, True),
        (5.0, 2.0, -2.6, True),  # good advantages have the usual clip alone
        (0.5, 2.0, -1.0, False),
    ],
)
def test_dual_clip_by_hand(ratio, advantage, loss, clipped):
    def total(logprob):
        got = clipped_surrogate(
            logprob[None, None],
            ZERO,
            jnp.array([[advantage]]),
            clip_low=0.2,
            clip_high=0.3,
            clip_dual=3.0,
        )
        return got.loss_RxL[0, 0], got

    (value, got), slope = jax.value_and_grad(total, has_aux=True)(jnp.log(ratio))
    assert value == pytest.approx(loss, rel=1e-6)
    assert bool(got.clipped_RxL[0, 0]) is clipped
    assert slope == pytest.approx(0.0 if clipped else loss, rel=1e-6)


def test_clipped_weights_by_hand():
    def total(logprobs):
        got = clipped_weight(
            logprobs,
            jnp.log(jnp.array([[0.5, 0.5, 0.5]])),
            jnp.array([[2.0, 2.0, -1.0]]),
            clip_low=0.2,
            clip_high=0.5,
        )
        return got.loss_RxL.sum(), got

    # Ratios 2, 1.2 and 0.5; weights 1.5, 1.2 and 0.8. No token is without a gradient: −weight · advantage.
    logprobs = jnp.log(jnp.array([[1.0, 0.6, 0.25]]))
    (_, got), grad = jax.value_and_grad(total, has_aux=True)(logprobs)
    np.testing.assert_allclose(grad, [[-3.0, -2.4, 0.8]], rtol=1e-5)
    want = [0.0, -2.4 * np.log(0.6), 0.8 * np.log(0.25)]
    np.testing.assert_allclose(got.loss_RxL[0], want, rtol=1e-5, atol=1e-6)
    assert got.clipped_RxL.tolist() == [[True, False, True]]


def test_one_ratio_a_sequence_by_hand():
    """Ratios 2 and 1/2 make 1; 4 alone makes 4 and is clipped; what has no weight is not in it."""
    ratios = jnp.array([[99.0, 2.0, 0.5, 99.0, 4.0, 99.0]])
    segments = jnp.array([[1, 1, 1, 2, 2, 0]])
    weights = jnp.array([[0.0, 1.0, 1.0, 0.0, 1.0, 0.0]])

    def total(logprobs):
        got = sequence_surrogate(
            logprobs,
            jnp.zeros((1, 6)),
            jnp.full((1, 6), 3.0),
            weights,
            segments,
            clip_low=0.2,
            clip_high=0.5,
        )
        return jnp.sum(got.loss_RxL * weights), got

    (_, got), grad = jax.value_and_grad(total, has_aux=True)(jnp.log(ratios))
    np.testing.assert_allclose(got.ratio_RxL[0, [1, 2, 4]], [1.0, 1.0, 4.0], rtol=1e-6)
    np.testing.assert_allclose(got.loss_RxL[0, [1, 2, 4]], [-3.0, -3.0, -4.5], rtol=1e-6)
    # Two tokens of loss, each through a mean of two: 3 for either of them.
    np.testing.assert_allclose(grad, [[0.0, -3.0, -3.0, 0.0, 0.0, 0.0]], rtol=1e-6)


@pytest.mark.parametrize(
    ("value", "loss", "slope"),
    [
        (1.2, 0.5 * 0.8**2, -0.8),  # near the old value: the usual error
        (1.8, 0.5 * 0.5**2, 0.0),  # went further than 0.5 towards the return: held at 1.5
        (0.2, 0.5 * 1.8**2, -1.8),  # away from it: the larger error counts and pulls back
    ],
)
def test_value_clipping_by_hand(value, loss, slope):
    """The value was 1 at the rollout, the return is 2."""

    def total(value):
        got, held = value_loss(value[None, None], ZERO + 1.0, ZERO + 2.0, clip=0.5)
        return got[0, 0], held

    (got, held), grad = jax.value_and_grad(total, has_aux=True)(jnp.asarray(value))
    assert got == pytest.approx(loss, rel=1e-5)
    assert grad == pytest.approx(slope, rel=1e-5)
    assert bool(held[0, 0]) is (slope == 0.0)
    free, _ = value_loss(ZERO + value, ZERO + 1.0, ZERO + 2.0, clip=0.0)
    assert free[0, 0] == pytest.approx(0.5 * (value - 2.0) ** 2, rel=1e-5)
