"""One jitted, donated, sharded optimiser step: `(state, batch) -> (state, metrics)`.

Micro-batches are accumulated exactly: every loss is a sum over tokens divided by a count over the whole
batch, and the gradients of the micro-batches are added up. So packing, row length, micro-batch size and
the number of devices change the order of additions and nothing else (law 10).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from psearch_jax import processes
from psearch_jax.config import AlgorithmConfig, SamplingConfig, SupervisedConfig
from psearch_jax.errors import UserError
from psearch_jax.learning import aggregation, losses
from psearch_jax.learning.batches import Batch, micro_batch_rows
from psearch_jax.learning.objective import kl_in_loss, make_policy_loss
from psearch_jax.mesh import Layout, batch_sharding, param_shardings, row_shards
from psearch_jax.models.decoder import hidden_states, unembedding
from psearch_jax.models.lora import join

Params = Any
Rows = TypeVar("Rows", bound=tuple)  # a `Batch` or another named tuple of [R, L] arrays
Metrics = dict[str, Float[Array, ""]]


class TrainState(NamedTuple):
    """Everything the optimiser carries from step to step. `step` counts applied updates.

    `params` is what trains: with adapters these alone (`lora.split_trainable`).
    """

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


def place_batch(batch: Rows, mesh: Mesh | None) -> Rows:
    """Put a batch (any named tuple of [R, L] arrays) on the devices, rows over the mesh's row axes."""
    if mesh is None:
        return jax.tree.map(jnp.asarray, batch)
    return jax.tree.map(lambda array: processes.place(array, batch_sharding(mesh)), batch)


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How a forward pass is computed; see `decoder.hidden_states`."""

    dtype: Any = jnp.float32
    remat: str = "none"
    attention: str = "plain"


FLOAT32 = Compute()


# A loss is a sum over the tokens of a micro-batch, already divided by the whole batch's count, so that
# sums over micro-batches are the metrics of the batch. `peaks` are merged by maximum instead.
# Its arguments: what trains, the micro-batch, the count, what is frozen, and what the update was given besides.
SumsAndPeaks = tuple[Metrics, Metrics]
MicroLoss = Callable[..., tuple[Float[Array, ""], SumsAndPeaks]]


def make_forward(
    graphdef: nnx.GraphDef, mesh: Mesh | None, compute: Compute
) -> Callable[[Params, Any], Float[Array, "R L D"]]:
    """The hidden states of a batch's tokens."""

    def forward(params: Params, batch: Any) -> Float[Array, "R L D"]:
        return hidden_states(
            graphdef,
            params,
            batch.tokens_RxL,
            batch.positions_RxL,
            batch.segments_RxL,
            dtype=compute.dtype,
            remat=compute.remat,
            attention_name=compute.attention,
            layout=Layout(mesh),
        )

    return forward


