"""`transformers.generate` as a peer of benchmarks/rollout.py: key-value cache, prompts padded on the left.

Turns end at token ids (its cheapest stopping criterion; in the embedded tokenizer every closing tag is one token).
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from serve import serve


class Peer:
    def load(
        self,
        directory: str,
        *,
        steps: int,
        end: int,
        pad: int,
        tags: dict[str, int],
        threads: int,
        **_: Any,
    ) -> dict[str, Any]:
        """Args: as in tunix_sampler.py; threads: cores that torch takes."""
        torch.set_num_threads(threads)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self.steps, self.pad, self.stops = steps, pad, [end, *tags.values()]
        return {"torch": torch.__version__, "transformers": transformers.__version__}

    def warm_up(self, temperature: float) -> int:
        """Nothing compiles here; a call allocates what the first one does."""
        self.generate([[self.stops[0]] * 8] * 8, temperature, 0)
        return 0

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], temperature: float, seed: int) -> list[list[int]]:
        """The turn of every prompt, the token that ended it included."""
        length = max(map(len, prompts))
        lines = [[self.pad] * (length - len(ids)) + ids for ids in prompts]
        mask = [[0] * (length - len(ids)) + [1] * len(ids) for ids in prompts]
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        torch.manual_seed(seed)
        drawn = self.model.generate(
            input_ids=torch.tensor(lines),
            attention_mask=torch.tensor(mask),
            max_new_tokens=self.steps,
            eos_token_id=self.stops,
            pad_token_id=self.pad,
            use_cache=True,
            **sampling,
        )
        return [self._ended(ids) for ids in drawn[:, length:].tolist()]

    def _ended(self, ids: list[int]) -> list[int]:
        for place, token in enumerate(ids):
            if token in self.stops:
                return ids[: place + 1]
        return ids


if __name__ == "__main__":
    peer = Peer()
    serve({"load": peer.load, "warm_up": peer.warm_up, "generate": peer.generate})
