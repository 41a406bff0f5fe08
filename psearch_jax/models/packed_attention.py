"""Causal attention over packed rows, by name.

"plain"        our reference: blocks of queries, softmax in float32; every platform
"dot_product"  `jax.nn.dot_product_attention` (what XLA makes of it on each platform)
"splash"       JAX's Pallas kernel for TPU: no scores in memory, segments after the diagonal skipped
"auto"         splash on TPU where the shapes allow it, plain elsewhere

"splash" on another platform than TPU runs the plain one, so that a recipe for TPU can be tried on a laptop.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jax.sharding import NamedSharding
from jaxtyping import Array, Int

from psearch_jax.errors import UserError
from psearch_jax.mesh import NOWHERE, Layout
from psearch_jax.models.attention import attend, attend_packed, packed_mask

NAMES = ("auto", "plain", "dot_product", "splash")
SPLASH_LANES = 128  # lengths of rows must be multiples of it
SPLASH_BLOCK = 512

#: Keys, values, what attention gives, and the log-sum-exp that splash attention's backward pass wants beside it carry
#: this name: a remat policy may keep them (`decoder.REMAT_POLICIES`).
KEPT = "attended"

# (q [B, L, N, H], k [B, L, K, H], v [B, L, K, H]) -> [B, L, N*H]
Attention = Callable[[Array, Array, Array], Array]


def resolve(name: str, length: int, layout: Layout) -> str:
    """The implementation that a name means for rows of this length on this platform.

    Raises:
      UserError: an unknown name, or splash attention asked for with a length that it cannot take.
    """
    if name not in NAMES:
        raise UserError(f"model.attention is {name!r}; choose one of {', '.join(NAMES)}.")
    if name not in ("auto", "splash"):
        return name
    if layout.platform != "tpu":
        return "plain"
    multiple = SPLASH_LANES * layout.size("length")
    if length % multiple == 0:
        return "splash"
    if name == "splash":
        raise UserError(
            f"model.attention=splash needs rows that are a multiple of {multiple} tokens, and they have {length}; "
            "change algorithm.row_length, or use model.attention=plain."
        )
    return "plain"


def packed_attention(
    name: str, segments_BxL: Int[Array, "B L"], layout: Layout = NOWHERE
) -> Attention:
    """Attention within equal segment ids, to tokens no later in the row; made once for all layers.

    q arrives with its rows, tokens and heads where `layout` says; keys and values of a row are needed whole, and
    are gathered along `length` here.
    """
    name = resolve(name, segments_BxL.shape[1], layout)
    if name == "splash":
        return partial(_splash, segments_BxL, layout)
    mask_BxLxL = packed_mask(segments_BxL)

    def run(q: Array, k: Array, v: Array) -> Array:
        k, v = (layout.constrain(x, "rows", None, "kv_heads", None) for x in (k, v))
        if name == "dot_product":
            out = jax.nn.dot_product_attention(q, k, v, mask=mask_BxLxL[:, None])
            return checkpoint_name(out.reshape(*q.shape[:2], -1), KEPT)
        # Blocks are slices along the tokens, which must not be cut over devices.
        own = attend if layout.size("length") > 1 else attend_packed
        return checkpoint_name(own(q, k, v, mask_BxLxL), KEPT)

    return run


def _splash(
    segments_BxL: Array, layout: Layout, q: Array, k: Array, v: Array, *, interpret: bool = False
) -> Array:
    """Splash attention on each device's rows and heads, for its own queries and all keys of the row."""
    length, heads, width = q.shape[1], q.shape[2], q.shape[3]
    pieces = layout.size("length")
    block = next(size for size in (SPLASH_BLOCK, 256, SPLASH_LANES) if length // pieces % size == 0)
    kernel = splash.make_splash_mha(
        mask=splash_mask.MultiHeadMask([splash_mask.CausalMask((length, length))] * heads),
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            # One backward kernel for all three gradients: scores and their weights are computed once more, not twice.
            # Its pieces of the queries' gradient, one a block of keys, are summed outside.
            use_fused_bwd_kernel=True,
        ),
        residual_checkpoint_name=KEPT,
        head_shards=layout.size("heads"),
        q_seq_shards=pieces,
        interpret=interpret,
    )

    def local(kernel, q, k, v, q_segments, kv_segments):
        def one_row(q_LxNxH, k_LxKxH, v_LxKxH, q_segments_L, kv_segments_L):
            ids = splash.SegmentIds(q=q_segments_L, kv=kv_segments_L)
            by_head = (x.transpose(1, 0, 2) for x in (q_LxNxH, k_LxKxH, v_LxKxH))
            return kernel(*by_head, segment_ids=ids).transpose(1, 0, 2)

        return jax.vmap(one_row)(q, k, v, q_segments, kv_segments)

    q = (q * width**-0.5).astype(k.dtype)  # the kernel does not scale
    if layout.mesh is None or layout.mesh.size == 1:
        out = local(kernel, q, k, v, segments_BxL, segments_BxL)
    else:
        whole = layout.spec("rows", None, "kv_heads", None)
        cut = layout.spec("rows", "length", "heads", None)
        where = kernel.manual_sharding_spec(
            NamedSharding(layout.mesh, layout.spec("heads", "length"))
        )
        out = jax.shard_map(
            local,
            mesh=layout.mesh,
            in_specs=(
                where,
                cut,
                whole,
                whole,
                layout.spec("rows", "length"),
                layout.spec("rows", None),
            ),
            out_specs=cut,
            check_vma=False,
        )(kernel, q, k, v, segments_BxL, segments_BxL)
    return jnp.reshape(out, (*out.shape[:2], -1))
