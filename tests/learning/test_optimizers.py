from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from learning.tiny import PARAMS

from psearch_jax.config import OptimizerConfig
from psearch_jax.errors import UserError
from psearch_jax.learning.optimizers import is_hidden_matrix, make_optimizer, make_schedule

CONFIG = OptimizerConfig(learning_rate=0.1, adam_learning_rate=0.01, clip_norm=0.0)


def one_step(config, params, grads, total_steps=10):
    optimizer = make_optimizer(config, total_steps)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    return updates


def test_schedules_by_hand():
    config = OptimizerConfig(warmup_steps=4)
    rates = [float(make_schedule(config, 1.0, 12)(step)) for step in range(6)]
    np.testing.assert_allclose(rates, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0])
    linear = make_schedule(replace(config, schedule="linear"), 1.0, 12)
    np.testing.assert_allclose([linear(s) for s in (3, 4, 8, 12)], [1.0, 1.0, 0.5, 0.0], atol=1e-6)
    cosine = make_schedule(replace(config, schedule="cosine"), 1.0, 12)
    np.testing.assert_allclose([cosine(s) for s in (4, 8, 12)], [1.0, 0.5, 0.0], atol=1e-6)
    assert float(make_schedule(OptimizerConfig(), 0.3, 12)(0)) == pytest.approx(0.3)
    one = make_schedule(OptimizerConfig(warmup_steps=1), 0.3, 12)
    assert [float(one(s)) for s in (0, 1)] == pytest.approx([0.3, 0.3])


def test_adam_moves_each_weight_by_the_learning_rate_first():
    params = {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}
    grads = {"kernel": jnp.full((2, 3), -4.0), "bias": jnp.full(3, 1e-3)}
    updates = one_step(CONFIG, params, grads)
    np.testing.assert_allclose(updates["kernel"], 0.1, rtol=1e-3)
    np.testing.assert_allclose(updates["bias"], -0.1, rtol=1e-3)


def test_weight_decay_falls_on_matrices_only():
    params = {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates = one_step(replace(CONFIG, weight_decay=0.5), params, zeros)
    np.testing.assert_allclose(updates["kernel"], -0.05, rtol=1e-6)
    np.testing.assert_array_equal(updates["bias"], 0.0)


def test_gradients_are_clipped_by_their_common_norm():
    # Adam's size does not depend on the gradient's, so look at the norm after the first link.
    config = replace(CONFIG, clip_norm=1.0, b1=0.0, b2=0.0)
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    optimizer = make_optimizer(config, 1)
    _, state = optimizer.update(
        {"a": jnp.array([3.0]), "b": jnp.array([4.0])}, optimizer.init(params), params
    )
    nu = optax.tree.get(state, "nu")
    np.testing.assert_allclose([nu["['a']"][0], nu["['b']"][0]], [0.36, 0.64], rtol=1e-5)


def test_muon_takes_hidden_matrices_and_nadam_the_rest():
    params = {
        "layers": {"mlp": {"kernel": jnp.zeros((4, 8)), "bias": jnp.zeros((2, 8))}},
        "stacked": {"kernel": jnp.zeros((3, 4, 8))},
        "embed_tokens": {"embedding": jnp.zeros((16, 4))},
        "lm_head": {"kernel": jnp.zeros((4, 16))},
        "norm": {"scale": jnp.zeros(4)},
    }
    keys = iter(jax.random.split(jax.random.key(0), 9))
    grads = jax.tree.map(lambda p: jax.random.normal(next(keys), p.shape), params)
    updates = one_step(replace(CONFIG, name="muon"), params, grads)
    # NAdam's first step (Dozat 2016): with m = (1 − b1)g it is b1·m / (1 − b1²) + g, divided by |g|.
    first = 0.01 * (1 + 0.9 * 0.1 / (1 - 0.9**2))
    for adams in (
        updates["embed_tokens"]["embedding"],
        updates["lm_head"]["kernel"],
        updates["norm"]["scale"],
        updates["layers"]["mlp"]["bias"],
    ):
        np.testing.assert_allclose(np.abs(adams), first, rtol=1e-3)
    for matrix in (updates["layers"]["mlp"]["kernel"], *updates["stacked"]["kernel"]):
        # Orthogonalised: singular values around 1, times √(fan_out / fan_in) times the rate.
        singular = np.linalg.svd(matrix, compute_uv=False) / (0.1 * 2**0.5)
        assert 0.5 < singular.min() <= singular.max() < 1.4


def test_muon_finds_the_matrices_of_the_decoder():
    names = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf.ndim
        for path, leaf in jax.tree.leaves_with_path(PARAMS)
    }
    muon = {name for name, ndim in names.items() if is_hidden_matrix(name, ndim)}
    assert len(muon) == 2 * 7  # q, k, v, o, gate, up, down of two layers
    assert all("proj" in name for name in muon)


def test_unknown_names_are_told():
    with pytest.raises(UserError, match=r"optimizer.name is 'sgd'; use one of adam, muon"):
        make_optimizer(replace(CONFIG, name="sgd"), 1)
    with pytest.raises(
        UserError, match=r"optimizer.schedule is 'step'; use one of constant, cosine, linear"
    ):
        make_optimizer(replace(CONFIG, schedule="step"), 1)
