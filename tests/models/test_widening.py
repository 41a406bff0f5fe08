"""Widening a policy changes nothing that it computes, and leaves the new units free to learn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from psearch_jax.errors import UserError
from psearch_jax.models.decoder import DecoderConfig, hidden_states, init_params, unembed
from psearch_jax.models.widening import widen


def logits(graphdef, params):
    tokens_BxL = jax.random.randint(jax.random.key(1), (2, 12), 0, 40)
    positions_BxL = jnp.broadcast_to(jnp.arange(12), (2, 12))
    hidden = hidden_states(graphdef, params, tokens_BxL, positions_BxL, jnp.ones((2, 12), int))
    return unembed(graphdef, params, hidden)


@pytest.mark.parametrize("max_unrolled_layers", [0, 6])  # stacked, and a list
def test_a_widened_policy_computes_what_it_computed(max_unrolled_layers):
    config = DecoderConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_unrolled_layers=max_unrolled_layers,
    )
    graphdef, params = init_params(config, jax.random.key(0))
    wide, wide_graphdef, wide_params = widen(config, params, 40, jax.random.key(2))
    assert wide.intermediate_size == 40
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    wide_count = sum(leaf.size for leaf in jax.tree.leaves(wide_params))
    assert wide_count - count == 2 * 3 * 16 * (40 - 24)
    np.testing.assert_allclose(
        logits(wide_graphdef, wide_params), logits(graphdef, params), atol=1e-6
    )
    gradient = jax.grad(lambda p: jnp.sum(logits(wide_graphdef, p) ** 2))(wide_params)
    new = [
        np.asarray(leaf)[..., 24:, :]
        for path, leaf in jax.tree_util.tree_leaves_with_path(gradient)
        if "down_proj" in jax.tree_util.keystr(path)
    ]
    assert new and all(np.abs(part).min() > 0 for part in new)


def test_a_policy_does_not_shrink():
    config = DecoderConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
    )
    _, params = init_params(config, jax.random.key(0))
    with pytest.raises(UserError, match="already has 24"):
        widen(config, params, 16, jax.random.key(2))
