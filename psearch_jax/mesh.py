"""The device mesh, and the one table that says which array dimension lies on which mesh axis.

Axes: `data` (rows only), `fsdp` (rows and a shard of every weight), `tensor` (heads and feed-forward columns) and
`sequence` (tokens of a row). Each function is data in, shardings out; `jax.jit` with these shardings and the
constraints of `Layout` is all the parallelism there is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from psearch_jax.config import MeshConfig
from psearch_jax.errors import UserError

AXES = ("data", "fsdp", "tensor", "sequence")

#: Logical axis → mesh axes. In training every weight is cut over `fsdp` and gathered where it is used. In a rollout a
#: token is drawn every few milliseconds, too often to gather anything: there `fsdp` cuts the wide dimensions, which
#: the activations of one token follow, and rows take every axis that is left.
RULES: dict[str, dict[str, tuple[str, ...]]] = {
    "training": {
        "rows": ("data", "fsdp"),
        "length": ("sequence",),
        "embed": ("fsdp", "sequence"),  # the model's width, of weights
        "heads": ("tensor",),
        "kv_heads": ("tensor",),
        "mlp": ("tensor",),
        "mlp_rows": ("data", "fsdp"),  # rows beside `mlp`
        "vocab": ("fsdp", "tensor", "sequence"),
        "vocab_rows": ("data",),  # rows beside `vocab`
        "table_rows": (),  # the token table: of a training batch every device needs a bit of most rows
        "table_width": ("fsdp", "tensor", "sequence"),
    },
    "rollout": {
        "rows": ("data", "fsdp", "sequence"),
        "length": (),
        "embed": (),
        "heads": ("tensor",),
        "kv_heads": ("tensor",),
        "mlp": ("fsdp", "tensor"),
        "mlp_rows": ("data", "sequence"),
        "vocab": ("fsdp", "tensor"),
        "vocab_rows": ("data", "sequence"),
        "table_rows": ("fsdp", "tensor"),
        "table_width": (),
    },
}

#: Linear layer → logical axes of its kernel [in, out]. A bias has the second; adapters have one each.
LINEARS: dict[str, tuple[str | None, str | None]] = {
    "q_proj": ("embed", "heads"),
    "k_proj": ("embed", "kv_heads"),
    "v_proj": ("embed", "kv_heads"),
    "o_proj": ("heads", "embed"),
    "gate_proj": ("embed", "mlp"),
    "up_proj": ("embed", "mlp"),
    "down_proj": ("mlp", "embed"),
    "lm_head": (None, "vocab"),
}
TABLES: dict[str, tuple[str | None, str | None]] = {"embed_tokens": ("table_rows", "table_width")}


#: Logical axes of an array, one a dimension.
Logical = tuple[str | None, ...]


@dataclass(frozen=True)
class Layout:
    """Where the activations and weights of a program lie: a mesh and one column of `RULES`.

    Without a mesh everything is where it is and `constrain` does nothing.
    """

    mesh: Mesh | None = None
    phase: str = "training"

    def axes(self, logical: str | None) -> tuple[str, ...]:
        """Mesh axes of a logical axis."""
        return () if logical is None else RULES[self.phase][logical]

    def size(self, logical: str | None) -> int:
        """Into how many pieces a logical axis is cut."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[a] for a in self.axes(logical))

    def spec(self, *logical: str | None) -> PartitionSpec:
        """The partition of an array with these logical axes.

        Raises:
          ValueError: two of them lie on the same mesh axis (our mistake, not the user's).
        """
        used = [axis for name in logical for axis in self.axes(name)]
        if len(set(used)) < len(used):
            raise ValueError(f"logical axes {logical} meet on a mesh axis: {used}")
        return PartitionSpec(*(self.axes(name) or None for name in logical))

    def constrain(self, x: jax.Array, *logical: str | None) -> jax.Array:
        """Say where an array of a traced program lies."""
        if self.mesh is None or self.mesh.size == 1:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, self.spec(*logical)))

    def gather(self, w: jax.Array, stored: Logical, used: Logical) -> jax.Array:
        """A weight where it is used; its gradient goes back to where it is stored.

        (A bare constraint would hold for the gradient, too: summed whole on every device, then cut.)
        """
        if self.mesh is None or self.mesh.size == 1:
            return w
        return _gather(self, stored, used, w)

    @property
    def platform(self) -> str:
        """The platform of the devices: of the mesh, or the default one."""
        return jax.default_backend() if self.mesh is None else self.mesh.devices.flat[0].platform


NOWHERE = Layout()


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gather(layout: Layout, stored: Logical, used: Logical, w: jax.Array) -> jax.Array:
    return layout.constrain(w, *used)


def _gather_forward(
    layout: Layout, stored: Logical, used: Logical, w: jax.Array
) -> tuple[jax.Array, None]:
    return layout.constrain(w, *used), None


