"""Whether two configurations describe the same run: what a checkpoint must agree with to be taken up."""

from __future__ import annotations

from dataclasses import replace

from psearch_jax.config import (
    Config,
    EvaluationConfig,
    HardwareConfig,
    RejectionConfig,
    SupervisedConfig,
    TrackingConfig,
)
from psearch_jax.config_files import config_hash


def recipe_hash(config: Config) -> str:
    """Changes with everything that the numbers of a run depend on; not with where, how long or how often saved."""
    steps = 0 if config.optimizer.schedule == "constant" else config.trainer.steps
    trainer = replace(
        config.trainer,
        steps=steps,
        checkpoint_every=1,
        keep=1,
        keep_best=False,
        keep_every=0,
        log_episodes=0,
    )
    return config_hash(
        replace(
            config,
            trainer=trainer,
            run_directory="",
            compile_cache="",
            supervised=SupervisedConfig(),
            rejection=RejectionConfig(),
            evaluation=EvaluationConfig(),
            tracking=TrackingConfig(),
            hardware=HardwareConfig(),
            architecture="",
        )
    )
