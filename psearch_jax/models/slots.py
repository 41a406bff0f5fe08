"""Which tensor of a file belongs where in a parameter tree, and how it gets there.

Every parameter is described by `Slot`s, made from the tree itself; checking, reading and writing go through that list.
What fits is decided from the headers, before anything is allocated. Then each parameter is made on its devices and
filled there block by block, each device with what it holds: the host never holds more than a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from psearch_jax.errors import UserError
from psearch_jax.mesh import param_shardings
from psearch_jax.models.decoder import abstract_params
from psearch_jax.models.decoder_config import DecoderConfig
from psearch_jax.models.lora import is_adapter
from psearch_jax.models.tensor_files import FLOATS, Index, StoredTensor, blocks

#: What one read brings into host memory at most.
BLOCK_BYTES = 32 * 2**20

Path_ = tuple[Any, ...]  # of str and int


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
    """The slots of a tree of arrays or shapes; adapters have none, they are no part of the model in its own file.

    rename turns a path without its last key, such as ("layers", 3, "mlp", "up_proj"), into the name in the file
    without its ending. With stacked_layers, everything under "layers" has a leading axis of that length.
    """
    slots = []
    for path, leaf in nnx.to_flat_state(params):
        if is_adapter(path):
            continue
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


def decoder_name(place: Path_) -> str:
    """Hugging Face's name of a module of the decoder; all families share them."""
    name = ".".join(map(str, place))
    return name if name == "lm_head" else f"model.{name}"


def decoder_slots(config: DecoderConfig) -> tuple[nnx.GraphDef, nnx.State, list[Slot]]:
    """The graphdef, the shapes and the slots of a decoder."""
    graphdef, shapes = abstract_params(config)
    stacked = config.num_layers if config.scanned else 0
    return graphdef, shapes, tree_slots(shapes, decoder_name, stacked)


def check_fit(
    slots: Sequence[Slot],
    tensors: Mapping[str, StoredTensor],
    ignore: Callable[[str], bool] = lambda name: False,
) -> None:
    """Raise one UserError that lists every missing, extra and misshapen tensor and every wrong dtype."""
    known = {slot.name for slot in slots}
    problems = [f"missing {slot.name}" for slot in slots if slot.name not in tensors]
    problems += [
        f"extra {name}" for name in sorted(tensors) if name not in known and not ignore(name)
    ]
    for slot in slots:
        tensor = tensors.get(slot.name)
        if tensor is None:
            continue
        if tensor.shape != slot.shape:
            problems.append(f"{slot.name} is {list(tensor.shape)}, expected {list(slot.shape)}")
        if tensor.dtype not in FLOATS:
            problems.append(
                f"{slot.name} is stored as {tensor.dtype}, expected one of {', '.join(FLOATS)}"
            )
    if problems:
        raise UserError(f"the weights do not fit the model: {'; '.join(problems)}.")


def fill_slots(
    shapes: nnx.State,
    slots: Sequence[Slot],
    tensors: Mapping[str, StoredTensor],
    dtype: Any,
    ignore: Callable[[str], bool] = lambda name: False,
    mesh: Mesh | None = None,
) -> nnx.State:
    """Make the parameters of a tree of shapes and fill them; adapters, which have no slots, are left out.

    ignore: names that may be there without a place. mesh: where the parameters are born (`param_shardings`); without
    one they lie on the default device.

    Raises:
      UserError: as `check_fit`, before anything is allocated.
    """
    check_fit(slots, tensors, ignore)
    by_path: dict[Path_, list[Slot]] = {}
    for slot in slots:
        by_path.setdefault(slot.path, []).append(slot)
    where = (
        {}
        if mesh is None
        else {
            tuple(path): jax.tree.leaves(leaf)[0]
            for path, leaf in nnx.to_flat_state(param_shardings(mesh, shapes))
        }
    )
    return nnx.from_flat_state(
        [
            (
                path,
                leaf.replace(
                    _load(leaf.shape, by_path[tuple(path)], tensors, dtype, where.get(tuple(path)))
                ),
            )
            for path, leaf in nnx.to_flat_state(shapes)
            if tuple(path) in by_path
        ]
    )


