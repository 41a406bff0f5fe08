"""Sums over packed sequences, and what a loss is the mean over."""

import jax.numpy as jnp
import numpy as np
import pytest

from psearch_jax.errors import UserError
from psearch_jax.learning.aggregation import (
    denominator,
    denominator_of,
    segment_means,
    segment_totals,
    token_shares,
)
from psearch_jax.learning.batches import Sequence, pack

SEGMENTS = jnp.array([[1, 1, 2, 2, 0], [1, 2, 3, 0, 0]])
X = jnp.array([[1.0, 2.0, 3.0, 4.0, 99.0], [5.0, 6.0, 7.0, 98.0, 97.0]])
SEQUENCES = [
    Sequence(ids=[1, 2, 3], weights=[0.0, 1.0, 1.0]),
    Sequence(ids=[4, 5], weights=[0.0, 1.0]),
    Sequence(ids=[6, 7], weights=[0.0, 0.0]),  # filtered: it counts nowhere
]


def test_totals_stay_within_segment_and_row():
    got = segment_totals(X, SEGMENTS)
    np.testing.assert_allclose(got[:, :3], [[3.0, 3.0, 7.0], [5.0, 6.0, 7.0]])


def test_means_count_what_has_weight():
    weights = jnp.array([[0.0, 1.0, 1.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0, 0.0]])
    x = X.at[0, 0].set(jnp.inf)
    got = segment_means(x, weights, SEGMENTS)
    np.testing.assert_allclose(got[0], [2.0, 2.0, 3.5, 3.5, 0.0])
    np.testing.assert_allclose(got[1], [0.0, 6.0, 0.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("name", "shares", "whole"),
    [
        ("token_mean", [0, 1, 1, 0, 1, 0, 0, 0], 3.0),
        ("sequence_mean", [0, 0.5, 0.5, 0, 1, 0, 0, 0], 2.0),
        ("fixed_length", [0, 1, 1, 0, 1, 0, 0, 0], 14.0),
    ],
)
def test_shares_and_denominators_by_hand(name, shares, whole):
    batch = pack(SEQUENCES, 8, 2)
    on_device = type(batch)(*map(jnp.asarray, batch))
    np.testing.assert_allclose(token_shares(name, on_device)[0], shares)
    assert float(denominator(name, on_device, 7)) == whole
    assert denominator_of(name, SEQUENCES, 7) == whole
    nothing = type(batch)(*map(jnp.asarray, pack([], 8, 2)))
    assert 0 < float(denominator(name, nothing, 7)) < 1e-6
    assert denominator_of(name, [], 7) == denominator_of(name, SEQUENCES[2:], 7) > 0


def test_an_unknown_aggregation_is_refused():
    with pytest.raises(UserError, match="'mean'; use one of token_mean, sequence_mean, fixed"):
        token_shares("mean", pack(SEQUENCES, 8))
