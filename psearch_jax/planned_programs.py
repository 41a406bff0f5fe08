"""The device programs of a recipe over abstract arrays: those that a run uses, with its shapes and shardings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from psearch_jax.config import Config
from psearch_jax.learning.batches import Batch
from psearch_jax.learning.critic import (
    JointBatch,
    ValueBatch,
    critic_optimizer,
    make_joint_update,
    make_value_update,
)
from psearch_jax.learning.objective import kl_in_loss, shares_trunk
from psearch_jax.learning.optimizers import make_optimizer
from psearch_jax.learning.update import Compute, make_policy_update, make_score
from psearch_jax.mesh import batch_sharding, replicated, row_shards
from psearch_jax.models import text_encoder
from psearch_jax.models.lora import join
from psearch_jax.planned_recipe import Abstract, shard_bytes
from psearch_jax.rollout.programs import empty_rows


@dataclass(frozen=True, kw_only=True)
class PlannedProgram:
    """One compiled function with the arguments it is called with.

    beside: names of what lies in memory beside its arguments meanwhile, see `Resident`.
    tokens: tokens that one call forwards. while_steps: steps of its loop, where data decides. in_place: bytes, on one
    device, of the arrays that it must update where they lie, each of them; 0: it has none.
    """

    name: str
    what: str
    function: Any
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    beside: tuple[str, ...]
    tokens: int
    while_steps: int = 1
    in_place: int = 0


def programs(recipe: Abstract) -> list[PlannedProgram]:
    """Every program of the recipe, with the largest shapes that it is called with."""
    return [
        _update(recipe),
        *([_critic(recipe)] if recipe.critic else []),
        _logprobs(recipe),
        _decode(recipe),
        *_appends(recipe),
        *([_embed(recipe)] if recipe.encoder else []),
    ]


def compute(config: Config) -> Compute:
    """How the update computes on an accelerator."""
    dtype = config.model.compute_dtype
    return Compute(
        dtype=jnp.dtype("bfloat16" if dtype == "auto" else dtype),
        remat=config.model.remat,
        attention=config.model.attention,
    )


def policy_update(recipe: Abstract, mesh: Mesh | None) -> Any:
    """The recipe's update; without a mesh, for counting its operations."""
    config = recipe.config
    rest = (
        make_optimizer(config.optimizer, config.trainer.steps * config.algorithm.minibatches),
        mesh,
        config.algorithm,
        config.sampling,
    )
    graphdef = recipe.engine.graphdef
    if shares_trunk(config.algorithm):
        width = recipe.decoder.hidden_size
        return make_joint_update(graphdef, width, *rest, compute=compute(config))
    return make_policy_update(graphdef, *rest, compute=compute(config))


def _update(recipe: Abstract) -> PlannedProgram:
    config = recipe.config
    rows, length = recipe.rows // config.algorithm.minibatches, config.algorithm.row_length
    reference = (recipe.trained,) if kl_in_loss(config.algorithm) else ()
    kind: Any = JointBatch if shares_trunk(config.algorithm) else Batch
    return PlannedProgram(
        name="update",
        what=f"{rows} rows of {length} tokens, {config.algorithm.micro_rows} at a time",
        function=policy_update(recipe, recipe.mesh),
        arguments=(recipe.state, abstract_batch(recipe.mesh, rows, length, kind), *reference),
        options={"denominator": jax.ShapeDtypeStruct((), jnp.float32), "frozen": recipe.frozen},
        # Where the KL is a part of the reward its reference is no argument.
        beside=("encoder", "critic") if reference else ("encoder", "critic", "reference"),
        tokens=rows * length,
    )


def _critic(recipe: Abstract) -> PlannedProgram:
    """The update of a critic with a trunk of its own."""
    config = recipe.config
    rows, length = recipe.rows // config.algorithm.minibatches, config.algorithm.row_length
    updates = config.trainer.steps * config.algorithm.minibatches
    return PlannedProgram(
        name="critic",
        what=f"{rows} rows of {length} tokens, {config.algorithm.micro_rows} at a time",
        function=make_value_update(
            recipe.engine.graphdef,
            recipe.decoder.hidden_size,
            recipe.mesh,
            config.algorithm,
            critic_optimizer(config.algorithm, config.optimizer, updates),
            compute=compute(config),
        ),
        arguments=(recipe.critic, abstract_batch(recipe.mesh, rows, length, ValueBatch)),
        options={"frozen": recipe.frozen},
        beside=("parameters", "optimizer", "reference", "encoder"),
        tokens=rows * length,
    )


