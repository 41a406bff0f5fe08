"""Law 11 for the algorithm: settings that cannot work together are errors that name the keys."""

import re

import pytest

from psearch_jax import config_values
from psearch_jax.config_files import resolve
from psearch_jax.errors import UserError
from psearch_jax.learning import aggregation, corrections, kl, objective
from psearch_jax.learning.advantages import OUTCOME


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["advantage=ppo"], "must be one of grpo, rloo, reinforce, gae"),
        (["gamma=0.9"], "algorithm.gamma=0.9 is read only beside algorithm.advantage=gae"),
        (["advantage=gae", "gamma=1.1"], "at most 1"),
        (["value_clip=0.2"], "beside algorithm.advantage=gae, and that is grpo"),
        (["critic_learning_rate=1e-6"], "beside algorithm.advantage=gae"),
        (["advantage=rloo"], "set algorithm.normalize_std=false"),
        (["advantage=gae", "refill_rounds=2"], "advantage=grpo or rloo, and that is gae"),
        (["loss=cispo", "clip_dual=3.0"], "beside algorithm.loss=clipped or gspo"),
        (["clip_dual=1.2"], "must be above 1 + algorithm.clip_high=1.2"),
        (["kl_estimator=k1"], "beside algorithm.kl_coefficient above 0, and that is 0.0"),
        (["kl_place=reward"], "beside algorithm.kl_coefficient above 0"),
        (["kl_target=0.1"], "beside algorithm.kl_coefficient above 0"),
        (["kl_coefficient=0.1", "kl_horizon=5"], "beside algorithm.kl_target above 0"),
        (["correction=token"], "beside algorithm.old_logprobs=trainer, and that is rollout"),
        (["old_logprobs=trainer", "correction_cap=3"], "beside algorithm.correction=token or sequ"),
        (
            ["old_logprobs=trainer", "correction=token", "correction_high=0.5"],
            "would leave out tokens on which rollout and trainer agree",
        ),
        (["aggregation=fixed_length"], "algorithm.fixed_length, which is 0"),
        (["fixed_length=100"], "beside algorithm.aggregation=fixed_length"),
        (["overlong_penalty=0.5"], "beside algorithm.overlong_buffer above 0"),
        (["overlong_buffer=512"], "leaves no length without a penalty"),
    ],
)
def test_law_11_settings_that_nothing_reads_are_errors(overrides, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        resolve([], [f"algorithm.{override}" for override in overrides])


@pytest.mark.parametrize(
    "overrides",
    [
        ["advantage=rloo", "normalize_std=false", "refill_rounds=2"],
        ["advantage=reinforce"],
        [
            "advantage=gae",
            "gamma=0.99",
            "kl_coefficient=0.001",
            "kl_place=reward",
            "kl_estimator=k1",
        ],
        ["loss=gspo", "clip_low=3e-4", "clip_high=4e-4", "aggregation=sequence_mean"],
        ["loss=cispo", "clip_low=1.0", "clip_high=4.0"],
        ["clip_high=0.28", "clip_dual=3.0", "overlong_filter=true", "overlong_buffer=64"],
        ["kl_coefficient=0.001", "kl_target=0.05", "kl_horizon=5000"],
        [
            "old_logprobs=trainer",
            "correction=sequence",
            "correction_low=0.5",
            "correction_high=5.0",
        ],
        ["aggregation=fixed_length", "fixed_length=256"],
    ],
)
def test_settings_that_work_together(overrides):
    config, _ = resolve([], [f"algorithm.{override}" for override in overrides])
    objective.check_names(config.algorithm)


def test_alone_members_have_nothing_to_be_compared_with():
    for advantage in ("grpo", "rloo"):
        overrides = [f"algorithm.advantage={advantage}", "algorithm.normalize_std=false"]
        with pytest.raises(UserError, match=f"advantage={advantage} compares the members of a gr"):
            resolve([], [*overrides, "trainer.group_size=1"])
    for advantage in ("reinforce", "gae"):
        resolve([], [f"algorithm.advantage={advantage}", "trainer.group_size=1"])


def test_the_configuration_offers_what_there_is():
    for key, names in (
        ("advantage", (*OUTCOME, "gae")),
        ("loss", objective.LOSSES),
        ("old_logprobs", objective.OLD_POLICIES),
        ("aggregation", aggregation.AGGREGATIONS),
        ("correction", corrections.LEVELS),
        ("kl_estimator", kl.ESTIMATORS),
        ("kl_place", kl.PLACES),
    ):
        assert config_values.CHOICES[f"algorithm.{key}"] == names, key
