"""The policy's objective, put together from its parts by name: surrogate, correction, entropy, KL, aggregation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from psearch_jax.config import AlgorithmConfig
from psearch_jax.errors import UserError
from psearch_jax.learning import losses
from psearch_jax.learning.aggregation import AGGREGATIONS, token_shares
from psearch_jax.learning.batches import Batch
from psearch_jax.learning.corrections import LEVELS, correction_weights
from psearch_jax.learning.kl import ESTIMATORS, PLACES, kl_penalty

LOSSES = ("clipped", "gspo", "cispo")
#: Whose log-probabilities the ratio of the update is taken against.
OLD_POLICIES = ("rollout", "trainer")

#: (parameters, batch, entropy mode) → scores of the predicted tokens.
Score = Callable[[Any, Batch, str], losses.TokenScores]
Metrics = dict[str, Float[Array, ""]]


def kl_in_loss(config: AlgorithmConfig) -> bool:
    """Whether the update itself needs the reference."""
    return config.kl_coefficient > 0 and config.kl_place == "loss"


def shares_trunk(config: AlgorithmConfig) -> bool:
    """Whether the critic is a head on the policy, so that one update trains both."""
    return config.advantage == "gae" and config.critic == "shared"


def scores_itself(config: AlgorithmConfig) -> bool:
    """Whether the trainer's old log-probabilities are those of the update's own forward pass.

    With one optimiser step a rollout the parameters are still those of the rollout, so no second pass is needed.
    """
    return config.old_logprobs == "trainer" and config.minibatches == 1


def make_policy_loss(
    score: Score, config: AlgorithmConfig
) -> Callable[..., tuple[Float[Array, ""], tuple[Metrics, Metrics]]]:
    """The loss of a micro-batch, `loss(params, batch, weight, reference=None, kl_coefficient=None)`.

    `weight` is what the whole batch's loss is divided by, so that losses (and the metrics, which are means over
    tokens once they are multiplied with weight / tokens) add up over micro-batches. `reference` are parameters, read
    where `kl_in_loss`; `kl_coefficient` replaces the configured one.

    Returns:
      (loss, (sums, peaks)); see `make_policy_update` for what they are.

    Raises:
      UserError: a loss, an estimator, a correction or an aggregation that is not known.
    """
    check_names(config)
    entropy_mode = "loss" if config.entropy_coefficient else "metric"

    def loss(
        params: Any,
        batch: Batch,
        weight: Float[Array, ""],
        reference: Any = None,
        kl_coefficient: Float[Array, ""] | None = None,
    ):
        shares_RxL = token_shares(config.aggregation, batch)

        def total_of(x_RxL, shares_RxL):
            # Where a token has no weight x may be anything, infinity included.
            return jnp.sum(jnp.where(batch.weights_RxL > 0, x_RxL * shares_RxL, 0.0)) / weight

        def mean(x_RxL):
            return total_of(x_RxL, batch.weights_RxL)

        def mean_and_term(x_RxL):
            """As a metric (over tokens), and as a term of the loss (aggregated as asked)."""
            over_tokens = mean(x_RxL)
            if config.aggregation != "sequence_mean":
                return over_tokens, over_tokens
            return over_tokens, total_of(x_RxL, shares_RxL)

        logprobs_RxL, entropy_RxL = score(params, batch, entropy_mode)
        advantages_RxL, old_RxL = batch.advantages_RxL, batch.old_logprobs_RxL
        corrected = {}
        if scores_itself(config):
            old_RxL = jax.lax.stop_gradient(logprobs_RxL)
            advantages_RxL, corrected = apply_correction(config, old_RxL, batch, mean)
        surrogate = _surrogate(config, logprobs_RxL, old_RxL, advantages_RxL, batch)
        entropy, entropy_term = mean_and_term(entropy_RxL)
        total = total_of(surrogate.loss_RxL, shares_RxL) - config.entropy_coefficient * entropy_term
        kl = jnp.zeros(())
        if kl_in_loss(config):
            before_RxL = score(reference, batch, "none").logprobs_RxL
            kl_RxL = kl_penalty(
                config.kl_estimator, logprobs_RxL, jax.lax.stop_gradient(before_RxL)
            )
            kl, kl_term = mean_and_term(kl_RxL)
            coefficient = config.kl_coefficient if kl_coefficient is None else kl_coefficient
            total = total + coefficient * kl_term
        gap_RxL = jnp.where(
            batch.weights_RxL > 0, jnp.abs(logprobs_RxL - batch.old_logprobs_RxL), 0.0
        )
        sums = {
            "loss": total,
            "ratio": mean(surrogate.ratio_RxL),
            "clip_fraction": mean(surrogate.clipped_RxL.astype(jnp.float32)),
            "approx_kl": mean(losses.kl_k3(batch.old_logprobs_RxL, logprobs_RxL)),
            "entropy": entropy,
            "kl": kl,
            "gap": mean(gap_RxL),
        }
        return total, (sums | corrected, {"gap_max": jnp.max(gap_RxL)})

    return loss


def apply_correction(
    config: AlgorithmConfig,
    own_RxL: Float[Array, "R L"],
    batch: Batch,
    mean: Callable[[Float[Array, "R L"]], Float[Array, ""]],
) -> tuple[Float[Array, "R L"], Metrics]:
    """Advantages times their correction, and what is told about it.

    Every surrogate is homogeneous in the advantage, so a weight that is not negative may be multiplied with it as
    well as with the loss. Metrics: correction (mean weight of a token), masked (share of tokens that count 0).
    """
    if config.correction == "none":
        return batch.advantages_RxL, {}
    weights_RxL = correction_weights(config, own_RxL, batch)
    told = {
        "correction": mean(weights_RxL),
        "masked": mean((weights_RxL == 0.0).astype(jnp.float32)),
    }
    return batch.advantages_RxL * weights_RxL, told


def _surrogate(
    config: AlgorithmConfig,
    logprobs_RxL: Float[Array, "R L"],
    old_RxL: Float[Array, "R L"],
    advantages_RxL: Float[Array, "R L"],
    batch: Batch,
) -> losses.Surrogate:
    clips = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    if config.loss == "cispo":
        return losses.clipped_weight(logprobs_RxL, old_RxL, advantages_RxL, **clips)
    clips["clip_dual"] = config.clip_dual
    if config.loss == "gspo":
        return losses.sequence_surrogate(
            logprobs_RxL, old_RxL, advantages_RxL, batch.weights_RxL, batch.segments_RxL, **clips
        )
    return losses.clipped_surrogate(logprobs_RxL, old_RxL, advantages_RxL, **clips)


def check_names(config: AlgorithmConfig) -> None:
    """Raise a UserError for a name that no part has. (A recipe's file is checked before: config_checks.py.)"""
    for key, names in (
        ("loss", LOSSES),
        ("aggregation", AGGREGATIONS),
        ("correction", LEVELS),
        ("kl_estimator", ESTIMATORS),
        ("kl_place", PLACES),
        ("old_logprobs", OLD_POLICIES),
    ):
        value = getattr(config, key)
        if value not in names:
            raise UserError(f"algorithm.{key} is {value!r}; use one of {', '.join(names)}.")
