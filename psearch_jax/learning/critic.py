"""The critic of GAE: a decoder of its own with a value head, and its update.

The trunk starts as a copy of the policy and trains beside it (with adapters: a second set of them over the same frozen
parameters). The head starts at zero, so the first values are 0 and the first advantages those without a critic.
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

from psearch_jax.config import AlgorithmConfig, OptimizerConfig
from psearch_jax.learning import losses
from psearch_jax.learning.batches import Sequence, pack, split
from psearch_jax.learning.optimizers import make_optimizer
from psearch_jax.learning.rescoring import over_micro_batches
from psearch_jax.learning.update import (
    FLOAT32,
    Compute,
    Metrics,
    TrainState,
    init_state,
    make_update,
)
from psearch_jax.mesh import Layout, replicated
from psearch_jax.models.decoder import hidden_states
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


class Critic(NamedTuple):
    """What a trainer holds of it. `values(params, frozen, batch)` and `update(state, value_batch, frozen=…)`."""

    state: TrainState
    values: Callable[[Any, Any, Any], Float[Array, "R L"]]
    update: Callable[..., tuple[TrainState, Metrics]]


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
    """A fresh critic beside a policy.

    Args:
      width: the model's hidden size.
      trainable: what trains of the policy; copied.
      optimizer: the policy's; the critic has its own rate and warm-up of it.
      updates: where a decaying schedule ends.

    Metrics of its update: loss (½ squared error, mean over policy tokens), value (mean), value_clip_fraction, and
    those of `make_supervised_update`.
    """
    head = ValueHead(width)
    head_def, head_params = nnx.split(head, nnx.Param)
    layout = Layout(mesh)

    def values_of(params: Any, frozen: Any, batch: Any) -> Float[Array, "R L"]:
        hidden_RxLxD = hidden_states(
            graphdef,
            join(params["trunk"], frozen),
            batch.tokens_RxL,
            batch.positions_RxL,
            batch.segments_RxL,
            dtype=compute.dtype,
            remat=compute.remat,
            attention_name=compute.attention,
            layout=layout,
        )
        values_RxL = nnx.merge(head_def, params["head"])(hidden_RxLxD)
        # From "after token t" to "before token t": the state that token t was chosen in.
        return jnp.roll(values_RxL, 1, axis=1)

    def values(params: Any, frozen: Any, batch: Any) -> Float[Array, "R L"]:
        return over_micro_batches(
            lambda micro: values_of(params, frozen, micro), batch, algorithm.micro_rows, mesh
        )

    def loss(params: Any, batch: ValueBatch, weight: Float[Array, ""], frozen: Any):
        def mean(x_RxL):
            counted_RxL = jnp.where(batch.weights_RxL > 0, x_RxL * batch.weights_RxL, 0.0)
            return jnp.sum(counted_RxL) / weight

        values_RxL = values_of(params, frozen, batch)
        loss_RxL, held_RxL = losses.value_loss(
            values_RxL, batch.old_values_RxL, batch.returns_RxL, clip=algorithm.value_clip
        )
        total = mean(loss_RxL)
        told = {"value": mean(values_RxL), "value_clip_fraction": mean(held_RxL * 1.0)}
        return total, ({"loss": total, **told}, {})

    own = replace(
        optimizer,
        name="adam",
        learning_rate=algorithm.critic_learning_rate,
        warmup_steps=algorithm.critic_warmup_steps,
    )
    rule: optax.GradientTransformation = make_optimizer(own, updates)
    whole = None if mesh is None else replicated(mesh)
    return Critic(
        state=init_state({"trunk": trainable, "head": head_params}, rule, mesh),
        values=jax.jit(values, out_shardings=whole),
        update=make_update(rule, mesh, algorithm.micro_rows, loss),
    )


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
