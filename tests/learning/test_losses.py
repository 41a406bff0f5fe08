import jax
import jax.numpy as jnp
import numpy as np
import pytest

from psearch_jax.learning.losses import clipped_surrogate, cross_entropy, kl_k3, token_scores

R, L, D, V = 3, 10, 4, 17
RNG = np.random.default_rng(0)
HIDDEN = jnp.asarray(RNG.normal(size=(R, L, D)), jnp.float32)
UNEMBEDDING = jnp.asarray(RNG.normal(size=(D, V)), jnp.float32)
TOKENS = jnp.asarray(RNG.integers(0, V, (R, L)), jnp.int32)
PREDICTED = jnp.asarray(RNG.random((R, L)) < 0.5).at[:, 0].set(False).at[1].set(False)


def plain(hidden, unembedding, temperature):
    """[R, L] log-probabilities and entropies about token t, from full logits; 0 where not predicted."""
    table = jax.nn.log_softmax(hidden @ unembedding / temperature)[:, :-1]
    chosen = jnp.take_along_axis(table, TOKENS[:, 1:, None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(table) * table, axis=-1)
    pad = ((0, 0), (1, 0))
    return (jnp.where(PREDICTED, jnp.pad(x, pad), 0.0) for x in (chosen, entropy))


@pytest.mark.parametrize("chunk", [1, 9, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunks_change_neither_values_nor_gradients(chunk, temperature):
    weights = jnp.asarray(RNG.normal(size=(2, R, L)), jnp.float32)

    def chunked(hidden, unembedding):
        scores = token_scores(
            hidden,
            unembedding,
            TOKENS,
            PREDICTED,
            temperature=temperature,
            chunk=chunk,
            entropy="loss",
        )
        return jnp.sum(jnp.stack(scores) * weights), scores

    def reference(hidden, unembedding):
        scores = tuple(plain(hidden, unembedding, temperature))
        return jnp.sum(jnp.stack(scores) * weights), scores

    (_, got), got_grads = jax.value_and_grad(chunked, (0, 1), has_aux=True)(HIDDEN, UNEMBEDDING)
    (_, want), want_grads = jax.value_and_grad(reference, (0, 1), has_aux=True)(HIDDEN, UNEMBEDDING)
    for a, b in zip((*got, *got_grads), (*want, *want_grads), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6)


def test_law_02_no_gradient_where_nothing_is_predicted():
    """Hidden states that only predict prompt, observation or padding tokens get exactly zero."""

    def loss(hidden):
        return cross_entropy(
            token_scores(hidden, UNEMBEDDING, TOKENS, PREDICTED).logprobs_RxL, PREDICTED * 1.0
        )

    grad = np.asarray(jax.grad(loss)(HIDDEN))
    predicts = np.zeros((R, L), bool)
    predicts[:, :-1] = np.asarray(PREDICTED)[:, 1:]
    assert np.all(grad[~predicts] == 0.0)
    assert np.all(np.abs(grad[predicts]).max(axis=-1) > 0.0)


def test_entropy_as_a_metric_carries_no_gradient():
    def entropy(hidden, mode):
        return jnp.sum(
            token_scores(hidden, UNEMBEDDING, TOKENS, PREDICTED, entropy=mode).entropy_RxL
        )

    np.testing.assert_allclose(entropy(HIDDEN, "metric"), entropy(HIDDEN, "loss"), rtol=1e-6)
    assert np.all(jax.grad(entropy)(HIDDEN, "metric") == 0.0)
    assert np.any(jax.grad(entropy)(HIDDEN, "loss") != 0.0)
    assert entropy(HIDDEN, "none") == 0.0


def _largest_array(jaxpr) -> int:
    sizes = [variable.aval.size for eqn in jaxpr.eqns for variable in eqn.outvars]
    inner = []
    for eqn in jaxpr.eqns:
        for value in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            value = getattr(value, "jaxpr", value)
            if hasattr(value, "eqns"):
                inner.append(_largest_array(value))
    return max([*sizes, *inner], default=0)


def test_law_08_no_array_of_all_logits_exists():
    """Neither forward nor backward: the largest array is far below rows × length × vocabulary."""
    rows, length, width, vocabulary = 2, 64, 8, 1000
    hidden = jnp.zeros((rows, length, width))
    tokens = jnp.zeros((rows, length), jnp.int32)

    def loss(hidden, unembedding):
        scores = token_scores(hidden, unembedding, tokens, tokens == 0, chunk=16, entropy="loss")
        return jnp.sum(scores.logprobs_RxL + scores.entropy_RxL)

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(hidden, jnp.zeros((width, vocabulary)))
    largest = _largest_array(jaxpr.jaxpr)
    assert 16 * vocabulary <= largest < rows * length * vocabulary / 4


def test_cross_entropy_by_hand():
    logprobs = jnp.log(jnp.array([[1.0, 0.5, 0.25]]))
    assert cross_entropy(logprobs, jnp.array([[1.0, 2.0, 0.5]])) == pytest.approx(
        2 * np.log(2) + np.log(2)
    )


def surrogate(ratio, advantage, low=0.2, high=0.3):
    return clipped_surrogate(
        jnp.log(jnp.array([[ratio]])),
        jnp.zeros((1, 1)),
        jnp.array([[advantage]]),
        clip_low=low,
        clip_high=high,
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.25, 2.0, -2.5, False),
        (1.5, 2.0, -2.6, True),  # held at 1 + high
        (0.5, 2.0, -1.0, False),  # the pessimistic side stays free
        (0.5, -2.0, 1.6, True),  # held at 1 − low
        (1.5, -2.0, 3.0, False),
    ],
)
def test_clipped_surrogate_by_hand(ratio, advantage, loss, clipped):
    got = surrogate(ratio, advantage)
    assert got.loss_RxL[0, 0] == pytest.approx(loss, rel=1e-6)
    assert bool(got.clipped_RxL[0, 0]) is clipped
    assert got.ratio_RxL[0, 0] == pytest.approx(ratio, rel=1e-6)


def test_a_clipped_token_has_no_gradient():
    def loss(logprob, advantage):
        return clipped_surrogate(
            logprob[None, None],
            jnp.zeros((1, 1)),
            advantage[None, None],
            clip_low=0.2,
            clip_high=0.2,
        ).loss_RxL.sum()

    assert jax.grad(loss)(jnp.log(1.5), jnp.array(1.0)) == 0.0
    assert jax.grad(loss)(jnp.log(1.5), jnp.array(-1.0)) == pytest.approx(1.5)


def test_k3_by_hand_and_its_mean_is_the_divergence():
    # π = 1/2, π_ref = 1/4: d = −log 2, e^d − d − 1 = log 2 − 1/2.
    got = kl_k3(jnp.log(jnp.array([[0.5]])), jnp.log(jnp.array([[0.25]])))
    assert got[0, 0] == pytest.approx(np.log(2) - 0.5, rel=1e-5)
    p, q = jnp.array([[0.2, 0.3, 0.5]]), jnp.array([[0.6, 0.3, 0.1]])
    k3 = kl_k3(jnp.log(p), jnp.log(q))
    assert jnp.all(k3 >= 0)
    assert jnp.sum(p * k3) == pytest.approx(float(jnp.sum(p * jnp.log(p / q))), rel=1e-5)
