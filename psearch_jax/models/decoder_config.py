"""Sizes and options of a decoder, and what a mesh makes of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from psearch_jax.errors import UserError
from psearch_jax.mesh import Layout, check_divides
from psearch_jax.models import families
from psearch_jax.models.attention import RopeScaling
from psearch_jax.models.lora import LoraSpec


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and options of a decoder.

    `max_positions` is what the checkpoint was made for; nothing is allocated from it. `kv_repeat` and `lora` are not
    the checkpoint's: the first comes from the mesh (`on_mesh`), the second from the recipe.
    """

    family: str = "qwen2"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = True
    attention_bias: bool = True  # on q, k and v, as in Qwen2; o has none
    qk_norm: bool = False  # RMS norm of each query and key head, as in Qwen3
    max_positions: int = 2048
    max_unrolled_layers: int = 6
    kv_repeat: int = 1  # copies of each key/value head in activations and cache
    lora: LoraSpec | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; "
                "choose a divisor."
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim {self.head_dim} is odd; rotary embeddings need an even one.")

    @property
    def scanned(self) -> bool:
        """Whether the layers are stored stacked and run by a scan."""
        return self.num_layers > self.max_unrolled_layers

    @property
    def scale_of_adapters(self) -> float:
        return self.lora.scale if self.lora else 0.0

    def rank_of(self, projection: str) -> int:
        """The rank of a projection's adapter, 0 where it has none."""
        return self.lora.rank if self.lora and projection in self.lora.projections else 0

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> DecoderConfig:
        """Read a Hugging Face config.json. Raises UserError naming what is not supported."""
        return cls(**families.read_config(values))

    def to_hf(self) -> dict[str, Any]:
        """The config.json of this model, readable by transformers 4 and 5."""
        return families.write_config(self)


def on_mesh(config: DecoderConfig, layout: Layout) -> DecoderConfig:
    """The same model, laid out: where the tensor axis is larger than the number of key/value heads, each is repeated,
    so that every device holds the one that its query heads read.

    Raises:
      UserError: heads, widths or the vocabulary that the mesh axes do not divide.
    """
    for what, logical, size in (
        ("num_attention_heads", "heads", config.num_heads),
        ("intermediate_size", "mlp", config.intermediate_size),
        ("vocab_size", "vocab", config.vocab_size),
        ("hidden_size", "table_width", config.hidden_size),
    ):
        check_divides(layout, f"{what} of the policy", logical, size)
    # Both the axis and the key/value heads divide the query heads, so their common multiple does.
    heads = math.lcm(config.num_kv_heads, layout.size("kv_heads"))
    return replace(config, kv_repeat=heads // config.num_kv_heads)
