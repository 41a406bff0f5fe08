"""The mesh on eight virtual devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from psearch_jax import mesh as mesh_lib
from psearch_jax.config import MeshConfig
from psearch_jax.errors import UserError


def test_data_takes_what_is_left():
    mesh = mesh_lib.make_mesh(MeshConfig(data=-1, fsdp=2, tensor=2))
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert dict(mesh_lib.make_mesh(MeshConfig()).shape) == {"data": 8, "fsdp": 1, "tensor": 1}


def test_a_part_of_the_devices():
    mesh = mesh_lib.make_mesh(MeshConfig(), jax.devices()[:1])
    assert mesh.size == 1


@pytest.mark.parametrize(
    ("config", "remedy"),
    [
        (MeshConfig(data=3), "set mesh.data=8"),
        (MeshConfig(data=4, fsdp=4), "set mesh.data=2"),
        (MeshConfig(fsdp=3), "must be one of 1, 2, 4, 8"),
        (MeshConfig(fsdp=0), "at least 1"),
        (MeshConfig(data=-2), "at least 1"),
    ],
)
def test_sizes_that_do_not_fit_say_what_would(config, remedy):
    with pytest.raises(UserError, match=remedy):
        mesh_lib.make_mesh(config)


def test_rows_lie_over_data_and_fsdp():
    mesh = mesh_lib.make_mesh(MeshConfig(fsdp=2, tensor=2))
    assert mesh_lib.row_shards(mesh) == 4
    x = jax.device_put(np.arange(24.0).reshape(8, 3), mesh_lib.batch_sharding(mesh))
    assert {s.data.shape for s in x.addressable_shards} == {(2, 3)}
    whole = jax.device_put(np.arange(3.0), mesh_lib.replicated(mesh))
    assert {s.data.shape for s in whole.addressable_shards} == {(3,)}


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((), PartitionSpec()),
        ((512,), PartitionSpec()),
        ((64, 128), PartitionSpec(("tensor",), ("fsdp",))),
        ((128, 64), PartitionSpec(("fsdp",), ("tensor",))),
        ((129, 64), PartitionSpec(None, ("fsdp",))),  # 129 is divisible by neither
        ((129, 65), PartitionSpec(None, None)),
        ((4, 6, 3), PartitionSpec(("fsdp",), ("tensor",), None)),  # 6 is not divisible by fsdp=4
    ],
)
def test_where_a_weight_lies(shape, spec):
    mesh = mesh_lib.make_mesh(MeshConfig(fsdp=4, tensor=2))
    assert mesh_lib.param_spec(mesh, shape) == spec


def test_shardings_of_a_module_keep_results():
    """A sharded linear layer gives what one device gives, and each device holds an eighth."""
    mesh = mesh_lib.make_mesh(MeshConfig(fsdp=4, tensor=2))
    graphdef, params = nnx.split(nnx.Linear(16, 32, rngs=nnx.Rngs(0)))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)), jnp.float32)

    def apply(params, x):
        return nnx.merge(graphdef, params)(x)

    shardings = mesh_lib.param_shardings(mesh, params)
    rows = mesh_lib.batch_sharding(mesh)
    sharded = jax.jit(apply, in_shardings=(shardings, rows), out_shardings=rows)
    np.testing.assert_allclose(sharded(params, x), apply(params, x), rtol=1e-5, atol=1e-6)
    placed = jax.device_put(params, shardings)
    kernel = next(leaf for leaf in jax.tree.leaves(placed) if leaf.ndim == 2)
    assert {s.data.size for s in kernel.addressable_shards} == {16 * 32 // 8}
