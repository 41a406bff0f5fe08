"""The whole ring on a toy policy: order of the data, exact resume, Ctrl-C, bad batches."""

import json
import os
import shutil
import signal
from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout.toys import PROTOCOL, ROLLOUT, Corpus, make_policy, make_tokenizer

from psearch_jax import trainer as trainer_module
from psearch_jax.assembly import Policy, lay_out
from psearch_jax.config import (
    AlgorithmConfig,
    Config,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    TrainerConfig,
)
from psearch_jax.config_files import config_hash
from psearch_jax.errors import Interrupted, UserError
from psearch_jax.learning import experience
from psearch_jax.mesh import make_mesh
from psearch_jax.metrics_log import EPISODES_FILE, read_lines
from psearch_jax.models.lora import split_trainable
from psearch_jax.questions.question import Question
from psearch_jax.rewards.composition import score_groups
from psearch_jax.rollout.engine import Engine
from psearch_jax.trainer import Trainer, question_order, recipe_hash

QUESTIONS = [
    Question(id=f"q{i}", text=text, golden_answers=("1",), kind=kind)
    for i, (text, kind) in enumerate(
        [("a b", "parallelizable"), ("b c", "bridge"), ("c a", "single"), ("b b", "parallelizable")]
    )
]
TOKENIZER = make_tokenizer("whole")
#: Searches or answers evenly, and half of its answers are the right one: groups have spread.
FOLLOWS = [
    ("\n", "<search> <answer>"),
    ("<search> ##", "b c"),
    ("b c", "</search> ##"),
    ("<answer>", "1 2"),
    ("1 2", "</answer>"),
]
MODEL, GRAPHDEF, PARAMS = make_policy(TOKENIZER, FOLLOWS)
ENGINE = Engine(GRAPHDEF, MODEL, TOKENIZER, PROTOCOL, Corpus(), ROLLOUT)
MESH = make_mesh(MeshConfig(data=1), jax.devices()[:1])
CONFIG = Config(
    protocol=PROTOCOL,
    rollout=ROLLOUT,
    reward=RewardConfig(name="gated"),
    optimizer=OptimizerConfig(learning_rate=1e-2),
    algorithm=AlgorithmConfig(row_length=96, micro_rows=2, minibatches=2, logprob_chunk=64),
    trainer=TrainerConfig(
        steps=4, questions_per_step=3, group_size=4, checkpoint_every=2, max_bad_batches=1
    ),
)


def make_trainer(directory, **trainer) -> Trainer:
    config = replace(
        CONFIG, run_directory=str(directory), trainer=replace(CONFIG.trainer, **trainer)
    )
    return Trainer(config, ENGINE, PARAMS, QUESTIONS, mesh=MESH)


