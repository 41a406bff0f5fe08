"""Weights in and out: bit-identical round trips, shards, and errors that list every fault."""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file, save_file

from benchmarks.weights import loading
from psearch_jax.config import MeshConfig
from psearch_jax.errors import UserError
from psearch_jax.mesh import make_mesh, param_shardings
from psearch_jax.models import decoder, export, slots, tensor_files, weights

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
    index = json.loads((tmp_path / tensor_files.INDEX_FILE).read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in jax.tree.leaves(params))
    assert_same_bits(weights.load_hf_directory(tmp_path)[2], params)
    other = jax.tree.map(lambda x: x + 1, params)
    weights.save_hf_directory(tmp_path, CONFIG, other, dtype="float32")
    assert_same_bits(weights.load_hf_directory(tmp_path)[2], other)
    assert not list(tmp_path.parent.glob(f".{tmp_path.name}*"))
    assert not list(tmp_path.glob("model-*"))


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


def test_a_directory_without_safetensors_is_refused_and_a_pickle_is_never_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    with pytest.raises(UserError, match="neither"):
        weights.load_hf_directory(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(UserError, match=r"pytorch_model\.bin.*convert it to safetensors"):
        weights.load_hf_directory(tmp_path)


def test_an_unknown_stored_dtype_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="'int4'"):
        weights.save_hf_directory(tmp_path, CONFIG, params_of(CONFIG), dtype="int4")


DEEP = replace(CONFIG, num_layers=7, tie_embeddings=False)
BIG = replace(DEEP, vocab_size=32, hidden_size=16, intermediate_size=16, head_dim=8, num_kv_heads=4)


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("block_bytes", [1, 60, 2**20])
def test_any_float_type_and_block_size_gives_the_same_bits(
    tmp_path, monkeypatch, stored, dtype, block_bytes
):
    """Against NumPy's own cast; subnormal numbers, both zeros and infinity are among them."""
    monkeypatch.setattr(slots, "BLOCK_BYTES", block_bytes)
    tensors = weights.to_hf_tensors(DEEP, params_of(DEEP), np.float32)
    rng = np.random.default_rng(0)
    for name, tensor in tensors.items():
        scale = np.float32(10.0) ** rng.integers(-44, 5, tensor.shape)
        odd = rng.choice(np.array([0.0, -0.0, 1.0, 1.0, np.inf]), tensor.shape)
        with np.errstate(all="ignore"):
            tensors[name] = (tensor * scale * odd).astype(stored)
    tensors = {
        name: np.where(tensor == tensor, tensor, stored(0)) for name, tensor in tensors.items()
    }
    (tmp_path / "config.json").write_text(json.dumps(DEEP.to_hf()))
    save_file(tensors, tmp_path / "model.safetensors")
    _, _, loaded = weights.load_hf_directory(tmp_path, dtype)
    for path, leaf in nnx.to_flat_state(loaded):
        array = np.asarray(leaf[...])
        assert array.dtype == dtype
        stacked = path[0] == "layers"
        for layer, part in enumerate(array) if stacked else [(None, array)]:
            place = ("layers", layer, *path[1:-1]) if stacked else path[:-1]
            ending = "bias" if path[-1] == "bias" else "weight"
            expected = tensors[f"{slots.decoder_name(place)}.{ending}"].astype(dtype)
            expected = expected.T if path[-1] == "kernel" else expected
            assert part.tobytes() == np.ascontiguousarray(expected).tobytes(), place


MESHES = [(8, 1, 1, 1), (1, 8, 1, 1), (2, 2, 2, 1), (1, 1, 4, 2)]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("layers", [2, 7])
def test_parameters_are_born_sharded_and_leave_a_mesh_bit_by_bit(tmp_path, sizes, layers):
    config = replace(BIG, num_layers=layers)
    params = params_of(config)
    weights.save_hf_directory(tmp_path / "a", config, params, dtype="float32", max_shard_bytes=4000)
    mesh = make_mesh(
        MeshConfig(**dict(zip(("data", "fsdp", "tensor", "sequence"), sizes, strict=True)))
    )
    _, _, loaded = weights.load_hf_directory(tmp_path / "a", mesh=mesh)
    assert_same_bits(loaded, params)
    expected = jax.tree.leaves(param_shardings(mesh, params))
    for array, sharding in zip(jax.tree.leaves(loaded), expected, strict=True):
        assert array.sharding == sharding
    weights.save_hf_directory(tmp_path / "b", config, loaded, dtype="float32", max_shard_bytes=4000)
    for file in (tmp_path / "a").iterdir():
        assert (tmp_path / "b" / file.name).read_bytes() == file.read_bytes(), file.name


def test_each_piece_is_read_once_and_no_more_than_a_block_at_a_time(monkeypatch):
    """On a mesh that cuts weights into 4 pieces, each held by two devices."""
    monkeypatch.setattr(slots, "BLOCK_BYTES", 256)
    _, shapes, wanted = slots.decoder_slots(BIG)
    source = weights.to_hf_tensors(BIG, params_of(BIG), np.float32)
    read = dict.fromkeys(source, 0)

    def fetch(name, index):
        value = source[name][index]
        read[name] += value.size
        assert value.nbytes <= 256
        return value

    tensors = {
        name: tensor_files.StoredTensor(shape=t.shape, dtype="F32", read=partial(fetch, name))
        for name, t in source.items()
    }
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    loaded = slots.fill_slots(shapes, wanted, tensors, jnp.float32, mesh=mesh)
    assert_same_bits(loaded, params_of(BIG))
    assert read == {name: tensor.size for name, tensor in source.items()}


