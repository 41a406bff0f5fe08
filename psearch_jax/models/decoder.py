"""The decoder as Flax NNX modules, and pure functions over (graphdef, params).

One decoder with options for the families of families.py. Parameter tree (all matrices are [in, out], the transpose of
Hugging Face's):

    embed_tokens.embedding_VxD
    layers.{i}.input_layernorm.scale          layers.{i}.post_attention_layernorm.scale
    layers.{i}.self_attn.{q,k,v,o}_proj.{kernel,bias}
    layers.{i}.self_attn.{q,k}_norm.scale     (Qwen3)
    layers.{i}.mlp.{gate,up,down}_proj.kernel
    norm.scale, lm_head.kernel (absent when the embeddings are tied)

and `lora_a`, `lora_b` beside the kernel of an adapted projection. A model deeper than `max_unrolled_layers` keeps one
`layers` subtree with a leading layer axis, and the forward pass scans over it, so that compile time does not grow
with depth.

Shape suffixes: B rows, L tokens, D hidden, F feed-forward, V vocabulary, N query heads, K key/value heads, H head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from psearch_jax.errors import UserError
from psearch_jax.mesh import LINEARS, NOWHERE, Layout, Logical
from psearch_jax.models import attention
from psearch_jax.models.decoder_config import DecoderConfig
from psearch_jax.models.lora import LoraParam, split_trainable
from psearch_jax.models.packed_attention import KEPT, packed_attention
from psearch_jax.models.token_table import Embedding, look_up

REMAT_POLICIES: dict[str, Callable[..., bool] | None] = {
    "full": None,  # keep nothing but the input of each layer
    # Full remat of all but attention: of each layer its input, keys, values and what attention gave. The scores, whose
    # cost grows with the length, are then computed once forward and once backward, as without remat.
    "attention": jax.checkpoint_policies.save_only_these_names(KEPT),
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # keep the outputs of weight matmuls
}


class Linear(nnx.Module):
    """y = x W (+ b) (+ scale · (x A) B), W stored [in, out] with standard deviation `std`.

    A of an adapter starts normal with variance 1/in, B at zero.
    """

    def __init__(
        self,
        n_in: int,
        n_out: int,
        *,
        std: float,
        bias: bool = False,
        rank: int = 0,
        scale: float = 0.0,
        rngs: nnx.Rngs,
    ):
        def normal(shape: tuple[int, int], std: float) -> Array:
            return std * jax.random.normal(rngs.params(), shape, jnp.float32)

        self.kernel = nnx.Param(normal((n_in, n_out), std))
        self.bias = nnx.Param(jnp.zeros((n_out,), jnp.float32)) if bias else None
        self.lora_a = LoraParam(normal((n_in, rank), n_in**-0.5)) if rank else None
        self.lora_b = LoraParam(jnp.zeros((rank, n_out), jnp.float32)) if rank else None
        self.scale = scale

    def __call__(
        self,
        x: Float[Array, "... i"],
        layout: Layout = NOWHERE,
        name: str = "",
        used: Logical = (),
    ) -> Float[Array, "... o"]:
        """`name`: which projection this is, for its place on the mesh. `used`: the logical axes of the kernel while
        it is used; as stored, but for the model's width, unless given. What is stored in pieces and used whole is
        gathered in the dtype of x."""
        w = self.kernel[...].astype(x.dtype)
        if name:
            stored = LINEARS[name]
            used = used or tuple(None if axis == "embed" else axis for axis in stored)
            w = layout.gather(w, stored, used)
        return self.finish(x, x @ w)

    def finish(self, x: Float[Array, "... i"], y: Float[Array, "... o"]) -> Float[Array, "... o"]:
        """Bias and adapter on top of x W."""
        if self.bias is not None:
            y = y + self.bias[...].astype(y.dtype)
        if self.lora_a is None or self.lora_b is None:
            return y
        low = x @ self.lora_a[...].astype(x.dtype)
        return y + (low @ self.lora_b[...].astype(x.dtype)) * jnp.asarray(self.scale, y.dtype)


def fused_linear(
    x: Float[Array, "... i"],
    *layers: Linear,
    layout: Layout = NOWHERE,
    names: Sequence[str] = (),
    used: Sequence[Logical] = (),
) -> list[Float[Array, "... o"]]:
    """Apply several linear layers to one input, as one matmul where one device holds them; in the dtype of x.

    Stored apart (checkpoints, optimiser and sharding see the usual names), multiplied together: a wide matmul
    is faster than several narrow ones, and joining the weights costs next to nothing beside it. Weights whose
    columns lie on several devices stay apart: joining them would move them.
    """
    if layout.mesh is not None and layout.mesh.size > 1:
        used = used or [()] * len(layers)
        return [
            layer(x, layout, name, where)
            for layer, name, where in zip(layers, names, used, strict=True)
        ]
    w = jnp.concatenate([layer.kernel[...].astype(x.dtype) for layer in layers], axis=1)
    widths = [layer.kernel.shape[1] for layer in layers]
    parts = jnp.split(x @ w, [sum(widths[: i + 1]) for i in range(len(widths) - 1)], axis=-1)
    return [layer.finish(x, y) for layer, y in zip(layers, parts, strict=True)]


class RMSNorm(nnx.Module):
    """Root-mean-square norm (Zhang & Sennrich 2019), computed in float32."""

    def __init__(self, width: int, eps: float):
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32))
        self.eps = eps

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * inverse * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class SelfAttention(nnx.Module):
    """Projections of grouped-query attention; what is attended is the caller's choice."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        d, h = config.hidden_size, config.head_dim

        def linear(name: str, n_in: int, n_out: int, std: float, bias: bool = False) -> Linear:
            rank, scale = config.rank_of(name), config.scale_of_adapters
            return Linear(n_in, n_out, std=std, bias=bias, rank=rank, scale=scale, rngs=rngs)

        std, bias = d**-0.5, config.attention_bias
        self.q_proj = linear("q_proj", d, config.num_heads * h, std, bias)
        self.k_proj = linear("k_proj", d, config.num_kv_heads * h, std, bias)
        self.v_proj = linear("v_proj", d, config.num_kv_heads * h, std, bias)
        out_std = (config.num_heads * h * 2 * config.num_layers) ** -0.5
        self.o_proj = linear("o_proj", config.num_heads * h, d, out_std)
        self.q_norm = RMSNorm(h, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(h, config.rms_norm_eps) if config.qk_norm else None
        self.head_dim, self.kv_repeat = h, config.kv_repeat

    def project(
        self, x_BxLxD: Float[Array, "B L D"], tables: tuple[Array, Array], layout: Layout = NOWHERE
    ) -> tuple[Float[Array, "B L N H"], Float[Array, "B L K H"], Float[Array, "B L K H"]]:
        """Queries and keys (rotated) and values, split into heads; key/value heads repeated as the mesh needs."""
        # Where key/value heads are repeated they are not whole in a piece of the columns.
        used: list[Logical] = [()] + [(None, None) if self.kv_repeat > 1 else ()] * 2
        names = ("q_proj", "k_proj", "v_proj")
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (
            y.reshape(*y.shape[:2], -1, self.head_dim)
            for y in fused_linear(x_BxLxD, *layers, layout=layout, names=names, used=used)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = attention.rotate(q, tables), attention.rotate(k, tables)
        k, v = (checkpoint_name(x, KEPT) for x in (k, v))
        if self.kv_repeat > 1:
            k, v = (jnp.repeat(x, self.kv_repeat, axis=2) for x in (k, v))
        return (
            layout.constrain(q, "rows", "length", "heads", None),
            layout.constrain(k, "rows", "length", "kv_heads", None),
            layout.constrain(v, "rows", "length", "kv_heads", None),
        )


class Mlp(nnx.Module):
    """SwiGLU feed-forward (Shazeer 2020)."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        d, f = config.hidden_size, config.intermediate_size

        def linear(name: str, n_in: int, n_out: int, std: float) -> Linear:
            rank, scale = config.rank_of(name), config.scale_of_adapters
            return Linear(n_in, n_out, std=std, rank=rank, scale=scale, rngs=rngs)

        self.gate_proj = linear("gate_proj", d, f, d**-0.5)
        self.up_proj = linear("up_proj", d, f, d**-0.5)
        self.down_proj = linear("down_proj", f, d, (f * 2 * config.num_layers) ** -0.5)

    def __call__(
        self, x_BxLxD: Float[Array, "B L D"], layout: Layout = NOWHERE
    ) -> Float[Array, "B L D"]:
        x_BxLxD = layout.constrain(x_BxLxD, "mlp_rows", "length", None)
        gate_BxLxF, up_BxLxF = fused_linear(
            x_BxLxD, self.gate_proj, self.up_proj, layout=layout, names=("gate_proj", "up_proj")
        )
        h_BxLxF = layout.constrain(jax.nn.silu(gate_BxLxF) * up_BxLxF, "mlp_rows", "length", "mlp")
        return self.down_proj(h_BxLxF, layout, "down_proj")


# (q, k, v) -> (attended [B, L, N*H], state): packed attention has no state, cached attention returns its cache.
Attend = Callable[[Array, Array, Array], tuple[Array, Any]]


class Block(nnx.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config, rngs)

    def __call__(
        self,
        x_BxLxD: Float[Array, "B L D"],
        tables: tuple[Array, Array],
        attend: Attend,
        layout: Layout = NOWHERE,
    ) -> tuple[Float[Array, "B L D"], Any]:
        with jax.named_scope("attention"):
            q, k, v = self.self_attn.project(self.input_layernorm(x_BxLxD), tables, layout)
            attended, state = attend(q, k, v)
            attended = layout.constrain(attended, "rows", "length", "heads")
            x_BxLxD = x_BxLxD + self.self_attn.o_proj(attended, layout, "o_proj")
            x_BxLxD = layout.constrain(x_BxLxD, "rows", "length", None)
        with jax.named_scope("mlp"):
            x_BxLxD = x_BxLxD + self.mlp(self.post_attention_layernorm(x_BxLxD), layout)
            x_BxLxD = layout.constrain(x_BxLxD, "rows", "length", None)
        return x_BxLxD, state


class Decoder(nnx.Module):
    """The whole model; see the module docstring for its tree."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, rngs)
        blocks = [Block(config, rngs) for _ in range(config.num_layers)]
        self.layers = stack(blocks) if config.scanned else nnx.List(blocks)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = (
            None
            if config.tie_embeddings
            else Linear(
                config.hidden_size, config.vocab_size, std=config.hidden_size**-0.5, rngs=rngs
            )
        )

    def embed(
        self, tokens_BxL: Int[Array, "B L"], dtype: Any, layout: Layout = NOWHERE
    ) -> Float[Array, "B L D"]:
        """Rows of the table; on a mesh each device looks up what its part of the table holds."""
        table_VxD = self.embed_tokens.embedding[...].astype(dtype)
        if layout.size("table_rows") * layout.size("table_width") == 1:
            return layout.constrain(table_VxD[tokens_BxL], "rows", "length", None)
        return look_up(table_VxD, tokens_BxL, layout)

    def unembedding(self) -> Float[Array, "D V"]:
        if self.lm_head is None:
            return self.embed_tokens.embedding[...].T
        return self.lm_head.kernel[...]


def stack(blocks: list[Block]) -> Block:
    """One block whose parameters carry a leading layer axis."""
    graphdef, _ = nnx.split(blocks[0])
    states = [nnx.split(block)[1] for block in blocks]
    return nnx.merge(graphdef, jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))


def init_params(
    config: DecoderConfig, key: Array, dtype: Any = jnp.float32
) -> tuple[nnx.GraphDef, nnx.State]:
    """Random parameters: fan-in scaled normals, the two projections into the residual also by 1/sqrt(2 layers)."""
    model = Decoder(config, rngs=nnx.Rngs(params=key))
    graphdef, params = nnx.split(model, nnx.Param)
    return graphdef, jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def init_adapters(config: DecoderConfig, key: Array) -> nnx.State:
    """Fresh adapters (float32) for a policy that has none yet: A normal with variance 1/in, B zero."""
    _, shapes = abstract_params(config)
    adapters, _ = split_trainable(shapes)

    def fresh(index: int, path: tuple[Any, ...], leaf: Any) -> Any:
        if path[-1] == "lora_b":
            return leaf.replace(jnp.zeros(leaf.shape, jnp.float32))
        std = leaf.shape[-2] ** -0.5
        own_key = jax.random.fold_in(key, index)
        return leaf.replace(std * jax.random.normal(own_key, leaf.shape, jnp.float32))

    flat = nnx.to_flat_state(adapters)
    return nnx.from_flat_state(
        [(path, fresh(i, path, leaf)) for i, (path, leaf) in enumerate(flat)]
    )


def abstract_params(
    config: DecoderConfig, dtype: Any = jnp.float32
) -> tuple[nnx.GraphDef, nnx.State]:
    """The graphdef and the shapes of the parameters, with nothing allocated."""
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(params=0)))
    graphdef, shapes = nnx.split(model, nnx.Param)
    return graphdef, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), shapes)


