"""Forward passes over a whole batch before it is learned from; compiled and run only where the algorithm needs them.

Which it needs: `rescores` (the trainer's own old log-probabilities, for more than one optimiser step a rollout) and
`scores_reference` (the KL as a part of the reward). Micro-batches without a policy token cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from psearch_jax.config import AlgorithmConfig, SamplingConfig
from psearch_jax.learning.batches import Batch
from psearch_jax.learning.objective import Metrics, apply_correction, scores_itself
from psearch_jax.learning.update import FLOAT32, Compute, make_score, micro_batches
from psearch_jax.mesh import batch_sharding, replicated
from psearch_jax.models.lora import join


def rescores(config: AlgorithmConfig) -> bool:
    """Whether old log-probabilities take a pass of their own."""
    return config.old_logprobs == "trainer" and not scores_itself(config)


def scores_reference(config: AlgorithmConfig) -> bool:
    """Whether the reference scores whole episodes before they have advantages."""
    return config.kl_coefficient > 0 and config.kl_place == "reward"


def over_micro_batches(
    score: Callable[[Any], Float[Array, "M L"]], batch: Any, micro_rows: int, mesh: Mesh | None
) -> Float[Array, "R L"]:
    """`score` of every micro-batch, row for row; 0 where a micro-batch has no weight."""
    micros_NxMxL = micro_batches(batch, micro_rows, mesh)

    def step(carry: None, micro: Any):
        nothing_MxL = jnp.zeros(micro.weights_RxL.shape, jnp.float32)
        used = jnp.any(micro.weights_RxL > 0)
        return carry, jax.lax.cond(used, score, lambda _: nothing_MxL, micro)

    _, scores_NxMxL = jax.lax.scan(step, None, micros_NxMxL)
    R, L = batch.tokens_RxL.shape
    return scores_NxMxL.reshape(-1, L)[:R]


def make_logprobs(
    graphdef: nnx.GraphDef,
    mesh: Mesh | None,
    config: AlgorithmConfig,
    sampling: SamplingConfig,
    *,
    compute: Compute = FLOAT32,
) -> Callable[[Any, Any, Batch], Float[Array, "R L"]]:
    """Jitted `(trainable, frozen, batch)` → log-probabilities, whole on every device (and so on every host)."""
    score = make_score(
        graphdef, mesh, compute, temperature=sampling.temperature, chunk=config.logprob_chunk
    )

    def logprobs(trainable: Any, frozen: Any, batch: Batch) -> Float[Array, "R L"]:
        params = join(trainable, frozen)
        return over_micro_batches(
            lambda micro: score(params, micro, "none").logprobs_RxL, batch, config.micro_rows, mesh
        )

    return jax.jit(logprobs, out_shardings=None if mesh is None else replicated(mesh))


def make_rescore(
    graphdef: nnx.GraphDef,
    mesh: Mesh | None,
    config: AlgorithmConfig,
    sampling: SamplingConfig,
    *,
    compute: Compute = FLOAT32,
) -> Callable[[Any, Any, Batch], tuple[Batch, Metrics]]:
    """Jitted `(trainable, frozen, batch)` → the batch with the trainer's old log-probabilities and its advantages
    corrected, and the gap (mean, largest) between trainer and rollout that it had.

    Call it for all minibatches of a rollout before the first of them changes the parameters.
    """
    score = make_score(
        graphdef, mesh, compute, temperature=sampling.temperature, chunk=config.logprob_chunk
    )

    def rescore(trainable: Any, frozen: Any, batch: Batch) -> tuple[Batch, Metrics]:
        params = join(trainable, frozen)
        own_RxL = over_micro_batches(
            lambda micro: score(params, micro, "none").logprobs_RxL, batch, config.micro_rows, mesh
        )
        weight = jnp.maximum(jnp.sum(batch.weights_RxL), 1e-9)

        def mean(x_RxL: Array) -> Array:
            counted_RxL = jnp.where(batch.weights_RxL > 0, x_RxL * batch.weights_RxL, 0.0)
            return jnp.sum(counted_RxL) / weight

        gap_RxL = jnp.abs(own_RxL - batch.old_logprobs_RxL)
        gap_RxL = jnp.where(batch.weights_RxL > 0, gap_RxL, 0.0)
        told = {"gap": mean(gap_RxL), "gap_max": jnp.max(gap_RxL)}
        advantages_RxL, corrected = apply_correction(config, own_RxL, batch, mean)
        batch = batch._replace(advantages_RxL=advantages_RxL, old_logprobs_RxL=own_RxL)
        return batch, told | corrected

    placed = None if mesh is None else (batch_sharding(mesh), replicated(mesh))
    return jax.jit(rescore, out_shardings=placed)
