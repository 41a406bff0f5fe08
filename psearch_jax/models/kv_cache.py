"""The KV cache, and the decoder run on top of it.

A cache is a tuple of (k, v) pairs: one pair [S, K, L, H] a layer where the layers are apart, and a single pair
[layers, S, K, L, H] where they are stacked and run by a scan. (Here S are slots of the rollout engine, L positions of
a slot; K counts key/value heads after repetition for the mesh. Heads before positions: what attention reads of a head
is then one matrix, and nothing is transposed or copied for it.) Position p of a slot holds the key and value of the
token at position p of its sequence. Carry a cache through a loop (`lax.while_loop`, `fori_loop`, a scan's carry) or
donate it: then it is updated in place. As input and output of a scan it would be copied whole at every step.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from psearch_jax.mesh import NOWHERE, Layout
from psearch_jax.models import attention, decode_attention
from psearch_jax.models.decoder import Block, Decoder, attention_tables
from psearch_jax.models.decoder_config import DecoderConfig

KVCache: TypeAlias = tuple[tuple[Array, Array], ...]


def init_cache(config: DecoderConfig, batch: int, length: int, dtype: Any = jnp.float32) -> KVCache:
    """A zero cache of `batch` slots of `length` positions."""
    shape = (batch, config.num_kv_heads * config.kv_repeat, length, config.head_dim)
    stacked, pairs = ((config.num_layers,), 1) if config.scanned else ((), config.num_layers)
    return tuple(
        (jnp.zeros(stacked + shape, dtype), jnp.zeros(stacked + shape, dtype)) for _ in range(pairs)
    )


def cache_axes(ndim: int) -> tuple[str | None, ...]:
    """Logical axes of a cache array."""
    return (None,) * (ndim - 4) + ("rows", "kv_heads", None, None)


def _in_pieces(x: Array, pieces: int) -> Array:
    """[…, S, K, L, H] → […, pieces, S / pieces, K, L, H]."""
    *before, slots, heads, length, width = x.shape
    return x.reshape(*before, pieces, slots // pieces, heads, length, width)


def read_slots(cache: KVCache, slot_N: Int[Array, "N"], window: int, pieces: int = 1) -> KVCache:
    """The first `window` positions of a few slots, as a cache of N slots.

    pieces: into how many equal runs the slots (and the N entries) are cut over devices. Entry n of run r must name a
    slot of run r, so that nothing travels. Entries that are not a slot (>= S) read anything.
    """

    def read(x: Array) -> Array:
        split = _in_pieces(x, pieces)
        local_PxN = (
            slot_N.reshape(pieces, -1)
            - (jnp.arange(pieces) * (x.shape[-4] // pieces)).astype(slot_N.dtype)[:, None]
        )

        def one(x_SxKxLxH: Array, slots: Array) -> Array:
            return x_SxKxLxH.at[slots, :, :window].get(mode="clip")

        over_pieces = jax.vmap(one)
        for _ in range(x.ndim - 4):
            over_pieces = jax.vmap(over_pieces, (0, None))
        few = over_pieces(split, local_PxN)
        return few.reshape(*x.shape[:-4], slot_N.shape[0], *few.shape[-3:])

    if pieces == 1:
        return jax.tree.map(lambda x: x.at[..., slot_N, :, :window, :].get(mode="clip"), cache)
    return jax.tree.map(read, cache)


def write_slots(
    cache: KVCache, few: KVCache, slot_N: Int[Array, "N"], window: int, pieces: int = 1
) -> KVCache:
    """Put back what `read_slots` has read; entries that are not a slot are dropped."""

    def write(x: Array, new: Array) -> Array:
        slots = x.shape[-4] // pieces
        split, new = _in_pieces(x, pieces), _in_pieces(new, pieces)
        local_PxN = (
            slot_N.reshape(pieces, -1) - (jnp.arange(pieces) * slots).astype(slot_N.dtype)[:, None]
        )
        # What belongs to no slot of its run must not wrap around into one.
        local_PxN = jnp.where((local_PxN < 0) | (local_PxN >= slots), slots, local_PxN)

        def one(x_SxKxLxH: Array, slots: Array, new_NxKxWxH: Array) -> Array:
            return x_SxKxLxH.at[slots, :, :window].set(new_NxKxWxH, mode="drop")

        over_pieces = jax.vmap(one)
        for _ in range(x.ndim - 4):
            over_pieces = jax.vmap(over_pieces, (0, None, 0))
        return over_pieces(split, local_PxN, new).reshape(x.shape)

    if pieces == 1:
        return jax.tree.map(
            lambda x, new: x.at[..., slot_N, :, :window, :].set(new, mode="drop"), cache, few
        )
    return jax.tree.map(write, cache, few)


def copy_slots(
    cache: KVCache,
    src_N: Int[Array, "N"],
    dst_N: Int[Array, "N"],
    pieces: int = 1,
    window: int | None = None,
) -> KVCache:
    """Copy slots, or their first `window` positions: row dst_n becomes what row src_n was before the call.

    Entries whose dst is not a slot (dst >= S) are dropped, so that N can stay fixed. Sources are all read
    before anything is written; two entries with the same dst are the caller's mistake. `pieces` as in `read_slots`.
    """
    length = window or cache[0][0].shape[-2]
    return write_slots(cache, read_slots(cache, src_N, length, pieces), dst_N, length, pieces)


def _write(
    old: Array, layer: tuple[Array, ...], new_BxTxKxH: Array, target_BxT: Array, layout: Layout
) -> Array:
    """Put new keys or values at their positions, in place; a position past the end writes nothing.

    Each head has an index of its own. As part of what one index writes it would have to lie beside the head's width in
    memory, and the TPU compiler would turn the whole cache around for that, in every call. On a mesh every device
    writes its own slots and heads: the compiler would bring all of them to each.
    """

    def local(old: Array, new_BxTxKxH: Array, target_BxT: Array, *layer: Array) -> Array:
        new_BxKxTxH = new_BxTxKxH.transpose(0, 2, 1, 3).astype(old.dtype)
        rows, heads = jnp.arange(old.shape[-4]), jnp.arange(old.shape[-3])
        at = old.at[*layer, rows[:, None, None], heads[None, :, None], target_BxT[:, None, :]]
        return at.set(new_BxKxTxH, mode="drop", unique_indices=True)

    if layout.mesh is None or layout.mesh.size == 1:
        return local(old, new_BxTxKxH, target_BxT, *layer)
    own = layout.spec(*cache_axes(old.ndim))
    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(
            own,
            layout.spec("rows", None, "kv_heads", None),
            layout.spec("rows", None),
            *[layout.spec() for _ in layer],
        ),
        out_specs=own,
        check_vma=False,
    )(old, new_BxTxKxH, target_BxT, *layer)


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
    layout: Layout = NOWHERE,
    attention_name: str = "plain",
) -> tuple[Float[Array, "B T D"], KVCache]:
    """Append up to T tokens to each row and return their hidden states (after the final norm).

    Row b gets its first count_b tokens, at positions start_b .. start_b + count_b - 1; a row with count 0 is left
    as it is. Hidden states at t >= count_b are finite and without meaning. T = 1 is a decoding step, T = a bucket
    is prefill or the append of an observation.

    window: static; only cache positions below it are read. It must be >= max(start_b + count_b) over rows with
    count_b > 0 (not checked: the values live on the device).

    attention_name: what attends where T = 1, as `decode_attention.resolve` names it; more tokens are attended plainly.
    """
    model: Decoder = nnx.merge(graphdef, params)
    batch, new = tokens_BxT.shape
    positions_BxT = start_B[:, None] + jnp.arange(new)
    tables = attention_tables(model.config, positions_BxT)
    mask = attention.cache_mask(start_B, new, window)
    # Padding is sent out of range, where a scatter with mode="drop" writes nothing.
    length = cache[0][0].shape[-2]
    target_BxT = jnp.where(jnp.arange(new) < count_B[:, None], positions_BxT, length)

    def through(block: Block, x: Array, pair: tuple[Array, Array], layer: tuple[Array, ...]):
        """One layer; `layer` is () or the index of its part in a stacked pair."""

        def write(old: Array, new_BxTxKxH: Array) -> Array:
            return _write(old, layer, new_BxTxKxH, target_BxT, layout)

        def attend(q: Array, k: Array, v: Array):
            k_cache, v_cache = write(pair[0], k), write(pair[1], v)
            if new == 1 and attention_name != "plain":
                out = decode_attention.attend_one(
                    attention_name,
                    q,
                    k_cache,
                    v_cache,
                    layer,
                    start_B,
                    window=window,
                    layout=layout,
                )
                return out, (k_cache, v_cache)
            seen_k, seen_v = (
                (c[layer[0]] if layer else c)[:, :, :window].astype(dtype)
                for c in (k_cache, v_cache)
            )
            return attention.attend_by_head(q, seen_k, seen_v, mask), (k_cache, v_cache)

        return block(x, tables, attend, layout)

    x_BxTxD = model.embed(tokens_BxT, dtype, layout)
    if model.config.scanned:
        block_def, stacked = nnx.split(model.layers)

        def step(carry, inputs):
            layer, block_params = inputs
            return through(nnx.merge(block_def, block_params), *carry, (layer,)), None

        layers = jnp.arange(model.config.num_layers)
        (x_BxTxD, pair), _ = jax.lax.scan(step, (x_BxTxD, cache[0]), (layers, stacked))
        return model.norm(x_BxTxD), (pair,)
    pairs = []
    parts = [nnx.split(block) for block in model.layers]
    block_def = parts[0][0]

    @jax.jit  # all layers are alike: traced once
    def layer(block_params: nnx.State, x: Array, pair: tuple[Array, Array]):
        return through(nnx.merge(block_def, block_params), x, pair, ())

    for (_, block_params), pair in zip(parts, cache, strict=True):
        x_BxTxD, pair = layer(block_params, x_BxTxD, pair)
        pairs.append(pair)
    return model.norm(x_BxTxD), tuple(pairs)
