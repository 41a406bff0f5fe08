"""The recipe: roll out, judge, compare within the group, update; again.

One step, top to bottom, is `Trainer.step`. A run is a function of its configuration: the questions of step s
follow from the data seed and s, an episode's random numbers from the trainer's seed, s, its group and its
number within the group. So a run that was killed goes on from its last checkpoint and ends with the same
numbers (law 13).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from psearch_jax import processes
from psearch_jax.assembly import (
    Policy,
    keep_compiled_programs,
    lay_out,
    open_backend,
    open_engine,
    open_policy,
)
from psearch_jax.checkpoints import Checkpointer, Restored
from psearch_jax.config import Config
from psearch_jax.config_checks import looked_for
from psearch_jax.config_files import config_hash, flatten
from psearch_jax.device_memory import ROLLOUT_MEMORY, UPDATE_MEMORY, memory_explained
from psearch_jax.display import Display
from psearch_jax.errors import Interrupted, UserError
from psearch_jax.evaluation.records import training_records
from psearch_jax.interruption import GracefulStop, StopNow
from psearch_jax.learning.advantages import zero_spread
from psearch_jax.learning.collapse import Detector
from psearch_jax.learning.experience import shaped_rewards
from psearch_jax.learning.learner import Learner
from psearch_jax.learning.selection import choose_groups, questions_to_refill
from psearch_jax.learning.update import TrainState
from psearch_jax.mesh import make_mesh
from psearch_jax.metrics_log import EPISODES_FILE, LineFile, MetricsLog
from psearch_jax.models.weights import save_hf_directory
from psearch_jax.questions.question import Question
from psearch_jax.questions.sources import load_questions
from psearch_jax.recipe_identity import recipe_hash
from psearch_jax.rewards.composition import Reward, score_together
from psearch_jax.rollout.engine import Engine
from psearch_jax.rollout.episode import Episode
from psearch_jax.stability import go_back
from psearch_jax.step_metrics import describe
from psearch_jax.throughput import Clock, Trace, breakdown, rates, weights_in_products

OnStep = Callable[[int, Mapping[str, Any]], None]
OnReturn = Callable[[int, str], None]


def question_order(count: int, seed: int, first: int, wanted: int) -> list[int]:
    """Positions `first` … `first + wanted − 1` of an endless order in which each epoch is a fresh shuffle."""
    order: list[int] = []
    for epoch in range(first // count, (first + wanted - 1) // count + 1):
        order.extend(np.random.default_rng([seed, epoch]).permutation(count).tolist())
    start = first % count
    return order[start : start + wanted]


class Trainer:
    """A learner on an engine. Attributes that matter outside: `state` (params, optimiser), `done` (steps finished)."""

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
          params: the starting policy; copied, and the reference of the KL term where that is switched on. Where it
            has adapters these alone train.
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
        self.learner = Learner(
            config, engine.graphdef, engine.config.hidden_size, params, self.mesh
        )
        self.key = jax.random.key(config.trainer.seed)
        self.done, self.bad_batches, self.bad_in_a_row = 0, 0, 0
        self.shown: list[dict[str, Any]] = []  # lines of some episodes of the last step
        self.position = 0  # questions that were played, those of refills included
        self.rewards: list[float] = []  # of the steps since the last checkpoint: its score
        collapse = config.trainer.collapse
        self.detector = Detector(collapse) if looked_for(collapse) else None
        self.checkpoints = Checkpointer(
            Path(config.run_directory) / "checkpoints",
            keep=config.trainer.keep,
            keep_best=config.trainer.keep_best,
            keep_every=config.trainer.keep_every,
        )
        self.saving = 0.0  # seconds that the last save held the run up
        self.stop = GracefulStop()
        self._weights = weights_in_products(engine.config, params)

    @property
    def state(self) -> TrainState:
        """What the optimiser carries from step to step."""
        return self.learner.state

    @property
    def params(self) -> nnx.State:
        """The whole policy as it is now."""
        return self.learner.params

    def step(self) -> dict[str, Any]:
        """One step; returns its metrics as host numbers.

        Raises:
          UserError: `trainer.max_bad_batches` batches in a row were not finite.
        """
        clock = Clock()
        # Asked to stop at once, a rollout is broken off: played again it gives the same episodes. The processes of
        # one run cannot break off at the same place; they finish the step.
        alone = processes.count() == 1
        with (
            self.stop.breakable() if alone else nullcontext(),
            memory_explained(ROLLOUT_MEMORY, self.done + 1),
        ):
            groups, rewards, rewards_GxM, rollouts = self._play(clock)
        flat_G = zero_spread(rewards_GxM)
        chosen = choose_groups(flat_G, self.config.trainer.questions_per_step)
        with memory_explained(UPDATE_MEMORY, self.done + 1):
            learned, applied = self.learner.learn(
                [groups[g] for g in chosen], rewards_GxM[chosen], self.done + 1
            )
        self._count_bad(applied)
        clock.lap("update")
        self.shown = training_records(
            self.config.protocol,
            self.done + 1,
            [episode for g in chosen for episode in groups[g]][: self.config.trainer.log_episodes],
            rewards_GxM[chosen].ravel().tolist(),
            [np.asarray(sequence.advantages).tolist() for sequence in self.learner.sequences],
            self.engine.decode_text,
        )

        self.done += 1
        self.position += len(groups)
        episodes = [episode for group in groups for episode in group]
        trained = [episode for g in chosen for episode in groups[g]]
        seconds = breakdown(
            clock, rollouts, logprobs=self.learner.logprob_seconds, checkpoint=self.saving
        )
        devices = self.mesh.size if self.mesh else 1
        metrics = {
            **describe(self.config.protocol, episodes, rewards),
            **learned,
            "groups": len(groups),
            "group_spread": float(rewards_GxM.std(axis=1).mean()),
            "zero_spread": float(flat_G.mean()),
            "bad_batches": self.bad_batches,
            **rates(self.engine.config, self._weights, episodes, trained, seconds, devices),
            "seconds": seconds,
        }
        self.saving = 0.0
        self.rewards.append(metrics["reward"])
        if self.detector is not None:
            returns = len(self.detector.returns)
            metrics |= {"returns": returns, "rate_scale": self.learner.rate_scale}
        return metrics

    def _play(
        self, clock: Clock
    ) -> tuple[list[Sequence[Episode]], list[Reward], np.ndarray, list[dict[str, Any]]]:
        """Groups, the reward of each episode, what is learned from [G, M], and the figures of each rollout; played
        again with new questions while groups without spread are to be replaced."""
        trainer, algorithm = self.config.trainer, self.config.algorithm
        wanted = trainer.questions_per_step
        groups: list[Sequence[Episode]] = []
        rewards: list[Reward] = []
        rollouts: list[dict[str, Any]] = []
        count, rounds_left = wanted, algorithm.refill_rounds
        while count:
            first = self.position + len(groups)
            order = question_order(len(self.questions), self.config.data.seed, first, count)
            questions = [self.questions[i] for i in order]
            episodes = self.engine.rollout(
                self.params,
                self.engine.requests(questions, trainer.group_size, first_group=len(groups)),
                key=jax.random.fold_in(self.key, self.done),
                sampling=self.config.sampling,
            )
            rollouts.append(self.engine.stats)
            clock.lap("rollout")
            starts = range(0, len(episodes), trainer.group_size)
            new = [episodes[i : i + trainer.group_size] for i in starts]
            scored = score_together(self.config.reward, self.config.protocol, new, questions)
            rewards += [reward for group in scored for reward in group]
            groups += new
            rewards_GxM = np.array([reward.total for reward in rewards]).reshape(len(groups), -1)
            context = self.config.rollout.context
            rewards_GxM = shaped_rewards(algorithm, rewards_GxM, groups, context)
            count = questions_to_refill(zero_spread(rewards_GxM), wanted, rounds_left)
            rounds_left -= 1
            clock.lap("rewards")
        return groups, rewards, rewards_GxM, rollouts

    def _count_bad(self, applied: Sequence[bool]) -> None:
        for good in applied:
            self.bad_batches += not good
            self.bad_in_a_row = 0 if good else self.bad_in_a_row + 1
        limit = self.config.trainer.max_bad_batches
        if self.bad_in_a_row > limit:
            raise UserError(
                f"The loss was not finite in {self.bad_in_a_row} batches in a row at step {self.done + 1} "
                f"(trainer.max_bad_batches is {limit}); lower optimizer.learning_rate and start from the last "
                f"checkpoint in {self.checkpoints.directory}."
            )

    def run(self, on_step: OnStep | None = None, on_return: OnReturn | None = None) -> None:
        """Go on from `done` to the last step, saving on the way.

        Args:
          on_step: called with (steps done, metrics) after each step.
          on_return: called with (steps done, sentence) after the run went back to a good checkpoint.

        Raises:
          Interrupted: Ctrl-C or SIGTERM; all steps that were finished are saved.
          UserError: the policy collapsed, and was taken back as often as it may be.
        """
        settings = self.config.trainer
        saved = self.done
        if self.detector is not None and self.detector.good is None:
            self.save()
        path = Path(self.config.run_directory) / EPISODES_FILE
        lines = LineFile(path, last_step=self.done) if processes.is_first() else nullcontext()
        with self.stop, lines as episodes:
            while self.done < settings.steps:
                try:
                    metrics = self.step()
                except StopNow:
                    metrics = None
                else:
                    if episodes is not None:
                        episodes.write(*self.shown)
                if metrics is not None and on_step is not None:
                    on_step(self.done, metrics)
                if metrics is not None and (told := go_back(self, metrics)):
                    saved = self.done
                    if episodes is not None:
                        episodes.rewind(saved)
                    if on_return is not None:
                        on_return(saved, told)
                stopped = processes.agree(self.stop.asked) and self.done < settings.steps
                due = self.done % settings.checkpoint_every == 0 or self.done == settings.steps
                if (due or stopped) and self.done != saved:
                    self.save(wait=False)
                    saved = self.done
                if stopped:
                    self.checkpoints.wait()
                    where = f"and saved to {self.checkpoints.directory}" if self.done else "(none)"
                    raise Interrupted(
                        f"Stopped after step {self.done} of {settings.steps} {where}; "
                        "the same command goes on from there.",
                        code=0 if self.stop.preempted else 130,
                    )
            self.checkpoints.wait()

    def save(self, *, wait: bool = True) -> None:
        """Write a checkpoint of the steps that are done. Without waiting, what goes wrong while it is written comes
        up at the next save, or at the end."""
        began = time.monotonic()
        arrays, numbers = self.learner.saved()
        extras = numbers | {
            "recipe": recipe_hash(self.config),
            "config": flatten(self.config),
            "config_hash": config_hash(self.config),
            "position": self.position,
            "bad_batches": self.bad_batches,
            "bad_in_a_row": self.bad_in_a_row,
        }
        if self.detector is not None:
            self.detector.saves(self.done)
            extras["collapse"] = self.detector.state
            self.checkpoints.spare = self.detector.good
        score = sum(self.rewards) / len(self.rewards) if self.rewards else None
        self.checkpoints.save(self.done, arrays, extras, score=score, wait=wait)
        self.rewards = []
        self.saving = time.monotonic() - began

    def resume(self) -> bool:
        """Take up the newest checkpoint of this run directory, if there is one.

        Raises:
          UserError: it was made by another recipe.
        """
        restored = self.checkpoints.restore_latest(self.learner.saved()[0])
        if restored is None:
            return False
        if restored.extras["recipe"] != recipe_hash(self.config):
            raise UserError(
                f"{self.checkpoints.directory} holds a run of another recipe; choose another run_directory, or "
                "delete that one to start anew."
            )
        self.take_up(restored)
        return True

    def take_up(self, restored: Restored, returns: list[dict[str, Any]] | None = None) -> None:
        """Go on from a checkpoint, after `returns` to it where these are more than it knows of."""
        extras = restored.extras
        self.learner.restore(restored.state, extras)
        self.done, self.position = restored.step, extras["position"]
        self.bad_batches, self.bad_in_a_row = extras["bad_batches"], extras["bad_in_a_row"]
        if self.detector is not None:
            self.detector.take_up(extras["collapse"], returns)
            self.learner.rate_scale = self.detector.rate_scale


def train(config: Config, *, profile: bool = False) -> None:
    """`psearch train`: open everything, take up a checkpoint if there is one, train, save the policy.

    The run directory holds checkpoints/, metrics.jsonl, tensorboard/ and, at the end, policy/ as a Hugging
    Face directory; with `profile` also profile/, a trace of three steps.
    """
    processes.check_agreement(flatten(config))
    keep_compiled_programs(config)
    directory = Path(config.run_directory)
    trace = Trace(directory / "profile") if profile else None
    stop = GracefulStop()
    first = processes.is_first()  # it alone writes what there is one of, and talks
    with stop, Display() if first else _silent() as display:
        try:
            with stop.breakable():
                trainer, policy = _open(config, display)
        except StopNow:
            raise Interrupted(
                "Stopped before training began; the same command starts again.", code=0
            ) from None
        trainer.stop = stop
        steps = config.trainer.steps
        with (
            MetricsLog(directory, resumed_step=trainer.done or None, tracking=config.tracking)
            if first
            else nullcontext()
        ) as log:

            def on_step(step: int, metrics: Mapping[str, Any]) -> None:
                if log is not None:
                    log.write(step, metrics)
                display.step(directory.name, step, steps, metrics)
                if trace is not None:
                    trace.after_step()

            def on_return(step: int, sentence: str) -> None:
                if log is not None:
                    log.rewind(step)
                display.note(sentence)

            trainer.run(on_step, on_return)
        save_hf_directory(
            directory / "policy",
            policy.config,
            trainer.params,
            tokenizer=policy.tokenizer,
            generation=policy.generation,
        )


def _silent() -> Display:
    """The display of a process that is not the first."""
    return Display(stream=open(os.devnull, "w"), live=False)


def _open(config: Config, display: Display) -> tuple[Trainer, Policy]:
    """All that a run needs, with its programs compiled and its newest checkpoint taken up."""
    display.phase("opening policy and index")
    mesh = make_mesh(config.mesh)
    policy = open_policy(
        config.policy,
        dtype=jnp.dtype(config.model.param_dtype),
        mesh=mesh if mesh.size > 1 else None,
    )
    policy = lay_out(policy, config, mesh)
    engine = open_engine(config, policy, open_backend(config.retrieval), mesh, training=True)
    display.note(str(engine.sizing))
    display.note(f"attention while decoding: {engine.attention}")
    questions = load_questions(config.data, "train")
    trainer = Trainer(config, engine, policy.params, questions, mesh=mesh)
    if trainer.resume():
        display.note(f"going on after step {trainer.done}")
    display.phase("compiling")
    engine.warm_up(trainer.params)
    return trainer, policy