def _load(
    shape: tuple[int, ...],
    slots: Sequence[Slot],
    tensors: Mapping[str, StoredTensor],
    dtype: Any,
    sharding: NamedSharding | None,
) -> jax.Array:
    """One parameter. Each piece of it is read once, by a process with a device that holds it, block by block."""
    stacked, turned = slots[0].layer is not None, slots[0].transposed

    def stored(dims: Iterable[Any]) -> tuple[Any, ...]:
        """What stands for the dimensions of the parameter, in the order of a stored tensor."""
        dims = tuple(dims)[stacked:]
        return dims[::-1] if turned else dims

    # Where each piece begins within a stored tensor → who holds it. Without a mesh no device is named: programs
    # would be compiled once more for arrays that are tied to one.
    holders: dict[tuple[int, ...], list[jax.Device | None]] = {}
    if sharding is None:
        local, parts = shape, None
        holders[stored(0 for _ in shape)] = [None]
    else:
        local = sharding.shard_shape(shape)
        spec = (*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
        parts = (sharding, NamedSharding(sharding.mesh, PartitionSpec(*stored(spec))))
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            origin = stored(p.indices(n)[0] for p, n in zip(index or (), shape, strict=True))
            holders.setdefault(origin, []).append(device)

    def on_devices(name: str, index: Index, finish: Callable[[np.ndarray], np.ndarray]) -> list:
        """`index` of each piece, on the devices of that piece."""
        arrays: list[jax.Array] = []
        for origin, devices in holders.items():
            moved = (slice(p.start + o, p.stop + o) for p, o in zip(index, origin, strict=True))
            value = finish(tensors[name].read(tuple(moved)))
            arrays += [
                jnp.asarray(value) if device is None else jax.device_put(value, device)
                for device in devices
            ]
        return arrays

    whole = tuple(slice(0, n) for n in stored(local))
    itemsize = np.dtype(FLOATS[tensors[slots[0].name].dtype]).itemsize
    cut = list(blocks(whole, itemsize, max(1, BLOCK_BYTES // len(holders))))
    if len(cut) == 1 and not stacked:
        # All of it in one block: turned and cast on the host, which spares a compilation for each shape.
        def finish(value: np.ndarray) -> np.ndarray:
            return np.ascontiguousarray(value.T if turned else value).astype(dtype)

        arrays = on_devices(slots[0].name, cut[0], finish)
        if sharding is None:
            return arrays[0]
        return jax.make_array_from_single_device_arrays(shape, sharding, arrays)
    array = jnp.zeros(shape, dtype, device=sharding)
    times = stored(n // m for n, m in zip(shape, local, strict=True))
    for slot in slots:
        for index in cut:
            arrays = on_devices(slot.name, index, lambda value: value)
            block = arrays[0]
            if parts is not None:
                sizes = tuple((p.stop - p.start) * n for p, n in zip(index, times, strict=True))
                block = jax.make_array_from_single_device_arrays(sizes, parts[1], arrays)
            start = tuple(part.start for part in index)
            start = ((slot.layer,) if stacked else ()) + (start[::-1] if turned else start)
            array = _put(array, block, start, turned=turned, shardings=parts)
            jax.block_until_ready(array)  # else blocks would pile up on the host
    return array


@partial(jax.jit, donate_argnums=0, static_argnames=("turned", "shardings"))
def _put(
    array: jax.Array,
    block: jax.Array,
    start: tuple[int | jax.Array, ...],
    *,
    turned: bool,
    shardings: tuple[NamedSharding, NamedSharding] | None,
) -> jax.Array:
    """Write a block into an array at `start`, or one into each piece of it; donated, so there is no second array."""

    def put(array: jax.Array, block: jax.Array, start: tuple[Any, ...]) -> jax.Array:
        block = (block.T if turned else block).astype(array.dtype)
        block = block.reshape((1,) * (array.ndim - block.ndim) + block.shape)
        return jax.lax.dynamic_update_slice(array, block, start)

    if shardings is None:
        return put(array, block, start)
    into, of_blocks = (sharding.spec for sharding in shardings)
    return jax.shard_map(
        put, mesh=shardings[0].mesh, in_specs=(into, of_blocks, PartitionSpec()), out_specs=into
    )(array, block, start)
