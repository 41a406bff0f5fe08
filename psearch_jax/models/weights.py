"""Weights in: Hugging Face directories, safetensors only, streamed onto the devices. The way out is export.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from psearch_jax.errors import UserError
from psearch_jax.models.decoder_config import DecoderConfig
from psearch_jax.models.export import save_hf_directory, to_hf_tensors
from psearch_jax.models.slots import Path_, Slot, decoder_slots, fill_slots, tree_slots
from psearch_jax.models.tensor_files import in_memory, read_json, stored_tensors

__all__ = [
    "Path_",
    "check_vocabulary",
    "from_hf_tensors",
    "load_hf_directory",
    "may_be_extra",
    "read_config",
    "read_json",
    "read_slots",
    "save_hf_directory",
    "to_hf_tensors",
    "tree_slots",
]


def read_slots(
    directory: Path,
    shapes: nnx.State,
    slots: Sequence[Slot],
    dtype: Any,
    *,
    ignore: Callable[[str], bool],
    prefix: str = "",
    mesh: Mesh | None = None,
) -> nnx.State:
    """`fill_slots` from the files of a directory; `prefix` is dropped from names that start with it."""
    tensors = {
        name.removeprefix(prefix): tensor for name, tensor in stored_tensors(directory).items()
    }
    try:
        return fill_slots(shapes, slots, tensors, dtype, ignore, mesh)
    except UserError as error:
        raise UserError(f"{directory} does not match its config.json: {error}") from error


def read_config(directory: Path) -> DecoderConfig:
    """The configuration of a checkpoint; UserError when it is missing, broken or not supported."""
    return DecoderConfig.from_hf(read_json(directory / "config.json"))


def load_hf_directory(
    path: str | Path, dtype: Any = jnp.float32, mesh: Mesh | None = None
) -> tuple[DecoderConfig, nnx.GraphDef, nnx.State]:
    """Read config.json and the safetensors of a checkpoint; parameters come out in `dtype`, born on the mesh.

    In a multi-host run every process calls this and must see the files; it reads what its devices hold.

    Raises UserError for an unsupported architecture, unreadable files, or tensors that do not fit.
    """
    directory = Path(path)
    config = read_config(directory)
    graphdef, shapes, slots = decoder_slots(config)
    params = read_slots(
        directory, shapes, slots, dtype, ignore=partial(may_be_extra, config), mesh=mesh
    )
    return config, graphdef, params


def may_be_extra(config: DecoderConfig, name: str) -> bool:
    """A tied checkpoint may store the head a second time, and old ones store the rotary frequencies."""
    tied_head = config.tie_embeddings and name == "lm_head.weight"
    return tied_head or name.endswith("rotary_emb.inv_freq")


def from_hf_tensors(
    config: DecoderConfig, tensors: Mapping[str, np.ndarray], dtype: Any = jnp.float32
) -> nnx.State:
    """The parameters of a decoder from tensors under Hugging Face's names; the inverse of `to_hf_tensors`."""
    _, shapes, slots = decoder_slots(config)
    stored = {name: in_memory(np.asarray(tensor)) for name, tensor in tensors.items()}
    return fill_slots(shapes, slots, stored, dtype)


def check_vocabulary(rows: int, tokenizer: Any, source: str) -> None:
    """Raise a UserError when the tokenizer has ids for which the model has no row.

    Fewer are normal: tables are padded to a round number of rows (Qwen2.5 to 151,936 for 151,665 tokens).
    """
    needed = max(tokenizer.get_vocab().values(), default=-1) + 1
    if needed > rows:
        raise UserError(
            f"policy {source!r}: its tokenizer has {needed} ids, but its model only {rows} rows (vocab_size); "
            "use the tokenizer that belongs to these weights."
        )
