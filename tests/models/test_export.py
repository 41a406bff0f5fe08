"""Weights out: what transformers and PEFT load, and adapters merged."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from models.random_decoder import logits, random_params
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch

from psearch_jax.config import MeshConfig
from psearch_jax.errors import UserError
from psearch_jax.mesh import make_mesh, param_shardings
from psearch_jax.models import decoder, export, weights
from psearch_jax.models.decoder_config import DecoderConfig
from psearch_jax.models.lora import LoraSpec, split_trainable

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES = {
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"tie_word_embeddings": False, "head_dim": 8},
    "Llama": {"tie_word_embeddings": False},
}
#: Every projection, in a family with biases.
LORA = LoraSpec(rank=3, alpha=12.0)
CONFIG = DecoderConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
)


@pytest.fixture(scope="module", params=[2, 7], ids=["apart", "stacked"])
def adapted(request):
    """(config, graphdef, params) with adapters on every projection."""
    config = replace(CONFIG, num_layers=request.param, lora=LORA)
    return config, *random_params(config)


TOKENS = np.random.default_rng(0).integers(0, 32, (2, 9))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("dtype", "layers", "shard_bytes"),
    [("float32", 2, 10**9), ("bfloat16", 7, 10**9), ("float32", 7, 9000)],
)
def test_a_checkpoint_of_transformers_goes_through_ours_unchanged(
    tmp_path, family, dtype, layers, shard_bytes
):
    settings = SIZES | FAMILIES[family] | {"num_hidden_layers": layers}
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**settings)
    ).to(getattr(torch, dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "theirs")
    config, _, params = weights.load_hf_directory(tmp_path / "theirs", jnp.dtype(dtype))
    generation = {"eos_token_id": [3, 4], "pad_token_id": 5, "do_sample": True, "top_p": 0.8}
    weights.save_hf_directory(
        tmp_path / "ours",
        config,
        params,
        dtype=dtype,
        generation=generation,
        max_shard_bytes=shard_bytes,
    )
    sharded = len(list((tmp_path / "ours").glob("model-*.safetensors"))) > 1
    assert sharded == (shard_bytes < 10**9)
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert type(again) is type(model)
    assert again.dtype == model.dtype
    expected, state = model.state_dict(), again.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert {key: getattr(again.generation_config, key) for key in generation} == generation


def test_merging_is_the_formula(adapted):
    """W + alpha / r A B for each projection, by hand; everything else is untouched."""
    config, graphdef, params = adapted
    plain, plain_def, merged = export.merge_lora(config, graphdef, params)
    assert plain == replace(config, lora=None)
    assert plain_def == decoder.abstract_params(plain)[0]
    before = {tuple(path): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(params)}
    after = {tuple(path): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(merged)}
    shapes = nnx.to_flat_state(decoder.abstract_params(plain)[1])
    assert after.keys() == {tuple(path) for path, _ in shapes}
    changed = 0
    for path, value in after.items():
        a = before.get((*path[:-1], "lora_a"))
        if path[-1] != "kernel" or a is None:
            assert value.tobytes() == before[path].tobytes()
            continue
        b = before[*path[:-1], "lora_b"]
        expected = before[path] + 4.0 * np.einsum("...ir,...ro->...io", a, b)
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)
        assert np.abs(value - before[path]).max() > 0.1
        changed += 1
    assert changed == 7 * (1 if config.scanned else config.num_layers)


def test_a_merged_model_computes_what_the_adapted_one_does(adapted):
    config, graphdef, params = adapted
    plain, plain_def, merged = export.merge_lora(config, graphdef, params)
    np.testing.assert_allclose(
        logits(plain, plain_def, merged, TOKENS),
        logits(config, graphdef, params, TOKENS),
        atol=2e-4,
    )
    assert export.merge_lora(plain, plain_def, merged)[2] is merged


def test_an_export_is_merged_tensor_by_tensor(adapted, tmp_path):
    config, graphdef, params = adapted
    plain, plain_def, merged = export.merge_lora(config, graphdef, params)
    weights.save_hf_directory(tmp_path / "a", config, params, dtype="float32")
    weights.save_hf_directory(tmp_path / "b", plain, merged, dtype="float32")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        np.testing.assert_allclose(tensor, theirs[name], rtol=1e-6, atol=1e-6)
    assert (tmp_path / "a" / "config.json").read_text() == (
        tmp_path / "b" / "config.json"
    ).read_text()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    with torch.no_grad():
        expected = model(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(logits(config, graphdef, params, TOKENS), expected, atol=2e-4)


def test_merging_on_a_mesh_keeps_the_shardings(adapted):
    config, graphdef, params = adapted
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    placed = jax.device_put(params, param_shardings(mesh, params))
    expected = export.merge_lora(config, graphdef, params)[2]
    merged = export.merge_lora(config, graphdef, placed)[2]
    shardings = jax.tree.leaves(param_shardings(mesh, merged))
    for one, other, sharding in zip(
        jax.tree.leaves(expected), jax.tree.leaves(merged), shardings, strict=True
    ):
        assert other.sharding.is_equivalent_to(sharding, other.ndim)
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("adapters_alone", [True, False])
def test_pefts_files_hold_the_adapters_under_pefts_names(adapted, tmp_path, adapters_alone):
    """By hand in torch: B A alpha / r on top of the base weights is the merged export."""
    config, graphdef, params = adapted
    given = split_trainable(params)[0] if adapters_alone else params
    export.save_peft_directory(tmp_path / "adapter", config, given, base="the/base")
    values = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert values["peft_type"] == "LORA"
    assert values["task_type"] == "CAUSAL_LM"
    assert values["base_model_name_or_path"] == "the/base"
    assert (values["r"], values["lora_alpha"], values["bias"]) == (3, 12.0, "none")
    assert set(values["target_modules"]) == set(LORA.projections)
    adapter = load_torch(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(adapter) == 2 * 7 * config.num_layers
    name = "base_model.model.model.layers.1.self_attn.k_proj"
    assert adapter[f"{name}.lora_A.weight"].shape == (3, 16)
    assert adapter[f"{name}.lora_B.weight"].shape == (8, 3)

    plain = replace(config, lora=None)
    weights.save_hf_directory(tmp_path / "base", plain, split_trainable(params)[1], dtype="float32")
    weights.save_hf_directory(tmp_path / "merged", config, params, dtype="float32")
    base = load_torch(tmp_path / "base" / "model.safetensors")
    merged = load_torch(tmp_path / "merged" / "model.safetensors")
    touched = set()
    for name in adapter:
        if name.endswith("lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = adapter[name.replace("lora_A", "lora_B")]
            base[f"{module}.weight"] += values["lora_alpha"] / values["r"] * (b @ adapter[name])
            touched.add(f"{module}.weight")
    assert len(touched) == 7 * config.num_layers
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, base[name], rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT's own, of transformers
def test_peft_itself_loads_the_adapter(adapted, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed (optional here)")
    config, graphdef, params = adapted
    plain = replace(config, lora=None)
    base = tmp_path / "base"
    weights.save_hf_directory(base, plain, split_trainable(params)[1], dtype="float32")
    export.save_peft_directory(tmp_path / "adapter", config, params, base=str(base))
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    model = peft.PeftModel.from_pretrained(model, tmp_path / "adapter")
    with torch.no_grad():
        theirs = model(torch.tensor(TOKENS)).logits.numpy()
        merged = model.merge_and_unload()(torch.tensor(TOKENS)).logits.numpy()
    ours = logits(config, graphdef, params, TOKENS)
    np.testing.assert_allclose(ours, theirs, atol=2e-4)
    np.testing.assert_allclose(ours, merged, atol=2e-4)


def test_peft_wants_adapters_and_a_dtype_it_knows(tmp_path):
    _, params = random_params(CONFIG)
    with pytest.raises(UserError, match="no adapters"):
        export.save_peft_directory(tmp_path / "x", CONFIG, params, base="b")
    with pytest.raises(UserError, match="'int4'"):
        export.save_peft_directory(
            tmp_path / "x", replace(CONFIG, lora=LORA), params, base="b", dtype="int4"
        )
    assert not list(tmp_path.iterdir())
