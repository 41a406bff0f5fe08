"""Attention of one new token a slot over what the slot has cached, by name.

"plain"             our reference: the window of every slot, softmax in float32; every platform
"paged_attention"   JAX's Pallas kernel for TPU: of each slot the pages that its own length reaches, nothing more
"ragged_paged_attention"  JAX's other kernel for TPU, which takes rows of any number of tokens: the same pages, but
                    with a head's keys and values side by side. This cache keeps them apart (as all the others want
                    them), so the window is joined for it first, which costs more than it saves
"decode_attention"  JAX's Pallas kernel for GPUs (Triton): the window, cut over blocks that are joined afterwards
"auto"              `paged_attention` on TPU where the shapes allow it (`psearch plan` says which one a recipe gets, and
                    docs/planning.md what it saves); plain elsewhere

A kernel asked for by name runs on its own platform; on another one the plain one does, so that a recipe for TPU can be
tried on a laptop. The engine tells which one it uses.

Shape suffixes: B slots, N query heads, K key/value heads, G = N / K, H head width, L positions of a slot.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import decode_attention as gpu
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jaxtyping import Array, Float, Int

from psearch_jax.errors import UserError
from psearch_jax.mesh import Layout

PLATFORMS = {"paged_attention": "tpu", "ragged_paged_attention": "tpu", "decode_attention": "gpu"}
NAMES = ("auto", "plain", *PLATFORMS)
LANES = 128  # heads of the TPU kernels are a multiple of it wide
PAGES = (
    512,
    256,
    128,
)  # positions of a page of theirs: the largest that divides the context and the window
RAGGED_ROWS = 32  # sequences that the ragged kernel takes at a time
GPU_BLOCK = 64  # positions that the GPU kernel takes at a time
GPU_SPLITS = 16  # into how many parts it cuts a window at most


def resolve(name: str, layout: Layout, *, head_dim: int, windows: tuple[int, ...]) -> str:
    """The implementation that a name means on this platform.

    Args:
      windows: how many positions of a slot a step may read, the context last.

    Raises:
      UserError: an unknown name, or a kernel asked for on its platform with shapes that it cannot take.
    """
    if name not in NAMES:
        raise UserError(f"rollout.attention is {name!r}; choose one of {', '.join(NAMES)}.")
    platform = layout.platform
    if name == "auto":
        fits = platform == "tpu" and not _misfit("paged_attention", head_dim, windows)
        return "paged_attention" if fits and read_share("paged_attention", windows) < 1 else "plain"
    if PLATFORMS.get(name) != platform:
        return "plain"
    if misfit := _misfit(name, head_dim, windows):
        raise UserError(f"rollout.attention={name} needs {misfit}; or use rollout.attention=plain.")
    return name


def _misfit(name: str, head_dim: int, windows: tuple[int, ...]) -> str:
    """What a kernel would need; empty where it can run."""
    if PLATFORMS[name] == "tpu":
        if head_dim % LANES:
            return f"heads that are a multiple of {LANES} wide, and they are {head_dim}"
        block = PAGES[-1]
    else:
        block = GPU_BLOCK
    odd = [window for window in windows if window % block]
    if odd:
        return f"rollout.context and rollout.window_buckets that are multiples of {block}, and {odd[0]} is not"
    return ""


def read_share(name: str, windows: tuple[int, ...]) -> float:
    """What a step reads of the cache below the largest window, where lengths are spread evenly up to it.

    The plain one and the GPU kernel are given the window, the TPU kernels go by pages: half of it and half a page. For
    the ragged one the window has been read before.
    """
    if PLATFORMS.get(name) != "tpu":
        return 1.0
    pages = (1 + page_size(windows[-1], windows[-1]) / windows[-1]) / 2
    return pages if name == "paged_attention" else 1.0 + pages


def page_size(positions: int, window: int) -> int:
    """Positions of a page of the TPU kernels."""
    return next(size for size in PAGES if positions % size == 0 and window % size == 0)


def attend_one(
    name: str,
    q_Bx1xNxH: Float[Array, "B 1 N H"],
    k_cache: Float[Array, "... B K L H"],
    v_cache: Float[Array, "... B K L H"],
    layer: tuple[Array, ...],
    start_B: Int[Array, "B"],
    *,
    window: int,
    layout: Layout,
    interpret: bool = False,
) -> Float[Array, "B 1 N*H"]:
    """A kernel of `resolve` over cached keys and values: row b reads positions 0 … start_b.

    Args:
      layer: () or the index of the layer in a cache whose first axis is layers; the cache is read where it lies.
      window: static; what is at or after it is not read.
      interpret: run the GPU kernel in Pallas's interpreter.
    """
    kernel: Callable[..., Array] = {
        "paged_attention": _paged,
        "ragged_paged_attention": _ragged,
        "decode_attention": partial(_split, interpret=interpret),
    }[name]

    def local(q: Array, k: Array, v: Array, start_B: Array, *layer: Array) -> Array:
        slots, _, heads, width = q.shape
        kv_heads = k.shape[-3]
        # A head of a slot is a sequence of its own: so the cache need not be turned around for the kernel.
        q_BKxGxH = (q * width**-0.5).astype(q.dtype).reshape(slots * kv_heads, -1, width)
        length_BK = jnp.repeat(jnp.minimum(start_B + 1, window).astype(jnp.int32), kv_heads)
        out = kernel(q_BKxGxH, k, v, layer, length_BK, window)
        return out.reshape(slots, 1, heads * width).astype(q.dtype)

    if layout.mesh is None or layout.mesh.size == 1:
        return local(q_Bx1xNxH, k_cache, v_cache, start_B, *layer)
    before = (None,) * len(layer)
    cache = layout.spec(*before, "rows", "kv_heads", None, None)
    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(
            layout.spec("rows", None, "heads", None),
            cache,
            cache,
            layout.spec("rows"),
            *[layout.spec() for _ in layer],
        ),
        out_specs=layout.spec("rows", None, "heads"),
        check_vma=False,
    )(q_Bx1xNxH, k_cache, v_cache, start_B, *layer)


def _paged(
    q: Array, k: Array, v: Array, layer: tuple[Array, ...], length: Array, window: int
) -> Array:
    """The whole cache, all layers of it, as one pool of pages: those of a sequence follow one another."""
    sequences, positions, width = q.shape[0], k.shape[-2], k.shape[-1]
    page = page_size(positions, window)
    pages = positions // page  # of a sequence
    first = (layer[0] * sequences if layer else 0) + jnp.arange(sequences)
    indices = first[:, None] * pages + jnp.arange(window // page)
    pool_k, pool_v = (x.reshape(1, -1, page, width) for x in (k, v))
    return paged_attention(
        q, pool_k, pool_v, length, indices.astype(jnp.int32), pages_per_compute_block=1
    )


def _sequences(x: Array, layer: tuple[Array, ...], window: int) -> Array:
    """The window of every head of every slot."""
    x = (x[layer[0]] if layer else x)[:, :, :window]
    return x.reshape(-1, window, x.shape[-1])


def _ragged(
    q: Array, k: Array, v: Array, layer: tuple[Array, ...], length: Array, window: int
) -> Array:
    sequences, page = q.shape[0], page_size(k.shape[-2], window)
    pages = jnp.stack([_sequences(x, layer, window) for x in (k, v)], axis=2)
    every = jnp.arange(sequences + 1, dtype=jnp.int32)  # one token each
    return ragged_paged_attention(
        q,
        pages.reshape(-1, page, 2, pages.shape[-1]),
        length,
        jnp.arange(sequences * (window // page), dtype=jnp.int32).reshape(sequences, -1),
        every,
        every[-1:],
        num_kv_pages_per_block=1,
        num_queries_per_block=min(RAGGED_ROWS, sequences),
    )


def _split(
    q: Array,
    k: Array,
    v: Array,
    layer: tuple[Array, ...],
    length: Array,
    window: int,
    *,
    interpret: bool,
) -> Array:
    blocks = window // GPU_BLOCK
    splits = max(n for n in range(1, GPU_SPLITS + 1) if blocks % n == 0)
    return gpu.mqa(
        q,
        _sequences(k, layer, window),
        _sequences(v, layer, window),
        kv_seq_len=length,
        sm_scale=1.0,
        block_k=GPU_BLOCK,
        k_splits=splits,
        interpret=interpret,
    )