def _gather_backward(
    layout: Layout, stored: Logical, used: Logical, _: None, grad: jax.Array
) -> tuple[jax.Array]:
    return (layout.constrain(grad, *stored),)


_gather.defvjp(_gather_forward, _gather_backward)


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Lay `devices` (default: all) out as data × fsdp × tensor × sequence.

    Raises:
      UserError: the sizes do not multiply to the number of devices; the sentence says what would fit.
    """
    devices = list(jax.devices() if devices is None else devices)
    count = len(devices)
    sizes = {axis: getattr(config, axis) for axis in AXES}
    asked = ", ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
    if min(sizes[axis] for axis in AXES[1:]) < 1 or (config.data < 1 and config.data != -1):
        raise UserError(f"{asked}: sizes must be at least 1 (mesh.data may be -1: what is left)")
    sharded = math.prod(sizes[axis] for axis in AXES[1:])
    if count % sharded:
        divisors = [n for n in range(1, count + 1) if count % n == 0]
        raise UserError(
            f"{asked} cannot be laid over {count} device(s): mesh.fsdp × mesh.tensor × mesh.sequence is {sharded}, "
            f"but must be one of {', '.join(map(str, divisors))}"
        )
    data = count // sharded if config.data == -1 else config.data
    if data * sharded != count:
        raise UserError(
            f"{asked} needs {data * sharded} device(s), but there are {count}: "
            f"set mesh.data={count // sharded}, or -1 to take what is left"
        )
    shape = (data, *(sizes[axis] for axis in AXES[1:]))
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows (the leading dimension) over `data` and `fsdp`, tokens (the second) over `sequence`."""
    layout = Layout(mesh)
    return NamedSharding(mesh, layout.spec("rows", "length" if layout.size("length") > 1 else None))


def row_shards(mesh: Mesh | None, phase: str = "training") -> int:
    """The number of row blocks: a batch has a multiple of this many rows."""
    return Layout(mesh, phase).size("rows")


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def logical_axes(path: str, ndim: int) -> tuple[str | None, ...]:
    """Logical axes of a parameter by the words of its path, e.g. "layers.3.self_attn.q_proj.kernel".

    One dimension more than the table knows is a leading axis of layers. What the table does not name (norms, text
    encoders, scalars) is replicated. Moments of an optimiser have the paths of their parameters in theirs.
    """
    words = re.findall(r"\w+", path)
    axes: tuple[str | None, ...] = ()
    for module, kind in pairwise(words):
        if module in TABLES and kind == "embedding":
            axes = TABLES[module]
        elif module in LINEARS:
            axes = {
                "kernel": LINEARS[module],
                "bias": LINEARS[module][1:],
                "lora_a": (LINEARS[module][0], None),
                "lora_b": (None, LINEARS[module][1]),
            }.get(kind, ())
    if not axes or ndim not in (len(axes), len(axes) + 1):
        return (None,) * ndim
    return (None,) * (ndim - len(axes)) + axes


def param_sharding(
    mesh: Mesh, path: str | Sequence[Any], shape: Sequence[int], phase: str = "training"
) -> NamedSharding:
    """Where one parameter lies.

    Raises:
      UserError: a dimension that its mesh axes do not divide; the sentence says what would work.
    """
    name = path if isinstance(path, str) else ".".join(map(str, path))
    layout = Layout(mesh, phase)
    logical = logical_axes(name, len(shape))
    for axis, size in zip(logical, shape, strict=True):
        check_divides(layout, f"the {axis} dimension of {name}", axis, size)
    return NamedSharding(mesh, layout.spec(*logical))


def check_divides(layout: Layout, what: str, logical: str | None, size: int) -> None:
    """Raise a UserError unless the mesh axes of a logical axis divide a size."""
    pieces = layout.size(logical)
    if size % pieces:
        product = " × ".join(f"mesh.{axis}" for axis in layout.axes(logical))
        fitting = [n for n in range(1, 2 * pieces) if size % n == 0]
        raise UserError(
            f"{what} is {size}, which {product} = {pieces} does not divide; "
            f"use {' or '.join(map(str, fitting))}."
        )


def param_shardings(mesh: Mesh, params: Any, phase: str = "training") -> Any:
    """A tree like `params` (arrays or `jax.ShapeDtypeStruct`, `nnx.State` included) of shardings.

    Also right for optimiser states, whose moments are named like the parameters.

    Raises:
      UserError: as `param_sharding`.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: param_sharding(mesh, jax.tree_util.keystr(path), leaf.shape, phase),
        params,
    )


def resolve_dtype(name: str, layout: Layout) -> Any:
    """The dtype of a computation. "auto" is bfloat16 on accelerators, and float32 on CPU, where it is as fast."""
    if name == "auto":
        name = "float32" if layout.platform == "cpu" else "bfloat16"
    return jnp.dtype(name)


def abstract(tree: Any, shardings: Any) -> Any:
    """Shapes with shardings, as `jit(…).lower` takes them in place of arrays."""
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        tree,
        shardings,
    )
