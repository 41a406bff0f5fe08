"""google-tunix's own sampler (`tunix.generate.sampler.Sampler`) as a peer of benchmarks/rollout.py.

It compiles for every number of prompts and every padded prompt length, so both come from a short list that is warmed
up before anything is measured, each length with a cache no longer than it needs. Prompts go in as token ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from serve import serve
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.qwen2.model import ModelConfig
from tunix.models.qwen2.params import create_model_from_safe_tensors


class Numbers:
    """A tokenizer whose text is token ids with blanks between them: nothing is tokenised anew at each turn."""

    def __init__(self, end: int, pad: int) -> None:
        self._end, self._pad = end, pad

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> None:
        return None

    def eos_id(self) -> int:
        return self._end

    def pad_id(self) -> int:
        return self._pad


class Peer:
    def load(
        self,
        directory: str,
        *,
        steps: int,
        rows: list[int],
        lengths: list[int],
        end: int,
        pad: int,
        tags: dict[str, int],
        compiled: str,
        **_: Any,
    ) -> dict[str, Any]:
        """Args:
        directory: a Hugging Face directory. steps: tokens of one turn at most. rows, lengths: the shapes.
        tags: the tokens that end a turn beside `end`, each under its opening tag's token id.
        compiled: a directory for compiled programs.
        """
        jax.config.update("jax_compilation_cache_dir", compiled)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
        hf = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
        config = ModelConfig(
            num_layers=hf["num_hidden_layers"],
            vocab_size=hf["vocab_size"],
            embed_dim=hf["hidden_size"],
            hidden_dim=hf["intermediate_size"],
            num_heads=hf["num_attention_heads"],
            head_dim=hf["head_dim"],
            num_kv_heads=hf["num_key_value_heads"],
            rope_theta=hf["rope_theta"],
            norm_eps=hf["rms_norm_eps"],
            use_tied_embedding=hf["tie_word_embeddings"],
        )
        model = create_model_from_safe_tensors(directory, config, dtype=jnp.float32)
        self.steps, self.rows, self.end = steps, rows, end
        self.tags = {int(opening): closing for opening, closing in tags.items()}
        self.samplers = {
            length: Sampler(
                model,
                Numbers(end, pad),
                CacheConfig(
                    length + steps, config.num_layers, config.num_kv_heads, config.head_dim
                ),
            )
            for length in lengths
        }
        return {"jax": jax.__version__}

    def warm_up(self, temperature: float) -> int:
        """Compile for every shape; returns how many programs there are."""
        for length, sampler in self.samplers.items():
            for rows in self.rows:
                self._draw(sampler, [[self.end]] * rows, length, temperature, 0)
        return self.compiled()

    def compiled(self) -> int:
        """Programs so far."""
        return sum(
            f._cache_size()
            for sampler in self.samplers.values()
            for f in (sampler._compiled_prefill_fn, sampler._compiled_decode_fn)
        )

    def generate(self, prompts: list[list[int]], temperature: float, seed: int) -> list[list[int]]:
        """The turn of every prompt, the token that ended it included."""
        longest = max(map(len, prompts))
        length = next(size for size in self.samplers if size >= longest)
        rows = next(size for size in self.rows if size >= len(prompts))
        # Empty rows repeat real ones, so that none runs longer than these do.
        padded = [prompts[n % len(prompts)] for n in range(rows)]
        drawn = self._draw(self.samplers[length], padded, length, temperature, seed)
        return [self._ended(ids) for ids in drawn[: len(prompts)]]

    def _draw(
        self,
        sampler: Sampler,
        prompts: list[list[int]],
        length: int,
        temperature: float,
        seed: int,
    ) -> list[list[int]]:
        output = sampler(
            [" ".join(map(str, ids)) for ids in prompts],
            max_generation_steps=self.steps,
            max_prompt_length=length,
            temperature=temperature or 1.0,
            top_p=1.0 if temperature else None,  # without top_p it is greedy
            seed=seed,
            eos_tokens=[self.end, *self.tags.values()],
        )
        return [ids.tolist() for ids in output.tokens]

    def _ended(self, ids: list[int]) -> list[int]:
        """A turn with the token that ended it, which the sampler leaves out: the tag that closes the last open one."""
        if len(ids) == self.steps:
            return ids
        opened = [self.tags[token] for token in ids if token in self.tags]
        return [*ids, opened[-1] if opened else self.end]


if __name__ == "__main__":
    peer = Peer()
    serve(
        {
            "load": peer.load,
            "warm_up": peer.warm_up,
            "compiled": peer.compiled,
            "generate": peer.generate,
        }
    )
