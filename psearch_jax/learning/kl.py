"""How far the policy is from its reference: three estimates, and a coefficient that follows a target."""

from __future__ import annotations

import math

import jax
from jaxtyping import Array, Float

from psearch_jax.errors import UserError
from psearch_jax.learning.losses import kl_k3

ESTIMATORS = ("k1", "k2", "k3")
PLACES = ("loss", "reward")
#: An adaptive coefficient changes by at most this share of (episodes / horizon) a step (Ziegler et al. 2019).
LARGEST_ERROR = 0.2


def kl_estimate(
    name: str, logprobs_RxL: Float[Array, "R L"], reference_RxL: Float[Array, "R L"]
) -> Float[Array, "R L"]:
    """KL(π ‖ π_ref) from tokens that π drew (Schulman 2020), with d = log π − log π_ref.

    k1 = d: unbiased, of either sign. k2 = d²/2: biased, never negative. k3 = e^−d − 1 + d: unbiased, never negative.

    Raises:
      UserError: a name that is not known.
    """
    if name == "k3":
        return kl_k3(logprobs_RxL, reference_RxL)
    difference_RxL = logprobs_RxL - reference_RxL
    if name == "k1":
        return difference_RxL
    if name == "k2":
        return 0.5 * difference_RxL * difference_RxL
    raise UserError(f"algorithm.kl_estimator is {name!r}; use one of {', '.join(ESTIMATORS)}.")


def kl_penalty(
    name: str, logprobs_RxL: Float[Array, "R L"], reference_RxL: Float[Array, "R L"]
) -> Float[Array, "R L"]:
    """The estimate as a term of the loss.

    The gradient of k1 itself is that of log π, which averages to nothing over what π draws and would hold nothing
    back. As a term of the loss k1 therefore has its own value and the gradient of k2, which averages to the gradient
    of the divergence. k2 and k3 are differentiated as they are.
    """
    estimate_RxL = kl_estimate(name, logprobs_RxL, reference_RxL)
    if name != "k1":
        return estimate_RxL
    pull_RxL = kl_estimate("k2", logprobs_RxL, reference_RxL)
    return pull_RxL + jax.lax.stop_gradient(estimate_RxL - pull_RxL)


def next_coefficient(
    coefficient: float, measured: float, *, target: float, horizon: float, episodes: int
) -> float:
    """The coefficient of the next step (Ziegler et al. 2019): larger where the divergence is above its target.

    Args:
      measured, target: nats a token.
      horizon: episodes after which an error of 20 % or more has changed the coefficient by 20 % (compounded).
      episodes: of this step.
    """
    if not math.isfinite(measured):
        return coefficient  # the batch was bad and not applied
    error = min(max(measured / target - 1.0, -LARGEST_ERROR), LARGEST_ERROR)
    return coefficient * max(0.0, 1.0 + error * episodes / horizon)
