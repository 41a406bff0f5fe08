"""Our policy update (`learning/update.py`) as a participant of benchmarks/update.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import memory
import numpy as np
from serve import serve

from psearch_jax.assembly import keep_compiled_programs
from psearch_jax.config import AlgorithmConfig, Config, OptimizerConfig, SamplingConfig
from psearch_jax.learning.batches import Sequence, pack, padding_share
from psearch_jax.learning.optimizers import make_optimizer
from psearch_jax.learning.update import init_state, make_policy_update, place_batch
from psearch_jax.models.weights import load_hf_directory


class Participant:
    def load(
        self, directory: str, *, learning_rate: float, compiled: str, settings: dict[str, Any]
    ) -> dict[str, Any]:
        """Args:
        directory: the policy, a Hugging Face directory. compiled: a directory for compiled programs.
        settings: of `algorithm`.
        """
        keep_compiled_programs(Config(compile_cache=compiled))
        jnp.zeros(()).block_until_ready()  # the backend itself belongs to nobody
        self.before = memory.resident()
        self.algorithm = dataclasses.replace(AlgorithmConfig(), **settings)
        _, graphdef, params = load_hf_directory(directory, np.float32)
        optimizer = make_optimizer(OptimizerConfig(learning_rate=learning_rate, b2=0.95), 1)
        self.update = make_policy_update(
            graphdef, optimizer, None, self.algorithm, SamplingConfig()
        )
        self.state = init_state(params, optimizer)
        return {"jax": jax.__version__}

    def batch(self, episodes: list[dict[str, Any]]) -> dict[str, Any]:
        """What every step learns from: `ids`, `weights` (1 for the policy's tokens), `advantage`, `logprobs`."""
        self.sequences = [
            Sequence(
                ids=episode["ids"],
                weights=episode["weights"],
                advantages=episode["advantage"],
                old_logprobs=episode["logprobs"],
            )
            for episode in episodes
        ]
        return {"padding_share": padding_share([self._pack()], self.algorithm.micro_rows)}

    def _pack(self):
        return pack(
            self.sequences,
            self.algorithm.row_length,
            rows_multiple=self.algorithm.micro_rows,
        )

    def step(self) -> dict[str, float]:
        """One update, from episodes to new parameters. `peak`: by how many bytes the process grew over what it was
        before there were parameters, at its largest in this step."""
        memory.start_peak()
        self.state, metrics = self.update(self.state, place_batch(self._pack(), None))
        jax.block_until_ready(self.state)
        return {
            "loss": float(metrics["loss"]),
            "nll": float(metrics["gap"]),  # to log-probabilities of 0
            "peak": memory.peak() - self.before,
        }

    def program_bytes(self) -> int:
        """What the compiled update needs at its largest: arguments, results and temporaries."""
        batch = place_batch(self._pack(), None)
        sizes = self.update.lower(self.state, batch).compile().memory_analysis()
        return (
            sizes.argument_size_in_bytes
            + sizes.output_size_in_bytes
            + sizes.temp_size_in_bytes
            - sizes.alias_size_in_bytes
        )


if __name__ == "__main__":
    one = Participant()
    serve(
        {
            "load": one.load,
            "batch": one.batch,
            "step": one.step,
            "program_bytes": one.program_bytes,
        }
    )