def hidden_states(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    tokens_BxL: Int[Array, "B L"],
    positions_BxL: Int[Array, "B L"],
    segments_BxL: Int[Array, "B L"],
    *,
    dtype: Any = jnp.float32,
    remat: str = "none",
    attention_name: str = "plain",
    layout: Layout = NOWHERE,
) -> Float[Array, "B L D"]:
    """Hidden states after the final norm, of rows into which several sequences may be packed.

    Args:
        tokens_BxL: token ids; padding may hold any valid id.
        positions_BxL: position of each token within its own sequence.
        segments_BxL: sequence number within the row, 0 for padding; attention stays within equal numbers.
        dtype: of the computation (softmax and norms are float32 always).
        remat: what is kept for the backward pass: "none" (everything), "dots", "attention" or "full" (recompute all).
        attention_name: see packed_attention.py.
        layout: where everything lies on the mesh.

    Raises UserError for an unknown remat policy or attention. Values at padding are finite and without meaning.
    """
    if remat != "none" and remat not in REMAT_POLICIES:
        raise UserError(
            f"remat policy {remat!r} is unknown; choose one of none, {', '.join(REMAT_POLICIES)}."
        )
    model: Decoder = nnx.merge(graphdef, params)
    # Shared by all layers, so computed once.
    tables = attention_tables(model.config, positions_BxL)
    attend = packed_attention(attention_name, segments_BxL, layout)

    def checkpointed(block_def: nnx.GraphDef) -> Callable[[nnx.State, Array], Array]:
        def call(block_params: nnx.State, x: Array) -> Array:
            block: Block = nnx.merge(block_def, block_params)
            return block(x, tables, lambda q, k, v: (attend(q, k, v), None), layout)[0]

        return call if remat == "none" else jax.checkpoint(call, policy=REMAT_POLICIES[remat])

    x_BxLxD = model.embed(tokens_BxL, dtype, layout)
    if model.config.scanned:
        block_def, stacked = nnx.split(model.layers)
        layer = checkpointed(block_def)
        x_BxLxD, _ = jax.lax.scan(lambda x, p: (layer(p, x), None), x_BxLxD, stacked)
    else:
        parts = [nnx.split(block) for block in model.layers]
        layer = jax.jit(checkpointed(parts[0][0]))  # all layers are alike: traced once
        for _, block_params in parts:
            x_BxLxD = layer(block_params, x_BxLxD)
    return model.norm(x_BxLxD)


def attention_tables(
    config: DecoderConfig, positions: Int[Array, "..."]
) -> tuple[Float[Array, "... H"], Float[Array, "... H"]]:
    """The rotary tables of a model."""
    return attention.rotary_tables(
        positions, config.head_dim, config.rope_theta, config.rope_scaling
    )


def unembedding(graphdef: nnx.GraphDef, params: nnx.State) -> Float[Array, "D V"]:
    """The matrix that turns hidden states into logits (the transposed token table when tied)."""
    return nnx.merge(graphdef, params).unembedding()


def unembed(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    hidden: Float[Array, "... D"],
    layout: Layout = NOWHERE,
) -> Float[Array, "... V"]:
    """float32 logits; for a few tokens only (law 8: a training batch goes through learning/losses in chunks)."""
    w_DxV = layout.constrain(unembedding(graphdef, params).astype(hidden.dtype), None, "vocab")
    return jnp.matmul(hidden, w_DxV, preferred_element_type=jnp.float32)
