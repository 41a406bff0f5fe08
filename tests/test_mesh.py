"""The mesh on eight virtual devices."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from psearch_jax import mesh as mesh_lib
from psearch_jax.config import MeshConfig
from psearch_jax.errors import UserError


def test_data_takes_what_is_left():
    mesh = mesh_lib.make_mesh(MeshConfig(data=-1, fsdp=2, tensor=2))
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2, "sequence": 1}
    assert dict(mesh_lib.make_mesh(MeshConfig()).shape) == {
        "data": 8,
        "fsdp": 1,
        "tensor": 1,
        "sequence": 1,
    }


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


WIDTH = ("fsdp", "sequence")


@pytest.mark.parametrize(
    ("path", "shape", "training", "rollout"),
    [
        (
            "layers.0.mlp.up_proj.kernel",
            (64, 128),
            (WIDTH, ("tensor",)),
            (None, ("fsdp", "tensor")),
        ),
        ("layers.mlp.down_proj.kernel", (3, 128, 64), (None, ("tensor",), WIDTH), None),
        ("layers.self_attn.q_proj.kernel", (3, 64, 32), (None, WIDTH, ("tensor",)), None),
        ("layers.self_attn.q_proj.bias", (3, 32), (None, ("tensor",)), None),
        ("layers.0.self_attn.o_proj.lora_a", (32, 4), (("tensor",), None), None),
        ("layers.0.self_attn.o_proj.lora_b", (4, 64), (None, WIDTH), None),
        (
            "embed_tokens.embedding",
            (64, 8),
            (None, ("fsdp", "tensor", "sequence")),
            (("fsdp", "tensor"), None),
        ),
        ("layers.0.input_layernorm.scale", (64,), (None,), (None,)),
        (
            "opt_state[1].mu['['layers']['mlp']['up_proj']['kernel'].value']",
            (3, 64, 128),
            None,
            None,
        ),
        ("step", (), (), ()),
    ],
)
def test_where_a_parameter_lies(path, shape, training, rollout):
    mesh = mesh_lib.make_mesh(MeshConfig(fsdp=4, tensor=2))
    for phase, spec in (("training", training), ("rollout", rollout)):
        got = mesh_lib.param_sharding(mesh, path, shape, phase).spec
        if spec is not None:
            assert got == PartitionSpec(*spec)
        elif path.startswith("opt_state"):
            assert got == mesh_lib.param_sharding(mesh, "up_proj.kernel", shape, phase).spec


def test_a_parameter_that_does_not_divide_says_what_would():
    mesh = mesh_lib.make_mesh(MeshConfig(fsdp=4, tensor=2))
    with pytest.raises(
        UserError,
        match=r"the table_width dimension of embed_tokens.embedding is 12, which mesh.fsdp × mesh.tensor × "
        r"mesh.sequence = 8 does not divide; use 1 or 2 or 3 or 4 or 6 or 12",
    ):
        mesh_lib.param_sharding(mesh, "embed_tokens.embedding", (8, 12))


def test_two_logical_axes_on_one_mesh_axis_are_our_mistake():
    layout = mesh_lib.Layout(mesh_lib.make_mesh(MeshConfig(fsdp=4, tensor=2)))
    with pytest.raises(ValueError, match="meet on a mesh axis"):
        layout.spec("heads", "mlp")
