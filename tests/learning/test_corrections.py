"""Truncated importance weights between rollout and trainer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from psearch_jax.config import AlgorithmConfig
from psearch_jax.errors import UserError
from psearch_jax.learning.batches import Sequence, pack
from psearch_jax.learning.corrections import correction_weights

#: One row: ratios 1/2, 4 and, in a second episode, 1.5; the first token of each is a prompt.
RATIOS = np.array([[9.0, 0.5, 4.0, 9.0, 1.5, 9.0]])
BATCH = pack(
    [
        Sequence(ids=[1, 2, 3], weights=[0.0, 1.0, 1.0], old_logprobs=-2.0),
        Sequence(ids=[4, 5], weights=[0.0, 1.0], old_logprobs=-2.0),
    ],
    6,
)
BATCH = type(BATCH)(*map(jnp.asarray, BATCH))
OWN = jnp.asarray(np.log(RATIOS) - 2.0, jnp.float32)


def weights(level, **settings):
    config = AlgorithmConfig(old_logprobs="trainer", correction=level, **settings)
    return np.asarray(correction_weights(config, OWN, BATCH))[0, [1, 2, 4]]


@pytest.mark.parametrize(
    ("level", "settings", "want"),
    [
        ("none", {}, [1.0, 1.0, 1.0]),
        ("token", {}, [0.5, 2.0, 1.5]),
        ("token", {"correction_cap": 0.0}, [0.5, 4.0, 1.5]),
        ("token", {"correction_high": 3.0}, [0.5, 0.0, 1.5]),  # out before the cap lets it in
        ("token", {"correction_low": 0.6, "correction_cap": 1.2}, [0.0, 1.2, 1.2]),
        ("sequence", {"correction_cap": 0.0}, [2.0, 2.0, 1.5]),  # 1/2 · 4, prompts left out
        ("sequence", {"correction_cap": 1.8}, [1.8, 1.8, 1.5]),
        ("sequence", {"correction_high": 1.9}, [0.0, 0.0, 1.5]),
    ],
)
def test_weights_by_hand(level, settings, want):
    np.testing.assert_allclose(weights(level, **settings), want, rtol=1e-5)


def test_no_gradient_and_no_infinity():
    config = AlgorithmConfig(old_logprobs="trainer", correction="sequence", correction_cap=0.0)
    grad = jax.grad(lambda own: correction_weights(config, own, BATCH).sum())(OWN)
    assert np.all(grad == 0.0)
    far = correction_weights(config, OWN + 100.0, BATCH)
    assert np.all(np.isfinite(far))


def test_an_unknown_level_is_refused():
    with pytest.raises(UserError, match="algorithm.correction is 'turn'; use one of none, token"):
        weights("turn")
