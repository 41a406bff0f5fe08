"""Low-rank adapters (LoRA, Hu et al. 2021): which parameters train, and how they join the frozen ones.

An adapted linear layer computes xW + b + (alpha / rank)(xA)B. A starts random and B at zero, so that a fresh adapter
changes nothing. A and B live beside the kernel in the parameter tree, as `lora_a` [in, rank] and `lora_b` [rank, out].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from psearch_jax.errors import UserError

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTERS = ("lora_a", "lora_b")


class LoraParam(nnx.Param):
    """A parameter of an adapter."""


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """Which projections get adapters, of which rank; the product is scaled by alpha / rank."""

    rank: int
    alpha: float
    projections: tuple[str, ...] = PROJECTIONS

    def __post_init__(self) -> None:
        unknown = [name for name in self.projections if name not in PROJECTIONS]
        if unknown or not self.projections:
            fault = f"names {unknown[0]!r}" if unknown else "is empty"
            raise UserError(
                f"model.lora_projections {fault}; choose from {', '.join(PROJECTIONS)}."
            )
        if self.rank < 1:
            raise UserError(
                f"model.lora_rank is {self.rank}; an adapter needs a rank of 1 or more."
            )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def is_adapter(path: tuple[Any, ...]) -> bool:
    """Whether a path of a flat state is an adapter's."""
    return path[-1] in ADAPTERS


def split_trainable(params: nnx.State) -> tuple[nnx.State, nnx.State]:
    """(what trains, what is frozen): the adapters and the rest where there are adapters, else all and nothing."""
    flat = nnx.to_flat_state(params)
    adapters = [(path, leaf) for path, leaf in flat if is_adapter(path)]
    if not adapters:
        return params, nnx.State({})
    rest = [(path, leaf) for path, leaf in flat if not is_adapter(path)]
    return nnx.from_flat_state(adapters), nnx.from_flat_state(rest)


def join(trainable: nnx.State, frozen: nnx.State) -> nnx.State:
    """The whole tree again; the inverse of `split_trainable`."""
    if not jax.tree.leaves(frozen):
        return trainable
    flat = [*nnx.to_flat_state(trainable), *nnx.to_flat_state(frozen)]
    return nnx.from_flat_state(sorted(flat, key=lambda item: tuple(map(str, item[0]))))
