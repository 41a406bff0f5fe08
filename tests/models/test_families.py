"""config.json in and out, and what is refused."""

import pytest

from psearch_jax.config import MeshConfig
from psearch_jax.errors import UserError
from psearch_jax.mesh import Layout, make_mesh
from psearch_jax.models.attention import RopeScaling, rotary_frequencies
from psearch_jax.models.decoder_config import DecoderConfig, on_mesh
from psearch_jax.models.lora import LoraSpec

LLAMA_32_3B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": True,
}


def test_llama_is_read_and_written_back():
    config = DecoderConfig.from_hf(LLAMA_32_3B)
    assert (config.family, config.attention_bias, config.scanned) == ("llama", False, True)
    assert config.rope_scaling == RopeScaling(kind="llama3", factor=32.0)
    written = config.to_hf()
    assert {k: written[k] for k in LLAMA_32_3B if k != "mlp_bias"} == {
        k: v for k, v in LLAMA_32_3B.items() if k != "mlp_bias"
    }
    assert DecoderConfig.from_hf(written) == config


def test_llama3_scaling_by_hand():
    """Head width 2 has one frequency, theta ** 0 = 1: 8192 / 2π turns, far above 4, so it is kept. A wavelength of
    the original length turns once (1 <= low), so it is divided; halfway between 1 and 4 turns, half is."""
    scaling = RopeScaling(kind="llama3", factor=8.0, original_max_positions=8192)
    assert float(rotary_frequencies(2, 10000.0, scaling)[0]) == 1.0
    for turns, share in ((1.0, 1 / 8), (2.5, 0.5 + 0.5 / 8), (4.0, 1.0)):
        frequency = turns * 2 * 3.141592653589793 / 8192
        theta = frequency**-2.0  # of head width 4: the second of two frequencies is theta ** -(1/2)
        scaled = float(rotary_frequencies(4, theta, scaling)[1])
        assert scaled / frequency == pytest.approx(share, rel=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM'.*Qwen2ForCausalLM, Qwen3"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "lacks low_freq_factor"),
        ({"rope_scaling": None, "hidden_size": None}, "hidden_size"),
    ],
)
def test_what_is_not_supported_is_named(change, message):
    values = {k: v for k, v in (LLAMA_32_3B | change).items() if v is not None}
    with pytest.raises(UserError, match=message):
        DecoderConfig.from_hf(values)


def test_key_value_heads_are_repeated_where_the_tensor_axis_is_wider():
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_layers": 1}
    config = DecoderConfig(**sizes, num_heads=8, num_kv_heads=2, head_dim=4)
    for tensor, repeat in ((1, 1), (2, 1), (4, 2), (8, 4)):
        layout = Layout(make_mesh(MeshConfig(tensor=tensor)))
        assert on_mesh(config, layout).kv_repeat == repeat
    with pytest.raises(
        UserError, match=r"num_attention_heads .* is 6, .* = 4 .* use 1 or 2 or 3 or 6"
    ):
        on_mesh(
            DecoderConfig(**sizes, num_heads=6, num_kv_heads=2, head_dim=4),
            Layout(make_mesh(MeshConfig(tensor=4))),
        )
    # 8 devices and 3 heads have 24 as common multiple, which 8 query heads cannot fill.
    odd = DecoderConfig(**sizes | {"hidden_size": 48}, num_heads=24, num_kv_heads=3, head_dim=2)
    assert on_mesh(odd, Layout(make_mesh(MeshConfig(tensor=8)))).kv_repeat == 8
    uneven = DecoderConfig(**sizes, num_heads=8, num_kv_heads=1, head_dim=4)
    assert on_mesh(uneven, Layout(make_mesh(MeshConfig(tensor=8)))).kv_repeat == 8


def test_adapters_that_cannot_be_are_refused():
    with pytest.raises(UserError, match="names 'w_proj'; choose from q_proj"):
        LoraSpec(rank=4, alpha=8.0, projections=("q_proj", "w_proj"))
    with pytest.raises(UserError, match="is empty"):
        LoraSpec(rank=4, alpha=8.0, projections=())
    with pytest.raises(UserError, match="rank is 0"):
        LoraSpec(rank=0, alpha=8.0)
