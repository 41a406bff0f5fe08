"""The engine on a mesh plays the episodes that one device plays."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rollout import toys

from psearch_jax.config import MeshConfig, SamplingConfig
from psearch_jax.errors import UserError
from psearch_jax.mesh import Layout, make_mesh
from psearch_jax.models.decoder import abstract_params
from psearch_jax.models.decoder_config import on_mesh
from psearch_jax.rollout.engine import Engine

KEY = jax.random.key(5)
PROMPTS = ("ab\n", "bca\n", "c1\n")
SLOTS = 8


def stacked(params: nnx.State) -> nnx.State:
    """The same parameters with a leading layer axis."""
    flat = nnx.to_flat_state(params)
    layers = sorted({path[1] for path, _ in flat if path[0] == "layers"})
    leaves = [(path, leaf) for path, leaf in flat if path[0] != "layers"]
    by_path = dict(flat)
    for path, leaf in flat:
        if path[:2] == ("layers", layers[0]):
            parts = [by_path["layers", layer, *path[2:]].get_value() for layer in layers]
            leaves.append((("layers", *path[2:]), leaf.replace(jnp.stack(parts))))
    return nnx.from_flat_state(leaves)


@cache
def episodes_on(axes: tuple[tuple[str, int], ...], scan: bool):
    tokenizer = toys.make_tokenizer("whole")
    config, _, params = toys.make_policy(tokenizer, toys.FOLLOWS["whole"])
    if scan:
        config, params = replace(config, max_unrolled_layers=1), stacked(params)
    mesh = make_mesh(MeshConfig(**dict(axes))) if axes else None
    config = on_mesh(config, Layout(mesh, "rollout"))
    graphdef, _ = abstract_params(config)
    engine = Engine(
        graphdef,
        config,
        tokenizer,
        toys.PROTOCOL,
        toys.Corpus(),
        replace(toys.ROLLOUT, slots=SLOTS),
        mesh=mesh,
    )
    engine.warm_up(params)
    requests = toys.make_requests(tokenizer, PROMPTS, 6)  # more episodes than slots
    episodes = engine.rollout(params, requests, key=KEY, sampling=SamplingConfig())
    return engine, episodes


@pytest.mark.parametrize(
    ("axes", "scan"),
    [
        ((), True),
        ((("data", 8),), False),
        ((("data", 8),), True),
        ((("data", 2), ("fsdp", 2), ("tensor", 2)), True),
        ((("data", 2), ("tensor", 4)), True),  # two key/value heads over four devices
    ],
    ids=["one device, scanned", "data", "data, scanned", "all three", "repeated heads"],
)
def test_every_mesh_plays_the_same_episodes(axes, scan):
    _, want = episodes_on((), False)
    engine, got = episodes_on(axes, scan)
    assert sum(len(episode.turns) > 1 for episode in want) >= 3  # searches and appends happened
    for a, b in zip(want, got, strict=True):
        assert (a.ids, a.roles, a.turns, a.end_reason) == (b.ids, b.roles, b.turns, b.end_reason)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
    assert engine.stats["compiled"] == 0
    assert engine.stats["forwarded_over_episode_tokens"] <= 1.0


def test_a_group_is_copied_within_a_device_only():
    """Eight runs of one slot: every member forwards its own prompt, and law 4 still holds."""
    engine, episodes = episodes_on((("data", 8),), False)
    prompts = sum(sum(role == 0 for role in episode.roles) for episode in episodes)
    assert engine.pieces == 8
    assert engine.stats["forwarded"]["prompt"] <= prompts


def test_slots_that_do_not_divide_say_what_would():
    tokenizer = toys.make_tokenizer("whole")
    config, graphdef, _ = toys.make_policy(tokenizer, [])
    with pytest.raises(UserError, match=r"rollout.slots is 6, which .* = 8 does not divide"):
        Engine(
            graphdef,
            config,
            tokenizer,
            toys.PROTOCOL,
            toys.Corpus(),
            replace(toys.ROLLOUT, slots=6),
            mesh=make_mesh(MeshConfig(data=8)),
        )