def test_without_a_mesh_arrays_are_tied_to_no_device(tmp_path):
    weights.save_hf_directory(tmp_path, DEEP, params_of(DEEP))
    for leaf in jax.tree.leaves(weights.load_hf_directory(tmp_path)[2]):
        assert isinstance(leaf.sharding, SingleDeviceSharding)
        assert not leaf.committed


def test_what_does_not_fit_is_found_before_anything_is_read_or_allocated(monkeypatch):
    _, shapes, wanted = slots.decoder_slots(CONFIG)

    def never(*arguments, **keywords):
        raise AssertionError("read or allocated")

    monkeypatch.setattr(slots, "_load", never)
    tensors = {
        slot.name: tensor_files.StoredTensor(shape=slot.shape, dtype="F32", read=never)
        for slot in wanted
    }
    for name, dtype in (
        ("model.norm.weight", "I8"),
        ("model.layers.1.mlp.up_proj.weight", "F8_E4M3"),
    ):
        tensors[name] = replace(tensors[name], dtype=dtype)
    del tensors["model.embed_tokens.weight"]
    with pytest.raises(UserError) as caught:
        slots.fill_slots(shapes, wanted, tensors, jnp.float32)
    message = str(caught.value)
    assert "model.norm.weight is stored as I8, expected one of F32, BF16, F16" in message
    assert "model.layers.1.mlp.up_proj.weight is stored as F8_E4M3" in message
    assert "missing model.embed_tokens.weight" in message


def test_an_integer_tensor_in_a_file_is_named_with_its_type(tmp_path):
    weights.save_hf_directory(tmp_path, CONFIG, params_of(CONFIG), dtype="float32")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = np.ones(8, np.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.norm\.weight is stored as I8"):
        weights.load_hf_directory(tmp_path)


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        ("[]", "not a safetensors index"),
        ('{"weight_map": {"a": 1}}', "not a safetensors index"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "not files beside it"),
        ('{"weight_map": {}}', "not files beside it"),
        ('{"weight_map": {"a": "model.safetensors", "b": "again.safetensors"}}', "in two files"),
    ],
)
def test_a_broken_index_is_a_user_error(tmp_path, index, sentence):
    weights.save_hf_directory(tmp_path, CONFIG, params_of(CONFIG))
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "again.safetensors").write_bytes(content)
    (tmp_path / tensor_files.INDEX_FILE).write_text(index)
    with pytest.raises(UserError, match=sentence):
        weights.load_hf_directory(tmp_path)


def test_a_tokenizer_may_have_fewer_ids_than_the_model_has_rows_and_not_more():
    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 30})
    weights.check_vocabulary(31, tokenizer, "x")
    weights.check_vocabulary(64, tokenizer, "x")
    with pytest.raises(
        UserError, match=r"'x': its tokenizer has 31 ids, but its model only 30 rows"
    ):
        weights.check_vocabulary(30, tokenizer, "x")


class BadTokenizer:
    def save_pretrained(self, directory):
        raise OSError(28, "No space left on device")


def test_a_write_that_fails_leaves_nothing_and_what_was_there(tmp_path):
    target = tmp_path / "policy"
    with pytest.raises(UserError, match="No space left"):
        weights.save_hf_directory(target, CONFIG, params_of(CONFIG), tokenizer=BadTokenizer())
    assert not list(tmp_path.iterdir())
    weights.save_hf_directory(target, CONFIG, params_of(CONFIG), dtype="float32")
    (target / "notes.txt").write_text("kept")
    before = {file.name: file.read_bytes() for file in target.iterdir()}
    with pytest.raises(UserError, match="No space left"):
        weights.save_hf_directory(target, DEEP, params_of(DEEP), tokenizer=BadTokenizer())
    assert {file.name: file.read_bytes() for file in target.iterdir()} == before
    other = jax.tree.map(lambda x: x + 1, params_of(CONFIG))
    weights.save_hf_directory(target, CONFIG, other, dtype="float32")
    assert_same_bits(weights.load_hf_directory(target)[2], other)
    assert (target / "notes.txt").read_text() == "kept"
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_a_run_killed_while_files_take_their_places_leaves_no_mixed_model(tmp_path, monkeypatch):
    weights.save_hf_directory(tmp_path, CONFIG, params_of(CONFIG), max_shard_bytes=1000)

    class Killed(BaseException):
        pass

    replace_file = export.os.replace

    def replaced(source, target):
        if target == tmp_path / "config.json":
            raise Killed
        replace_file(source, target)

    monkeypatch.setattr(export.os, "replace", replaced)
    with pytest.raises(Killed):
        weights.save_hf_directory(tmp_path, CONFIG, params_of(CONFIG))
    with pytest.raises(UserError, match=r"config\.json is missing"):
        weights.load_hf_directory(tmp_path)


def test_a_place_that_cannot_be_written_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        weights.save_hf_directory(tmp_path / "file" / "policy", CONFIG, params_of(CONFIG))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
def test_a_gigabyte_is_loaded_in_less_host_memory_than_its_largest_file(devices):
    """The benchmark's measurement: peak over baseline, without the parameters themselves."""
    result = loading(1000, 250, devices)
    assert result["checkpoint_bytes"] > 1e9
    assert result["shards"] == 5
    assert 0.1 < result["load_peak_over_largest_shard"] <= 1.2
    assert result["roundtrip_identical"]
