"""The critic of GAE: values of states, and how they are learned.

`separate`: a decoder of its own, which starts as a copy of the policy and trains beside it (with adapters: a second set
of them over the same frozen parameters). `shared`: a head on the policy, trained by the policy's update on the sum of
both losses. The head starts at zero, so the first values are 0 and the first advantages those without a critic.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from psearch_jax.config import AlgorithmConfig, OptimizerConfig, SamplingConfig
from psearch_jax.learning import losses
from psearch_jax.learning.aggregation import token_shares
from psearch_jax.learning.batches import Batch, Sequence, pack, split
from psearch_jax.learning.objective import kl_in_loss, make_policy_loss
from psearch_jax.learning.optimizers import make_optimizer
from psearch_jax.learning.rescoring import over_micro_batches
from psearch_jax.learning.update import (
    FLOAT32,
    Compute,
    Metrics,
    TrainState,
    check_sampling,
    init_state,
    make_forward,
    make_score,
    make_update,
)
from psearch_jax.mesh import replicated
from psearch_jax.models.lora import join


class ValueHead(nnx.Module):
    """One number from a hidden state."""

    def __init__(self, width: int):
        self.kernel = nnx.Param(jnp.zeros((width,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((), jnp.float32))

    def __call__(self, hidden_RxLxD: Float[Array, "R L D"]) -> Float[Array, "R L"]:
        return hidden_RxLxD.astype(jnp.float32) @ self.kernel[...] + self.bias[...]


class ValueBatch(NamedTuple):
    """Rows as in `Batch`, aligned alike: the value before token t stands at t."""

    tokens_RxL: Int[np.ndarray, "R L"]
    positions_RxL: Int[np.ndarray, "R L"]
    segments_RxL: Int[np.ndarray, "R L"]
    weights_RxL: Float[np.ndarray, "R L"]
    returns_RxL: Float[np.ndarray, "R L"]
    old_values_RxL: Float[np.ndarray, "R L"]


class JointBatch(NamedTuple):
    """A `Batch` with what a shared critic learns from the same tokens."""

    tokens_RxL: Int[np.ndarray, "R L"]
    positions_RxL: Int[np.ndarray, "R L"]
    segments_RxL: Int[np.ndarray, "R L"]
    weights_RxL: Float[np.ndarray, "R L"]
    advantages_RxL: Float[np.ndarray, "R L"]
    old_logprobs_RxL: Float[np.ndarray, "R L"]
    returns_RxL: Float[np.ndarray, "R L"]
    old_values_RxL: Float[np.ndarray, "R L"]


class Critic(NamedTuple):
    """What a trainer holds of a separate one. `update(state, batch, frozen=…)`."""

    state: TrainState
    update: Callable[..., tuple[TrainState, Metrics]]


def fresh_head(width: int) -> nnx.State:
    """Parameters of a head that says 0, for a model of hidden size `width`."""
    return nnx.split(ValueHead(width), nnx.Param)[1]


def with_head(trainable: Any, width: int) -> dict[str, Any]:
    """Parameters of a trunk with a fresh head."""
    return {"trunk": trainable, "head": fresh_head(width)}


def _head_values(
    head_params: Any, hidden_RxLxD: Float[Array, "R L D"], head_def: nnx.GraphDef
) -> Float[Array, "R L"]:
    values_RxL = nnx.merge(head_def, head_params)(hidden_RxLxD)
    # From "after token t" to "before token t": the state that token t was chosen in.
    return jnp.roll(values_RxL, 1, axis=1)


def _head_def(width: int) -> nnx.GraphDef:
    return nnx.split(ValueHead(width), nnx.Param)[0]


def make_values(
    graphdef: nnx.GraphDef,
    width: int,
    mesh: Mesh | None,
    algorithm: AlgorithmConfig,
    *,
    compute: Compute = FLOAT32,
) -> Callable[[Any, Any, Any], Float[Array, "R L"]]:
    """Jitted `(params, frozen, batch)` → the value before each token; `params` as `with_head` gives them."""
    forward, head_def = make_forward(graphdef, mesh, compute), _head_def(width)

    def values(params: Any, frozen: Any, batch: Any) -> Float[Array, "R L"]:
        return over_micro_batches(
            lambda micro: _head_values(
                params["head"], forward(join(params["trunk"], frozen), micro), head_def
            ),
            batch,
            algorithm.micro_rows,
            mesh,
        )

    return jax.jit(values, out_shardings=None if mesh is None else replicated(mesh))


def make_value_update(
    graphdef: nnx.GraphDef,
    width: int,
    mesh: Mesh | None,
    algorithm: AlgorithmConfig,
    optimizer: optax.GradientTransformation,
    *,
    compute: Compute = FLOAT32,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """The update of a separate critic.

    Metrics: loss (½ squared error, mean over policy tokens), value (mean), value_clip_fraction, and those of
    `make_supervised_update`.
    """
    forward, head_def = make_forward(graphdef, mesh, compute), _head_def(width)

    def loss(params: Any, batch: ValueBatch, weight: Float[Array, ""], frozen: Any):
        def mean(x_RxL):
            counted_RxL = jnp.where(batch.weights_RxL > 0, x_RxL * batch.weights_RxL, 0.0)
            return jnp.sum(counted_RxL) / weight

        hidden_RxLxD = forward(join(params["trunk"], frozen), batch)
        values_RxL = _head_values(params["head"], hidden_RxLxD, head_def)
        loss_RxL, held_RxL = losses.value_loss(
            values_RxL, batch.old_values_RxL, batch.returns_RxL, clip=algorithm.value_clip
        )
        total = mean(loss_RxL)
        told = {"value": mean(values_RxL), "value_clip_fraction": mean(held_RxL * 1.0)}
        return total, ({"loss": total, **told}, {})

    return make_update(optimizer, mesh, algorithm.micro_rows, loss)


def critic_optimizer(
    algorithm: AlgorithmConfig, optimizer: OptimizerConfig, updates: int
) -> optax.GradientTransformation:
    """The policy's optimiser with the rate and warm-up of a separate critic; `updates`: where a schedule ends."""
    own = replace(
        optimizer,
        name="adam",
        learning_rate=algorithm.critic_learning_rate,
        warmup_steps=algorithm.critic_warmup_steps,
    )
    return make_optimizer(own, updates)


