"""A policy that falls apart is seen, and the run goes back to its last good checkpoint, a stated number of times."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from test_trainer import CONFIG, ENGINE, MESH, PARAMS, QUESTIONS, numbers

from psearch_jax.config import CollapseConfig, OptimizerConfig
from psearch_jax.config_files import resolve
from psearch_jax.errors import UserError
from psearch_jax.learning.collapse import Detector, signs
from psearch_jax.metrics_log import EPISODES_FILE, MetricsLog, read_lines, read_metrics
from psearch_jax.trainer import Trainer

FINE = {"reward": 1.0, "entropy": 1.0, "gap": 0.001, "search_rate": 0.9, "invalid": 0.0}


@pytest.mark.parametrize(
    ("setting", "metrics", "words"),
    [
        ({"entropy_below": 0.05}, {"entropy": 0.04}, "entropy 0.04 is below 0.05"),
        ({"gap_above": 0.5}, {"gap": 0.6}, "gap 0.6 is above 0.5"),
        ({"search_rate_below": 0.1}, {"search_rate": 0.0}, "search_rate 0 is below 0.1"),
        ({"invalid_above": 0.5}, {"invalid": 0.75}, "invalid 0.75 is above 0.5"),
        ({"reward_drop": 0.5}, {"reward": 0.4}, "reward 0.4 is more than 0.5 below 1"),
    ],
)
def test_each_sign_is_looked_for_only_where_it_is_asked_for(setting, metrics, words):
    assert signs(CollapseConfig(**setting), FINE | metrics, 1.0) == [words]
    assert signs(CollapseConfig(**setting), FINE, 1.0) == []
    assert signs(CollapseConfig(), FINE | metrics, 1.0) == []


def test_a_collapse_is_several_steps_in_a_row():
    detector = Detector(CollapseConfig(entropy_below=0.1, reward_drop=0.6, window=2))
    bad = FINE | {"entropy": 0.0}
    seen = [detector.see(metrics) for metrics in (bad, FINE, bad, bad)]
    assert seen == ["", "", "", "entropy 0 is below 0.1"]
    again = Detector(detector.config)
    again.take_up(json.loads(json.dumps(detector.state)))  # as a checkpoint keeps it
    assert again.state == detector.state and again.state["best"] == 1.0
    both = bad | {"reward": 0.3}
    assert again.see(both) == "entropy 0 is below 0.1 and reward 0.3 is more than 0.6 below 1"
    assert again.see(FINE) == "" and again.state["streak"] == 0


def test_a_checkpoint_is_good_once_the_step_after_it_is():
    detector = Detector(CollapseConfig(entropy_below=0.1, rate_factor=0.5))
    bad = FINE | {"entropy": 0.0}
    detector.saves(0)
    assert detector.good == 0
    detector.see(FINE)
    detector.saves(1)
    detector.see(bad)  # of the policy that checkpoint 1 holds
    detector.saves(2)
    assert detector.good == 0
    detector.see(FINE)
    assert detector.good == 2
    detector.take_up(detector.state, [{"at": 2}, {"at": 5}])
    assert detector.rate_scale == 0.25


def test_settings_that_nothing_reads_are_errors():
    with pytest.raises(UserError, match=r"trainer\.collapse\.window is set, but no sign"):
        resolve([], ["trainer.collapse.window=5"])
    assert resolve([], ["trainer.collapse.window=5", "trainer.collapse.gap_above=1"])


#: A rate at which one update is enough to leave nothing of the policy; a hundredth of it does no harm.
WILD = replace(
    CONFIG,
    optimizer=OptimizerConfig(learning_rate=3.0),
    trainer=replace(
        CONFIG.trainer,
        steps=7,
        checkpoint_every=1,
        keep=1,
        collapse=CollapseConfig(entropy_below=0.02, window=2, returns=2, rate_factor=1e-3),
    ),
)


def make(directory, **collapse) -> Trainer:
    settings = replace(WILD.trainer.collapse, **collapse)
    config = replace(
        WILD, run_directory=str(directory), trainer=replace(WILD.trainer, collapse=settings)
    )
    trainer = Trainer(config, ENGINE, PARAMS, QUESTIONS, mesh=MESH)
    trainer.learner.update = COMPILED.setdefault("update", trainer.learner.update)
    return trainer


COMPILED = {}  # one program for all of them


def play(trainer, directory, kill_at=None):
    """Run (or die after a number of calls) and keep the log as `psearch train` does."""
    said = []
    resumed = trainer.resume()
    with MetricsLog(directory, resumed_step=trainer.done if resumed else None) as log:
        calls = 0

        def on_step(step, metrics):
            nonlocal calls
            log.write(step, numbers(metrics))
            calls += 1
            if calls == kill_at:
                raise KeyboardInterrupt

        def on_return(step, sentence):
            log.rewind(step)
            said.append(sentence)

        try:
            trainer.run(on_step, on_return)
        except KeyboardInterrupt:
            assert kill_at
    return said


@pytest.fixture(scope="module")
def collapsed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("collapsed")
    trainer = make(directory)
    return trainer, play(trainer, directory), read_metrics(directory)


def test_a_collapsed_run_goes_back_and_recovers(collapsed):
    trainer, said, steps = collapsed
    assert len(said) == 1
    assert said[0].startswith("The policy collapsed at step")
    assert "with 0.001 of the learning rate (1 of 2 returns)" in said[0]
    assert trainer.detector.returns[0]["to"] < trainer.detector.returns[0]["at"] - 1
    # Every step stands in the log once, and those after the return are sound and slow.
    assert [step["step"] for step in steps] == list(range(1, 8))
    assert steps[-1]["entropy"] > 0.02 and steps[-1]["returns"] == 1
    assert steps[-1]["rate_scale"] == 1e-3
    good = trainer.detector.returns[0]["to"]
    assert all(step["returns"] == (step["step"] > good) for step in steps)
    shown = [
        line["step"] for line in read_lines(trainer.checkpoints.directory.parent / EPISODES_FILE)
    ]
    assert shown == sorted(shown) and set(shown) == set(range(1, 8))


@pytest.mark.parametrize("kill_at", [2, 3, 5])
def test_law_13_a_collapsing_run_that_is_killed_ends_alike(collapsed, tmp_path, kill_at):
    trainer, _, steps = collapsed
    play(make(tmp_path), tmp_path, kill_at)
    again = make(tmp_path)
    play(again, tmp_path)
    assert again.detector.returns == trainer.detector.returns
    assert read_metrics(tmp_path) == steps
    for a, b in zip(jax.tree.leaves(again.state), jax.tree.leaves(trainer.state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_after_the_stated_returns_the_run_stops_with_its_last_good_checkpoint(tmp_path):
    trainer = make(tmp_path, returns=1, rate_factor=1.0)
    with pytest.raises(UserError, match=r"collapsed at step \d+ .*after 1 returns to a good"):
        play(trainer, tmp_path)
    assert trainer.checkpoints.steps() == [trainer.detector.good]
    assert len(trainer.detector.returns) == 1


def test_a_step_tells_everything_about_stability(collapsed):
    step = collapsed[2][0]
    told = {"reward", "entropy", "kl", "ratio", "clip_fraction", "gap", "gap_max", "search_rate"}
    told |= {"subqueries", "distinct_queries", "decomposed", "invalid", "well_formed"}
    told |= {"group_spread", "zero_spread", "grad_norm", "lengths/policy", "lengths/longest"}
    assert told <= set(step)
    assert any(name.startswith("parts/") for name in step)
    kinds = {name.split("/")[1] for name in step if name.startswith("kinds/")}
    assert kinds and {f"kinds/{kind}/decomposed" for kind in kinds} <= set(step)
