"""Decoders with every parameter random, and their logits."""

import jax
import jax.numpy as jnp
import numpy as np

from psearch_jax.models import decoder


def random_params(config, dtype=jnp.float32):
    """(graphdef, params). Biases, norms and adapters are random, too, so that no mistake with them is hidden."""
    graphdef, shapes = decoder.abstract_params(config)
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    draw = [
        (0.3 * jax.random.normal(key, leaf.shape)).astype(dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return graphdef, jax.tree.unflatten(tree, draw)


def logits(config, graphdef, params, tokens):
    """[rows, length, vocabulary] of whole rows."""
    tokens = jnp.asarray(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden = decoder.hidden_states(graphdef, params, tokens, positions, jnp.ones_like(tokens))
    return np.asarray(decoder.unembed(graphdef, params, hidden))
