"""More hidden units for a policy that goes on computing what it computed (Net2Net, Chen et al., arXiv 1511.05641)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from psearch_jax.errors import UserError
from psearch_jax.models.decoder import abstract_params
from psearch_jax.models.decoder_config import DecoderConfig


def widen(
    config: DecoderConfig, params: Any, intermediate_size: int, key: jax.Array
) -> tuple[DecoderConfig, nnx.GraphDef, Any]:
    """Give every MLP `intermediate_size` units.

    New units get random weights in (the spread of their matrix) and zeros out, so that logits stay as they were to
    the last bit where sums run in the same order, and the zeros have a gradient at once.

    Args:
      config: of `params`, without adapters.
      params: float parameters, layers stacked or not.
      intermediate_size: units after, at least `config.intermediate_size`.
      key: of the new weights.

    Raises:
      UserError: fewer units than there are.
    """
    added = intermediate_size - config.intermediate_size
    if added < 0:
        raise UserError(
            f"supervised.widen_to is {intermediate_size}, but the policy already has {config.intermediate_size} "
            "hidden units; give a larger number, or 0 to leave it as it is."
        )
    wide = replace(config, intermediate_size=intermediate_size)
    graphdef, _ = abstract_params(wide)

    def grow(path: Any, leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if "['down_proj']" in name:
            return jnp.concatenate(
                [leaf, jnp.zeros((*leaf.shape[:-2], added, leaf.shape[-1]), leaf.dtype)], axis=-2
            )
        if "['gate_proj']" not in name and "['up_proj']" not in name:
            return leaf
        own = jax.random.fold_in(key, sum(name.encode()))
        new = jax.random.normal(own, (*leaf.shape[:-1], added), leaf.dtype) * jnp.std(leaf)
        return jnp.concatenate([leaf, new], axis=-1)

    return wide, graphdef, jax.tree_util.tree_map_with_path(grow, params)
