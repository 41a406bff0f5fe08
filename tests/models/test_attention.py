"""Attention against hand-computed values and against the plain formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from psearch_jax.models import attention


def test_rotary_tables_rotate_by_position_times_frequency():
    """Width 4, theta 100: frequencies 1 and 0.1; the pairs are (0, 2) and (1, 3)."""
    tables = attention.rotary_tables(jnp.array([[3]]), 4, 100.0)
    x = jnp.array([1.0, 0.0, 0.0, 2.0]).reshape(1, 1, 1, 4)
    rotated = attention.rotate(x, tables)[0, 0, 0]
    expected = [np.cos(3), -2 * np.sin(0.3), np.sin(3), 2 * np.cos(0.3)]
    np.testing.assert_allclose(rotated, expected, atol=1e-6)


def test_packed_mask_by_hand():
    """A row of two sequences and padding: causal within each, nothing across."""
    mask = attention.packed_mask(jnp.array([[1, 1, 2, 2, 0]]))[0].astype(int)
    expected = [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]
    np.testing.assert_array_equal(mask, expected)


def test_cache_mask_by_hand():
    mask = attention.cache_mask(jnp.array([0, 2]), 2, 4).astype(int)
    np.testing.assert_array_equal(
        mask, [[[1, 0, 0, 0], [1, 1, 0, 0]], [[1, 1, 1, 0], [1, 1, 1, 1]]]
    )


def test_equal_scores_average_the_visible_values():
    """Zero queries see every allowed value alike; query heads 0-1 read kv head 0, 2-3 kv head 1."""
    v = jnp.array([[1.0, 10.0], [3.0, 30.0]]).reshape(
        1, 2, 2, 1
    )  # two positions, two kv heads, width 1
    mask = jnp.array([[[True, False], [True, True]]])
    out = attention.attend(jnp.zeros((1, 2, 4, 1)), v, v, mask)
    np.testing.assert_allclose(out[0], [[1, 1, 10, 10], [2, 2, 20, 20]], rtol=1e-6)


@pytest.mark.parametrize("length", [5, 64, 150])
def test_packed_attention_and_its_gradient_match_the_plain_formula(length):
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (2, length, 4, 8))
    k = jax.random.normal(keys[1], (2, length, 2, 8))
    v = jax.random.normal(keys[2], (2, length, 2, 8))
    segments = jnp.tile(jnp.arange(length) // 40 + 1, (2, 1))
    mask = attention.packed_mask(segments)

    def plain(q, k, v):
        k, v = jnp.repeat(k, 2, axis=2), jnp.repeat(v, 2, axis=2)
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) / 8**0.5
        weights = jax.nn.softmax(scores, where=mask[:, None], axis=-1)
        return jnp.einsum("bnts,bsnh->btnh", weights, v).reshape(2, length, -1)

    def loss(f):
        return lambda q, k, v: jnp.sum(jnp.sin(f(q, k, v)))

    np.testing.assert_allclose(attention.attend_packed(q, k, v, mask), plain(q, k, v), atol=1e-5)

    def gradient(f):
        return jax.jit(jax.grad(loss(f), (0, 1, 2)))(q, k, v)

    ours = gradient(lambda q, k, v: attention.attend_packed(q, k, v, mask))
    theirs = gradient(plain)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
