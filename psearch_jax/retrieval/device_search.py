"""Exact search on the devices: the whole matrix in their memory, a part on each, the best of all merged.

Dearer than ScaNN (two bytes a dimension, or one), and without its loss of recall. Scores are those of the rounded
matrix; `index.Index` scores the candidates again with the stored vectors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float, Float32, Int64

from psearch_jax.retrieval.embedding import query_rows, up_to

BLOCK = 16_384  # rows scored at a time on one device
CANDIDATE_BUCKETS = (16, 64, 256, 1024)
PRECISIONS = ("bfloat16", "int8")


class DeviceNeighbours:
    """The rows of a matrix on every device of a mesh, N / devices on each. See `neighbours.Neighbours`."""

    def __init__(
        self,
        vectors_NxE: Float[np.ndarray, "N E"],
        mesh: Mesh,
        precision: str = "bfloat16",
    ) -> None:
        """Send the matrix, block by block, in `precision`: bfloat16, or int8 with one scale a row."""
        count, dims = vectors_NxE.shape
        devices = mesh.devices.size
        block = min(BLOCK, up_to(-(-count // devices), 8))
        own = up_to(-(-count // devices), block)  # rows of a device; the last ones may be empty
        axes = PartitionSpec(mesh.axis_names)
        self._count, self._own = count, own

        def part(index: Any) -> np.ndarray:
            start = index[0].start or 0
            rows = np.asarray(vectors_NxE[start : min(start + own, count)], np.float32)
            return np.pad(rows, ((0, own - len(rows)), (0, 0)))

        def matrix(index: Any) -> np.ndarray:
            rows = part(index)
            if precision == "int8":
                scale = _scales(rows)[:, None]
                return np.rint(rows / np.where(scale > 0, scale, 1)).astype(np.int8)
            return rows.astype(jnp.bfloat16)

        total = own * devices
        sharding = NamedSharding(mesh, axes)
        self._matrix = jax.make_array_from_callback((total, dims), sharding, matrix)
        self._scales = jax.make_array_from_callback(
            (total,),
            sharding,
            lambda index: _scales(part(index)) if precision == "int8" else np.ones(own, np.float32),
        )
        self._search = _searcher(mesh, count, own, block)

    @property
    def bytes_a_device(self) -> int:
        """What the matrix takes on each device."""
        shard = self._matrix.addressable_shards[0].data
        return shard.nbytes + self._scales.addressable_shards[0].data.nbytes

    def candidates(
        self, queries_QxE: Float32[np.ndarray, "Q E"], k: int
    ) -> Int64[np.ndarray, "Q k"]:
        """See `Neighbours`. Queries go in blocks of one size and k is rounded up, so that few shapes compile."""
        found = np.full((len(queries_QxE), k), -1, np.int64)
        bucket = next((b for b in CANDIDATE_BUCKETS if b >= k), k)
        rows = query_rows()
        for start in range(0, len(queries_QxE), rows):
            block = queries_QxE[start : start + rows]
            padded = np.pad(block, ((0, rows - len(block)), (0, 0)))
            ids = np.asarray(self._search(self._matrix, self._scales, padded, bucket))
            own = ids[: len(block), :k]
            found[start : start + rows, : own.shape[1]] = own
        return found


def _scales(rows: np.ndarray) -> np.ndarray:
    """The step of a row's int8 numbers: its largest magnitude is 127."""
    return (np.abs(rows).max(axis=1, initial=0) / 127).astype(np.float32)


def _searcher(mesh: Mesh, count: int, own: int, block: int) -> Callable[..., jax.Array]:
    """Compiled: matrix [N, E], scales [N], queries float32 [Q, E], k → int32 row numbers [Q, k], -1 for none."""
    axes = mesh.axis_names
    rows, everywhere = PartitionSpec(axes), PartitionSpec()

    def local(
        matrix: jax.Array, scales: jax.Array, queries_QxE: jax.Array, k: int
    ) -> tuple[jax.Array, jax.Array]:
        """The best rows of one device: a running best over blocks of its rows."""
        first = jax.lax.axis_index(axes) * own

        def one_block(best: tuple[jax.Array, jax.Array], start: jax.Array) -> tuple:
            part = jax.lax.dynamic_slice_in_dim(matrix, start, block)
            scale = jax.lax.dynamic_slice_in_dim(scales, start, block)
            products = jnp.einsum(
                "qe,pe->qp",
                queries_QxE.astype(jnp.bfloat16),
                part.astype(jnp.bfloat16),
                preferred_element_type=jnp.float32,
            )
            ids = first + start + jnp.arange(block)
            scores = jnp.where(ids < count, products * scale, -jnp.inf)
            scores = jnp.concatenate([best[0], scores], axis=1)
            ids = jnp.concatenate([best[1], jnp.broadcast_to(ids, products.shape)], axis=1)
            top, places = jax.lax.top_k(scores, k)
            return (top, jnp.take_along_axis(ids, places, axis=1)), None

        empty = (
            jnp.full((len(queries_QxE), k), -jnp.inf),
            jnp.full((len(queries_QxE), k), -1, jnp.int32),
        )
        empty = jax.lax.pcast(empty, axes, to="varying")
        (scores, ids), _ = jax.lax.scan(one_block, empty, jnp.arange(0, own, block))
        return scores, ids

    @functools.partial(jax.jit, static_argnums=3)
    def search(matrix: jax.Array, scales: jax.Array, queries_QxE: jax.Array, k: int) -> jax.Array:
        sharded = jax.shard_map(
            functools.partial(local, k=k),
            mesh=mesh,
            in_specs=(rows, rows, everywhere),
            out_specs=PartitionSpec(None, axes),
        )
        scores, ids = sharded(matrix, scales, queries_QxE)  # k from every device
        top, places = jax.lax.top_k(scores, k)
        return jnp.where(jnp.isfinite(top), jnp.take_along_axis(ids, places, axis=1), -1)

    return search
