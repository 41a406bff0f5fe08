"""google-tunix's GRPO train step (`tunix.rl.trainer.Trainer` with its loss "grpo") in benchmarks/update.py.

Set up as `tunix.rl.grpo.GRPOLearner` sets it up, without a KL term; gradients are accumulated over micro-batches. Its
examples are prompts padded on the left and completions padded on the right, or with `packed` rows of several episodes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import memory
import numpy as np
import optax
from flax import nnx
from serve import serve
from tunix.models.qwen2.model import ModelConfig, RematConfig
from tunix.models.qwen2.params import create_model_from_safe_tensors
from tunix.rl import algo_core, common
from tunix.rl.grpo.grpo_learner import GRPOConfig
from tunix.rl.trainer import Trainer
from tunix.sft.peft_trainer import TrainingConfig


class Participant:
    def load(
        self,
        directory: str,
        *,
        learning_rate: float,
        compiled: str,
        settings: dict[str, Any],
        pad: int,
        end: int,
    ) -> dict[str, Any]:
        """Args:
        directory: the policy, a Hugging Face directory. compiled: a directory for compiled programs.
        settings: `micro_rows`, `remat` (none, block or decoder), and `packed`: tokens of a row, 0 for padded ones.
        """
        jax.config.update("jax_compilation_cache_dir", compiled)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
        jnp.zeros(()).block_until_ready()  # the backend itself belongs to nobody
        self.before = memory.resident()
        self.settings, self.pad, self.end = settings, pad, end
        self.learning_rate = learning_rate
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
            remat_config=RematConfig[settings["remat"].upper()],
        )
        self.model = create_model_from_safe_tensors(directory, config, dtype=jnp.float32)
        return {"jax": jax.__version__}

    def batch(self, episodes: list[dict[str, Any]]) -> dict[str, Any]:
        """What every step learns from; see psearch_update.py. Also makes the trainer: how many micro-batches it
        accumulates is fixed."""
        self.episodes = episodes
        examples = self._examples()
        algorithm = GRPOConfig(num_generations=8, beta=0.0, loss_agg_mode="token-mean")
        algorithm.temperature = 1.0

        def loss(model, train_example, algo_config):
            return algo_core.grpo_loss_fn(
                model, train_example, algo_config=algorithm, pad_id=self.pad, eos_id=self.end
            )

        optimizer = optax.chain(
            optax.clip_by_global_norm(1.0), optax.adam(self.learning_rate, b1=0.9, b2=0.95)
        )
        accumulate = len(examples) if len(examples) > 1 else None
        trainer = self.trainer = Trainer(
            self.model,
            optimizer,
            TrainingConfig(eval_every_n_steps=1 << 30, gradient_accumulation_steps=accumulate),
            custom_checkpoint_metadata_fn=dict,
        )
        trainer.with_loss_fn(loss, has_aux=True)
        trainer.with_gen_model_input_fn(lambda x: {"train_example": x, "algo_config": algorithm})
        trainer.is_managed_externally = True
        computed = sum(
            example.prompt_ids.size + example.completion_ids.size for example in examples
        )
        held = sum(len(episode["ids"]) for episode in episodes)
        return {
            "padding_share": 1.0 - held / computed,
            "micro_batches": len(examples),
            "nll": self._nll(examples),
        }

    def _nll(self, examples: list[common.TrainExample]) -> float:
        """The mean −log p of the policy's tokens, as the trainer scores them: the same model on the same tokens?"""
        total = count = 0.0
        for example in examples:
            scored = common.compute_per_token_logps(
                *nnx.split(self.model),
                prompt_tokens=example.prompt_ids,
                completion_tokens=example.completion_ids,
                pad_id=self.pad,
                eos_id=self.end,
                segment_ids=example.segment_ids,
                segment_positions=example.segment_positions,
            )
            total -= float(jnp.sum(scored * example.completion_mask))
            count += float(jnp.sum(example.completion_mask))
        return total / count

    def _examples(self) -> list[common.TrainExample]:
        return self._packed() if self.settings["packed"] else self._padded()

    def _padded(self) -> list[common.TrainExample]:
        """Micro-batches of whole episodes, all of one shape: what is before the first token of the policy is prompt."""
        firsts = [episode["weights"].index(1) for episode in self.episodes]
        lengths = [len(episode["ids"]) for episode in self.episodes]
        before = max(firsts)
        after = max(length - first for length, first in zip(lengths, firsts, strict=True))
        size = self.settings["micro_rows"]
        rows = -(-len(self.episodes) // size) * size
        prompts = np.full((rows, before), self.pad, np.int32)
        completions = np.full((rows, after), self.pad, np.int32)
        masks = np.zeros((rows, after), np.float32)
        advantages = np.zeros(rows, np.float32)
        for row, (episode, first) in enumerate(zip(self.episodes, firsts, strict=True)):
            rest = len(episode["ids"]) - first
            prompts[row, before - first :] = episode["ids"][:first]
            completions[row, :rest] = episode["ids"][first:]
            masks[row, :rest] = episode["weights"][first:]
            advantages[row] = episode["advantage"]
        return [
            common.TrainExample(
                prompt_ids=jnp.asarray(prompts[here]),
                prompt_mask=jnp.asarray(prompts[here] != self.pad),
                completion_ids=jnp.asarray(completions[here]),
                completion_mask=jnp.asarray(masks[here]),
                advantages=jnp.asarray(advantages[here]),
                ref_per_token_logps=None,
                old_per_token_logps=None,
            )
            for start in range(0, rows, size)
            for here in [slice(start, start + size)]
        ]

    def _packed(self) -> list[common.TrainExample]:
        """One row a micro-batch, in the form of `tunix.rl.utils.pack_sequences` (which itself cannot hold what a
        search returned: it takes the first tokens of a completion for its policy's)."""
        budget = self.settings["packed"]
        rows: list[list[dict[str, Any]]] = []
        for episode in sorted(self.episodes, key=lambda each: -len(each["ids"])):
            size = len(episode["ids"])
            fitting = (r for r in rows if sum(len(e["ids"]) for e in r) + size <= budget)
            row = next(fitting, None)
            if row is None:
                rows.append([episode])
            else:
                row.append(episode)
        return [self._row(row, budget) for row in rows]

    def _row(self, episodes: list[dict[str, Any]], budget: int) -> common.TrainExample:
        ids, segments, places = (np.zeros((1, budget), np.int32) for _ in range(3))
        masks, advantages = (np.zeros((1, budget), np.float32) for _ in range(2))
        start = 0
        for number, episode in enumerate(episodes, 1):
            size = len(episode["ids"])
            here = (0, slice(start, start + size))
            ids[here], segments[here], places[here] = episode["ids"], number, np.arange(size)
            masks[here], advantages[here] = episode["weights"], episode["advantage"]
            start += size
        return common.TrainExample(
            prompt_ids=jnp.zeros((1, 0), jnp.int32),
            prompt_mask=jnp.zeros((1, 0), jnp.int32),
            completion_ids=jnp.asarray(ids),
            completion_mask=jnp.asarray(masks),
            advantages=jnp.asarray(advantages),
            ref_per_token_logps=None,
            old_per_token_logps=None,
            segment_ids=jnp.asarray(segments),
            segment_positions=jnp.asarray(places),
        )

    def step(self) -> dict[str, float]:
        """One update; see psearch_update.py. The loss is the mean over the micro-batches."""
        memory.start_peak()
        trainer = self.trainer
        trainer._buffered_train_metrics = trainer._prev_buffered_train_metrics = None
        trainer.train(self._examples())
        jax.block_until_ready(jax.tree.leaves(trainer.optimizer.opt_state))
        told = trainer._prev_buffered_train_metrics
        return {"loss": float(told.loss), "peak": memory.peak() - self.before}


if __name__ == "__main__":
    one = Participant()
    serve({"load": one.load, "batch": one.batch, "step": one.step})