def _logprobs(recipe: Abstract) -> PlannedProgram:
    algorithm = recipe.config.algorithm
    shards = row_shards(recipe.mesh)
    rows = -(-algorithm.micro_rows // shards) * shards
    score = make_score(
        recipe.engine.graphdef,
        recipe.mesh,
        compute(recipe.config),
        temperature=recipe.config.sampling.temperature,
        chunk=algorithm.logprob_chunk,
    )
    return PlannedProgram(
        name="logprobs",
        what=f"{rows} rows of {algorithm.row_length} tokens",
        function=jax.jit(
            lambda params, frozen, batch: score(join(params, frozen), batch, "metric")
        ),
        arguments=(
            recipe.trained,
            recipe.frozen,
            abstract_batch(recipe.mesh, rows, algorithm.row_length),
        ),
        options={},
        beside=("optimizer", "reference", "critic", "encoder"),
        tokens=rows * algorithm.row_length,
    )


#: What of training stays in memory while episodes are played.
WHILE_PLAYING = ("parameters", "optimizer", "frozen", "reference", "critic", "encoder")


def _decode(recipe: Abstract) -> PlannedProgram:
    rollout, engine = recipe.config.rollout, recipe.engine
    rows = rollout.decode_rows or rollout.slots
    inputs = jax.eval_shape(lambda: empty_rows(rows, rollout.slots))
    whole = replicated(recipe.mesh)
    key = jax.eval_shape(lambda: jax.random.key(0))
    pauses_V = jax.ShapeDtypeStruct((recipe.decoder.vocab_size,), jnp.bool_, sharding=whole)
    return PlannedProgram(
        name="decode",
        what=f"{rollout.decode_block} tokens in {rows} slots of {rollout.context}, attention {engine.attention}",
        function=engine.decode,
        arguments=(
            recipe.rollout_params,
            recipe.slots,
            inputs,
            jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=whole),
            pauses_V,
        ),
        options={"window": engine.windows[-1]},
        beside=WHILE_PLAYING,
        tokens=rows * rollout.decode_block,
        while_steps=rollout.decode_block,
        in_place=min(shard_bytes(leaf) for leaf in jax.tree.leaves(recipe.slots.cache)),
    )


def _appends(recipe: Abstract) -> list[PlannedProgram]:
    """Prompts, which begin at an empty cache, and observations, which come after a long one."""
    engine = recipe.engine
    rows, chunk = engine.append_rows, engine.chunks[-1]
    numbers_N = jax.ShapeDtypeStruct((rows,), jnp.int32)
    near = next(window for window in engine.append_windows if window >= chunk)
    return [
        PlannedProgram(
            name=name,
            what=f"{chunk} tokens in {rows} slots, {window} positions read",
            function=engine.append,
            arguments=(
                recipe.rollout_params,
                recipe.slots,
                numbers_N,
                jax.ShapeDtypeStruct((rows, chunk), jnp.int32),
                numbers_N,
                numbers_N,
            ),
            options={"window": window},
            beside=WHILE_PLAYING,
            tokens=rows * chunk,
        )
        for name, window in (("prefill", near), ("append", engine.append_windows[-1]))
    ]


def _embed(recipe: Abstract) -> PlannedProgram:
    assert recipe.encoder is not None
    sizes, graphdef, params = recipe.encoder
    shards = row_shards(recipe.mesh, "rollout")
    length = min(sizes.max_tokens, 256)
    rows = max(1, recipe.config.retrieval.embed_batch_tokens // length) * shards
    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    return PlannedProgram(
        name="embed",
        what=f"{rows} passages of {length} tokens",
        function=text_encoder.make_encode(graphdef, recipe.mesh),
        arguments=(params, tokens, tokens),
        options={},
        beside=("parameters", "frozen"),
        tokens=rows * length,
    )


def abstract_batch(mesh: Mesh, rows: int, length: int, kind: Any = Batch) -> Any:
    """A packed batch on the mesh: a `Batch`, or another named tuple of [R, L] arrays."""

    def leaf(name: str) -> Any:
        kind = jnp.int32 if name.startswith(INTEGERS) else jnp.float32
        return jax.ShapeDtypeStruct((rows, length), kind, sharding=batch_sharding(mesh))

    return kind(*(leaf(name) for name in kind._fields))


INTEGERS = ("tokens", "positions", "segments")
