"""The device mesh, and the one table that says which array dimension lies on which mesh axis.

Axes: `data` (rows only), `fsdp` (rows and a shard of every weight), `tensor` (a second shard of every
weight). Each function is data in, shardings out; `jax.jit` with these shardings as `in_shardings` and
`out_shardings` is all the parallelism there is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from psearch_jax.config import MeshConfig
from psearch_jax.errors import UserError

AXES = ("data", "fsdp", "tensor")

#: Logical axis → mesh axes. `rows` is the leading dimension of every batch; `widest` is the largest
#: dimension of a weight that the axis size divides, `second` the largest one left after that.
RULES: dict[str, tuple[str, ...]] = {
    "rows": ("data", "fsdp"),
    "widest": ("fsdp",),
    "second": ("tensor",),
}


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Lay `devices` (default: all) out as data × fsdp × tensor.

    Raises:
      UserError: the sizes do not multiply to the number of devices; the sentence says what would fit.
    """
    devices = list(jax.devices() if devices is None else devices)
    count = len(devices)
    asked = f"mesh.data={config.data}, mesh.fsdp={config.fsdp}, mesh.tensor={config.tensor}"
    if config.fsdp < 1 or config.tensor < 1 or (config.data < 1 and config.data != -1):
        raise UserError(f"{asked}: sizes must be at least 1 (mesh.data may be -1: what is left)")
    sharded = config.fsdp * config.tensor
    if count % sharded:
        divisors = [n for n in range(1, count + 1) if count % n == 0]
        raise UserError(
            f"{asked} cannot be laid over {count} device(s): mesh.fsdp × mesh.tensor is {sharded}, "
            f"but must be one of {', '.join(map(str, divisors))}"
        )
    data = count // sharded if config.data == -1 else config.data
    if data * sharded != count:
        raise UserError(
            f"{asked} needs {data * sharded} device(s), but there are {count}: "
            f"set mesh.data={count // sharded}, or -1 to take what is left"
        )
    shape = (data, config.fsdp, config.tensor)
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows (the leading dimension) over `data` and `fsdp`, everything else whole on each device."""
    return NamedSharding(mesh, PartitionSpec(RULES["rows"]))


def row_shards(mesh: Mesh) -> int:
    """The number of row blocks: a batch has a multiple of this many rows."""
    return math.prod(mesh.shape[axis] for axis in RULES["rows"])


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def param_spec(mesh: Mesh, shape: Sequence[int]) -> PartitionSpec:
    """Where one weight lies. Vectors and scalars are replicated: a shard of them saves nothing.

    The largest dimension that `fsdp` divides is cut over `fsdp`, then the largest remaining one that
    `tensor` divides over `tensor`; a dimension that no size divides stays whole.
    """
    spec: list[tuple[str, ...] | None] = [None] * len(shape)
    if len(shape) < 2:
        return PartitionSpec()
    for logical in ("widest", "second"):
        size = math.prod(mesh.shape[axis] for axis in RULES[logical])
        fitting = [i for i, n in enumerate(shape) if spec[i] is None and n and n % size == 0]
        if size > 1 and fitting:
            spec[max(fitting, key=lambda i: shape[i])] = RULES[logical]
    return PartitionSpec(*spec)


def param_shardings(mesh: Mesh, params: Any) -> Any:
    """A tree like `params` (arrays or `jax.ShapeDtypeStruct`, `nnx.State` included) of shardings.

    Also right for optimiser states: each moment gets the sharding of a weight of its shape.
    """
    return jax.tree.map(lambda leaf: NamedSharding(mesh, param_spec(mesh, leaf.shape)), params)
