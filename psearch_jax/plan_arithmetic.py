"""Memory of a recipe by arithmetic: where no compiler answers (a GPU host), and to compare changes of a recipe.

What lies in memory between programs follows exactly from shapes and shardings. Temporaries are a guess from a few
terms, each named below; beside the TPU compiler's own figures the guess is within about a third.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from psearch_jax.config import Config, MeshConfig
from psearch_jax.errors import UserError
from psearch_jax.mesh import AXES, row_shards
from psearch_jax.planned_programs import WHILE_PLAYING
from psearch_jax.planned_recipe import Abstract, lay_out_abstract, shard_bytes
from psearch_jax.topologies import GIB


@dataclass(frozen=True, kw_only=True)
class Reckoned:
    """Bytes on one device while the policy is updated and while episodes are played, guessed temporaries included."""

    recipe: Abstract
    gradients: int
    activations: int  # kept for the backward pass, and one layer's own
    gathered: int  # weights of the layer in work, whole
    logits: int
    playing: int  # temporaries of a rollout

    @property
    def temporaries(self) -> int:
        """Of the update."""
        return self.gradients + self.activations + self.gathered + self.logits

    @property
    def update(self) -> int:
        """Of the update with what lies beside it."""
        held = self.recipe.resident.sum(
            "parameters", "optimizer", "frozen", "reference", "critic", "encoder"
        )
        return held + self.temporaries

    @property
    def rollout(self) -> int:
        """Of a rollout with what lies beside it."""
        held = self.recipe.resident.sum(*WHILE_PLAYING, "rollout_parameters", "cache")
        return held + self.playing


def mesh_of_shapes(config: MeshConfig, devices: int) -> Mesh:
    """A mesh to lay shapes out on, where there are no such devices: one of this machine stands for all of them.

    Raises:
      UserError: the sizes do not multiply to the number of devices.
    """
    sizes = {axis: getattr(config, axis) for axis in AXES}
    sharded = math.prod(sizes[axis] for axis in AXES[1:])
    data = devices // sharded if sizes["data"] == -1 else sizes["data"]
    if data * sharded != devices or data < 1:
        asked = ", ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
        raise UserError(
            f"{asked} do not multiply to {devices} devices: set mesh.data=-1 and let the others divide {devices}"
        )
    shape = (data, *(sizes[axis] for axis in AXES[1:]))
    stand_in = np.array([jax.devices()[0]] * devices, dtype=object)
    return Mesh(stand_in.reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def reckon(config: Config, devices: int) -> Reckoned:
    """A recipe on `devices` devices.

    Raises:
      UserError: sizes that the mesh does not divide, no architecture.
    """
    recipe = lay_out_abstract(config, mesh_of_shapes(config.mesh, devices))
    shape, sizes, algorithm = recipe.mesh.shape, recipe.decoder, config.algorithm
    tensor, width = shape["tensor"], 2 if config.model.compute_dtype == "bfloat16" else 4
    rows = -(-min(algorithm.micro_rows, recipe.rows) // row_shards(recipe.mesh))
    tokens = rows * algorithm.row_length // shape["sequence"]
    # Numbers a token that a layer keeps for the backward pass; `full` keeps its input alone.
    heads = (sizes.num_heads + 2 * sizes.num_kv_heads * sizes.kv_repeat) * sizes.head_dim // tensor
    projected = heads + 2 * sizes.intermediate_size // tensor + 2 * sizes.hidden_size
    everything = 2 * projected + 6 * sizes.hidden_size + sizes.intermediate_size // tensor
    kept = {
        "none": everything,
        "dots": projected + sizes.hidden_size,
        "attention": heads
        + sizes.hidden_size,  # keys, values, and what attention gave, as wide as the queries
        "full": sizes.hidden_size,
    }
    layer = 2 * sizes.num_heads * sizes.head_dim + 2 * sizes.num_kv_heads * sizes.head_dim
    layer = (layer + 3 * sizes.intermediate_size) * sizes.hidden_size * width // tensor
    vocabulary = sizes.vocab_size // (shape["fsdp"] * tensor * shape["sequence"])
    slots = recipe.config.rollout.slots // recipe.engine.pieces
    appended = recipe.engine.append_rows // recipe.engine.pieces
    return Reckoned(
        recipe=recipe,
        # Of one micro-batch and of those before it, float32.
        gradients=shard_bytes(recipe.state.params)
        * (2 if recipe.rows > algorithm.micro_rows else 1),
        activations=tokens * width * (sizes.num_layers * kept[config.model.remat] + 2 * everything),
        gathered=2 * layer if shape["fsdp"] * shape["sequence"] > 1 else 0,
        logits=3 * 4 * max(1, algorithm.logprob_chunk // shape["data"]) * vocabulary,
        # Logits of every slot, and the cache rows of an append: read, and with what is new.
        playing=3 * 4 * slots * vocabulary
        + 2 * recipe.resident.cache * appended // max(1, slots)
        + appended * recipe.engine.chunks[-1] * width * everything,
    )


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change of a recipe: what to set, and the bytes that it saves in the fullest program by arithmetic."""

    settings: str
    why: str
    saves: int
    enough: bool
    config: Config


