"""The decoder families that are supported, as differences between options of one decoder.

A Hugging Face config.json decides. `read_config` turns it into the arguments of `DecoderConfig`, `write_config` back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from psearch_jax.errors import UserError
from psearch_jax.models.attention import RopeScaling

if TYPE_CHECKING:
    from psearch_jax.models.decoder_config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a family's config.json does not say because its code does.

    `attention_bias`: on q, k and v when the file is silent; where `bias_is_fixed` the file has no say.
    """

    architecture: str
    model_type: str
    attention_bias: bool
    bias_is_fixed: bool
    qk_norm: bool


FAMILIES: dict[str, Family] = {
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        attention_bias=True,
        bias_is_fixed=True,
        qk_norm=False,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        attention_bias=False,
        bias_is_fixed=False,
        qk_norm=True,
    ),
    "llama": Family(
        architecture="LlamaForCausalLM",
        model_type="llama",
        attention_bias=False,
        bias_is_fixed=False,
        qk_norm=False,
    ),
}

#: Ours → Hugging Face's, for what every family has and must say.
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}


def read_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `DecoderConfig` from a config.json.

    Raises:
      UserError: an architecture or an option that is not supported, or values that are missing.
    """
    architecture = (values.get("architectures") or [None])[0]
    name = next((n for n, f in FAMILIES.items() if f.architecture == architecture), None)
    if name is None:
        supported = ", ".join(family.architecture for family in FAMILIES.values())
        raise UserError(
            f"architecture {architecture!r} in config.json is not supported; use one of {supported}."
        )
    family = FAMILIES[name]
    bias = values.get("attention_bias", family.attention_bias)
    _refuse(values, "use_sliding_window", False)
    _refuse(values, "hidden_act", "silu")
    _refuse(values, "mlp_bias", False)
    if not family.bias_is_fixed and bias:  # these families would put a bias on o_proj, too
        _refuse(values, "attention_bias", False)
    missing = [theirs for theirs in SIZES.values() if theirs not in values]
    if missing:
        raise UserError(
            f"config.json lacks {', '.join(missing)}; it is not a whole {family.model_type} config."
        )
    theta, scaling = _read_rope(values)
    heads = values["num_attention_heads"]
    return {
        **{ours: values[theirs] for ours, theirs in SIZES.items()},
        "family": name,
        "num_kv_heads": values.get("num_key_value_heads") or heads,
        "head_dim": values.get("head_dim") or values["hidden_size"] // heads,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rms_norm_eps": values.get("rms_norm_eps", 1e-6),
        "tie_embeddings": values.get("tie_word_embeddings", False),
        "attention_bias": family.attention_bias if family.bias_is_fixed else bias,
        "qk_norm": family.qk_norm,
        "max_positions": values.get("max_position_embeddings", 32768),
    }


def _refuse(values: Mapping[str, Any], key: str, only: Any) -> None:
    if values.get(key, only) not in (only, None):
        raise UserError(f"{key} {values[key]!r} in config.json is not supported; only {only!r} is.")


def _read_rope(values: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling. transformers 5 keeps both in rope_parameters, older files apart at the top."""
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta", values.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3"):
        raise UserError(
            f"rope type {kind!r} in config.json is not supported; use default, linear or llama3."
        )
    try:
        if kind == "linear":
            return theta, RopeScaling(kind="linear", factor=float(rope["factor"]))
        return theta, RopeScaling(
            kind="llama3",
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_positions=int(rope["original_max_position_embeddings"]),
        )
    except KeyError as error:
        raise UserError(
            f"rope type {kind!r} in config.json lacks {error.args[0]}; fetch the file again."
        ) from error


def write_config(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a model, readable by transformers 4 and 5."""
    family = FAMILIES[config.family]
    values: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_dropout": 0.0,
    }
    if family.bias_is_fixed:
        values["use_sliding_window"] = False
    else:
        values["attention_bias"] = config.attention_bias
    if config.rope_scaling is not None:
        values["rope_scaling"] = write_rope(config.rope_scaling)
    return values


def write_rope(scaling: RopeScaling) -> dict[str, Any]:
    """The rope_scaling entry of a config.json."""
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_positions,
    }
