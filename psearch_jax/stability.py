"""What a run does about a policy that has collapsed: back to the last good checkpoint, more slowly, a few times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psearch_jax.errors import UserError


def go_back(trainer: Any, metrics: Mapping[str, Any]) -> str:
    """Where the last step shows that the policy has collapsed, take up the last good checkpoint with a lower learning
    rate; a sentence about it, or "" where there is nothing to do.

    Later checkpoints are deleted first, and the return is written into the good one: a run that is killed meanwhile or
    afterwards goes the same way.

    Args:
      trainer: a `Trainer`, which stands downstream of here.
      metrics: of its last step.

    Raises:
      UserError: the policy was taken back as often as it may be.
    """
    detector, checkpoints = trainer.detector, trainer.checkpoints
    if detector is None or not (sign := detector.see(metrics)):
        return ""
    at, good, returns = trainer.done, detector.good, detector.returns
    limit = detector.config.returns
    assert good is not None, "there is a checkpoint before the first step"
    checkpoints.drop_after(good)
    if len(returns) >= limit:
        raise UserError(
            f"The policy collapsed at step {at} ({sign}) after {len(returns)} returns to a good checkpoint "
            f"(trainer.collapse.returns); lower optimizer.learning_rate, or raise algorithm.kl_coefficient. The last "
            f"good checkpoint, of step {good}, is in {checkpoints.directory}."
        )
    score = checkpoints.score(good)
    restored = checkpoints.restore(good, trainer.learner.saved()[0])
    trainer.take_up(restored, [*returns, {"at": at, "to": good, "sign": sign}])
    trainer.rewards = [] if score is None else [score]
    trainer.save()
    return (
        f"The policy collapsed at step {at} ({sign}): back to step {good} with {trainer.learner.rate_scale:g} of the "
        f"learning rate ({len(returns) + 1} of {limit} returns)."
    )
