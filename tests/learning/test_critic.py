"""The critic: values before each token, packing, and that it learns."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from learning.tiny import CONFIG, GRAPHDEF, PARAMS, largest_difference, make_sequences

from psearch_jax.config import AlgorithmConfig, OptimizerConfig, SamplingConfig
from psearch_jax.learning.batches import pack, unpack
from psearch_jax.learning.critic import (
    joint_batches,
    make_critic,
    make_joint_update,
    make_value_update,
    make_values,
    value_batches,
)
from psearch_jax.learning.update import init_state, make_policy_update, place_batch
from psearch_jax.models.decoder import hidden_states

SEQUENCES = make_sequences(5)
NOTHING = nnx.State({})
ALGORITHM = AlgorithmConfig(
    advantage="gae", micro_rows=2, value_clip=0.5, critic_learning_rate=3e-3
)
CRITIC = make_critic(
    GRAPHDEF, CONFIG.hidden_size, PARAMS, None, ALGORITHM, OptimizerConfig(clip_norm=0.0), 100
)
VALUES = make_values(GRAPHDEF, CONFIG.hidden_size, None, ALGORITHM)


def told_apart(state):
    """A head that tells hidden states apart; a fresh one is zero."""
    head = jax.tree.map(
        lambda x: jnp.linspace(-1.0, 1.0, x.size).reshape(x.shape) + 0.1, state.params["head"]
    )
    return {"trunk": state.params["trunk"], "head": head}


def plain_values(params, sequence):
    """Of one sequence alone: what stands before each token but the first."""
    ids = jnp.asarray(sequence.ids, jnp.int32)[None]
    n = ids.shape[1]
    hidden = hidden_states(
        GRAPHDEF, params["trunk"], ids, jnp.arange(n)[None], jnp.ones((1, n), jnp.int32)
    )
    return hidden[0, :-1] @ params["head"]["kernel"][...] + params["head"]["bias"][...]


def test_values_stand_before_their_token_and_begin_at_zero():
    batch = place_batch(pack(SEQUENCES, 12), None)
    assert np.all(np.asarray(VALUES(CRITIC.state.params, NOTHING, batch)) == 0.0)
    params = told_apart(CRITIC.state)
    found = unpack(np.asarray(VALUES(params, NOTHING, batch)), SEQUENCES, 12)
    for values, sequence in zip(found, SEQUENCES, strict=True):
        np.testing.assert_allclose(values[1:], plain_values(params, sequence), atol=1e-5)


def test_a_critic_learns_its_returns_from_policy_tokens_alone():
    """Returns of ±1 by episode; where the policy did not write they are nonsense and change nothing."""

    def learn(noise, row_length):
        returns = [
            np.where(np.asarray(s.weights) > 0, 1.0 if i % 2 else -1.0, noise)
            for i, s in enumerate(SEQUENCES)
        ]
        values = [np.zeros(len(s.ids)) for s in SEQUENCES]
        (batch,) = value_batches(SEQUENCES, returns, values, row_length, 6, 1)
        state, told = jax.tree.map(jnp.copy, CRITIC.state), []
        for _ in range(20):
            state, metrics = CRITIC.update(state, place_batch(batch, None), frozen=NOTHING)
            told.append(float(metrics["loss"]))
        return told, state

    told, state = learn(0.0, 12)
    assert told[0] == pytest.approx(0.5)  # values 0, returns ±1
    assert told[-1] < 0.45
    other, _ = learn(1e6, 20)  # law 2 and law 10
    np.testing.assert_allclose(told, other, rtol=1e-4)
    moved = optax.global_norm(jax.tree.map(jnp.subtract, state.params["trunk"], PARAMS))
    assert moved > 0 and int(state.step) == 20
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(PARAMS))


def test_the_critic_has_a_rate_of_its_own():
    fast = make_critic(
        GRAPHDEF,
        CONFIG.hidden_size,
        PARAMS,
        None,
        replace(ALGORITHM, critic_learning_rate=0.1),
        OptimizerConfig(learning_rate=1e-9, clip_norm=0.0),
        100,
    )
    returns = [np.ones(len(s.ids)) for s in SEQUENCES]
    (batch,) = value_batches(SEQUENCES, returns, returns, 12, 6, 1)
    state, metrics = fast.update(fast.state, place_batch(batch, None), frozen=NOTHING)
    assert float(state.params["head"]["bias"][...]) == pytest.approx(0.1, rel=1e-3)
    assert metrics["value_clip_fraction"] == 0.0


def test_a_shared_critic_steps_along_the_sum_of_both_losses():
    """With plain gradient descent: as far as the policy's step and the value coefficient times the critic's together,
    from one pass over the same tokens, however the rows are cut into micro-batches (law 10)."""
    sgd, coefficient = optax.sgd(1.0), 0.3
    algorithm = replace(
        ALGORITHM,
        critic="shared",
        value_coefficient=coefficient,
        entropy_coefficient=0.01,
        kl_coefficient=0.1,
        logprob_chunk=8,
    )
    rng = np.random.default_rng(1)
    returns, values = ([rng.normal(size=len(s.ids)) for s in SEQUENCES] for _ in range(2))
    (targets,) = value_batches(SEQUENCES, returns, values, 12, 6, 1)
    batch = pack(SEQUENCES, 12, 6)
    (joint,) = joint_batches([batch], [targets])
    start = told_apart(CRITIC.state)
    rest = (CONFIG.hidden_size, None)
    reference = jax.tree.map(lambda x: x * 0.9, PARAMS)
    count = float(batch.weights_RxL.sum())
    given = {"frozen": NOTHING, "denominator": count}

    def step(update, params, batch, *reference):
        state, metrics = update(
            init_state(params, sgd), place_batch(batch, None), *reference, **given
        )
        return jax.tree.map(jnp.subtract, state.params, params), metrics

    whole = replace(algorithm, micro_rows=6)
    policy = make_policy_update(GRAPHDEF, sgd, None, whole, SamplingConfig())
    moved_p, metrics_p = step(policy, start["trunk"], batch, reference)
    moved_v, metrics_v = step(make_value_update(GRAPHDEF, *rest, whole, sgd), start, targets)
    update = make_joint_update(GRAPHDEF, CONFIG.hidden_size, sgd, None, algorithm, SamplingConfig())
    moved, metrics = step(update, start, joint, reference)
    want = {
        "trunk": jax.tree.map(lambda p, v: p + coefficient * v, moved_p, moved_v["trunk"]),
        "head": jax.tree.map(lambda v: coefficient * v, moved_v["head"]),
    }
    assert largest_difference(moved, want) < 1e-5
    assert largest_difference(moved["trunk"], moved_p) > 1e-3  # the trunk learns values
    total = metrics_p["loss"] + coefficient * metrics_v["loss"]
    assert float(metrics["loss"]) == pytest.approx(float(total), abs=1e-5)
    for name in ("loss", "value", "value_clip_fraction"):
        assert float(metrics[f"critic_{name}"]) == pytest.approx(float(metrics_v[name]), abs=1e-5)
    for name in ("entropy", "kl", "ratio", "clip_fraction", "gap"):
        assert float(metrics[name]) == pytest.approx(float(metrics_p[name]), abs=1e-5)
