"""Optimisers and schedules by name."""

from __future__ import annotations

from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers

from psearch_jax.config import OptimizerConfig
from psearch_jax.errors import UserError

OPTIMIZERS = ("adam", "muon")
SCHEDULES = ("constant", "cosine", "linear")


def make_schedule(config: OptimizerConfig, peak: float, total_steps: int) -> optax.Schedule:
    """Linear warm-up from 0 to `peak`, then constant, cosine to 0, or linear to 0 at `total_steps`.

    The first step already moves: step t of the warm-up uses (t + 1) / warmup_steps of the peak.
    """
    if config.schedule not in SCHEDULES:
        raise UserError(
            f"optimizer.schedule is {config.schedule!r}; use one of {', '.join(SCHEDULES)}"
        )
    warmup = config.warmup_steps
    rest = max(1, total_steps - warmup)
    after = {
        "constant": optax.constant_schedule(peak),
        "cosine": optax.cosine_decay_schedule(peak, rest),
        "linear": optax.linear_schedule(peak, 0.0, rest),
    }[config.schedule]
    if warmup <= 0:
        return after
    rise = optax.linear_schedule(peak / warmup, peak, max(1, warmup - 1))
    return optax.join_schedules([rise, after], [warmup])


def is_hidden_matrix(name: str, ndim: int) -> bool:
    """Muon's share: weights of hidden layers with two dimensions (three when layers are stacked).

    Embedding and unembedding are tables, norms and biases vectors (stacked biases have two
    dimensions, hence the names): those are Adam's.
    """
    table_or_vector = ("embed", "lm_head", "bias", "norm", "scale")
    return ndim in (2, 3) and not any(word in name.lower() for word in table_or_vector)


def make_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """Clip by the global norm, then Adam(W), or Muon for hidden matrices and NAdam(W) for the rest.

    (Optax's Muon has one switch for the Nesterov momentum of both its parts, and Muon wants it.)
    `learning_rate` belongs to Muon where Muon is used (its update has singular values near 1 times
    √max(1, fan_out / fan_in), so 0.01–0.03 is usual), and to Adam otherwise; `adam_learning_rate` to the
    tensors that Muon leaves. Weight decay falls on matrices only (on Muon's only, where Muon is used).
    `total_steps` is where a decaying schedule ends.

    Raises:
      UserError: an optimiser or schedule with an unknown name.
    """
    if config.name not in OPTIMIZERS:
        raise UserError(f"optimizer.name is {config.name!r}; use one of {', '.join(OPTIMIZERS)}")
    rate = make_schedule(config, config.learning_rate, total_steps)
    if config.name == "adam":
        inner = optax.adamw(
            rate,
            b1=config.b1,
            b2=config.b2,
            weight_decay=config.weight_decay,
            mask=lambda flat: {name: leaf.ndim >= 2 for name, leaf in flat.items()},
        )
    else:

        def dimension_numbers(flat: dict[str, Any]) -> dict[str, MuonDimensionNumbers | None]:
            """Which tensors are Muon's; the last two axes are (in, out), an axis before them is a stack."""
            numbers = {}
            for name, leaf in flat.items():
                ndim = getattr(leaf, "ndim", 0)  # optax shows the tensors it masks as empty nodes
                mine = is_hidden_matrix(name, ndim)
                numbers[name] = MuonDimensionNumbers(ndim - 2, ndim - 1) if mine else None
            return numbers

        inner = optax.contrib.muon(
            rate,
            adam_learning_rate=make_schedule(config, config.adam_learning_rate, total_steps),
            adam_b1=config.b1,
            adam_b2=config.b2,
            weight_decay=config.weight_decay,
            muon_weight_dimension_numbers=dimension_numbers,
        )
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm > 0 else optax.identity()
    return _by_name(optax.chain(clip, inner))


def _by_name(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Show `inner` any tree of parameters as one flat dict from path to array, so rules can go by name."""

    def flat(tree: Any) -> dict[str, jax.Array]:
        return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}

    def init(params: Any) -> optax.OptState:
        return inner.init(flat(params))

    def update(
        updates: Any, state: optax.OptState, params: Any = None
    ) -> tuple[Any, optax.OptState]:
        names = flat(updates)
        new, state = inner.update(names, state, None if params is None else flat(params))
        return jax.tree.unflatten(jax.tree.structure(updates), [new[name] for name in names]), state

    return optax.GradientTransformation(init, update)
