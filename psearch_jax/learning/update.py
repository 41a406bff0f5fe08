"""One jitted, donated, sharded optimiser step: `(state, batch) -> (state, metrics)`.

Micro-batches are accumulated exactly: every loss is a sum over tokens divided by a count over the whole
batch, and the gradients of the micro-batches are added up. So packing, row length, micro-batch size and
the number of devices change the order of additions and nothing else (law 10).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from psearch_jax.config import AlgorithmConfig, SamplingConfig, SupervisedConfig
from psearch_jax.errors import UserError
from psearch_jax.learning import losses
from psearch_jax.learning.batches import Batch
from psearch_jax.mesh import RULES, batch_sharding, param_shardings, row_shards
from psearch_jax.models.decoder import hidden_states, unembedding

Params = Any
Metrics = dict[str, Float[Array, ""]]


class TrainState(NamedTuple):
    """Everything the optimiser carries from step to step. `step` counts applied updates."""

    params: Params
    opt_state: optax.OptState
    step: Int[Array, ""]


def init_state(
    params: Params, optimizer: optax.GradientTransformation, mesh: Mesh | None = None
) -> TrainState:
    """A fresh state in its place on the mesh. The arrays are copies: the update donates them."""

    def make(params: Params) -> TrainState:
        params = jax.tree.map(jnp.copy, params)
        return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))

    if mesh is None:
        return jax.jit(make)(params)
    return jax.jit(make, out_shardings=param_shardings(mesh, jax.eval_shape(make, params)))(params)


def place_batch(batch: Batch, mesh: Mesh | None) -> Batch:
    """Put a batch on the devices, rows over the mesh's row axes."""
    if mesh is None:
        return jax.tree.map(jnp.asarray, batch)
    return jax.device_put(batch, batch_sharding(mesh))


# A loss is a sum over the tokens of a micro-batch, already divided by the whole batch's count, so that
# sums over micro-batches are the metrics of the batch. `peaks` are merged by maximum instead.
SumsAndPeaks = tuple[Metrics, Metrics]
MicroLoss = Callable[[Params, Batch, Float[Array, ""]], tuple[Float[Array, ""], SumsAndPeaks]]