def cheapest_changes(
    config: Config, devices: int, *, fullest: str, over: int, limit: int = 3
) -> tuple[Change, ...]:
    """Changes that save memory in the fullest program, the least costly first; those that suffice before the others.

    Args:
      fullest: the name of the program that needs most.
      over: bytes to save.
    """
    playing = fullest in ("decode", "prefill", "append")

    def size(candidate: Config) -> int:
        found = reckon(candidate, devices)
        return found.rollout if playing else found.update

    before = size(config)
    found = []
    for settings, why, candidate in _candidates(config, devices, playing):
        try:
            saves = before - size(candidate)
        except UserError:
            continue
        if saves > 0:
            found.append(
                Change(
                    settings=settings, why=why, saves=saves, enough=saves >= over, config=candidate
                )
            )
    enough = [change for change in found if change.enough]
    rest = sorted((c for c in found if not c.enough), key=lambda change: -change.saves)
    return tuple([*enough, *rest][:limit])


def _candidates(config: Config, devices: int, playing: bool) -> list[tuple[str, str, Config]]:
    """(what to set, what it costs, the recipe with it), from cheap to dear."""
    found: list[tuple[str, str, Config]] = []

    def offer(why: str, **sections: dict[str, Any]) -> None:
        settings = " ".join(
            f"{section}.{key}={value}"
            for section, keys in sections.items()
            for key, value in keys.items()
        )
        changed = {name: replace(getattr(config, name), **keys) for name, keys in sections.items()}
        found.append((settings, why, replace(config, **changed)))

    algorithm, rollout, model, mesh = config.algorithm, config.rollout, config.model, config.mesh
    if playing:
        episodes = config.trainer.questions_per_step * config.trainer.group_size
        for share in (0.75, 0.5, 0.25):
            fewer = int((rollout.slots or episodes) * share) // devices * devices
            offer("fewer episodes at a time", rollout={"slots": max(devices, fewer)})
    else:
        if algorithm.micro_rows > 1:
            offer("smaller micro-batches", algorithm={"micro_rows": algorithm.micro_rows // 2})
        if algorithm.logprob_chunk > 256:
            offer(
                "fewer logits at a time", algorithm={"logprob_chunk": algorithm.logprob_chunk // 2}
            )
        if model.remat in ("none", "dots"):
            offer("a quarter more computation", model={"remat": "attention"})
        if model.remat != "full":
            more = (
                "attention once more" if model.remat == "attention" else "a third more computation"
            )
            offer(more, model={"remat": "full"})
    if mesh.data not in (1, -1) or (mesh.data == -1 and mesh.fsdp * mesh.tensor < devices):
        offer(
            "parameters cut over all chips",
            mesh={"data": 1, "fsdp": devices // (mesh.tensor * mesh.sequence)},
        )
    if not playing and mesh.fsdp % 2 == 0:
        offer("more communication", mesh={"fsdp": mesh.fsdp // 2, "sequence": mesh.sequence * 2})
    if mesh.fsdp % 2 == 0:
        offer("more communication", mesh={"fsdp": mesh.fsdp // 2, "tensor": mesh.tensor * 2})
    if algorithm.kl_coefficient:
        offer("no reference policy", algorithm={"kl_coefficient": 0.0})
    if not model.lora_rank:
        offer("only adapters train", model={"lora_rank": 32, "param_dtype": "bfloat16"})
    return found


def gib(count: float) -> str:
    """Bytes for a reader."""
    return f"{count / GIB:.1f} GiB"