def numbers(metrics) -> dict:
    """What must not depend on the clock."""
    return {
        k: v for k, v in metrics.items() if k not in ("seconds", "tokens_per_second", "throughput")
    }


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Metrics of every step of a whole run, and its final parameters."""
    trainer, steps = make_trainer(tmp_path_factory.mktemp("unbroken")), []
    trainer.run(lambda step, metrics: steps.append((step, numbers(metrics))))
    return steps, jax.device_get(jax.tree.leaves(trainer.state.params))


@given(st.integers(1, 9), st.integers(0, 3), st.integers(1, 7))
def test_each_question_comes_once_an_epoch(count, seed, a_step):
    order = [i for step in range(20) for i in question_order(count, seed, step * a_step, a_step)]
    assert len(order) == 20 * a_step
    for start in range(0, len(order) - count + 1, count):
        assert sorted(order[start : start + count]) == list(range(count))


def test_the_order_follows_from_the_seed():
    assert question_order(50, 1, 0, 50) != question_order(50, 2, 0, 50)
    assert question_order(50, 1, 0, 50) != question_order(50, 1, 50, 50)


def test_a_run_learns_and_tells(unbroken):
    steps, params = unbroken
    assert [step for step, _ in steps] == [1, 2, 3, 4]
    first = steps[0][1]
    assert first["reward"] == pytest.approx(sum(first["parts"].values()))
    assert first["gap_max"] < 1e-3  # law 9: the first minibatch is scored by the policy that played
    assert set(first["kinds"]) <= {"parallelizable", "bridge", "single"}
    assert sum(kind["episodes"] for kind in first["kinds"].values()) == 12
    assert 0.0 < first["entropy"] < np.log(len(TOKENIZER))
    # Every step has something to learn from, so the tests of resuming compare numbers that move.
    assert all(metrics["grad_norm"] > 0 and metrics["zero_spread"] < 1 for _, metrics in steps)
    assert all(np.any(a != b) for a, b in zip(params, jax.tree.leaves(PARAMS), strict=True))


def test_the_reward_rises(tmp_path):
    rewards = []
    trainer = make_trainer(tmp_path, steps=16, checkpoint_every=16)
    trainer.run(lambda step, metrics: rewards.append(metrics["em"]))
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.3


@pytest.mark.parametrize("axes", [{}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=["one", "eight"])
def test_adapters_alone_learn_and_are_saved(axes, tmp_path):
    """The frozen parameters stay bit for bit, a checkpoint holds adapters and their moments only, and a resumed run
    ends like an unbroken one; on a mesh the engine and the update share it."""
    mesh = make_mesh(MeshConfig(**axes)) if axes else MESH
    config = replace(
        CONFIG,
        run_directory=str(tmp_path),
        model=ModelConfig(lora_rank=2, lora_alpha=16.0),
        rollout=replace(ROLLOUT, slots=8),
        algorithm=replace(CONFIG.algorithm, micro_rows=4, kl_coefficient=0.01),
        trainer=replace(CONFIG.trainer, steps=2, checkpoint_every=1),
    )
    policy = lay_out(
        Policy(config=MODEL, graphdef=GRAPHDEF, params=PARAMS, tokenizer=TOKENIZER), config, mesh
    )
    engine = Engine(
        policy.graphdef, policy.config, TOKENIZER, PROTOCOL, Corpus(), config.rollout, mesh=mesh
    )
    trainer = Trainer(config, engine, policy.params, QUESTIONS, mesh=mesh)
    steps = []
    trainer.run(lambda step, metrics: steps.append(metrics))
    assert steps[0]["gap_max"] < 1e-3
    assert all(metrics["kl"] > 0 for metrics in steps)  # the reference is the fresh adapter
    assert all(metrics["grad_norm"] > 0 for metrics in steps)
    trained, frozen = split_trainable(trainer.params)
    before, original = split_trainable(policy.params)
    for a, b in zip(jax.tree.leaves(frozen), jax.tree.leaves(original), strict=True):
        np.testing.assert_array_equal(a, b)
    assert any(
        np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (trained, before)), strict=True)
    )
    assert len(jax.tree.leaves(trainer.state.params)) == 2 * 7 * MODEL.num_layers
    again = Trainer(config, engine, policy.params, QUESTIONS, mesh=mesh)
    assert again.resume()
    for a, b in zip(jax.tree.leaves(again.params), jax.tree.leaves(trainer.params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_law_13_a_killed_run_ends_with_the_same_numbers(unbroken, tmp_path):
    class Killed(Exception):
        pass

    def kill(step, metrics):
        if step == 3:
            raise Killed  # after the checkpoint of step 2, and before step 3 is saved

    first = make_trainer(tmp_path)
    with pytest.raises(Killed):
        first.run(kill)
    first.checkpoints.wait()  # step 2's is written in the background; a kill before it is done resumes earlier
    again, rest = make_trainer(tmp_path), []
    assert again.resume()
    assert again.done == 2
    compiled = ENGINE.compile_count
    again.run(lambda step, metrics: rest.append((step, numbers(metrics))))
    steps, params = unbroken
    assert rest == steps[2:]
    assert ENGINE.compile_count == compiled  # law 6: restored arrays are like fresh ones
    for a, b in zip(params, jax.device_get(jax.tree.leaves(again.state.params)), strict=True):
        np.testing.assert_array_equal(a, b)
    # Whole groups of every step are kept for the report, each step once; advantages are against the group's mean.
    lines = read_lines(tmp_path / EPISODES_FILE)
    assert [line["step"] for line in lines] == [step for step in range(1, 5) for _ in range(8)]
    for start in range(0, len(lines), 4):
        group = lines[start : start + 4]
        assert len({line["id"] for line in group}) == 1
        assert sum(line["advantage"] for line in group) == pytest.approx(0.0, abs=1e-3)
        best = max(group, key=lambda line: line["reward"])
        assert best["advantage"] == max(line["advantage"] for line in group)


ALGORITHMS = {
    # Three passes beside the update: the reference's, the trainer's own; and rounds of new questions.
    "rloo": {
        "advantage": "rloo",
        "normalize_std": False,
        "kl_coefficient": 0.1,
        "kl_place": "reward",
        "kl_estimator": "k1",
        "kl_target": 1e-4,
        "kl_horizon": 100.0,
        "old_logprobs": "trainer",
        "correction": "token",
        "refill_rounds": 2,
    },
    "gae": {
        "advantage": "gae",
        "critic_learning_rate": 1e-2,
        "kl_coefficient": 0.1,
        "kl_target": 1e-4,
        "kl_horizon": 100.0,
        "loss": "gspo",
        "aggregation": "sequence_mean",
    },
    "shared": {
        "advantage": "gae",
        "critic": "shared",
        "kl_coefficient": 0.1,
        "kl_target": 1e-4,
        "kl_horizon": 100.0,
        "old_logprobs": "trainer",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_law_13_everything_that_an_algorithm_keeps_is_resumed(name, tmp_path):
    config = replace(
        CONFIG,
        run_directory=str(tmp_path),
        algorithm=replace(CONFIG.algorithm, **ALGORITHMS[name]),
        trainer=replace(CONFIG.trainer, steps=3, checkpoint_every=1, keep=3),
    )
    trainer, steps = Trainer(config, ENGINE, PARAMS, QUESTIONS, mesh=MESH), []
    trainer.run(lambda step, metrics: steps.append(numbers(metrics)))
    assert all(metrics["grad_norm"] > 0 and metrics["gap_max"] < 1e-3 for metrics in steps)
    assert steps[0]["kl_coefficient"] == 0.1 != steps[2]["kl_coefficient"]
    assert 0.0 < steps[0]["padding"] < 1.0
    if name == "rloo":
        assert steps[0]["correction"] == pytest.approx(1.0, abs=1e-3) and steps[0]["masked"] == 0.0
        assert trainer.position == sum(metrics["groups"] for metrics in steps) > 9
        assert abs(steps[0]["kl"]) < 1e-3 < abs(steps[2]["kl"])
    else:
        assert steps[0]["critic_value"] == 0.0 != steps[2]["critic_value"]
        assert steps[0]["critic_loss"] > 0
        assert name == "shared" or steps[0]["critic_grad_norm"] > 0
    shutil.rmtree(tmp_path / "checkpoints" / "3")
    shutil.rmtree(tmp_path / "checkpoints" / "2")
    again, rest = Trainer(config, ENGINE, PARAMS, QUESTIONS, mesh=MESH), []
    assert again.resume() and again.done == 1
    again.run(lambda step, metrics: rest.append(numbers(metrics)))
    assert rest == steps[1:]
    for a, b in zip(jax.tree.leaves(again.state), jax.tree.leaves(trainer.state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_ctrl_c_finishes_the_step_saves_and_says_how_to_go_on(unbroken, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def press(step, metrics):
        seen.append((step, numbers(metrics)))
        os.kill(os.getpid(), signal.SIGINT)

    trainer = make_trainer(tmp_path)
    with pytest.raises(Interrupted, match=r"after step 1 of 4 .* the same command goes on"):
        trainer.run(press)
    assert signal.getsignal(signal.SIGINT) is before
    assert trainer.checkpoints.steps() == [1]
    again = make_trainer(tmp_path)
    again.resume()
    again.run(lambda step, metrics: seen.append((step, numbers(metrics))))
    assert seen == unbroken[0]


@pytest.mark.parametrize("moment", ["rollout", "rewards", "update"])
def test_sigterm_saves_what_is_done_and_exits_with_0(moment, tmp_path, monkeypatch):
    """In the third step: a rollout is broken off, and an update is finished first."""
    trainer = make_trainer(tmp_path, checkpoint_every=9)
    # Nothing is compiled for this: what is learned does not matter here.
    learn = {"loss": 0.0}, [True, True]

    def send():
        if trainer.done == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    def learned(groups, rewards_GxM, step):
        if moment == "update":
            send()
        return learn

    def search(queries, k):
        if moment == "rollout":
            send()
        return Corpus().search(queries, k)

    def scored(*arguments):
        if moment == "rewards":
            send()
        return score_groups(*arguments)

    monkeypatch.setattr(trainer.learner, "learn", learned)
    monkeypatch.setattr(trainer_module, "score_together", scored)
    monkeypatch.setattr(ENGINE.environment.backend, "search", search)
    seen = []
    done = 3 if moment == "update" else 2
    with pytest.raises(Interrupted, match=rf"after step {done} of 4 .* same command") as stopped:
        trainer.run(lambda step, metrics: seen.append(step))
    assert stopped.value.code == 0
    assert seen == list(range(1, done + 1)) and trainer.checkpoints.steps() == [done]
    again = make_trainer(tmp_path)
    assert again.resume() and (again.done, again.position) == (done, 3 * done)


def test_a_checkpoint_says_what_it_is_of(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.rewards = [1.0, 2.0]
    trainer.save()
    extras = json.loads((tmp_path / "checkpoints" / "0" / "extras.json").read_text())
    assert extras["config"]["trainer.group_size"] == 4
    assert extras["config_hash"] == config_hash(trainer.config)
    assert trainer.checkpoints.score(0) == 1.5 and trainer.rewards == []


def test_a_checkpoint_of_another_recipe_is_refused(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.save()
    assert make_trainer(tmp_path, steps=9, keep=5).resume()  # longer is the same run
    with pytest.raises(
        UserError, match="holds a run of another recipe; choose another run_directory"
    ):
        make_trainer(tmp_path, seed=1).resume()
    linear = replace(CONFIG, optimizer=OptimizerConfig(schedule="linear"))
    longer = replace(linear, trainer=replace(CONFIG.trainer, steps=9))
    assert recipe_hash(linear) != recipe_hash(longer)  # here the length decides the rates


def test_bad_batches_are_counted_and_end_the_run_beyond_the_limit(tmp_path, monkeypatch):
    def poison(name, rewards_GxM, *, normalize_std):
        return np.full_like(rewards_GxM, np.nan, np.float32)

    monkeypatch.setattr(experience, "outcome_advantages", poison)
    monkeypatch.setattr(experience, "KEPT_BAD_BATCHES", 3)
    trainer = make_trainer(tmp_path, max_bad_batches=2)
    assert trainer.step()["bad_batches"] == 2
    with pytest.raises(UserError, match=r"not finite in 4 batches in a row at step 2"):
        trainer.step()
    kept = sorted((tmp_path / "bad_batches").iterdir())
    assert [path.name for path in kept] == ["step-1-0.npz", "step-1-1.npz", "step-2-2.npz"]
    with np.load(kept[0]) as arrays:
        assert np.isnan(arrays["advantages_RxL"]).any()
        assert arrays["tokens_RxL"].any()
    for a, b in zip(jax.tree.leaves(trainer.state.params), jax.tree.leaves(PARAMS), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("phase", "sentence"),
    [
        ("rollout", r"memory for the rollout of step 1 .*lower rollout\.slots"),
        ("update", r"memory for the update of step 1 .*lower algorithm\.micro_rows"),
    ],
)
def test_a_device_out_of_memory_is_a_sentence(phase, sentence, tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path)

    def exhausted(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    if phase == "rollout":
        monkeypatch.setattr(trainer.engine, "decode", exhausted)
    else:
        monkeypatch.setattr(trainer.learner, "update", exhausted)
    with pytest.raises(UserError, match=sentence):
        trainer.step()
    assert trainer.done == trainer.position == 0


def test_where_no_group_has_spread_one_is_scored_for_the_gap(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.questions = [replace(q, golden_answers=("c",)) for q in QUESTIONS]  # never answered
    metrics = trainer.step()
    assert metrics["zero_spread"] == 1.0 and metrics["grad_norm"] == 0.0
    assert 0.0 < metrics["gap"] <= metrics["gap_max"] < 1e-3
    assert 0 < metrics["weight"] < 12 * metrics["lengths"]["policy"]
    assert metrics["entropy"] > 0
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-4)
    for a, b in zip(jax.tree.leaves(trainer.state.params), jax.tree.leaves(PARAMS), strict=True):
        np.testing.assert_array_equal(a, b)


def test_questions_are_chosen_by_kind():
    config = replace(CONFIG, trainer=replace(CONFIG.trainer, kinds=("bridge",)))
    assert [q.id for q in Trainer(config, ENGINE, PARAMS, QUESTIONS, mesh=MESH).questions] == ["q1"]
    config = replace(CONFIG, trainer=replace(CONFIG.trainer, kinds=("mixed",)))
    with pytest.raises(
        UserError, match=r"trainer\.kinds=mixed leaves none of the 4 training questions"
    ):
        Trainer(config, ENGINE, PARAMS, QUESTIONS, mesh=MESH)
