"""The measurements of benchmarks/faults.py, small; and that what it kills and breaks is still there."""

import importlib.util
from types import SimpleNamespace

import pytest

from psearch_jax import checkpoints, trainer
from psearch_jax.learning import learner
from psearch_jax.retrieval import searcher
from psearch_jax.rollout import loop

SMALL = SimpleNamespace(seed=0, fault_steps=6, away=0.5)


@pytest.fixture(scope="module")
def faults(root):
    spec = importlib.util.spec_from_file_location("faults", root / "benchmarks" / "faults.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_faults_of_the_index_lose_no_question(faults, tmp_path):
    told = faults.faults(tmp_path, SMALL)
    assert told["fault_lost_questions"] == 0
    assert told["fault_throughput_after"] > 0.3  # of a dozen steps on a busy machine


def test_a_checkpoint_goes_from_four_devices_to_two_and_back(faults, tmp_path):
    assert faults.reshard(tmp_path, SMALL) == {"reshard_exact": True}


def test_the_moments_of_the_kills_exist(faults):
    """A renamed function would be a kill that never comes."""
    assert set(faults.CALLS) == set(faults.MOMENTS)
    for owner, name in (
        (loop.Player, "_decode"),
        (searcher.Searcher, "search"),
        (learner, "place_batch"),
        (checkpoints, "_digest"),
        (trainer.Trainer, "run"),
    ):
        assert callable(getattr(owner, name))
