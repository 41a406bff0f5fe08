"""Estimates of a divergence, their gradients, and the coefficient that follows a target."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from psearch_jax.errors import UserError
from psearch_jax.learning.kl import kl_estimate, kl_penalty, next_coefficient

HALF, QUARTER = jnp.log(jnp.array([[0.5]])), jnp.log(jnp.array([[0.25]]))


@pytest.mark.parametrize(
    ("name", "value"),
    [("k1", np.log(2)), ("k2", np.log(2) ** 2 / 2), ("k3", 0.5 - 1 + np.log(2))],
)
def test_estimates_by_hand(name, value):
    # d = log(1/2) − log(1/4) = log 2.
    assert kl_estimate(name, HALF, QUARTER)[0, 0] == pytest.approx(value, rel=1e-5)
    assert kl_penalty(name, HALF, QUARTER)[0, 0] == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_unbiased_estimates_average_to_the_divergence(name):
    p, q = jnp.array([[0.2, 0.3, 0.5]]), jnp.array([[0.6, 0.3, 0.1]])
    estimate = kl_estimate(name, jnp.log(p), jnp.log(q))
    assert jnp.sum(p * estimate) == pytest.approx(float(jnp.sum(p * jnp.log(p / q))), rel=1e-5)


@pytest.mark.parametrize(("name", "slope"), [("k1", np.log(2)), ("k2", np.log(2)), ("k3", 0.5)])
def test_gradients_by_hand(name, slope):
    """k2: d. k3: 1 − e^−d. k1 as a penalty pulls like k2: by itself it would pull by 1 wherever the policy is."""
    grad = jax.grad(lambda x: kl_penalty(name, x, QUARTER).sum())(HALF)
    assert grad[0, 0] == pytest.approx(slope, rel=1e-5)


def test_the_penalty_k1_restrains_on_average():
    """Its expected gradient is that of the divergence, over everything that the policy may draw."""
    logits, q = jnp.array([0.3, -0.2, 1.0]), jnp.log(jnp.array([0.6, 0.3, 0.1]))

    def expected(logits):
        logprobs = jax.nn.log_softmax(logits)
        drawn = jax.lax.stop_gradient(jnp.exp(logprobs))
        return jnp.sum(drawn * kl_penalty("k1", logprobs[None], q[None])[0])

    def divergence(logits):
        logprobs = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(logprobs) * (logprobs - q))

    np.testing.assert_allclose(jax.grad(expected)(logits), jax.grad(divergence)(logits), atol=1e-6)


def test_an_unknown_estimate_is_refused():
    with pytest.raises(UserError, match="kl_estimator is 'k4'; use one of k1, k2, k3"):
        kl_estimate("k4", HALF, QUARTER)


def test_an_adaptive_coefficient_by_hand():
    def step(measured, coefficient=0.1, episodes=100):
        return next_coefficient(
            coefficient, measured, target=0.05, horizon=1000.0, episodes=episodes
        )

    assert step(0.05) == pytest.approx(0.1)
    assert step(0.055) == pytest.approx(0.1 * 1.01)  # 10 % too much, a tenth of the horizon
    assert step(5.0) == pytest.approx(0.1 * 1.02)  # an error counts 20 % at most
    assert step(-1.0) == pytest.approx(0.1 * 0.98)  # k1 may be negative
    assert step(float("nan")) == 0.1
    assert step(0.0, episodes=10**6) == 0.0
