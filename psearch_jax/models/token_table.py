"""The token table, and looking tokens up in one that lies on several devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from psearch_jax.mesh import Layout


class Embedding(nnx.Module):
    """The token table."""

    def __init__(self, rows: int, width: int, rngs: nnx.Rngs):
        std = width**-0.5
        self.embedding = nnx.Param(
            std * jax.random.normal(rngs.params(), (rows, width), jnp.float32)
        )


def look_up(
    table_VxD: Float[Array, "V D"], tokens_BxL: Int[Array, "B L"], layout: Layout
) -> Float[Array, "B L D"]:
    """table[tokens] where the table lies on devices that share the tokens out among them, too.

    Each device looks at the tokens of all that hold another part of the table, and sends each what it has found for
    its own tokens: some of their elements where the table is cut over its width, the sum where it is cut over its
    rows. (Left to itself the compiler sends every device all of it.)
    """
    rows, width = layout.axes("table_rows"), layout.axes("table_width")
    # Mesh axis of the table → dimension of the tokens that it also cuts.
    shared = {a: i for i, name in enumerate(("rows", "length")) for a in layout.axes(name)}

    def local(table, tokens):
        for axis in (*rows, *width):
            if axis in shared:
                tokens = jax.lax.all_gather(tokens, axis, axis=shared[axis], tiled=True)
        if rows:
            place = tokens - jax.lax.axis_index(rows) * table.shape[0]
            mine = (place >= 0) & (place < table.shape[0])
            found = jnp.where(mine[..., None], table[jnp.where(mine, place, 0)], 0)
        else:
            found = table[tokens]
        for axis in reversed(rows):
            if axis in shared:
                found = jax.lax.psum_scatter(
                    found, axis, scatter_dimension=shared[axis], tiled=True
                )
            else:
                found = jax.lax.psum(found, axis)
        for axis in reversed(width):
            if axis in shared:
                found = jax.lax.all_to_all(
                    found, axis, split_axis=shared[axis], concat_axis=2, tiled=True
                )
            else:
                found = jax.lax.all_gather(found, axis, axis=2, tiled=True)
        return found

    tokens = layout.spec("rows", "length")
    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(layout.spec("table_rows", "table_width"), tokens),
        out_specs=layout.spec("rows", "length", None),
        check_vma=False,  # what all_gather gives is the same on all devices, which the check does not see
    )(table_VxD, tokens_BxL)
