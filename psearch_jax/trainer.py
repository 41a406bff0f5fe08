"""The recipe: roll out, judge, compare within the group, update; again.

One step, top to bottom, is `Trainer.step`. A run is a function of its configuration: the questions of step s
follow from the data seed and s, an episode's random numbers from the trainer's seed, s, its group and its
number within the group. So a run that was killed goes on from its last checkpoint and ends with the same
numbers (law 13).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from psearch_jax.assembly import keep_compiled_programs, open_backend, open_engine, open_policy
from psearch_jax.checkpoints import Checkpointer
from psearch_jax.config import Config, EvaluationConfig, SupervisedConfig
from psearch_jax.config_files import config_hash
from psearch_jax.display import Display
from psearch_jax.errors import Interrupted, UserError
from psearch_jax.interruption import GracefulStop
from psearch_jax.learning.advantages import group_advantages, zero_spread
from psearch_jax.learning.batches import Batch, from_episode, pack, split
from psearch_jax.learning.optimizers import make_optimizer
from psearch_jax.learning.update import init_state, make_policy_update, place_batch
from psearch_jax.mesh import make_mesh, param_shardings, row_shards
from psearch_jax.metrics_log import MetricsLog
from psearch_jax.models.weights import save_hf_directory
from psearch_jax.questions.question import Question
from psearch_jax.questions.world import load_questions
from psearch_jax.rewards.composition import score_group
from psearch_jax.rollout.engine import Engine
from psearch_jax.rollout.episode import Episode
from psearch_jax.step_metrics import describe

OnStep = Callable[[int, Mapping[str, Any]], None]


def question_order(count: int, seed: int, first: int, wanted: int) -> list[int]:
    """Positions `first` … `first + wanted − 1` of an endless order in which each epoch is a fresh shuffle."""
    order: list[int] = []
    for epoch in range(first // count, (first + wanted - 1) // count + 1):
        order.extend(np.random.default_rng([seed, epoch]).permutation(count).tolist())
    start = first % count
    return order[start : start + wanted]


class Trainer:
    """GRPO on an engine. Attributes that matter outside: `state` (params, optimiser), `done` (steps finished)."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        params: nnx.State,
        questions: Sequence[Question],
        *,
        mesh: Mesh | None = None,
    ) -> None:
        """Args:
          params: the starting policy; copied, and the reference of the KL term where that is switched on.
          questions: the training questions; `trainer.kinds` chooses among them.
          mesh: default: what `config.mesh` asks for.

        Raises:
          UserError: no question is left, or settings that cannot train.
        """
        self.config, self.engine = config, engine
        kinds = config.trainer.kinds
        self.questions = [q for q in questions if not kinds or q.kind in kinds]
        if not self.questions:
            raise UserError(
                f"trainer.kinds={', '.join(kinds)} leaves none of the {len(questions)} training questions; "
                "name kinds that the data has, or none for all."
            )
        mesh = make_mesh(config.mesh) if mesh is None else mesh
        # One device needs no placement; arrays that are not tied to a device keep the engine's programs
        # from being compiled a second time for arrays that are.
        self.mesh = mesh if mesh.size > 1 else None
        algorithm = config.algorithm
        updates = config.trainer.steps * algorithm.minibatches
        optimizer = make_optimizer(config.optimizer, updates)
        self.update = make_policy_update(
            engine.graphdef,
            optimizer,
            self.mesh,
            algorithm,
            config.sampling,
            dtype=jnp.dtype(config.rollout.dtype),
        )
        self.state = init_state(params, optimizer, self.mesh)
        self.reference: tuple[nnx.State, ...] = ()
        if algorithm.kl_coefficient > 0:
            placed = jax.device_put(params, param_shardings(mesh, params)) if self.mesh else params
            self.reference = (placed,)
        # Enough rows for the longest episodes there can be: every step has the same shape (law 6), and
        # micro-batches that stay empty are stepped over.
        episodes = config.trainer.questions_per_step * config.trainer.group_size
        needed = -(-episodes // max(1, algorithm.row_length // config.rollout.context))
        shards = row_shards(mesh)
        multiple = algorithm.minibatches * -(-algorithm.micro_rows // shards) * shards
        self.rows = -(-needed // multiple) * multiple
        self.key = jax.random.key(config.trainer.seed)
        self.done, self.bad_batches, self.bad_in_a_row = 0, 0, 0
        self.checkpoints = Checkpointer(
            Path(config.run_directory) / "checkpoints", keep=config.trainer.keep
        )

    def step(self) -> dict[str, Any]:
        """One step; returns its metrics as host numbers.

        Raises:
          UserError: `trainer.max_bad_batches` batches in a row were not finite.
        """
        trainer, algorithm = self.config.trainer, self.config.algorithm
        clock = _Clock()

        count = trainer.questions_per_step
        order = question_order(len(self.questions), self.config.data.seed, self.done * count, count)
        questions = [self.questions[i] for i in order]
        episodes = self.engine.rollout(
            self.state.params,
            self.engine.requests(questions, trainer.group_size),
            key=jax.random.fold_in(self.key, self.done),
            sampling=self.config.sampling,
        )
        groups = [
            episodes[i : i + trainer.group_size]
            for i in range(0, len(episodes), trainer.group_size)
        ]
        clock.lap("rollout")

        rewards = [
            score_group(self.config.reward, self.config.protocol, group, question)
            for group, question in zip(groups, questions, strict=True)
        ]
        rewards_GxM = np.array([[reward.total for reward in group] for group in rewards])
        advantages_GxM = group_advantages(rewards_GxM, normalize_std=algorithm.normalize_std)
        batches, denominator = self._batches(groups, advantages_GxM)
        clock.lap("rewards")

        learned = []
        for batch in batches:
            placed = place_batch(batch, self.mesh)
            self.state, metrics = self.update(
                self.state, placed, *self.reference, denominator=denominator
            )
            learned.append(jax.device_get(metrics))
        self._count_bad(learned)
        clock.lap("update")

        self.done += 1
        flat = [reward for group in rewards for reward in group]
        tokens = sum(len(episode.ids) for episode in episodes)
        return {
            **describe(self.config.protocol, episodes, flat),
            **_learning(learned),
            "group_spread": float(rewards_GxM.std(axis=1).mean()),
            "zero_spread": float(zero_spread(rewards_GxM).mean()),
            "bad_batches": self.bad_batches,
            "tokens_per_second": tokens / clock.total,
            "seconds": {**clock.laps, "total": clock.total},
        }

    def _batches(
        self, groups: Sequence[Sequence[Episode]], advantages_GxM: np.ndarray
    ) -> tuple[list[Batch], float]:
        """The minibatches, and the policy tokens that a minibatch's loss is the mean over.

        A group without spread has advantage 0 throughout: unless there is a KL or entropy term, its gradient is
        exactly 0 and it is left out of the computation, not out of the mean. Where no group has spread one is
        scored all the same, for the gap to the rollout (law 9).
        """
        algorithm = self.config.algorithm
        everything = algorithm.kl_coefficient > 0 or algorithm.entropy_coefficient > 0
        every = [
            from_episode(episode, float(advantage))
            for group, advantages_M in zip(groups, advantages_GxM, strict=True)
            for episode, advantage in zip(group, advantages_M, strict=True)
        ]
        kept = [sequence for sequence in every if everything or sequence.advantages != 0.0]
        batch = pack(kept or every[: len(groups[0])], algorithm.row_length, self.rows)
        policy_tokens = float(sum(np.sum(sequence.weights) for sequence in every))
        return split(batch, algorithm.minibatches), max(policy_tokens, 1.0) / algorithm.minibatches

    def _count_bad(self, learned: Sequence[Mapping[str, Any]]) -> None:
        for metrics in learned:
            good = metrics["applied"] > 0
            self.bad_batches += not good
            self.bad_in_a_row = 0 if good else self.bad_in_a_row + 1
        limit = self.config.trainer.max_bad_batches
        if self.bad_in_a_row > limit:
            raise UserError(
                f"The loss was not finite in {self.bad_in_a_row} batches in a row at step {self.done + 1} "
                f"(trainer.max_bad_batches is {limit}); lower optimizer.learning_rate and start from the last "
                f"checkpoint in {self.checkpoints.directory}."
            )

    def run(self, on_step: OnStep | None = None) -> None:
        """Go on from `done` to the last step, saving on the way. `on_step(steps done, metrics)` after each.

        Raises:
          Interrupted: Ctrl-C; the step in progress was finished and saved.
        """
        settings = self.config.trainer
        with GracefulStop() as stop:
            while self.done < settings.steps:
                metrics = self.step()
                if on_step is not None:
                    on_step(self.done, metrics)
                last = self.done == settings.steps or stop.asked
                if last or self.done % settings.checkpoint_every == 0:
                    self.save()
                if stop.asked and self.done < settings.steps:
                    raise Interrupted(
                        f"Stopped after step {self.done} of {settings.steps} and saved to "
                        f"{self.checkpoints.directory}; the same command goes on from there."
                    )

    def save(self) -> None:
        """Write a checkpoint of the steps that are done."""
        extras = {
            "recipe": recipe_hash(self.config),
            "position": self.done * self.config.trainer.questions_per_step,
            "bad_batches": self.bad_batches,
            "bad_in_a_row": self.bad_in_a_row,
        }
        self.checkpoints.save(self.done, self.state, extras)

    def resume(self) -> bool:
        """Take up the newest checkpoint of this run directory, if there is one.

        Raises:
          UserError: it was made by another recipe.
        """
        restored = self.checkpoints.restore_latest(self.state)
        if restored is None:
            return False
        if restored.extras["recipe"] != recipe_hash(self.config):
            raise UserError(
                f"{self.checkpoints.directory} holds a run of another recipe; choose another run_directory, or "
                "delete that one to start anew."
            )
        self.state, self.done = restored.state, restored.step
        if self.mesh is None:
            self.state = jax.tree.map(jnp.asarray, jax.device_get(restored.state))
        self.bad_batches = restored.extras["bad_batches"]
        self.bad_in_a_row = restored.extras["bad_in_a_row"]
        return True


def recipe_hash(config: Config) -> str:
    """Changes with everything that the numbers of a run depend on; not with where, how long or how often saved."""
    steps = 0 if config.optimizer.schedule == "constant" else config.trainer.steps
    trainer = replace(config.trainer, steps=steps, checkpoint_every=1, keep=1)
    return config_hash(
        replace(
            config,
            trainer=trainer,
            run_directory="",
            compile_cache="",
            supervised=SupervisedConfig(),
            evaluation=EvaluationConfig(),
        )
    )


def train(config: Config) -> None:
    """`psearch train`: open everything, take up a checkpoint if there is one, train, save the policy.

    The run directory holds checkpoints/, metrics.jsonl, tensorboard/ and, at the end, policy/ as a Hugging
    Face directory.
    """
    keep_compiled_programs(config)
    with Display() as display:
        display.phase("opening policy and index")
        policy = open_policy(config.policy)
        engine = open_engine(config, policy, open_backend(config.retrieval))
        questions = load_questions(config.data.questions, "train")
        trainer = Trainer(config, engine, policy.params, questions)
        resumed = trainer.resume()
        if resumed:
            display.note(f"going on after step {trainer.done}")
        display.phase("compiling")
        engine.warm_up(trainer.state.params)
        name, steps = Path(config.run_directory).name, config.trainer.steps
        with MetricsLog(
            config.run_directory, resumed_step=trainer.done if resumed else None
        ) as log:

            def on_step(step: int, metrics: Mapping[str, Any]) -> None:
                log.write(step, metrics)
                display.step(name, step, steps, metrics)

            trainer.run(on_step)
        save_hf_directory(
            Path(config.run_directory) / "policy",
            policy.config,
            trainer.state.params,
            tokenizer=policy.tokenizer,
        )


#: Metrics of an update that are means over its scored tokens.
TOKEN_MEANS = ("ratio", "clip_fraction", "approx_kl", "entropy", "kl")


def _learning(learned: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Metrics of a step's updates. Means over tokens stay means over all tokens, however few are in a
    minibatch; counts are added up; the gap to the rollout is the first minibatch's alone (law 9)."""
    weights = np.array([metrics["weight"] for metrics in learned], np.float64)
    result = {}
    for name in learned[0]:
        values = np.array([metrics[name] for metrics in learned], np.float64)
        if name in TOKEN_MEANS:
            result[name] = float(np.average(values, weights=weights if weights.any() else None))
        elif name in ("weight", "tokens"):
            result[name] = float(np.sum(values))
        else:
            result[name] = float(values[0] if name in ("gap", "gap_max") else np.mean(values))
    return result


class _Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name], self._last = now - self._last, now

    @property
    def total(self) -> float:
        return self._last - self._start
