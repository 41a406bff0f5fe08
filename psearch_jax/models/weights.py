"""Weights in and out of Hugging Face directories: safetensors only, nothing is ever unpickled.

Every parameter of a model is described by one `Slot` (its name and shape in the file, its place in the tree), made
from the tree itself; reading, writing and checking all go through that list.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from psearch_jax.errors import UserError
from psearch_jax.models.decoder import DecoderConfig, abstract_params

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
STORED_DTYPES = {"bfloat16": jnp.bfloat16, "float32": np.float32}

Path_ = tuple[str | int, ...]


@dataclass(frozen=True)
class Slot:
    """One tensor of a file and its place in the parameter tree.

    layer is the index on the leading axis of a stacked parameter, None for one that stands alone. `transposed`
    tensors are [out, in] in the file and [in, out] in the tree.
    """

    name: str
    path: Path_
    layer: int | None
    transposed: bool
    shape: tuple[int, ...]


def tree_slots(
    params: nnx.State, rename: Callable[[Path_], str], stacked_layers: int = 0
) -> list[Slot]:
    """The slots of a tree of arrays or shapes.

    rename turns a path without its last key, such as ("layers", 3, "mlp", "up_proj"), into the name in the file
    without its ending. With stacked_layers, everything under "layers" has a leading axis of that length.
    """
    slots = []
    for path, leaf in nnx.to_flat_state(params):
        *module, kind = path
        ending = "bias" if kind == "bias" else "weight"
        transposed = kind == "kernel"
        stacked = bool(stacked_layers) and module[0] == "layers"
        shape = tuple(leaf.shape[1:] if stacked else leaf.shape)
        for layer in range(stacked_layers) if stacked else [None]:
            place = (module[0], layer, *module[1:]) if stacked else tuple(module)
            slots.append(
                Slot(
                    name=f"{rename(place)}.{ending}",
                    path=tuple(path),
                    layer=layer,
                    transposed=transposed,
                    shape=shape[::-1] if transposed else shape,
                )
            )
    return slots


def decoder_slots(config: DecoderConfig) -> tuple[nnx.GraphDef, nnx.State, list[Slot]]:
    """The graphdef, the shapes and the slots of a decoder, under the names of Qwen2ForCausalLM."""
    graphdef, shapes = abstract_params(config)

    def rename(place: Path_) -> str:
        name = ".".join(map(str, place))
        return name if name == "lm_head" else f"model.{name}"

    return graphdef, shapes, tree_slots(shapes, rename, config.num_layers if config.scanned else 0)


@contextmanager
def open_tensors(directory: Path) -> Iterator[dict[str, Callable[[], np.ndarray]]]:
    """The tensors of a directory by name, each read when called; sharded or in one file.

    Raises UserError when there are none, or a file is missing, cut short or not safetensors.
    """
    index = directory / INDEX_FILE
    if index.is_file():
        try:
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise UserError(
                f"{index} is not a safetensors index ({error}); fetch it again."
            ) from error
    elif (directory / SINGLE_FILE).is_file():
        files = [SINGLE_FILE]
    else:
        raise UserError(
            f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}; name a directory with safetensors weights."
        )
    with ExitStack() as stack:
        readers: dict[str, Callable[[], np.ndarray]] = {}
        for file in files:
            path = directory / file
            try:
                handle = stack.enter_context(safe_open(path, framework="numpy"))
            except (SafetensorError, OSError) as error:
                raise UserError(
                    f"{path} cannot be read as safetensors ({error}); it is missing or cut short, fetch it again."
                ) from error
            for name in handle.keys():  # noqa: SIM118 (not a mapping)
                readers[name] = lambda handle=handle, name=name: handle.get_tensor(name)
        yield readers


def fill_slots(
    shapes: nnx.State,
    slots: list[Slot],
    readers: Mapping[str, Callable[[], np.ndarray]],
    dtype: Any,
    ignore: Callable[[str], bool] = lambda name: False,
) -> nnx.State:
    """Fill a tree of shapes from tensors by name; names for which `ignore` holds may be there without a place.

    Raises one UserError that lists every missing, extra and misshapen tensor.
    """
    leaves = {tuple(path): leaf for path, leaf in nnx.to_flat_state(shapes)}
    known = {slot.name for slot in slots}
    problems = [f"missing {slot.name}" for slot in slots if slot.name not in readers]
    problems += [
        f"extra {name}" for name in sorted(readers) if name not in known and not ignore(name)
    ]
    values: dict[Path_, np.ndarray] = {}
    for slot in slots:
        if slot.name not in readers:
            continue
        tensor = readers[slot.name]()
        if tensor.shape != slot.shape:
            problems.append(f"{slot.name} is {list(tensor.shape)}, expected {list(slot.shape)}")
        if problems:
            continue  # only looking for further faults now
        if slot.path not in values:
            values[slot.path] = np.empty(leaves[slot.path].shape, dtype)
        place = ... if slot.layer is None else slot.layer
        values[slot.path][place] = tensor.T if slot.transposed else tensor
    if problems:
        raise UserError(f"the weights do not fit the model: {'; '.join(problems)}.")
    return nnx.from_flat_state(
        [(path, leaf.replace(jnp.asarray(values[path]))) for path, leaf in leaves.items()]
    )


def read_slots(
    directory: Path,
    shapes: nnx.State,
    slots: list[Slot],
    dtype: Any,
    *,
    ignore: Callable[[str], bool],
    prefix: str = "",
) -> nnx.State:
    """`fill_slots` from the files of a directory; `prefix` is dropped from names that start with it."""
    with open_tensors(directory) as found:
        readers = {name.removeprefix(prefix): reader for name, reader in found.items()}
        try:
            return fill_slots(shapes, slots, readers, dtype, ignore)
        except UserError as error:
            raise UserError(f"{directory} does not match its config.json: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; UserError when it is missing or not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing; name a Hugging Face model directory.") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); fetch it again.") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object; fetch it again.")
    return value


def load_hf_directory(
    path: str | Path, dtype: Any = jnp.float32
) -> tuple[DecoderConfig, nnx.GraphDef, nnx.State]:
    """Read config.json and the safetensors of a Qwen2 checkpoint; parameters come out in `dtype`.

    Raises UserError for an unsupported architecture, unreadable files, or tensors that do not fit.
    """
    directory = Path(path)
    config = DecoderConfig.from_hf(read_json(directory / "config.json"))
    graphdef, shapes, slots = decoder_slots(config)
    # A tied checkpoint may store the head a second time, and old ones store the rotary frequencies.
    params = read_slots(
        directory,
        shapes,
        slots,
        dtype,
        ignore=lambda name: (
            (config.tie_embeddings and name == "lm_head.weight")
            or name.endswith("rotary_emb.inv_freq")
        ),
    )
    return config, graphdef, params


def to_hf_tensors(config: DecoderConfig, params: nnx.State, dtype: Any) -> dict[str, np.ndarray]:
    """The tensors of a decoder under Hugging Face's names and in its layout, cast to dtype."""
    _, _, slots = decoder_slots(config)
    leaves = {tuple(path): leaf for path, leaf in nnx.to_flat_state(params)}
    tensors = {}
    for slot in slots:
        leaf = leaves[slot.path][...]
        value = np.asarray(leaf if slot.layer is None else leaf[slot.layer]).astype(dtype)
        tensors[slot.name] = np.ascontiguousarray(value.T if slot.transposed else value)
    return tensors


