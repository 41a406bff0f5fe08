"""Law 10 over meshes: the same loss and gradients wherever the arrays lie."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from psearch_jax.config import AlgorithmConfig, MeshConfig, OptimizerConfig, SamplingConfig
from psearch_jax.learning.batches import Sequence, pack
from psearch_jax.learning.critic import ValueBatch, make_critic, make_values
from psearch_jax.learning.rescoring import make_logprobs, make_rescore
from psearch_jax.learning.update import Compute, init_state, make_policy_update, place_batch
from psearch_jax.mesh import Layout, make_mesh, param_shardings
from psearch_jax.models.decoder import abstract_params, init_adapters, init_params
from psearch_jax.models.decoder_config import DecoderConfig, on_mesh
from psearch_jax.models.lora import LoraSpec, join, split_trainable

CONFIG = DecoderConfig(
    family="qwen3",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=4,
    qk_norm=True,
    tie_embeddings=False,
    max_unrolled_layers=2,  # so that the layers are stacked and scanned
)
ALGORITHM = AlgorithmConfig(
    kl_coefficient=0.1, entropy_coefficient=0.01, micro_rows=8, logprob_chunk=16
)
MESHES = {
    "data": {"data": 8},
    "all three": {"data": 2, "fsdp": 2, "tensor": 2},
    "fsdp": {"fsdp": 8},
    "tensor": {"tensor": 8},  # two key/value heads, each repeated four times
    "sequence": {"data": 1, "fsdp": 2, "tensor": 2, "sequence": 2},
}


def make_batch():
    rng = np.random.default_rng(0)
    sequences = []
    for _ in range(24):
        n = int(rng.integers(6, 16))
        sequences.append(
            Sequence(
                ids=rng.integers(0, CONFIG.vocab_size, n),
                weights=(rng.random(n) < 0.7).astype(np.float32),
                advantages=rng.normal(size=n).astype(np.float32),
                old_logprobs=(-4.2 + 0.3 * rng.normal(size=n)).astype(np.float32),
            )
        )
    return pack(sequences, 16, 24)


BATCH = make_batch()


SEQUENCE_LEVEL = replace(
    ALGORITHM,
    loss="gspo",
    aggregation="sequence_mean",
    old_logprobs="trainer",
    correction="sequence",
)


def step(config, axes, params, compute, algorithm=ALGORITHM):
    """One step of plain gradient descent at rate 1, so that what changes is the gradient."""
    mesh = None if axes is None else make_mesh(MeshConfig(**axes))
    laid_out = on_mesh(config, Layout(mesh))
    graphdef, _ = abstract_params(laid_out)
    trainable, frozen = split_trainable(params)
    if mesh is not None:
        frozen = jax.device_put(frozen, param_shardings(mesh, frozen))
    optimizer = optax.sgd(1.0)
    update = make_policy_update(
        graphdef, optimizer, mesh, algorithm, SamplingConfig(), compute=compute
    )
    reference = jax.tree.map(lambda x: x * 1.01, trainable)
    if mesh is not None:
        reference = jax.device_put(reference, param_shardings(mesh, reference))
    state, metrics = update(
        init_state(trainable, optimizer, mesh), place_batch(BATCH, mesh), reference, frozen=frozen
    )
    grads = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), trainable, state.params)
    return grads, {name: float(value) for name, value in metrics.items()}, state


@cache
def starting_point(lora):
    config = replace(CONFIG, lora=LoraSpec(rank=2, alpha=4.0)) if lora else CONFIG
    _, params = init_params(CONFIG, jax.random.key(0))
    if lora:
        adapters = jax.tree.map(
            lambda x: x + 0.05 * jax.random.normal(jax.random.key(x.size), x.shape),
            init_adapters(config, jax.random.key(1)),
        )
        params = join(adapters, params)
    return config, params


@cache
def on_one_device(lora):
    config, params = starting_point(lora)
    return step(config, None, params, Compute())


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES.keys())
def test_law_10_every_mesh_gives_the_same_loss_and_gradients(axes, lora):
    config, params = starting_point(lora)
    want, want_metrics, _ = on_one_device(lora)
    got, metrics, state = step(config, axes, params, Compute(remat="full"))
    for (path, a), b in zip(jax.tree.leaves_with_path(want), jax.tree.leaves(got), strict=True):
        scale = np.abs(a).max()
        assert scale > 0, f"{path} has no gradient: the test would prove nothing"
        assert np.abs(a - b).max() <= 1e-5 * max(1.0, scale), jax.tree_util.keystr(path)
    for name, value in want_metrics.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(state.params)} == {8}


@pytest.mark.slow
def test_law_10_sums_over_sequences_are_the_same_on_a_mesh():
    """Rows over two devices and the tokens of a row over two: a sequence lies on several."""
    config, params = starting_point(False)
    want, want_metrics, _ = step(config, None, params, Compute(), SEQUENCE_LEVEL)
    got, metrics, _ = step(config, MESHES["sequence"], params, Compute(), SEQUENCE_LEVEL)
    for (path, a), b in zip(jax.tree.leaves_with_path(want), jax.tree.leaves(got), strict=True):
        assert np.abs(a - b).max() <= 1e-5 * max(1.0, np.abs(a).max()), jax.tree_util.keystr(path)
    for name, value in want_metrics.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    assert want_metrics["correction"] != 1.0


@pytest.mark.slow
def test_law_10_passes_beside_the_update_are_the_same_on_a_mesh():
    """Old log-probabilities and a critic's values, whole on every device; the critic's step."""
    config, params = starting_point(False)
    several = replace(SEQUENCE_LEVEL, minibatches=2, advantage="gae", micro_rows=16)
    told = []
    for axes in (None, {"data": 2, "fsdp": 2, "tensor": 2}):
        mesh = None if axes is None else make_mesh(MeshConfig(**axes))
        graphdef, _ = abstract_params(on_mesh(config, Layout(mesh)))
        placed = params if mesh is None else jax.device_put(params, param_shardings(mesh, params))
        batch, nothing = place_batch(BATCH, mesh), nnx.State({})
        given = (graphdef, mesh, several, SamplingConfig())
        rescored, gap = make_rescore(*given)(placed, nothing, batch)
        own_RxL = make_logprobs(*given)(placed, nothing, batch)
        sizes = (config.hidden_size, params, mesh, several, OptimizerConfig(clip_norm=0.0), 10)
        critic = make_critic(graphdef, *sizes)
        # Log-probabilities for returns, and values that a step has moved away from zero.
        targets = ValueBatch(*batch[:4], returns_RxL=own_RxL, old_values_RxL=own_RxL * 0.0)
        state, metrics = critic.update(critic.state, targets, frozen=nothing)
        values = make_values(graphdef, config.hidden_size, mesh, several)
        values_RxL = values(state.params, nothing, batch)
        assert own_RxL.is_fully_replicated and values_RxL.is_fully_replicated
        found = (rescored.old_logprobs_RxL, rescored.advantages_RxL, own_RxL, values_RxL)
        told.append((*map(np.asarray, found), {**gap, **metrics}))
    for a, b in zip(told[0][:-1], told[1][:-1], strict=True):
        assert np.abs(a).max() > 0
        np.testing.assert_allclose(a, b, atol=1e-5)
    for name, value in told[0][-1].items():
        assert told[1][-1][name] == pytest.approx(float(value), rel=1e-5, abs=1e-5), name


def test_weights_are_held_in_pieces():
    """fsdp=8: an eighth of every matrix and of its moments is on each device."""
    config, params = starting_point(False)
    mesh = make_mesh(MeshConfig(fsdp=8))
    state = init_state(params, optax.adam(1e-3), mesh)
    for path, leaf in jax.tree.leaves_with_path(state):
        if any(word in jax.tree_util.keystr(path) for word in ("kernel", "embedding")):
            held = {shard.data.size for shard in leaf.addressable_shards}
            assert held == {leaf.size // 8}, jax.tree_util.keystr(path)


def test_adapters_alone_train_and_the_rest_stays_out_of_the_optimiser():
    config, params = starting_point(True)
    trainable, frozen = split_trainable(params)
    assert jax.tree.all(
        jax.tree.map(lambda a, b: bool(jnp.all(a == b)), join(trainable, frozen), params)
    )
    names = {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(trainable)}
    assert names and all("lora_" in name for name in names)
    assert not any(
        "lora_" in jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(frozen)
    )
    moments = [x for x in jax.tree.leaves(optax.adam(1e-3).init(trainable)) if x.ndim]
    assert sum(x.size for x in moments) == 2 * sum(x.size for x in jax.tree.leaves(trainable))
