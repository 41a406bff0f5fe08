"""Weights in and out: bit-identical round trips, shards, and errors that list every fault."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from psearch_jax.errors import UserError
from psearch_jax.models import decoder, weights

CONFIG = decoder.DecoderConfig(
    vocab_size=31,
    hidden_size=8,
    intermediate_size=12,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
)


def params_of(config, dtype=jnp.float32):
    """Random everywhere, biases too, so that no tensor can be swapped for another unnoticed."""
    shapes = decoder.abstract_params(config)[1]
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return jax.tree.unflatten(
        tree,
        [
            jax.random.normal(key, leaf.shape).astype(dtype)
            for key, leaf in zip(keys, leaves, strict=True)
        ],
    )


def assert_same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize(("dtype", "name"), [(jnp.float32, "float32"), (jnp.bfloat16, "bfloat16")])
def test_export_then_import_is_bit_identical(tmp_path, tied, scanned, dtype, name):
    config = replace(CONFIG, tie_embeddings=tied)
    if scanned:
        config = replace(config, num_layers=7)
    params = params_of(config, dtype)
    weights.save_hf_directory(tmp_path, config, params, dtype=name)
    loaded_config, graphdef, loaded = weights.load_hf_directory(tmp_path, dtype)
    assert loaded_config == config
    assert graphdef == decoder.abstract_params(config)[0]
    assert_same_bits(loaded, params)


def test_names_and_shapes_are_hugging_faces(tmp_path):
    weights.save_hf_directory(tmp_path, CONFIG, params_of(CONFIG), dtype="float32")
    tensors = load_file(tmp_path / "model.safetensors")
    block = {
        "input_layernorm.weight": (8,),
        "post_attention_layernorm.weight": (8,),
        "self_attn.q_proj.weight": (8, 8),
        "self_attn.q_proj.bias": (8,),
        "self_attn.k_proj.weight": (4, 8),
        "self_attn.k_proj.bias": (4,),
        "self_attn.v_proj.weight": (4, 8),
        "self_attn.v_proj.bias": (4,),
        "self_attn.o_proj.weight": (8, 8),
        "mlp.gate_proj.weight": (12, 8),
        "mlp.up_proj.weight": (12, 8),
        "mlp.down_proj.weight": (8, 12),
    }
    expected = {f"model.layers.{i}.{n}": shape for i in range(2) for n, shape in block.items()}
    expected |= {"model.embed_tokens.weight": (31, 8), "model.norm.weight": (8,)}
    assert {name: tensor.shape for name, tensor in tensors.items()} == expected


def test_shards_round_trip_and_a_later_single_file_replaces_them(tmp_path):
    params = params_of(CONFIG)
    weights.save_hf_directory(tmp_path, CONFIG, params, dtype="float32", max_shard_bytes=1000)
    index = json.loads((tmp_path / weights.INDEX_FILE).read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in jax.tree.leaves(params))
    assert_same_bits(weights.load_hf_directory(tmp_path)[2], params)
    other = jax.tree.map(lambda x: x + 1, params)
    weights.save_hf_directory(tmp_path, CONFIG, other, dtype="float32")
    assert_same_bits(weights.load_hf_directory(tmp_path)[2], other)
    assert not list(tmp_path.glob("*.part"))


def test_a_tied_checkpoint_may_store_the_head_again(tmp_path):
    weights.save_hf_directory(tmp_path, CONFIG, params_of(CONFIG), dtype="float32")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same_bits(weights.load_hf_directory(tmp_path)[2], params_of(CONFIG))


def test_one_error_lists_all_missing_extra_and_misshapen_tensors(tmp_path):
    weights.save_hf_directory(tmp_path, CONFIG, params_of(CONFIG), dtype="float32")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"], tensors["model.layers.1.self_attn.k_proj.bias"]
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((8, 12), np.float32)
    tensors["surprise"] = np.zeros(1, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError) as caught:
        weights.load_hf_directory(tmp_path)
    message = str(caught.value)
    for words in (
        "missing model.norm.weight",
        "missing model.layers.1.self_attn.k_proj.bias",
        "extra surprise",
        "model.layers.0.mlp.up_proj.weight is [8, 12], expected [12, 8]",
        str(tmp_path),
    ):
        assert words in message


@pytest.mark.parametrize("keep", [0, 5, 200, -8])
def test_a_file_cut_short_is_a_user_error(tmp_path, keep):
    weights.save_hf_directory(tmp_path, CONFIG, params_of(CONFIG))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"model\.safetensors.*cut short"):
        weights.load_hf_directory(tmp_path)


def test_a_missing_shard_is_a_user_error_that_names_it(tmp_path):
    weights.save_hf_directory(
        tmp_path, CONFIG, params_of(CONFIG), dtype="float32", max_shard_bytes=1000
    )
    victim = sorted(tmp_path.glob("model-*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(UserError, match=victim.name):
        weights.load_hf_directory(tmp_path)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_missing_or_broken_config_is_a_user_error(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config\.json"):
        weights.load_hf_directory(tmp_path)


def test_a_directory_without_safetensors_is_refused_even_with_a_pickle_in_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(UserError, match="neither"):
        weights.load_hf_directory(tmp_path)


def test_an_unknown_stored_dtype_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="'int4'"):
        weights.save_hf_directory(tmp_path, CONFIG, params_of(CONFIG), dtype="int4")
