"""Every objective against the formula written out over single episodes; law 2 and law 10 for all of them.

The "parameters" are the logits themselves, so a gradient is the gradient with respect to logits.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psearch_jax.config import AlgorithmConfig
from psearch_jax.errors import UserError
from psearch_jax.learning import losses
from psearch_jax.learning.aggregation import denominator_of
from psearch_jax.learning.batches import Sequence, first_fit_decreasing, pack, unpack
from psearch_jax.learning.objective import make_policy_loss

V = 5
BASE = AlgorithmConfig(clip_low=0.2, clip_high=0.3)
OBJECTIVES = {
    "clipped": {},
    "dual clip, k1, entropy": {
        "clip_dual": 1.5,
        "kl_coefficient": 0.3,
        "kl_estimator": "k1",
        "entropy_coefficient": 0.1,
    },
    "gspo, sequence mean, k2, entropy": {
        "loss": "gspo",
        "aggregation": "sequence_mean",
        "kl_coefficient": 0.3,
        "kl_estimator": "k2",
        "entropy_coefficient": 0.1,
    },
    "gspo, dual clip, fixed length, k3": {
        "loss": "gspo",
        "clip_dual": 1.4,
        "aggregation": "fixed_length",
        "fixed_length": 7,
        "kl_coefficient": 0.3,
    },
    "cispo": {"loss": "cispo", "clip_low": 1.0},
    "token correction, sequence mean": {
        "aggregation": "sequence_mean",
        "old_logprobs": "trainer",
        "correction": "token",
        "correction_cap": 1.2,
        "correction_low": 0.7,
        "correction_high": 2.0,
    },
    "sequence correction, gspo": {
        "loss": "gspo",
        "old_logprobs": "trainer",
        "correction": "sequence",
        "correction_cap": 1.5,
        "correction_low": 0.5,
    },
}


def stub_score(logits_RxLxV, batch, entropy):
    """As `token_scores`, plainly."""
    table = jax.nn.log_softmax(logits_RxLxV)[:, :-1]
    chosen = jnp.take_along_axis(table, batch.tokens_RxL[:, 1:, None], axis=-1)[..., 0]
    spread = -jnp.sum(jnp.exp(table) * table, axis=-1)
    if entropy != "loss":
        spread = jax.lax.stop_gradient(spread)
    active = batch.weights_RxL > 0
    pad = ((0, 0), (1, 0))
    return losses.TokenScores(*(jnp.where(active, jnp.pad(x, pad), 0.0) for x in (chosen, spread)))


def plain(config, sequences, logits, reference):
    """The loss, one episode at a time."""
    total = whole = 0.0
    for sequence, table, before in zip(sequences, logits, reference, strict=True):
        policy = np.flatnonzero(sequence.weights)
        if not len(policy):
            continue
        rows = jax.nn.log_softmax(table)[policy - 1]
        logprobs = rows[np.arange(len(policy)), sequence.ids[policy]]
        a, old = sequence.advantages[policy], sequence.old_logprobs[policy]
        if config.old_logprobs == "trainer":
            own = jax.lax.stop_gradient(logprobs)
            ratio = jnp.exp(own - old)
            if config.correction == "sequence":
                ratio = jnp.full(len(policy), jnp.prod(ratio))
            out = (ratio < config.correction_low) | (
                (config.correction_high > 0) & (ratio > config.correction_high)
            )
            a = a * jnp.where(out, 0.0, jnp.minimum(ratio, config.correction_cap))
            old = own
        ratio = jnp.exp(logprobs - old)
        if config.loss == "gspo":
            ratio = jnp.full(len(policy), jnp.exp(jnp.mean(logprobs - old)))
        held = jnp.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
        if config.loss == "cispo":
            loss = -jax.lax.stop_gradient(held) * a * logprobs
        else:
            loss = -jnp.minimum(ratio * a, held * a)
            if config.clip_dual:
                loss = jnp.where(a < 0, jnp.minimum(loss, -config.clip_dual * a), loss)
        if config.kl_coefficient:
            other = jax.nn.log_softmax(before)[policy - 1][
                np.arange(len(policy)), sequence.ids[policy]
            ]
            d = logprobs - other
            fixed = jax.lax.stop_gradient(d)
            loss += (
                config.kl_coefficient
                * {
                    "k1": fixed + fixed * (d - fixed),
                    "k2": d**2 / 2,
                    "k3": jnp.exp(-d) - 1 + d,
                }[config.kl_estimator]
            )
        loss += config.entropy_coefficient * jnp.sum(jnp.exp(rows) * rows, axis=-1)
        if config.aggregation == "token_mean":
            total, whole = total + loss.sum(), whole + len(policy)
        elif config.aggregation == "sequence_mean":
            total, whole = total + loss.mean(), whole + 1
        else:
            total, whole = total + loss.sum(), whole + config.fixed_length
    return total / whole


def draw(seed):
    """Five episodes with arbitrary roles, the last of them without a policy token; logits, and a reference's."""
    rng = np.random.default_rng(seed)
    sequences = []
    for i, n in enumerate((3, 9, 6, 3, 6)):
        weights = (rng.random(n) < 0.6).astype(np.float32)
        weights[0], weights[-1] = 0.0, 1.0
        sequences.append(
            Sequence(
                ids=rng.integers(0, V, n),
                weights=weights if i < 4 else np.zeros(n, np.float32),
                advantages=np.full(n, rng.normal(), np.float32),
                old_logprobs=(-1.6 + 0.5 * rng.normal(size=n)).astype(np.float32),
            )
        )
    logits = [rng.normal(size=(len(s.ids), V)).astype(np.float32) for s in sequences]
    reference = [x + 0.5 * rng.normal(size=x.shape).astype(np.float32) for x in logits]
    return sequences, logits, reference


