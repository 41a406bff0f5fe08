"""The KV cache, and the decoder run on top of it.

A cache is a tuple over layers of (k_BxSxKxH, v_BxSxKxH). Rows are slots of the rollout engine; position p of a
row holds the key and value of the token at position p of its sequence. Carry it as a tuple through a loop
(`lax.while_loop`, `fori_loop`) or donate it: then it is updated in place. As input and output of a scan it
would be copied whole at every step.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from psearch_jax.models import attention
from psearch_jax.models.decoder import Decoder, DecoderConfig

KVCache: TypeAlias = tuple[tuple[Array, Array], ...]


def init_cache(config: DecoderConfig, batch: int, length: int, dtype: Any = jnp.float32) -> KVCache:
    """A zero cache of `batch` slots of `length` positions."""
    shape = (batch, length, config.num_kv_heads, config.head_dim)
    return tuple(
        (jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers)
    )


def copy_slots(cache: KVCache, src_N: Int[Array, "N"], dst_N: Int[Array, "N"]) -> KVCache:
    """Copy whole slots: row dst_n becomes what row src_n was before the call.

    Entries whose dst is not a slot (dst >= B) are dropped, so that N can stay fixed. Sources are all read
    before anything is written; two entries with the same dst are the caller's mistake.
    """
    return jax.tree.map(lambda x: x.at[dst_N].set(x[src_N], mode="drop"), cache)


def extend(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    cache: KVCache,
    tokens_BxT: Int[Array, "B T"],
    start_B: Int[Array, "B"],
    count_B: Int[Array, "B"],
    *,
    window: int,
    dtype: Any = jnp.float32,
) -> tuple[Float[Array, "B T D"], KVCache]:
    """Append up to T tokens to each row and return their hidden states (after the final norm).

    Row b gets its first count_b tokens, at positions start_b .. start_b + count_b - 1; a row with count 0 is left
    as it is. Hidden states at t >= count_b are finite and without meaning. T = 1 is a decoding step, T = a bucket
    is prefill or the append of an observation.

    window: static; only cache positions below it are read. It must be >= max(start_b + count_b) over rows with
    count_b > 0 (not checked: the values live on the device).
    """
    model: Decoder = nnx.merge(graphdef, params)
    batch, new = tokens_BxT.shape
    positions_BxT = start_B[:, None] + jnp.arange(new)
    tables = attention.rotary_tables(positions_BxT, model.config.head_dim, model.config.rope_theta)
    mask = attention.cache_mask(start_B, new, window)
    # Padding is sent out of range, where a scatter with mode="drop" writes nothing.
    length = cache[0][0].shape[1]
    target_BxT = jnp.where(jnp.arange(new) < count_B[:, None], positions_BxT, length)
    rows_Bx1 = jnp.arange(batch)[:, None]

    def write(old_BxSxKxH: Array, new_BxTxKxH: Array) -> Array:
        return old_BxSxKxH.at[rows_Bx1, target_BxT].set(
            new_BxTxKxH.astype(old_BxSxKxH.dtype), mode="drop", unique_indices=True
        )

    x_BxTxD = model.embed(tokens_BxT, dtype)
    caches = []
    for block, (k_cache, v_cache) in zip(model.blocks(), cache, strict=True):

        def attend(q: Array, k: Array, v: Array, kc=k_cache, vc=v_cache):
            kc, vc = write(kc, k), write(vc, v)
            out = attention.attend(
                q, kc[:, :window].astype(dtype), vc[:, :window].astype(dtype), mask
            )
            return out, (kc, vc)

        x_BxTxD, layer_cache = block(x_BxTxD, tables, attend)
        caches.append(layer_cache)
    return model.norm(x_BxTxD), tuple(caches)
