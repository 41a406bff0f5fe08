"""Drawing tokens: hand-computed values, and independence of the neighbours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from psearch_jax.rollout.sampling import cut, sample

LOGITS = jnp.log(jnp.array([[0.1, 0.4, 0.3, 0.2]]))


def run(logits, seeds, temperature=1.0, top_k=0, top_p=1.0):
    n = logits.shape[0]
    return sample(
        logits,
        jax.vmap(jax.random.key)(jnp.asarray(seeds)),
        jnp.full(n, temperature, jnp.float32),
        jnp.full(n, top_k, jnp.int32),
        jnp.full(n, top_p, jnp.float32),
    )


def test_greedy_takes_the_most_likely_and_reports_temperature_one():
    ids, logprobs = run(LOGITS, [0], temperature=0.0)
    assert ids.tolist() == [1]
    np.testing.assert_allclose(logprobs, np.log([0.4]), rtol=1e-6)


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (0, 1.0, [0, 1, 2, 3]),
        (2, 1.0, [1, 2]),
        (9, 1.0, [0, 1, 2, 3]),
        (0, 0.5, [1, 2]),
        (0, 0.39, [1]),
        (0, 0.0, [1]),
        (3, 0.7, [1, 2]),  # of the three left, 0.4/0.9 + 0.3/0.9 reaches 0.7
        (2, 0.5, [1]),  # of the two left, 0.4/0.7 reaches 0.5
    ],
)
def test_cut_keeps_the_support(top_k, top_p, kept):
    out = cut(LOGITS, jnp.array([top_k]), jnp.array([top_p], jnp.float32))
    assert np.flatnonzero(np.isfinite(out[0])).tolist() == kept


def test_law_09_logprobs_are_on_the_sampled_support_and_temperature():
    n = 4000
    ids, logprobs = run(jnp.tile(LOGITS, (n, 1)), np.arange(n), temperature=0.5, top_k=2)
    p = np.array([0.16, 0.09]) / 0.25  # squares of 0.4 and 0.3, renormalised
    assert set(np.unique(ids)) == {1, 2}
    np.testing.assert_allclose(logprobs, np.log(p)[np.asarray(ids) - 1], rtol=1e-5)
    assert abs(np.mean(np.asarray(ids) == 1) - p[0]) < 4 * np.sqrt(p[0] * p[1] / n)


def test_law_07_a_row_does_not_depend_on_its_neighbours():
    logits = jax.random.normal(jax.random.key(1), (6, 32))
    keys = jax.random.split(jax.random.key(2), 6)
    settings = (
        jnp.array([1.0, 0.0, 0.7, 1.3, 1.0, 0.0]),
        jnp.array([0, 0, 5, 0, 3, 2]),
        jnp.array([1.0, 1.0, 1.0, 0.8, 0.9, 1.0]),
    )
    together = sample(logits, keys, *settings)
    for i in range(6):
        alone = sample(logits[i : i + 1], keys[i : i + 1], *(s[i : i + 1] for s in settings))
        assert alone[0][0] == together[0][i]
        np.testing.assert_allclose(alone[1][0], together[1][i], rtol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_logits_that_are_not_finite_show_in_the_logprob(temperature, bad):
    logits = jnp.concatenate([LOGITS, LOGITS.at[0, 2].set(bad)])
    _, logprobs = run(logits, [0, 0], temperature)
    assert np.isfinite(logprobs).tolist() == [True, False]


def test_a_forbidden_token_is_never_drawn():
    ids, logprobs = run(jnp.tile(LOGITS.at[0, 1].set(-jnp.inf), (200, 1)), np.arange(200))
    assert 1 not in ids
    assert np.isfinite(logprobs).all()
