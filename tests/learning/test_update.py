"""The jitted update against losses written out over single, unpadded sequences."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from learning.tiny import GRAPHDEF, PARAMS, largest_difference, make_sequences, plain_scores

from psearch_jax.config import AlgorithmConfig, MeshConfig, SamplingConfig, SupervisedConfig
from psearch_jax.errors import UserError
from psearch_jax.learning.batches import Batch, pack, unpack
from psearch_jax.learning.rescoring import make_rescore, rescores
from psearch_jax.learning.update import (
    init_state,
    make_policy_update,
    make_supervised_update,
    place_batch,
)
from psearch_jax.mesh import make_mesh

SEQUENCES = make_sequences(7)
#: The new parameters are the old ones minus the gradient, so comparing them compares gradients.
SGD = optax.sgd(1.0)
ALGORITHM = AlgorithmConfig(micro_rows=2, logprob_chunk=8, clip_low=0.2, clip_high=0.3)
REFERENCE = jax.tree.map(lambda x: x * 0.9, PARAMS)


def supervised(batch, *, micro_rows=16, mesh=None, chunk=8):
    config = replace(SupervisedConfig(), micro_rows=micro_rows)
    update = make_supervised_update(GRAPHDEF, SGD, mesh, config, logprob_chunk=chunk)
    return update(init_state(PARAMS, SGD, mesh), place_batch(batch, mesh))


def policy(batch, config=ALGORITHM, *, mesh=None, temperature=1.0, reference=(), denominator=None):
    sampling = SamplingConfig(temperature=temperature)
    update = make_policy_update(GRAPHDEF, SGD, mesh, config, sampling)
    state = init_state(PARAMS, SGD, mesh)
    return update(state, place_batch(batch, mesh), *reference, denominator=denominator)


def plain_supervised(params):
    total = weight = 0.0
    for sequence in SEQUENCES:
        weights_L = jnp.asarray(sequence.weights[1:])
        total -= jnp.sum(weights_L * plain_scores(params, sequence)[0])
        weight += weights_L.sum()
    return total / weight


def plain_policy(params, temperature=1.0, kl=0.0, entropy=0.0):
    total = count = 0.0
    for sequence in SEQUENCES:
        logprobs_L, entropy_L = plain_scores(params, sequence, temperature)
        ratio_L = jnp.exp(logprobs_L - sequence.old_logprobs[1:])
        a_L = sequence.advantages[1:]
        loss_L = (
            -jnp.minimum(ratio_L * a_L, jnp.clip(ratio_L, 0.8, 1.3) * a_L) - entropy * entropy_L
        )
        d_L = plain_scores(REFERENCE, sequence, temperature)[0] - logprobs_L
        loss_L += kl * (jnp.exp(d_L) - 1 - d_L)
        total += jnp.sum(loss_L * sequence.weights[1:])
        count += sequence.weights[1:].sum()
    return total / count


def test_supervised_loss_and_gradient_equal_the_plain_ones():
    loss, grads = jax.value_and_grad(plain_supervised)(PARAMS)
    state, metrics = supervised(pack(SEQUENCES, 12), micro_rows=2)
    assert metrics["loss"] == pytest.approx(float(loss), abs=1e-5)
    assert largest_difference(state.params, jax.tree.map(jnp.subtract, PARAMS, grads)) < 1e-5
    assert metrics["grad_norm"] == pytest.approx(float(optax.global_norm(grads)), rel=1e-4)
    assert metrics["tokens"] == sum(len(sequence.ids) for sequence in SEQUENCES)
    assert metrics["weight"] == sum(sequence.weights[1:].sum() for sequence in SEQUENCES)
    assert (int(state.step), float(metrics["applied"])) == (1, 1.0)


@pytest.mark.parametrize(
    ("temperature", "kl", "entropy"), [(1.0, 0.0, 0.0), (0.7, 0.3, 0.0), (1.0, 0.0, 0.2)]
)
def test_policy_loss_and_gradient_equal_the_plain_ones(temperature, kl, entropy):
    loss, grads = jax.value_and_grad(plain_policy)(PARAMS, temperature, kl, entropy)
    config = replace(ALGORITHM, kl_coefficient=kl, entropy_coefficient=entropy)
    state, metrics = policy(
        pack(SEQUENCES, 12), config, temperature=temperature, reference=(REFERENCE,) if kl else ()
    )
    assert metrics["loss"] == pytest.approx(float(loss), abs=1e-5)
    assert largest_difference(state.params, jax.tree.map(jnp.subtract, PARAMS, grads)) < 1e-5


@pytest.mark.parametrize(
    ("order", "row_length", "rows", "micro_rows"),
    [
        (1, 9, 7, 1),  # one row each
        (1, 40, None, 16),  # long rows
        (-1, 17, 11, 3),  # another order, rows of padding, a last micro-batch that is not full
    ],
)
def test_law_10_packing_and_micro_batches_change_nothing(order, row_length, rows, micro_rows):
    want, want_metrics = supervised(pack(SEQUENCES, 12))
    batch = pack(SEQUENCES[::order], row_length, rows)
    got, metrics = supervised(batch, micro_rows=micro_rows, chunk=5)
    assert largest_difference(got.params, want.params) < 1e-5
    for name in ("loss", "weight", "tokens", "grad_norm"):
        assert metrics[name] == pytest.approx(float(want_metrics[name]), abs=1e-5)


@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_law_10_eight_devices_change_nothing(axes):
    assert jax.device_count() == 8
    mesh = make_mesh(MeshConfig(**axes))
    want, want_metrics = policy(pack(SEQUENCES, 12, 16))
    got, metrics = policy(pack(SEQUENCES, 12, 16), mesh=mesh)
    assert largest_difference(got.params, want.params) < 1e-5
    for name, value in want_metrics.items():
        assert metrics[name] == pytest.approx(float(value), abs=1e-5), name
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(got.params)} == {8}


def test_law_02_what_padding_prompt_and_observation_hold_is_nothing():
    """Their weights, advantages and log-probabilities may be anything; padding tokens, too."""
    batch = pack(SEQUENCES, 17, 6)
    other = Batch(*(array.copy() for array in batch))
    silent = batch.weights_RxL == 0
    other.advantages_RxL[silent] = 1e9
    other.old_logprobs_RxL[silent] = -50.0
    other.tokens_RxL[batch.segments_RxL == 0] = 5
    want, want_metrics = policy(batch)
    got, metrics = policy(other)
    assert largest_difference(got.params, want.params) == 0.0
    for name, value in want_metrics.items():
        assert metrics[name] == value, name


def on_policy():
    """The sequences with the log-probabilities of these very parameters."""
    return [
        replace(s, old_logprobs=np.concatenate([[0.0], np.asarray(plain_scores(PARAMS, s)[0])]))
        for s in SEQUENCES
    ]


def test_law_09_a_first_update_has_ratio_one_and_the_policy_gradient():
    def policy_gradient(params):
        parts = [
            jnp.sum(plain_scores(params, s)[0] * s.weights[1:] * s.advantages[1:])
            for s in SEQUENCES
        ]
        return -sum(parts) / sum(s.weights[1:].sum() for s in SEQUENCES)

    state, metrics = policy(pack(on_policy(), 12))
    grads = jax.grad(policy_gradient)(PARAMS)
    assert largest_difference(state.params, jax.tree.map(jnp.subtract, PARAMS, grads)) < 1e-5
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["clip_fraction"] == 0.0
    assert metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["gap_max"] < 1e-5


def test_law_09_the_gap_to_the_rollout_is_told():
    shifted = [replace(s, old_logprobs=s.old_logprobs - 0.25) for s in on_policy()]
    shifted[3].old_logprobs[-1] -= 0.5
    _, metrics = policy(pack(shifted, 12))
    count = float(metrics["weight"])
    assert metrics["gap"] == pytest.approx(0.25 + 0.5 / count, abs=1e-5)
    assert metrics["gap_max"] == pytest.approx(0.75, abs=1e-5)
    ratio = (np.exp(0.25) * (count - 1) + np.exp(0.75)) / count
    assert metrics["ratio"] == pytest.approx(ratio, abs=1e-5)


def test_episodes_without_advantage_may_be_left_out_when_the_denominator_stays():
    zeroed = [replace(s, advantages=0.0) if i % 2 else s for i, s in enumerate(SEQUENCES)]
    want, want_metrics = policy(pack(zeroed, 12))
    got, metrics = policy(pack(zeroed[::2], 12), denominator=float(want_metrics["weight"]))
    assert largest_difference(got.params, want.params) < 1e-6
    assert metrics["loss"] == pytest.approx(float(want_metrics["loss"]), abs=1e-6)
    _, own = policy(pack(zeroed[::2], 12))
    assert metrics["ratio"] == pytest.approx(float(own["ratio"]), rel=1e-5)


def test_a_bad_batch_is_never_applied():
    bad = [replace(SEQUENCES[0], advantages=np.nan), *SEQUENCES[1:]]
    state, metrics = policy(pack(bad, 12))
    assert (int(state.step), float(metrics["applied"])) == (0, 0.0)
    assert largest_difference(state.params, PARAMS) == 0.0


def test_a_batch_without_policy_tokens_changes_nothing():
    state, metrics = policy(pack([], 12, 4))
    assert largest_difference(state.params, PARAMS) == 0.0
    assert (float(metrics["loss"]), float(metrics["applied"])) == (0.0, 1.0)


def test_law_07_the_state_is_donated_and_the_callers_parameters_are_not():
    update = make_policy_update(GRAPHDEF, SGD, None, ALGORITHM, SamplingConfig())
    state = init_state(PARAMS, SGD)
    update(state, place_batch(pack(SEQUENCES, 12), None))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(PARAMS))


def test_law_06_one_shape_compiles_once():
    update = make_policy_update(GRAPHDEF, SGD, None, ALGORITHM, SamplingConfig())
    state = init_state(PARAMS, SGD)
    for sequences, denominator in ((SEQUENCES, 9.0), (SEQUENCES[:2], 5.5), ([], 3.0)):
        state, _ = update(state, place_batch(pack(sequences, 12, 8), None), denominator=denominator)
    assert update._cache_size() == 1


def test_training_that_could_not_score_its_tokens_is_refused():
    for sampling, words in (
        (SamplingConfig(temperature=0.0), "sampling.temperature is 0"),
        (SamplingConfig(top_k=5), "sampling.top_k=5"),
        (SamplingConfig(top_p=0.9), "sampling.top_p=0.9"),
    ):
        with pytest.raises(UserError, match=words):
            make_policy_update(GRAPHDEF, SGD, None, ALGORITHM, sampling)
    with pytest.raises(UserError, match="'mean'; use one of token_mean, sequence_mean"):
        make_policy_update(
            GRAPHDEF, SGD, None, replace(ALGORITHM, aggregation="mean"), SamplingConfig()
        )


#: Everything that needs sums over a sequence, a second policy or a forward pass of the old one.
SEQUENCE_LEVEL = replace(
    ALGORITHM,
    loss="gspo",
    aggregation="sequence_mean",
    kl_coefficient=0.3,
    kl_estimator="k2",
    old_logprobs="trainer",
    correction="sequence",
    correction_cap=1.5,
)


def test_law_10_packing_changes_nothing_where_sequences_are_summed():
    want, want_metrics = policy(pack(SEQUENCES, 12), SEQUENCE_LEVEL, reference=(REFERENCE,))
    got, metrics = policy(
        pack(SEQUENCES[::-1], 20, 7), replace(SEQUENCE_LEVEL, micro_rows=3), reference=(REFERENCE,)
    )
    assert largest_difference(got.params, want.params) < 1e-5
    for name, value in want_metrics.items():
        assert metrics[name] == pytest.approx(float(value), abs=1e-5), name
    assert 0 < metrics["correction"] != 1.0


def test_an_adaptive_coefficient_is_an_argument_and_compiles_nothing():
    config = replace(ALGORITHM, kl_coefficient=0.1, kl_target=0.05)
    update = make_policy_update(GRAPHDEF, SGD, None, config, SamplingConfig())
    batch, told = place_batch(pack(SEQUENCES, 12), None), []
    for coefficient in (0.1, 0.4):
        state = init_state(PARAMS, SGD)
        _, metrics = update(state, batch, REFERENCE, kl_coefficient=coefficient)
        told.append(metrics)
    assert update._cache_size() == 1
    rise = float(told[1]["loss"] - told[0]["loss"])
    assert rise == pytest.approx(0.3 * float(told[0]["kl"]), rel=1e-4)


def test_old_log_probabilities_of_a_pass_of_their_own_are_those_of_the_update():
    """What one optimiser step finds in its own forward pass, several get from a pass before the first of them."""
    batch = place_batch(pack(SEQUENCES, 12), None)
    want, want_metrics = policy(pack(SEQUENCES, 12), SEQUENCE_LEVEL, reference=(REFERENCE,))
    several = replace(SEQUENCE_LEVEL, minibatches=2)
    assert rescores(several) and not rescores(SEQUENCE_LEVEL) and not rescores(ALGORITHM)
    rescored, told = make_rescore(GRAPHDEF, None, several, SamplingConfig())(
        PARAMS, nnx.State({}), batch
    )
    for name in ("gap", "gap_max", "correction", "masked"):
        assert told[name] == pytest.approx(float(want_metrics[name]), abs=1e-5), name
    got, metrics = policy(rescored, several, reference=(REFERENCE,))
    assert largest_difference(got.params, want.params) < 1e-5
    assert metrics["loss"] == pytest.approx(float(want_metrics["loss"]), abs=1e-5)
    lengths = [len(s.ids) for s in SEQUENCES]
    for own, sequence, n in zip(
        unpack(np.asarray(rescored.old_logprobs_RxL), SEQUENCES, 12),
        SEQUENCES,
        lengths,
        strict=True,
    ):
        counts = np.asarray(sequence.weights[1:]) > 0
        plain_L = np.asarray(plain_scores(PARAMS, sequence)[0])
        np.testing.assert_allclose(own[1:n], np.where(counts, plain_L, 0.0), atol=1e-5)