def place(sequences, tables, row_length, rows, rng):
    """Logits where `pack` puts the tokens, and noise everywhere else."""
    placed = rng.normal(size=(rows, row_length, V)).astype(np.float32)
    bins, _ = first_fit_decreasing([len(s.ids) for s in sequences], row_length, rows)
    for row, members in enumerate(bins):
        start = 0
        for member in members:
            stop = start + len(tables[member])
            placed[row, start:stop], start = tables[member], stop
    return jnp.asarray(placed)


def run(config, sequences, logits, reference, row_length, rows, order, micro_rows):
    """Loss, and gradient by episode, of one way to lay the episodes out."""
    rng = np.random.default_rng(1)
    ordered, tables, before = ([x[i] for i in order] for x in (sequences, logits, reference))
    batch = pack(ordered, row_length, rows)
    placed = place(ordered, tables, row_length, rows, rng)
    other = place(ordered, before, row_length, rows, rng)
    weight = jnp.asarray(denominator_of(config.aggregation, sequences, config.fixed_length))
    loss = make_policy_loss(stub_score, config)
    total, grads = 0.0, []
    for start in range(0, rows, micro_rows):
        here = slice(start, start + micro_rows)
        micro = type(batch)(*(jnp.asarray(x[here]) for x in batch))
        (part, _), grad = jax.value_and_grad(loss, has_aux=True)(
            placed[here], micro, weight, other[here]
        )
        total, grads = total + part, [*grads, np.asarray(grad)]
    grad = np.concatenate(grads)
    # Law 2: logits that predict no policy token have a gradient of exactly nothing.
    predicts = np.zeros(batch.tokens_RxL.shape, bool)
    predicts[:, :-1] = batch.weights_RxL[:, 1:] > 0
    assert np.all(grad[~predicts] == 0.0)
    back = unpack(grad, ordered, row_length)
    return float(total), [back[order.index(i)] for i in range(len(order))]


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_laws_02_and_10_hold_for_every_objective(name, seed):
    config = replace(BASE, **OBJECTIVES[name])
    sequences, logits, reference = draw(seed)
    want, slopes = jax.value_and_grad(lambda tables: plain(config, sequences, tables, reference))(
        [jnp.asarray(x) for x in logits]
    )
    for row_length, rows, order, micro_rows in (
        (12, 4, [0, 1, 2, 3, 4], 4),
        (12, 4, [4, 2, 3, 0, 1], 1),  # another order, micro-batches of one row
        (24, 2, [0, 1, 2, 3, 4], 2),  # longer rows
    ):
        got, grads = run(config, sequences, logits, reference, row_length, rows, order, micro_rows)
        assert got == pytest.approx(float(want), abs=1e-5)
        for a, b in zip(grads, slopes, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_metrics_are_means_over_tokens_whatever_the_aggregation():
    sequences, logits, _ = draw(0)
    told = {}
    for aggregation in ("token_mean", "sequence_mean", "fixed_length"):
        config = replace(BASE, aggregation=aggregation, fixed_length=7)
        batch = pack(sequences, 12, 4)
        placed = place(sequences, logits, 12, 4, np.random.default_rng(1))
        weight = denominator_of(aggregation, sequences, 7)
        on_device = type(batch)(*map(jnp.asarray, batch))
        _, (sums, _) = make_policy_loss(stub_score, config)(placed, on_device, jnp.asarray(weight))
        told[aggregation] = {k: float(v) * weight for k, v in sums.items() if k != "loss"}
    for name, value in told["token_mean"].items():
        assert told["sequence_mean"][name] == pytest.approx(value, rel=1e-5)
        assert told["fixed_length"][name] == pytest.approx(value, rel=1e-5)


def test_the_correction_is_told():
    config = replace(BASE, **OBJECTIVES["token correction, sequence mean"])
    sequences, logits, _ = draw(0)
    batch = pack(sequences, 12, 4)
    placed = place(sequences, logits, 12, 4, np.random.default_rng(1))
    on_device = type(batch)(*map(jnp.asarray, batch))
    _, (sums, peaks) = make_policy_loss(stub_score, config)(placed, on_device, jnp.asarray(1.0))
    count = batch.weights_RxL.sum()
    assert 0 < float(sums["masked"]) < count
    assert 0 < float(sums["correction"]) < 1.2 * count
    assert float(sums["ratio"]) == pytest.approx(count)  # against its own log-probabilities
    assert float(peaks["gap_max"]) > 0.1  # law 9: against the rollout's


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("loss", "ppo"),
        ("aggregation", "mean"),
        ("correction", "turn"),
        ("kl_estimator", "k4"),
        ("kl_place", "nowhere"),
        ("old_logprobs", "nobody"),
    ],
)
def test_unknown_names_are_refused(key, value):
    with pytest.raises(UserError, match=f"algorithm.{key} is '{value}'; use one of "):
        make_policy_loss(stub_score, replace(BASE, **{key: value}))
