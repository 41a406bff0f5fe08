"""Everything of a run that learns: the policy's state, and what the algorithm needs beside it.

`Learner.learn` takes the judged episodes of a step, and makes the optimiser steps. Programs and parameters that the
algorithm does not need (a reference, further forward passes, a critic) are neither compiled nor kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from psearch_jax import processes
from psearch_jax.config import Config
from psearch_jax.config_checks import looked_for
from psearch_jax.learning.batches import Sequence as Tokens
from psearch_jax.learning.batches import pack, padding_share, unpack
from psearch_jax.learning.critic import (
    Critic,
    ValueBatch,
    joint_batches,
    make_critic,
    make_joint_update,
    make_values,
    value_batches,
    with_head,
)
from psearch_jax.learning.experience import (
    batch_rows,
    give_advantages,
    keep_bad_batch,
    merge_metrics,
    minibatches,
    to_sequence,
)
from psearch_jax.learning.kl import kl_estimate, next_coefficient
from psearch_jax.learning.objective import kl_in_loss, shares_trunk
from psearch_jax.learning.optimizers import make_optimizer
from psearch_jax.learning.rescoring import make_logprobs, make_rescore, rescores, scores_reference
from psearch_jax.learning.update import Compute, init_state, make_policy_update, place_batch
from psearch_jax.mesh import Layout, param_shardings, resolve_dtype, row_shards
from psearch_jax.models.lora import join, split_trainable
from psearch_jax.rollout.episode import Episode


class Learner:
    """Attributes that matter outside: `state` (of the policy: parameters, optimiser), `frozen`, `params`."""

    def __init__(
        self,
        config: Config,
        graphdef: nnx.GraphDef,
        width: int,
        params: nnx.State,
        mesh: Mesh | None,
    ) -> None:
        """Args:
          width: the model's hidden size.
          params: the starting policy; copied, and the reference of the KL where that is switched on. Where it has
            adapters these alone train.
          mesh: None on one device.

        Raises:
          UserError: settings that cannot train.
        """
        self.config, self.mesh = config, mesh
        algorithm = config.algorithm
        updates = config.trainer.steps * algorithm.minibatches
        optimizer = make_optimizer(config.optimizer, updates)
        compute = Compute(
            dtype=resolve_dtype(config.model.compute_dtype, Layout(mesh)),
            remat=config.model.remat,
            attention=config.model.attention,
        )
        given = (graphdef, mesh, algorithm, config.sampling)
        self.rescore = make_rescore(*given, compute=compute) if rescores(algorithm) else None
        self.logprobs = (
            make_logprobs(*given, compute=compute) if scores_reference(algorithm) else None
        )
        trainable, frozen = split_trainable(params)
        self.shared = shares_trunk(algorithm)
        self.values: Callable[..., Any] | None = None
        if algorithm.advantage == "gae":
            self.values = make_values(graphdef, width, mesh, algorithm, compute=compute)
        rest = (optimizer, mesh, algorithm, config.sampling)
        if self.shared:
            self.state = init_state(with_head(trainable, width), optimizer, mesh)
            self.update = make_joint_update(graphdef, width, *rest, compute=compute)
        else:
            self.state = init_state(trainable, optimizer, mesh)
            self.update = make_policy_update(graphdef, *rest, compute=compute)
        self.frozen = self._placed(frozen)
        # With adapters the reference is the frozen policy under the adapters that it started with.
        self.reference: tuple[nnx.State, ...] = ()
        if algorithm.kl_coefficient > 0:
            self.reference = (self._placed(trainable),)
        self.kl_coefficient = algorithm.kl_coefficient
        # Of the learning rate; None where nothing will ever lower it.
        self.rate_scale = 1.0 if looked_for(config.trainer.collapse) else None
        self.critic: Critic | None = None
        if self.values is not None and not self.shared:
            sizes = (width, trainable, mesh, algorithm, config.optimizer, updates)
            self.critic = make_critic(graphdef, *sizes, compute=compute)
        self.rows = batch_rows(config, row_shards(mesh))
        self.logprob_seconds = 0.0  # of the last `learn`: forward passes beside the updates
        self.sequences: list[Tokens] = []  # of the last step, with their advantages

    def _placed(self, tree: nnx.State) -> nnx.State:
        if self.mesh is None:
            return tree
        shardings = param_shardings(self.mesh, tree)
        if processes.count() == 1:
            return jax.device_put(tree, shardings)
        return jax.jit(lambda given: given, out_shardings=shardings)(tree)

    @property
    def params(self) -> nnx.State:
        """The whole policy as it is now."""
        return join(self.trained, self.frozen)

    @property
    def trained(self) -> nnx.State:
        """What trains of the policy, as it is now."""
        return self.state.params["trunk"] if self.shared else self.state.params

    def learn(
        self, groups: Sequence[Sequence[Episode]], rewards_GxM: np.ndarray, step: int
    ) -> tuple[dict[str, Any], list[bool]]:
        """The optimiser steps of one rollout.

        Args:
          groups: the episodes, [G, M] like their rewards.
          step: from 1; for the name of a bad batch that is kept.

        Returns:
          Metrics as host numbers (those of `make_policy_update`, padding, and the critic's as `critic_…`), and which
          minibatches were applied: one that is not finite is left out.
        """
        algorithm = self.config.algorithm
        began = time.monotonic()
        every = [to_sequence(algorithm, episode) for group in groups for episode in group]
        sequences, critic_batches, told = self._give_advantages(every, rewards_GxM)
        self.sequences = sequences
        batches, denominator = minibatches(algorithm, sequences, self.rows, len(groups[0]))
        placed: list[Any] = [place_batch(batch, self.mesh) for batch in batches]
        before: list[Mapping[str, Any]] = [{} for _ in placed]
        if self.rescore is not None:
            # All of them before the first update: they were all played by the same policy.
            pairs = [self.rescore(self.trained, self.frozen, batch) for batch in placed]
            placed, before = [batch for batch, _ in pairs], [metrics for _, metrics in pairs]
        if self.shared:
            beside = [place_batch(targets, self.mesh) for targets in critic_batches]
            placed, critic_batches = joint_batches(placed, beside), []
        passes = any(p is not None for p in (self.rescore, self.logprobs, self.values))
        self.logprob_seconds = 0.0
        if passes:
            jax.block_until_ready(placed)
            self.logprob_seconds = time.monotonic() - began
        reference = self.reference if kl_in_loss(algorithm) else ()
        adaptive = algorithm.kl_target > 0 and kl_in_loss(algorithm)
        settings = {"kl_coefficient": self.kl_coefficient} if adaptive else {}
        if self.rate_scale is not None:
            settings["rate_scale"] = self.rate_scale
        learned = []
        for batch, scored in zip(placed, before, strict=True):
            self.state, metrics = self.update(
                self.state,
                batch,
                *reference,
                denominator=denominator,
                frozen=self.frozen,
                **settings,
            )
            learned.append(jax.device_get({**metrics, **scored}))
            if not learned[-1]["applied"]:
                whole = jax.tree.map(processes.to_host, batch)
                keep_bad_batch(Path(self.config.run_directory), step, whole)
        result = merge_metrics(learned) | told | self._update_critic(critic_batches)
        result["padding"] = padding_share(batches, algorithm.micro_rows, row_shards(self.mesh))
        if algorithm.kl_target > 0:
            result["kl_coefficient"] = self.kl_coefficient
            self.kl_coefficient = next_coefficient(
                self.kl_coefficient,
                result["kl"],
                target=algorithm.kl_target,
                horizon=algorithm.kl_horizon,
                episodes=len(every),
            )
        return result, [bool(metrics["applied"] > 0) for metrics in learned]

    def _give_advantages(
        self, every: Sequence[Tokens], rewards_GxM: np.ndarray
    ) -> tuple[list[Tokens], list[ValueBatch], dict[str, float]]:
        """The sequences with advantages, what the critic learns from them, and the KL that their rewards paid."""
        algorithm = self.config.algorithm
        divergences = values = None
        told: dict[str, float] = {}
        if self.logprobs is not None or self.values is not None:
            packed = pack(every, algorithm.row_length, self.rows)
            placed, policy_RxL = place_batch(packed, self.mesh), packed.weights_RxL > 0
        if self.logprobs is not None:
            # From what the rollout drew and how likely it was there: that is the policy that acted.
            estimate_RxL = kl_estimate(
                algorithm.kl_estimator,
                jnp.asarray(packed.old_logprobs_RxL),
                jnp.asarray(
                    processes.to_host(self.logprobs(self.reference[0], self.frozen, placed))
                ),
            )
            kl_RxL = np.where(policy_RxL, np.asarray(estimate_RxL), 0.0)
            divergences = unpack(kl_RxL, every, algorithm.row_length)
            told = {"kl": float(kl_RxL.sum() / max(1, policy_RxL.sum()))}
        if self.values is not None:
            state = self.state if self.critic is None else self.critic.state
            values_RxL = processes.to_host(self.values(state.params, self.frozen, placed))
            values = unpack(values_RxL, every, algorithm.row_length)
        sequences, returns = give_advantages(
            algorithm,
            rewards_GxM,
            every,
            divergences=divergences,
            kl_coefficient=self.kl_coefficient,
            values=values,
        )
        if values is None:
            return sequences, [], told
        # Of those that a shared critic's update computes, packed alike; others have nothing for either to learn.
        counted = [i for i, sequence in enumerate(every) if np.any(sequence.weights)]
        targets = value_batches(
            [every[i] for i in counted],
            [returns[i] for i in counted],
            [values[i] for i in counted],
            algorithm.row_length,
            self.rows,
            algorithm.minibatches,
        )
        return sequences, targets, told

    def _update_critic(self, batches: Sequence[ValueBatch]) -> dict[str, float]:
        """One step a minibatch."""
        learned = []
        for batch in batches:
            assert self.critic is not None
            state, metrics = self.critic.update(
                self.critic.state, place_batch(batch, self.mesh), frozen=self.frozen
            )
            self.critic = self.critic._replace(state=state)
            learned.append(jax.device_get(metrics))
        return {f"critic_{k}": v for k, v in merge_metrics(learned).items()} if learned else {}

    def saved(self) -> tuple[Any, dict[str, Any]]:
        """What a checkpoint holds: arrays, and numbers beside them."""
        arrays = self.state if self.critic is None else (self.state, self.critic.state)
        return arrays, {"kl_coefficient": self.kl_coefficient}

    def restore(self, arrays: Any, extras: Mapping[str, Any]) -> None:
        """Take up what `saved` gave; a checkpoint of before there were coefficients has none."""
        if self.mesh is None:
            # Arrays that are not tied to a device, like fresh ones: nothing compiles a second time.
            arrays = jax.tree.map(jnp.asarray, jax.device_get(arrays))
        self.kl_coefficient = extras.get("kl_coefficient", self.kl_coefficient)
        if self.critic is None:
            self.state = arrays
        else:
            self.state, self.critic = arrays[0], self.critic._replace(state=arrays[1])