def make_critic(
    graphdef: nnx.GraphDef,
    width: int,
    trainable: Any,
    mesh: Mesh | None,
    algorithm: AlgorithmConfig,
    optimizer: OptimizerConfig,
    updates: int,
    *,
    compute: Compute = FLOAT32,
) -> Critic:
    """A fresh separate critic beside a policy.

    Args:
      width: the model's hidden size.
      trainable: what trains of the policy; copied.
      optimizer: the policy's; the critic has its own rate and warm-up of it.
      updates: where a decaying schedule ends.
    """
    rule = critic_optimizer(algorithm, optimizer, updates)
    return Critic(
        state=init_state(with_head(trainable, width), rule, mesh),
        update=make_value_update(graphdef, width, mesh, algorithm, rule, compute=compute),
    )


def make_joint_update(
    graphdef: nnx.GraphDef,
    width: int,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None,
    algorithm: AlgorithmConfig,
    sampling: SamplingConfig,
    *,
    compute: Compute = FLOAT32,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """`make_policy_update` for a policy with a head: its loss plus `value_coefficient` times the value loss, from one
    forward pass, over a `JointBatch`. The value loss is aggregated like the policy's.

    The caller gives the `denominator`. Metrics beside those of the policy's update: critic_loss, critic_value and
    critic_value_clip_fraction.
    """
    check_sampling(sampling)
    forward, head_def = make_forward(graphdef, mesh, compute), _head_def(width)
    score = make_score(
        graphdef, mesh, compute, temperature=sampling.temperature, chunk=algorithm.logprob_chunk
    )

    def loss(
        params: Any,
        batch: JointBatch,
        weight: Float[Array, ""],
        frozen: Any,
        *reference: Any,
        kl_coefficient: Float[Array, ""] | None = None,
    ):
        policy = join(params["trunk"], frozen)
        hidden_RxLxD = forward(policy, batch)

        def score_once(given: Any, batch: Batch, entropy: str) -> losses.TokenScores:
            # The reference, if there is one, has a pass of its own.
            return score(given, batch, entropy, hidden_RxLxD if given is policy else None)

        before = join(reference[0], frozen) if kl_in_loss(algorithm) else None
        tokens = Batch(*batch[: len(Batch._fields)])
        total, (sums, peaks) = make_policy_loss(score_once, algorithm)(
            policy, tokens, weight, before, kl_coefficient
        )

        def mean(x_RxL, shares_RxL):
            counted_RxL = jnp.where(batch.weights_RxL > 0, x_RxL * shares_RxL, 0.0)
            return jnp.sum(counted_RxL) / weight

        values_RxL = _head_values(params["head"], hidden_RxLxD, head_def)
        loss_RxL, held_RxL = losses.value_loss(
            values_RxL, batch.old_values_RxL, batch.returns_RxL, clip=algorithm.value_clip
        )
        shares_RxL = token_shares(algorithm.aggregation, tokens)
        total = total + algorithm.value_coefficient * mean(loss_RxL, shares_RxL)
        told = {
            "loss": total,
            "critic_loss": mean(loss_RxL, batch.weights_RxL),
            "critic_value": mean(values_RxL, batch.weights_RxL),
            "critic_value_clip_fraction": mean(held_RxL * 1.0, batch.weights_RxL),
        }
        return total, (sums | told, peaks)

    return make_update(optimizer, mesh, algorithm.micro_rows, loss)


def value_batches(
    sequences: Many[Sequence],
    returns: Many[np.ndarray],
    values: Many[np.ndarray],
    row_length: int,
    rows: int,
    parts: int,
) -> list[ValueBatch]:
    """All episodes packed with their returns and the values that they were judged by, in `parts` minibatches."""
    targets = [
        replace(sequence, advantages=r, old_logprobs=v)
        for sequence, r, v in zip(sequences, returns, values, strict=True)
    ]
    return [ValueBatch(*batch) for batch in split(pack(targets, row_length, rows), parts)]


def joint_batches(batches: Many[Batch], targets: Many[ValueBatch]) -> list[JointBatch]:
    """The policy's minibatches with the critic's, which hold the same tokens in the same places."""
    return [
        JointBatch(*batch, target.returns_RxL, target.old_values_RxL)
        for batch, target in zip(batches, targets, strict=True)
    ]