def make_supervised_update(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None,
    config: SupervisedConfig,
    *,
    dtype: Any = jnp.float32,
    remat: str = "none",
    logprob_chunk: int = 2048,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Cross-entropy over weighted tokens, mean over the weights of the whole batch.

    Metrics: loss (nats a unit of weight), weight (the denominator), tokens (that are not padding), grad_norm
    (before clipping), param_norm, applied (1, or 0 when the loss or gradient was not finite and the state was
    left as it was).
    """

    def loss(params: Params, batch: Batch, weight: Float[Array, ""]):
        hidden_RxLxD = hidden_states(
            graphdef,
            params,
            batch.tokens_RxL,
            batch.positions_RxL,
            batch.segments_RxL,
            dtype=dtype,
            remat=remat,
        )
        scores = losses.token_scores(
            hidden_RxLxD,
            unembedding(graphdef, params),
            batch.tokens_RxL,
            batch.weights_RxL > 0,
            chunk=logprob_chunk,
        )
        total = losses.cross_entropy(scores.logprobs_RxL, batch.weights_RxL) / weight
        return total, ({"loss": total}, {})

    return _make_update(optimizer, mesh, config.micro_rows, loss)


def check_sampling(sampling: SamplingConfig) -> None:
    """Raise a UserError for sampling whose log-probabilities the update cannot reproduce (law 9)."""
    if sampling.temperature <= 0:
        raise UserError(
            "sampling.temperature is 0 (greedy), which leaves nothing to learn from; set it above 0 to train."
        )
    if sampling.top_k != 0 or sampling.top_p != 1.0:
        raise UserError(
            f"sampling.top_k={sampling.top_k}, sampling.top_p={sampling.top_p}: training scores tokens on the "
            "whole vocabulary; set top_k to 0 and top_p to 1 to train."
        )


def make_policy_update(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None,
    config: AlgorithmConfig,
    sampling: SamplingConfig,
    *,
    dtype: Any = jnp.float32,
    remat: str = "none",
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Clipped surrogate over policy tokens, mean over the tokens of the whole batch.

    `update(state, batch)`, or `update(state, batch, reference_params)` when `kl_coefficient` > 0: only then
    are reference parameters needed, and each row meets the reference once.

    Metrics beside those of `make_supervised_update`: ratio (mean π/π_old), clip_fraction, approx_kl (k3 of the
    old to the new policy), entropy (nats a token), kl (k3 to the reference, 0 without one), gap and gap_max
    (mean and largest |log π − log π_old|; in the first minibatch of a rollout that is the gap between the
    rollout and the trainer, law 9).

    Raises:
      UserError: an aggregation that is not known, or sampling whose support is not the whole vocabulary.
    """
    check_sampling(sampling)
    if config.aggregation != "token_mean":
        raise UserError(f"algorithm.aggregation is {config.aggregation!r}; use 'token_mean'.")
    entropy_mode = "loss" if config.entropy_coefficient else "metric"

    def score(params: Params, batch: Batch, entropy: str) -> losses.TokenScores:
        hidden_RxLxD = hidden_states(
            graphdef,
            params,
            batch.tokens_RxL,
            batch.positions_RxL,
            batch.segments_RxL,
            dtype=dtype,
            remat=remat,
        )
        return losses.token_scores(
            hidden_RxLxD,
            unembedding(graphdef, params),
            batch.tokens_RxL,
            batch.weights_RxL > 0,
            temperature=sampling.temperature,
            chunk=config.logprob_chunk,
            entropy=entropy,
        )

    def loss(params: Params, batch: Batch, weight: Float[Array, ""], *reference: Params):
        def mean(x_RxL):
            return (
                jnp.sum(jnp.where(batch.weights_RxL > 0, x_RxL * batch.weights_RxL, 0.0)) / weight
            )

        logprobs_RxL, entropy_RxL = score(params, batch, entropy_mode)
        surrogate = losses.clipped_surrogate(
            logprobs_RxL,
            batch.old_logprobs_RxL,
            batch.advantages_RxL,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
        )
        entropy = mean(entropy_RxL)
        total = mean(surrogate.loss_RxL) - config.entropy_coefficient * entropy
        kl = jnp.zeros(())
        if config.kl_coefficient > 0:
            frozen_RxL = jax.lax.stop_gradient(score(reference[0], batch, "none").logprobs_RxL)
            kl = mean(losses.kl_k3(logprobs_RxL, frozen_RxL))
            total = total + config.kl_coefficient * kl
        gap_RxL = jnp.where(
            batch.weights_RxL > 0, jnp.abs(logprobs_RxL - batch.old_logprobs_RxL), 0.0
        )
        sums = {
            "loss": total,
            "ratio": mean(surrogate.ratio_RxL),
            "clip_fraction": mean(surrogate.clipped_RxL.astype(jnp.float32)),
            "approx_kl": mean(losses.kl_k3(batch.old_logprobs_RxL, logprobs_RxL)),
            "entropy": entropy,
            "kl": kl,
            "gap": mean(gap_RxL),
        }
        return total, (sums, {"gap_max": jnp.max(gap_RxL)})

    return _make_update(optimizer, mesh, config.micro_rows, loss)


def _make_update(
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None,
    micro_rows: int,
    loss: MicroLoss,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """The step around a loss; further arguments of the update are handed to the loss.

    `denominator` replaces the batch's sum of weights as what the loss is divided by: a caller that leaves out
    episodes whose gradient is 0 keeps the mean over all of them. Metrics other than the loss stay means over
    the tokens that are there.
    """

    def update(
        state: TrainState,
        batch: Batch,
        *extra: Any,
        denominator: Float[Array, ""] | float | None = None,
    ) -> tuple[TrainState, Metrics]:
        # A batch without a predicted token has loss 0 and gradient 0, not 0/0.
        own_weight = jnp.maximum(jnp.sum(batch.weights_RxL), 1e-9)
        weight = own_weight if denominator is None else jnp.asarray(denominator, jnp.float32)
        gradient = jax.value_and_grad(loss, has_aux=True)
        micros_NxMxL = _micro_batches(batch, micro_rows, mesh)
        first = jax.tree.map(lambda array: array[0], micros_NxMxL)
        if micros_NxMxL.tokens_RxL.shape[0] == 1:
            (_, (sums, peaks)), grads = gradient(state.params, first, weight, *extra)
        else:
            shapes = jax.eval_shape(gradient, state.params, first, weight, *extra)
            (_, (sums, peaks)), grads = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

            def add(total, micro):
                (_, (sums, peaks)), grads = gradient(state.params, micro, weight, *extra)
                return _merge(total, (grads, sums, peaks))

            def accumulate(total, micro):
                # Batches keep one shape; what a short one leaves empty is stepped over.
                used = jnp.any(micro.weights_RxL > 0)
                return jax.lax.cond(used, add, lambda total, _: total, total, micro), None

            (grads, sums, peaks), _ = jax.lax.scan(accumulate, (grads, sums, peaks), micros_NxMxL)

        grad_norm = optax.global_norm(grads)
        finite = jnp.isfinite(grad_norm) & jnp.isfinite(sums["loss"])
        steps, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, steps)
        new = TrainState(params, opt_state, state.step + 1)
        new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
        if mesh is not None:
            new = jax.lax.with_sharding_constraint(new, param_shardings(mesh, new))
        means = {name: value * (weight / own_weight) for name, value in sums.items()}
        metrics = means | {"loss": sums["loss"]} | peaks
        metrics["weight"] = jnp.sum(batch.weights_RxL)
        metrics["tokens"] = jnp.sum((batch.segments_RxL > 0).astype(jnp.float32))
        metrics["grad_norm"] = grad_norm
        metrics["param_norm"] = optax.global_norm(new.params)
        metrics["applied"] = finite.astype(jnp.float32)
        return new, metrics

    return jax.jit(update, donate_argnums=0)


def _merge(a, b):
    """Add gradients and sums, keep the larger of two peaks (which are never negative)."""
    (grads_a, sums_a, peaks_a), (grads_b, sums_b, peaks_b) = a, b
    return (
        jax.tree.map(jnp.add, grads_a, grads_b),
        jax.tree.map(jnp.add, sums_a, sums_b),
        jax.tree.map(jnp.maximum, peaks_a, peaks_b),
    )


def _micro_batches(batch: Batch, micro_rows: int, mesh: Mesh | None) -> Batch:
    """[R, L] → [N, M, L] in order, M being `micro_rows` (at most R) rounded up to the row shards.

    The rows of every micro-batch lie over the mesh's row axes; only token-sized arrays move for that.
    """
    R = batch.tokens_RxL.shape[0]
    shards = 1 if mesh is None else row_shards(mesh)
    M = -(-min(micro_rows, R) // shards) * shards
    N = -(-R // M)

    def deal(array_RxL):
        dealt_NxMxL = jnp.pad(array_RxL, [(0, N * M - R), (0, 0)]).reshape(N, M, -1)
        if mesh is None:
            return dealt_NxMxL
        spec = PartitionSpec(None, RULES["rows"])
        return jax.lax.with_sharding_constraint(dealt_NxMxL, NamedSharding(mesh, spec))

    return jax.tree.map(deal, batch)
