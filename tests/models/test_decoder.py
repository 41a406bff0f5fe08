"""The decoder: causality, packing, padding, scanned layers, rematerialisation, configuration."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psearch_jax.errors import UserError
from psearch_jax.models import decoder
from psearch_jax.models.weights import from_hf_tensors, to_hf_tensors

CONFIG = decoder.DecoderConfig(
    vocab_size=61,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,  # not hidden / heads, so that a mix-up of the two shows
)
GRAPHDEF, PARAMS = decoder.init_params(CONFIG, jax.random.key(0))
HIDDEN = jax.jit(decoder.hidden_states, static_argnums=0, static_argnames=("dtype", "remat"))


def tokens_of(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, CONFIG.vocab_size, shape).astype(np.int32)


def whole(tokens_BxL, **kwargs):
    """Hidden states of rows that hold one sequence each."""
    positions = np.broadcast_to(np.arange(tokens_BxL.shape[1]), tokens_BxL.shape)
    return HIDDEN(GRAPHDEF, PARAMS, tokens_BxL, positions, np.ones_like(tokens_BxL), **kwargs)


def test_causality_by_gradient():
    """The output at t depends on the inputs up to t and on no later one (nanodo's test)."""
    length = 7
    # Every position holds its own token, so the gradient by a row of the token table is one by position.
    tokens = jnp.arange(length)[None]

    def output_at(params, t):
        hidden = decoder.hidden_states(GRAPHDEF, params, tokens, tokens, jnp.ones_like(tokens))
        return hidden[0, t].sum()

    gradients = jax.vmap(jax.grad(output_at), (None, 0))(PARAMS, jnp.arange(length))
    gradient_TxLxD = gradients["embed_tokens"]["embedding"][...][:, :length]
    reached_TxL = np.abs(gradient_TxLxD).max(-1) > 0
    np.testing.assert_array_equal(reached_TxL, np.tri(length, dtype=bool))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 1000))
def test_law_10_packing_and_padding_never_change_values(lengths, seed):
    """Sequences packed into a row of 40 with padding at both ends give what each gives alone in a row."""
    row = 40
    sequences = [tokens_of(seed + i, 1, n) for i, n in enumerate(lengths)]
    tokens = np.full(
        (1, row), 7, np.int32
    )  # padding holds a real id: the segment alone must hide it
    positions, segments = np.zeros((1, row), np.int32), np.zeros((1, row), np.int32)
    begin = 2
    for number, sequence in enumerate(sequences, 1):
        end = begin + sequence.shape[1]
        tokens[:, begin:end], positions[:, begin:end] = sequence, np.arange(end - begin)
        segments[:, begin:end] = number
        begin = end
    packed = HIDDEN(GRAPHDEF, PARAMS, tokens, positions, segments)
    assert np.isfinite(packed).all()
    alone_tokens = np.full((4, 9), 3, np.int32)
    alone_segments = np.zeros((4, 9), np.int32)
    for i, sequence in enumerate(sequences):
        alone_tokens[i, : sequence.shape[1]] = sequence
        alone_segments[i, : sequence.shape[1]] = 1
    alone = HIDDEN(GRAPHDEF, PARAMS, alone_tokens, np.tile(np.arange(9), (4, 1)), alone_segments)
    begin = 2
    for i, n in enumerate(lengths):
        np.testing.assert_allclose(packed[0, begin : begin + n], alone[i, :n], atol=1e-5)
        begin += n


def test_rows_longer_than_a_query_block_agree_with_short_ones():
    """150 tokens go through three blocks of queries; the first 60 of them alone through one."""
    tokens = tokens_of(1, 2, 150)
    np.testing.assert_allclose(whole(tokens)[:, :60], whole(tokens[:, :60]), atol=1e-5)


def scanned_twin(config, params):
    """The same weights in a model whose layers are stacked and scanned."""
    deep = replace(config, max_unrolled_layers=0)
    assert deep.scanned
    assert not config.scanned
    return decoder.abstract_params(deep)[0], from_hf_tensors(
        deep, to_hf_tensors(config, params, np.float32)
    )


