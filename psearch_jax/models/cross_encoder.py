"""A BERT cross-encoder for reranking: a query and a passage in one row, one score.

Shape suffixes: B pairs, L tokens of query and passage together, D hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from psearch_jax.errors import UserError
from psearch_jax.models import text_encoder, weights
from psearch_jax.models.decoder import Linear
from psearch_jax.models.encoder_families import DTYPES
from psearch_jax.models.text_encoder import EncoderConfig, TextEncoder

ARCHITECTURE = "BertForSequenceClassification"


class CrossEncoder(nnx.Module):
    """The trunk, BERT's pooler over the first token, and one output."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        d = config.hidden_size
        self.trunk = TextEncoder(config, rngs=rngs)
        self.pooler = Linear(d, d, std=d**-0.5, bias=True, rngs=rngs)
        self.classifier = Linear(d, 1, std=d**-0.5, bias=True, rngs=rngs)


def abstract_params(config: EncoderConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """Graphdef and parameter shapes of a cross-encoder, without allocating it."""
    model = nnx.eval_shape(lambda: CrossEncoder(config, rngs=nnx.Rngs(params=0)))
    return nnx.split(model, nnx.Param)


def score(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    tokens_BxL: Int[Array, "B L"],
    types_BxL: Int[Array, "B L"],
    mask_BxL: Int[Array, "B L"] | Bool[Array, "B L"],
) -> Float[Array, "B"]:
    """Logits (float32) of pairs: classifier(tanh(pooler(first token's last state))).

    types: 0 for the query with its special tokens, 1 for the passage with its own. Padding goes on the right; the
    score of a row whose mask is all 0 means nothing. L must not exceed config.max_positions (UserError).
    """
    model: CrossEncoder = nnx.merge(graphdef, params)
    with jax.default_matmul_precision(text_encoder.precision(model.config)):
        x_BxLxD = text_encoder.hidden_states(
            model.trunk, tokens_BxL, mask_BxL.astype(bool), types_BxL
        )
        # The head is float32 in any case: next to the trunk it costs nothing.
        pooled_BxD = jnp.tanh(model.pooler(x_BxLxD[:, 0].astype(jnp.float32)))
        return model.classifier(pooled_BxD)[:, 0]


def make_score(
    graphdef: nnx.GraphDef, mesh: Mesh | None = None
) -> Callable[[nnx.State, Any, Any, Any], jax.Array]:
    """`score` compiled for one device or over a mesh: (params, tokens_BxL, types_BxL, mask_BxL) → float32 scores_B.

    Over a mesh as `text_encoder.make_encode`.
    """
    return text_encoder.jit_rows(functools.partial(score, graphdef), mesh, inputs=3)


def load_cross_encoder(
    path: str | Path, dtype: str = "float32"
) -> tuple[EncoderConfig, nnx.GraphDef, nnx.State]:
    """Config, graphdef and float32 parameters of a cross-encoder in a Hugging Face directory.

    dtype: what the trunk computes in, "float32" or "bfloat16".

    Raises UserError for missing files, another architecture, another number of outputs than one, or tensors that
    do not fit.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise UserError(
            f"the reranker {str(path)!r} is not a directory; name one that holds a {ARCHITECTURE}."
        )
    if dtype not in DTYPES:
        raise UserError(f"the reranker's dtype is {dtype!r}; use {' or '.join(DTYPES)}.")
    values = weights.read_json(directory / "config.json")
    tokenizer = directory / "tokenizer_config.json"
    limit = weights.read_json(tokenizer).get("model_max_length") if tokenizer.is_file() else None
    config = EncoderConfig.from_hf(values, limit, (ARCHITECTURE,))
    labels = len(values.get("id2label") or range(2))  # transformers leaves out its default, two
    if labels != 1:
        raise UserError(
            f"{directory} is a classifier with {labels} labels; reranking needs one with a single score."
        )
    graphdef, shapes = abstract_params(config := replace(config, dtype=dtype))
    params = weights.read_slots(
        directory,
        shapes,
        weights.tree_slots(shapes, _name),
        jnp.float32,
        ignore=lambda name: name.endswith("position_ids"),
        prefix="bert.",
    )
    return config, graphdef, params


def _name(place: weights.Path_) -> str:
    if place[0] == "trunk":
        return text_encoder.bert_name(place[1:])
    return {"pooler": "pooler.dense", "classifier": "classifier"}[str(place[0])]