def make_score(
    graphdef: nnx.GraphDef,
    mesh: Mesh | None,
    compute: Compute,
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> Callable[..., losses.TokenScores]:
    """Log-probabilities (and entropies) of the tokens of a batch that have a weight: a `Score`, which takes hidden
    states of these parameters that are there already as a fourth argument."""
    layout = Layout(mesh)
    forward = make_forward(graphdef, mesh, compute)

    def score(
        params: Params,
        batch: Batch,
        entropy: str,
        hidden_RxLxD: Float[Array, "R L D"] | None = None,
    ) -> losses.TokenScores:
        if hidden_RxLxD is None:
            hidden_RxLxD = forward(params, batch)
        return losses.token_scores(
            hidden_RxLxD,
            unembedding(graphdef, params),
            batch.tokens_RxL,
            batch.weights_RxL > 0,
            temperature=temperature,
            chunk=chunk,
            entropy=entropy,
            layout=layout,
        )

    return score


def make_supervised_update(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None,
    config: SupervisedConfig,
    *,
    compute: Compute = Compute(),
    logprob_chunk: int = 2048,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Cross-entropy over weighted tokens, mean over the weights of the whole batch.

    Metrics: loss (nats a unit of weight), weight (the denominator), tokens (that are not padding), grad_norm
    (before clipping), param_norm, applied (1, or 0 when the loss or gradient was not finite and the state was
    left as it was).
    """

    score = make_score(graphdef, mesh, compute, chunk=logprob_chunk)

    def loss(params: Params, batch: Batch, weight: Float[Array, ""], frozen: Params):
        scores = score(join(params, frozen), batch, "none")
        total = losses.cross_entropy(scores.logprobs_RxL, batch.weights_RxL) / weight
        return total, ({"loss": total}, {})

    return make_update(optimizer, mesh, config.micro_rows, loss)


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
    compute: Compute = Compute(),
) -> Callable[..., tuple[TrainState, Metrics]]:
    """The objective that the algorithm's settings ask for (objective.py), over policy tokens of the whole batch.

    `update(state, batch)`, or `update(state, batch, reference_params)` where there is a KL term in the loss: only
    then are reference parameters needed, and each row meets the reference once. `kl_coefficient=` replaces the
    configured one (an adaptive one changes from step to step, and nothing that changes is baked in).

    Metrics beside those of `make_supervised_update`, means over tokens whatever the aggregation is: ratio (mean
    π/π_old), clip_fraction, approx_kl (k3 of the policy that played to the new one), entropy (nats a token), kl
    (estimate to the reference, 0 without one in the loss), gap and gap_max (mean and largest |log π − log π_old|;
    in the first minibatch of a rollout that is the gap between the rollout and the trainer, law 9); and with a
    correction: correction (mean weight), masked (share of tokens that count 0).

    Raises:
      UserError: a name that is not known, or sampling whose support is not the whole vocabulary.
    """
    check_sampling(sampling)
    score = make_score(
        graphdef,
        mesh,
        compute,
        temperature=sampling.temperature,
        chunk=config.logprob_chunk,
    )
    policy_loss = make_policy_loss(score, config)

    def loss(
        params: Params,
        batch: Batch,
        weight: Float[Array, ""],
        frozen: Params,
        *reference: Params,
        kl_coefficient: Float[Array, ""] | None = None,
    ):
        before = join(reference[0], frozen) if kl_in_loss(config) else None
        return policy_loss(join(params, frozen), batch, weight, before, kl_coefficient)

    def denominator(batch: Batch) -> Float[Array, ""]:
        return aggregation.denominator(config.aggregation, batch, config.fixed_length)

    own = None if config.aggregation == "token_mean" else denominator
    return make_update(optimizer, mesh, config.micro_rows, loss, own)


def make_update(
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None,
    micro_rows: int,
    loss: MicroLoss,
    own_denominator: Callable[[Any], Float[Array, ""]] | None = None,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """The step around a loss; further arguments of the update are handed to the loss.

    A batch is a `Batch`, or another named tuple of [R, L] arrays with tokens, segments and weights among them.
    `frozen` is the part of the parameters that does not train (with adapters: all but these). `rate_scale` is a
    factor of the optimiser's learning rate (and so of its weight decay).

    What the loss is divided by is `own_denominator` of the whole batch (default: its sum of weights), or what the
    caller gives as `denominator`: one that leaves out episodes whose gradient is 0 keeps the mean over all of them.
    Metrics other than the loss stay means over the tokens that are there.
    """

    def update(
        state: TrainState,
        batch: Any,
        *extra: Any,
        denominator: Float[Array, ""] | float | None = None,
        frozen: Params = None,
        rate_scale: Float[Array, ""] | float | None = None,
        **settings: Any,
    ) -> tuple[TrainState, Metrics]:
        # A batch without a predicted token has loss 0 and gradient 0, not 0/0.
        own_weight = jnp.maximum(jnp.sum(batch.weights_RxL), 1e-9)
        if denominator is not None:
            weight = jnp.asarray(denominator, jnp.float32)
        else:
            weight = own_weight if own_denominator is None else own_denominator(batch)
        gradient = jax.value_and_grad(partial(loss, **settings), has_aux=True)
        extra = (nnx.State({}) if frozen is None else frozen, *extra)

        def in_place(tree: Any) -> Any:
            """Gradients and states lie as the parameters do."""
            if mesh is None:
                return tree
            return jax.lax.with_sharding_constraint(tree, param_shardings(mesh, tree))

        micros_NxMxL = micro_batches(batch, micro_rows, mesh)
        first = jax.tree.map(lambda array: array[0], micros_NxMxL)
        if micros_NxMxL.tokens_RxL.shape[0] == 1:
            (_, (sums, peaks)), grads = gradient(state.params, first, weight, *extra)
        else:
            shapes = jax.eval_shape(gradient, state.params, first, weight, *extra)
            (_, (sums, peaks)), grads = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

            def add(total, micro):
                (_, (sums, peaks)), grads = gradient(state.params, micro, weight, *extra)
                return _merge(total, (in_place(grads), sums, peaks))

            def accumulate(total, micro):
                # Batches keep one shape; what a short one leaves empty is stepped over.
                used = jnp.any(micro.weights_RxL > 0)
                return jax.lax.cond(used, add, lambda total, _: total, total, micro), None

            (grads, sums, peaks), _ = jax.lax.scan(accumulate, (grads, sums, peaks), micros_NxMxL)

        grads = in_place(grads)
        grad_norm = optax.global_norm(grads)
        finite = jnp.isfinite(grad_norm) & jnp.isfinite(sums["loss"])
        steps, opt_state = optimizer.update(grads, state.opt_state, state.params)
        if rate_scale is not None:
            steps = jax.tree.map(lambda step: step * rate_scale, steps)
        params = optax.apply_updates(state.params, steps)
        new = TrainState(params, opt_state, state.step + 1)
        new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
        new = in_place(new)
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


def micro_batches(batch: Any, micro_rows: int, mesh: Mesh | None) -> Any:
    """[R, L] → [N, M, L] in order, M being `micro_batch_rows`.

    The rows of every micro-batch lie over the mesh's row axes; only token-sized arrays move for that.
    """
    R = batch.tokens_RxL.shape[0]
    M = micro_batch_rows(R, micro_rows, 1 if mesh is None else row_shards(mesh))
    N = -(-R // M)

    def deal(array_RxL):
        dealt_NxMxL = jnp.pad(array_RxL, [(0, N * M - R), (0, 0)]).reshape(N, M, -1)
        if mesh is None:
            return dealt_NxMxL
        return Layout(mesh).constrain(dealt_NxMxL, None, "rows", "length")

    return jax.tree.map(deal, batch)