def from_hf_tensors(
    config: DecoderConfig, tensors: Mapping[str, np.ndarray], dtype: Any = jnp.float32
) -> nnx.State:
    """The parameters of a decoder from tensors under Hugging Face's names; the inverse of `to_hf_tensors`."""
    _, shapes, slots = decoder_slots(config)
    return fill_slots(shapes, slots, {name: lambda t=t: t for name, t in tensors.items()}, dtype)


def save_hf_directory(
    path: str | Path,
    config: DecoderConfig,
    params: nnx.State,
    *,
    dtype: str = "bfloat16",
    tokenizer: Any = None,
    generation: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a directory that transformers' AutoModelForCausalLM and AutoTokenizer load.

    dtype: "bfloat16" or "float32", as stored. tokenizer: anything with save_pretrained. generation: values of
    generation_config.json; by default the tokenizer's end and padding ids. Each file is written beside its
    place and renamed, so a killed run leaves no half file under a final name.

    Raises UserError for another dtype.
    """
    if dtype not in STORED_DTYPES:
        raise UserError(f"cannot store weights as {dtype!r}; choose bfloat16 or float32.")
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    shards = split_shards(to_hf_tensors(config, params, STORED_DTYPES[dtype]), max_shard_bytes)
    if len(shards) == 1:
        save_tensors(directory / SINGLE_FILE, shards[0])
        (directory / INDEX_FILE).unlink(missing_ok=True)
    else:
        weight_map = {}
        for number, shard in enumerate(shards, 1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            save_tensors(directory / file, shard)
            weight_map |= dict.fromkeys(shard, file)
        total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
        write_json(
            directory / INDEX_FILE,
            {"metadata": {"total_size": total}, "weight_map": weight_map},
        )
    if tokenizer is not None:
        tokenizer.save_pretrained(str(directory))
    ids = {
        key: getattr(tokenizer, key)
        for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        if getattr(tokenizer, key, None) is not None
    }
    write_json(directory / "generation_config.json", dict(generation or ids))
    write_json(
        directory / "config.json", config.to_hf() | ids | {"dtype": dtype, "torch_dtype": dtype}
    )


def split_shards(tensors: dict[str, np.ndarray], max_bytes: int) -> list[dict[str, np.ndarray]]:
    """Tensors in order, cut into shards of at most max_bytes (a larger tensor has a shard of its own)."""
    shards: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def save_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write one safetensors file under its final name only when whole."""
    part = path.with_name(path.name + ".part")
    save_file(
        tensors, part, metadata={"format": "pt"}
    )  # transformers refuses a file without a format
    os.replace(part, path)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON under the final name only when whole."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(part, path)
