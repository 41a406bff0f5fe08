"""Weights out: a directory that transformers loads, an adapter that PEFT loads, and adapters merged into their kernels.

Tensors are fetched from the devices and written one at a time, under temporary names until all are whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Float

from psearch_jax.errors import UserError
from psearch_jax.models.decoder import abstract_params
from psearch_jax.models.decoder_config import DecoderConfig
from psearch_jax.models.lora import ADAPTERS, LoraSpec, is_adapter
from psearch_jax.models.slots import Path_, Slot, decoder_name, decoder_slots
from psearch_jax.models.tensor_files import (
    INDEX_FILE,
    SINGLE_FILE,
    Outgoing,
    write_json,
    write_safetensors,
    write_weights,
)

STORED_DTYPES: dict[str, Any] = {"bfloat16": jnp.bfloat16, "float32": np.float32}
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
SHARD_BYTES = 5_000_000_000
#: In transformers' and PEFT's directories these make the rest readable, so they are moved into place last.
LAST_FILES = ("config.json", ADAPTER_CONFIG)


def merged(
    kernel: Float[Array, "*L i o"],
    lora_a: Float[Array, "*L i r"],
    lora_b: Float[Array, "*L r o"],
    scale: float | Float[Array, ""],
) -> Float[Array, "*L i o"]:
    """W + scale A B, computed in float32 and returned in it."""
    product = jnp.matmul(
        lora_a.astype(jnp.float32), lora_b.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    return kernel.astype(jnp.float32) + scale * product


def merge_lora(
    config: DecoderConfig, graphdef: nnx.GraphDef, params: nnx.State
) -> tuple[DecoderConfig, nnx.GraphDef, nnx.State]:
    """The same model without adapters: each adapted kernel becomes W + (alpha / rank) A B, in its dtype and place.

    The kernels that have adapters exist twice until the caller lets go of `params`. A model without adapters is
    returned as it is. `save_hf_directory` merges by itself, one tensor at a time.
    """
    if config.lora is None:
        return config, graphdef, params
    leaves = {tuple(path): leaf for path, leaf in nnx.to_flat_state(params)}
    plain = []
    for path, leaf in leaves.items():
        if is_adapter(path):
            continue
        adapter = [(*path[:-1], name) for name in ADAPTERS]
        if path[-1] == "kernel" and all(name in leaves for name in adapter):
            arrays = [leaf[...], *(leaves[name][...] for name in adapter)]
            where = arrays[0].sharding if len(arrays[0].sharding.device_set) > 1 else None
            kernel = _one_layer(arrays, None, config.lora.scale, where=where)
            leaf = leaf.replace(kernel.astype(leaf.dtype))
        plain.append((path, leaf))
    without = replace(config, lora=None)
    return without, abstract_params(without)[0], nnx.from_flat_state(plain)


@partial(jax.jit, static_argnames="where")
def _one_layer(
    arrays: Sequence[Array],
    layer: int | Array | None,
    scale: float | Array,
    *,
    where: Sharding | None,
) -> Array:
    """A kernel (or other parameter), merged with its adapter where there is one."""
    kernel, *adapter = arrays if layer is None else [array[layer] for array in arrays]
    value = merged(kernel, adapter[0], adapter[1], scale) if adapter else jnp.copy(kernel)
    return value if where is None else jax.lax.with_sharding_constraint(value, where)


def to_host(arrays: Sequence[Any], layer: int | None, scale: float = 0.0) -> np.ndarray:
    """A parameter, or one layer of a stacked one, in host memory; with its adapter, if given, merged into it.

    In a multi-host run every process must call this, in the same order.
    """
    first = arrays[0]
    if len(arrays) == 1 and (
        not isinstance(first, jax.Array)
        or (len(first.sharding.device_set) == 1 and jax.default_backend() == "cpu")
    ):
        value = np.asarray(first)  # a view
        return value if layer is None else value[layer]
    where = None
    if not first.is_fully_addressable:
        where = NamedSharding(first.sharding.mesh, PartitionSpec())
    # A new array: one that was fetched keeps its copy on the host for as long as it lives.
    return np.asarray(_one_layer(list(arrays), layer, scale, where=where))


def outgoing(config: DecoderConfig, params: nnx.State, dtype: Any) -> list[Outgoing]:
    """The tensors of a decoder under Hugging Face's names and in its layout, each made when it is fetched.

    Adapters are merged into their kernels on the way.
    """
    leaves = {tuple(path): leaf for path, leaf in nnx.to_flat_state(params)}
    scale = config.scale_of_adapters

    def fetch(slot: Slot) -> np.ndarray:
        names = [slot.path]
        if slot.path[-1] == "kernel":
            names += [(*slot.path[:-1], name) for name in ADAPTERS]
        arrays = [leaves[name][...] for name in names if name in leaves]
        value = to_host(arrays, slot.layer, scale).astype(dtype, copy=False)
        return np.ascontiguousarray(value.T if slot.transposed else value)

    return [
        Outgoing(name=slot.name, shape=slot.shape, dtype=dtype, fetch=partial(fetch, slot))
        for slot in decoder_slots(config)[2]
    ]


def to_hf_tensors(config: DecoderConfig, params: nnx.State, dtype: Any) -> dict[str, np.ndarray]:
    """All tensors of a decoder under Hugging Face's names and in its layout, cast to dtype."""
    return {tensor.name: tensor.fetch() for tensor in outgoing(config, params, dtype)}