def value_and_gradient(graphdef, params, remat="none"):
    tokens = jnp.asarray(tokens_of(2, 2, 12))
    positions = jnp.tile(jnp.arange(12), (2, 1))

    @jax.jit
    def loss(params):
        hidden = decoder.hidden_states(
            graphdef, params, tokens, positions, jnp.ones_like(tokens), remat=remat
        )
        return jnp.sum(jax.nn.log_softmax(decoder.unembed(graphdef, params, hidden))[..., 5])

    return jax.value_and_grad(loss)(params)


def test_scanned_layers_give_the_values_and_gradients_of_unrolled_ones():
    value, gradient = value_and_gradient(GRAPHDEF, PARAMS)
    scanned_value, scanned_gradient = value_and_gradient(*scanned_twin(CONFIG, PARAMS))
    np.testing.assert_allclose(scanned_value, value, rtol=1e-5)
    deep = replace(CONFIG, max_unrolled_layers=0)
    expected = to_hf_tensors(CONFIG, gradient, np.float32)
    for name, tensor in to_hf_tensors(deep, scanned_gradient, np.float32).items():
        np.testing.assert_allclose(tensor, expected[name], atol=2e-4, err_msg=name)


def test_the_traced_program_of_scanned_layers_does_not_grow_with_depth():
    def size(layers):
        config = replace(CONFIG, num_layers=layers)
        graphdef, shapes = decoder.abstract_params(config)
        row = jax.ShapeDtypeStruct((1, 8), jnp.int32)
        program = jax.make_jaxpr(lambda p, t: decoder.hidden_states(graphdef, p, t, t, t))
        return len(str(program(shapes, row)).splitlines())

    assert size(7) == size(14)
    assert size(6) > size(3)  # unrolled: the counter-example that shows the measure works


@pytest.mark.parametrize("remat", ["dots", "attention", "full"])
@pytest.mark.parametrize("scanned", [False, True])
def test_remat_changes_memory_not_values(remat, scanned):
    graphdef, params = scanned_twin(CONFIG, PARAMS) if scanned else (GRAPHDEF, PARAMS)
    value, gradient = value_and_gradient(graphdef, params)
    again, gradient_again = value_and_gradient(graphdef, params, remat)
    np.testing.assert_allclose(again, value, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), gradient, gradient_again)


def test_unknown_remat_policy_is_a_user_error():
    with pytest.raises(UserError, match="remat policy 'some'"):
        whole(tokens_of(0, 1, 4), remat="some")


def test_bfloat16_computation_stays_close_and_returns_bfloat16():
    tokens = tokens_of(3, 2, 20)
    half = whole(tokens, dtype=jnp.bfloat16)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(np.float32), whole(tokens), atol=0.15)


def test_unembed_is_hidden_times_unembedding_in_float32():
    hidden = jnp.ones((3, CONFIG.hidden_size), jnp.bfloat16)
    logits = decoder.unembed(GRAPHDEF, PARAMS, hidden)
    assert logits.dtype == jnp.float32
    assert logits.shape == (3, CONFIG.vocab_size)
    w_DxV = decoder.unembedding(GRAPHDEF, PARAMS)
    np.testing.assert_allclose(logits[0], np.asarray(w_DxV).sum(0), atol=0.05)


def test_config_survives_hugging_face_json():
    assert decoder.DecoderConfig.from_hf(CONFIG.to_hf()) == CONFIG


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "relu"}, "'relu'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'linear'"),
    ],
)
def test_unsupported_configs_are_named(change, words):
    with pytest.raises(UserError, match=words):
        decoder.DecoderConfig.from_hf(CONFIG.to_hf() | change)


def test_an_incomplete_config_lists_what_it_lacks():
    values = CONFIG.to_hf()
    del values["hidden_size"], values["vocab_size"]
    with pytest.raises(UserError, match="vocab_size, hidden_size"):
        decoder.DecoderConfig.from_hf(values)


def test_rope_theta_is_read_from_either_place():
    values = CONFIG.to_hf() | {"rope_theta": 5.0}
    assert decoder.DecoderConfig.from_hf(values).rope_theta == 5.0
    del values["rope_theta"]
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": 7.0}
    assert decoder.DecoderConfig.from_hf(values).rope_theta == 7.0


@pytest.mark.parametrize(("change", "words"), [({"num_kv_heads": 3}, "3"), ({"head_dim": 5}, "5")])
def test_impossible_sizes_are_user_errors(change, words):
    with pytest.raises(UserError, match=words):
        replace(CONFIG, **change)
