"""The decoder: Qwen2's architecture as Flax NNX modules, and pure functions over (graphdef, params).

Parameter tree (all matrices are [in, out], the transpose of Hugging Face's):

    embed_tokens.embedding_VxD
    layers.{i}.input_layernorm.scale          layers.{i}.post_attention_layernorm.scale
    layers.{i}.self_attn.{q,k,v,o}_proj.{kernel,bias}
    layers.{i}.mlp.{gate,up,down}_proj.kernel
    norm.scale, lm_head.kernel (absent when the embeddings are tied)

A model deeper than `max_unrolled_layers` keeps one `layers` subtree with a leading layer axis, and the forward
pass scans over it, so that compile time does not grow with depth.

Shape suffixes: B rows, L tokens, D hidden, F feed-forward, V vocabulary, N query heads, K key/value heads, H head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from psearch_jax.errors import UserError
from psearch_jax.models import attention

REMAT_POLICIES: dict[str, Callable[..., bool] | None] = {
    "full": None,  # keep nothing but the input of each layer
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # keep the outputs of weight matmuls
}


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes of a decoder. `max_positions` is what the checkpoint was made for; nothing is allocated from it."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = True
    attention_bias: bool = True  # on q, k and v, as in Qwen2; o has none
    max_positions: int = 2048
    max_unrolled_layers: int = 6

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; "
                "choose a divisor."
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim {self.head_dim} is odd; rotary embeddings need an even one.")

    @property
    def scanned(self) -> bool:
        """Whether the layers are stored stacked and run by a scan."""
        return self.num_layers > self.max_unrolled_layers

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> DecoderConfig:
        """Read a Hugging Face config.json (Qwen2ForCausalLM). Raises UserError naming what is not supported."""
        architecture = (values.get("architectures") or [None])[0]
        if architecture != "Qwen2ForCausalLM":
            raise UserError(
                f"architecture {architecture!r} in config.json is not supported; "
                "use a Qwen2ForCausalLM checkpoint."
            )
        if values.get("use_sliding_window"):
            raise UserError(
                "use_sliding_window true in config.json is not supported; use a checkpoint without it."
            )
        if values.get("hidden_act", "silu") != "silu":
            raise UserError(
                f"hidden_act {values['hidden_act']!r} in config.json is not supported; only 'silu' is."
            )
        # transformers 5 moved rope_theta into rope_parameters; older files keep it at the top, with rope_scaling.
        rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise UserError(
                f"rope type {kind!r} in config.json is not supported; only 'default' is."
            )
        missing = [
            name
            for name in (
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
            )
            if name not in values
        ]
        if missing:
            raise UserError(
                f"config.json lacks {', '.join(missing)}; it is not a whole Qwen2 config."
            )
        heads = values["num_attention_heads"]
        return cls(
            vocab_size=values["vocab_size"],
            hidden_size=values["hidden_size"],
            intermediate_size=values["intermediate_size"],
            num_layers=values["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=values.get("num_key_value_heads") or heads,
            head_dim=values.get("head_dim") or values["hidden_size"] // heads,
            rope_theta=float(rope.get("rope_theta", values.get("rope_theta", 10000.0))),
            rms_norm_eps=values.get("rms_norm_eps", 1e-6),
            tie_embeddings=values.get("tie_word_embeddings", False),
            max_positions=values.get("max_position_embeddings", 32768),
        )

    def to_hf(self) -> dict[str, Any]:
        """The config.json of this model, readable by transformers 4 and 5."""
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tie_embeddings,
            "use_sliding_window": False,
            "attention_dropout": 0.0,
        }


class Linear(nnx.Module):
    """y = x W (+ b), W stored [in, out] with standard deviation `std`."""

    def __init__(self, n_in: int, n_out: int, *, std: float, bias: bool = False, rngs: nnx.Rngs):
        self.kernel = nnx.Param(std * jax.random.normal(rngs.params(), (n_in, n_out), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((n_out,), jnp.float32)) if bias else None

    def __call__(self, x: Float[Array, "... i"]) -> Float[Array, "... o"]:
        return fused_linear(x, self)[0]


def fused_linear(x: Float[Array, "... i"], *layers: Linear) -> list[Float[Array, "... o"]]:
    """Apply several linear layers to one input as one matmul; one output a layer, in the dtype of x.

    Stored apart (checkpoints, optimiser and sharding see the usual names), multiplied together: a wide matmul
    is faster than several narrow ones, and joining the weights costs next to nothing beside it.
    """
    w = jnp.concatenate([layer.kernel[...].astype(x.dtype) for layer in layers], axis=1)
    y = x @ w
    widths = [layer.kernel.shape[1] for layer in layers]
    if layers[0].bias is not None:
        y = y + jnp.concatenate([layer.bias[...].astype(x.dtype) for layer in layers])
    return jnp.split(y, [sum(widths[: i + 1]) for i in range(len(widths) - 1)], axis=-1)


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
        std, bias = d**-0.5, config.attention_bias
        self.q_proj = Linear(d, config.num_heads * h, std=std, bias=bias, rngs=rngs)
        self.k_proj = Linear(d, config.num_kv_heads * h, std=std, bias=bias, rngs=rngs)
        self.v_proj = Linear(d, config.num_kv_heads * h, std=std, bias=bias, rngs=rngs)
        out_std = (config.num_heads * h * 2 * config.num_layers) ** -0.5
        self.o_proj = Linear(config.num_heads * h, d, std=out_std, rngs=rngs)
        self.head_dim = h

    def project(
        self, x_BxLxD: Float[Array, "B L D"], tables: tuple[Array, Array]
    ) -> tuple[Float[Array, "B L N H"], Float[Array, "B L K H"], Float[Array, "B L K H"]]:
        """Queries and keys (rotated) and values, split into heads."""
        q, k, v = (
            y.reshape(*y.shape[:2], -1, self.head_dim)
            for y in fused_linear(x_BxLxD, self.q_proj, self.k_proj, self.v_proj)
        )
        return attention.rotate(q, tables), attention.rotate(k, tables), v


class Mlp(nnx.Module):
    """SwiGLU feed-forward (Shazeer 2020)."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        d, f = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(d, f, std=d**-0.5, rngs=rngs)
        self.up_proj = Linear(d, f, std=d**-0.5, rngs=rngs)
        self.down_proj = Linear(f, d, std=(f * 2 * config.num_layers) ** -0.5, rngs=rngs)

    def __call__(self, x_BxLxD: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        gate_BxLxF, up_BxLxF = fused_linear(x_BxLxD, self.gate_proj, self.up_proj)
        return self.down_proj(jax.nn.silu(gate_BxLxF) * up_BxLxF)


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
        self, x_BxLxD: Float[Array, "B L D"], tables: tuple[Array, Array], attend: Attend
    ) -> tuple[Float[Array, "B L D"], Any]:
        with jax.named_scope("attention"):
            q, k, v = self.self_attn.project(self.input_layernorm(x_BxLxD), tables)
            attended, state = attend(q, k, v)
            x_BxLxD = x_BxLxD + self.self_attn.o_proj(attended)
        with jax.named_scope("mlp"):
            x_BxLxD = x_BxLxD + self.mlp(self.post_attention_layernorm(x_BxLxD))
        return x_BxLxD, state