def save_hf_directory(
    path: str | Path,
    config: DecoderConfig,
    params: nnx.State,
    *,
    dtype: str = "bfloat16",
    tokenizer: Any = None,
    generation: Mapping[str, Any] | None = None,
    max_shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a directory that transformers' AutoModelForCausalLM and AutoTokenizer load.

    dtype: "bfloat16" or "float32", as stored. tokenizer: anything with save_pretrained. generation: values of
    generation_config.json; by default the tokenizer's end and padding ids. Adapters are merged into their kernels.
    Weights of an earlier call are replaced, other files stay. In a multi-host run every process calls this and the
    first one writes.

    Raises:
      UserError: another dtype, or a directory that cannot be written.
    """
    stored = _stored_dtype(dtype)
    ids = {
        key: getattr(tokenizer, key)
        for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        if getattr(tokenizer, key, None) is not None
    }
    tensors = outgoing(config, params, stored)
    with staged(Path(path)) as part:
        write_weights(part or Path(), tensors, max_shard_bytes, writes=part is not None)
        if part is None:
            return
        if tokenizer is not None:
            tokenizer.save_pretrained(str(part))
        write_json(part / "generation_config.json", dict(generation or ids))
        write_json(
            part / "config.json", config.to_hf() | ids | {"dtype": dtype, "torch_dtype": dtype}
        )


def _stored_dtype(name: str) -> Any:
    if name not in STORED_DTYPES:
        raise UserError(f"cannot store weights as {name!r}; choose bfloat16 or float32.")
    return STORED_DTYPES[name]


@contextmanager
def staged(directory: Path) -> Iterator[Path | None]:
    """A directory beside `directory` to write into, whose files take their places when the block ends.

    None on all processes but the first. A run that is killed leaves a hidden directory that the next one removes,
    and no half model under a final name.

    Raises:
      UserError: the directory cannot be written.
    """
    if jax.process_index() != 0:
        yield None
        return
    directory = directory.absolute()
    part = directory.with_name(f".{directory.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        yield part
        _take_places(part, directory)
    except OSError as error:
        raise UserError(
            f"cannot write {directory}: {error.strerror or error}; choose another place, or free it."
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _take_places(part: Path, directory: Path) -> None:
    if not directory.exists():
        part.rename(directory)
        return
    # Without its config the directory is no model while old and new files are mixed.
    for name in (*LAST_FILES, INDEX_FILE, SINGLE_FILE, ADAPTER_FILE):
        (directory / name).unlink(missing_ok=True)
    for old in directory.glob("model-*-of-*.safetensors"):
        old.unlink()
    for file in sorted(part.iterdir(), key=lambda file: file.name in LAST_FILES):
        target = directory / file.name
        if file.is_dir():
            shutil.rmtree(target, ignore_errors=True)
        os.replace(file, target)


def save_peft_directory(
    path: str | Path,
    config: DecoderConfig,
    params: nnx.State,
    *,
    base: str,
    dtype: str = "float32",
) -> None:
    """Write the adapters alone, as PEFT's PeftModel.from_pretrained(base model, directory) loads them.

    params: adapters, with or without the rest of the model. base: what adapter_config.json names as the model
    that they belong to. dtype: "bfloat16" or "float32", as stored.

    Raises:
      UserError: a model without adapters, another dtype, or a directory that cannot be written.
    """
    if config.lora is None:
        raise UserError(
            "this policy has no adapters; set model.lora_rank, or export without --peft."
        )
    stored = _stored_dtype(dtype)
    tensors: list[Outgoing] = []
    for leaf_path, leaf in nnx.to_flat_state(params):
        if is_adapter(leaf_path):
            tensors += _adapter_tensors(tuple(leaf_path), leaf[...], config, stored)
    with staged(Path(path)) as part:
        file = (part or Path()) / ADAPTER_FILE
        write_safetensors(file, tensors, writes=part is not None)
        if part is not None:
            write_json(part / ADAPTER_CONFIG, peft_config(config.lora, base))


def _adapter_tensors(
    path: Path_, array: Any, config: DecoderConfig, dtype: Any
) -> Iterator[Outgoing]:
    """lora_A.weight [r, in] or lora_B.weight [out, r], one for each layer."""
    *module, kind = path
    stacked = config.scanned and module[0] == "layers"
    *_, rows, columns = array.shape

    def fetch(layer: int | None) -> np.ndarray:
        return to_host([array], layer).astype(dtype, copy=False).T

    for layer in range(config.num_layers) if stacked else [None]:
        place = (module[0], layer, *module[1:]) if stacked else tuple(module)
        yield Outgoing(
            name=f"base_model.model.{decoder_name(place)}.lora_{kind[-1].upper()}.weight",
            shape=(columns, rows),
            dtype=dtype,
            fetch=partial(fetch, layer),
        )


def peft_config(lora: LoraSpec, base: str) -> dict[str, Any]:
    """adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(lora.projections),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