class Embedding(nnx.Module):
    """The token table."""

    def __init__(self, rows: int, width: int, rngs: nnx.Rngs):
        std = width**-0.5
        self.embedding = nnx.Param(
            std * jax.random.normal(rngs.params(), (rows, width), jnp.float32)
        )


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

    def embed(self, tokens_BxL: Int[Array, "B L"], dtype: Any) -> Float[Array, "B L D"]:
        return self.embed_tokens.embedding[...].astype(dtype)[tokens_BxL]

    def blocks(self) -> list[Block]:
        """The layers one by one, whichever way they are stored."""
        if not self.config.scanned:
            return list(self.layers)
        graphdef, stacked = nnx.split(self.layers)
        return [
            nnx.merge(graphdef, jax.tree.map(lambda leaf, i=i: leaf[i], stacked))
            for i in range(self.config.num_layers)
        ]

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
) -> Float[Array, "B L D"]:
    """Hidden states after the final norm, of rows into which several sequences may be packed.

    Args:
        tokens_BxL: token ids; padding may hold any valid id.
        positions_BxL: position of each token within its own sequence.
        segments_BxL: sequence number within the row, 0 for padding; attention stays within equal numbers.
        dtype: of the computation (softmax and norms are float32 always).
        remat: what is kept for the backward pass: "none" (everything), "dots" or "full" (recompute all).

    Raises UserError for an unknown remat policy. Values at padding are finite and without meaning.
    """
    if remat != "none" and remat not in REMAT_POLICIES:
        raise UserError(
            f"remat policy {remat!r} is unknown; choose one of none, {', '.join(REMAT_POLICIES)}."
        )
    model: Decoder = nnx.merge(graphdef, params)
    # Shared by all layers, so computed once.
    tables = attention.rotary_tables(positions_BxL, model.config.head_dim, model.config.rope_theta)
    mask = attention.packed_mask(segments_BxL)

    def run(state: tuple[nnx.GraphDef, nnx.State], x: Array) -> Array:
        block: Block = nnx.merge(*state)
        return block(x, tables, lambda q, k, v: (attention.attend_packed(q, k, v, mask), None))[0]

    def checkpointed(block_def: nnx.GraphDef) -> Callable[[nnx.State, Array], Array]:
        def call(block_params: nnx.State, x: Array) -> Array:
            return run((block_def, block_params), x)

        return call if remat == "none" else jax.checkpoint(call, policy=REMAT_POLICIES[remat])

    x_BxLxD = model.embed(tokens_BxL, dtype)
    if model.config.scanned:
        block_def, stacked = nnx.split(model.layers)
        layer = checkpointed(block_def)
        x_BxLxD, _ = jax.lax.scan(lambda x, p: (layer(p, x), None), x_BxLxD, stacked)
    else:
        for block in model.layers:
            block_def, block_params = nnx.split(block)
            x_BxLxD = checkpointed(block_def)(block_params, x_BxLxD)
    return model.norm(x_BxLxD)


def unembedding(graphdef: nnx.GraphDef, params: nnx.State) -> Float[Array, "D V"]:
    """The matrix that turns hidden states into logits (the transposed token table when tied)."""
    return nnx.merge(graphdef, params).unembedding()


def unembed(
    graphdef: nnx.GraphDef, params: nnx.State, hidden: Float[Array, "... D"]
) -> Float[Array, "... V"]:
    """float32 logits; for a few tokens only (law 8: a training batch goes through learning/losses in chunks)."""
    w_DxV = unembedding(graphdef, params).astype(hidden.dtype)
    return jnp.matmul(hidden, w_DxV, preferred_element_type=jnp.float32)
