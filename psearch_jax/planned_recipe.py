"""A recipe laid out on a mesh in shapes only: what `psearch plan` reckons with. No weight is read or allocated."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from psearch_jax.assembly import EMBEDDED_POLICY, lora_spec
from psearch_jax.config import Config
from psearch_jax.errors import UserError
from psearch_jax.learning.critic import critic_optimizer, fresh_head
from psearch_jax.learning.experience import batch_rows
from psearch_jax.learning.objective import shares_trunk
from psearch_jax.learning.optimizers import make_optimizer
from psearch_jax.learning.update import TrainState
from psearch_jax.mesh import Layout, abstract, param_shardings, row_shards
from psearch_jax.models import text_encoder
from psearch_jax.models.decoder import abstract_params
from psearch_jax.models.decoder_config import DecoderConfig, on_mesh
from psearch_jax.models.lora import join, split_trainable
from psearch_jax.models.weights import read_json
from psearch_jax.retrieval.searcher import NoSearcher
from psearch_jax.rollout.engine import Engine, state_shardings

Tree = Any


@dataclass(frozen=True, kw_only=True)
class Resident:
    """Bytes on the fullest device, by what they are."""

    parameters: int  # what trains, as the optimiser holds it
    optimizer: int
    frozen: int  # what adapters leave alone
    reference: int  # of the KL term
    critic: int  # one with a trunk of its own: parameters and optimiser
    rollout_parameters: int  # the copy that the engine computes with
    cache: int  # keys and values of all slots
    encoder: int  # of queries and passages

    def sum(self, *names: str) -> int:
        """Of some of them."""
        return sum(getattr(self, name) for name in names)


@dataclass(frozen=True, kw_only=True)
class Abstract:
    """A recipe laid out on a mesh, in shapes only."""

    config: Config
    decoder: DecoderConfig
    mesh: Mesh
    state: TrainState
    critic: TrainState | None  # one with a trunk of its own
    frozen: Tree
    engine: Engine
    rollout_params: Tree
    slots: Tree
    encoder: tuple[text_encoder.EncoderConfig, Any, Tree] | None
    resident: Resident
    rows: int

    @property
    def trained(self) -> Tree:
        """What trains of the policy."""
        params = self.state.params
        return params["trunk"] if shares_trunk(self.config.algorithm) else params


class _NoTokenizer:
    """The engine asks a tokenizer for little before it plays, and a plan has none."""

    eos_token_id = None
    all_special_tokens = ()


def lay_out_abstract(config: Config, mesh: Mesh) -> Abstract:
    """The recipe on the mesh.

    Raises:
      UserError: there is no architecture, or its sizes do not fit the mesh.
    """
    layout = Layout(mesh)
    config = _with_slots(config, mesh)
    decoder = on_mesh(replace(read_architecture(config), lora=lora_spec(config.model)), layout)
    graphdef, shapes = abstract_params(decoder, jnp.dtype(config.model.param_dtype))
    trainable, frozen = split_trainable(shapes)
    trainable = _with_dtype(trainable, jnp.float32) if decoder.lora else trainable
    optimizer = make_optimizer(
        config.optimizer, config.trainer.steps * config.algorithm.minibatches
    )

    def begin(params: Tree, optimizer: Any = optimizer) -> TrainState:
        return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))

    def placed(tree: Tree) -> Tree:
        return abstract(tree, param_shardings(mesh, tree))

    headed = {"trunk": trainable, "head": jax.eval_shape(lambda: fresh_head(decoder.hidden_size))}
    shared = shares_trunk(config.algorithm)
    state = placed(jax.eval_shape(begin, headed if shared else trainable))
    critic = None
    if config.algorithm.advantage == "gae" and not shared:
        updates = config.trainer.steps * config.algorithm.minibatches
        own = critic_optimizer(config.algorithm, config.optimizer, updates)
        critic = placed(jax.eval_shape(lambda params: begin(params, own), headed))
    frozen = abstract(frozen, param_shardings(mesh, frozen))
    engine = Engine(
        graphdef,
        decoder,
        _NoTokenizer(),
        config.protocol,
        NoSearcher(),
        config.rollout,
        mesh=mesh,
    )
    whole = _with_dtype(join(trainable, shapes_of(frozen)), engine.dtype)
    rollout_params = abstract(whole, param_shardings(mesh, whole, "rollout"))
    slots = jax.eval_shape(engine.start)
    slots = abstract(slots, state_shardings(engine.layout, slots))
    encoder = read_encoder(config)
    reference = shard_bytes(placed(trainable)) if config.algorithm.kl_coefficient > 0 else 0
    return Abstract(
        config=config,
        decoder=decoder,
        mesh=mesh,
        state=state,
        critic=critic,
        frozen=frozen,
        engine=engine,
        rollout_params=rollout_params,
        slots=slots,
        encoder=encoder,
        resident=Resident(
            parameters=shard_bytes(state.params),
            optimizer=shard_bytes(state.opt_state),
            frozen=shard_bytes(frozen),
            reference=reference,
            critic=shard_bytes(critic) if critic else 0,
            rollout_parameters=shard_bytes(rollout_params),
            cache=shard_bytes(slots),
            encoder=shard_bytes(encoder[2]) if encoder else 0,
        ),
        rows=batch_rows(config, row_shards(mesh)),
    )


def _with_slots(config: Config, mesh: Mesh) -> Config:
    """The number of slots that a run would choose if memory were no matter: its episodes of a step."""
    if config.rollout.slots:
        return config
    pieces = row_shards(mesh, "rollout")
    episodes = config.trainer.questions_per_step * config.trainer.group_size
    slots = -(-episodes // pieces) * pieces
    return replace(config, rollout=replace(config.rollout, slots=slots))


def read_architecture(config: Config) -> DecoderConfig:
    """Sizes of the policy: its directory's config.json, or what `architecture` names.

    Raises:
      UserError: there is neither, or the architecture is not supported.
    """
    directory = EMBEDDED_POLICY if config.policy == "embedded" else Path(config.policy)
    path = _first_file(directory / "config.json", config.architecture)
    if path is None:
        raise UserError(
            f"policy {config.policy!r} is not here and architecture={config.architecture!r} is no file: name a "
            "Hugging Face config.json, such as architecture=configs/models/qwen2.5-7b.json"
        )
    return DecoderConfig.from_hf(read_json(path))


def read_encoder(config: Config) -> tuple[text_encoder.EncoderConfig, Any, Tree] | None:
    """Sizes, graphdef and parameter shapes of the encoder; None where search needs none.

    Raises:
      UserError: the encoder is not here and `retrieval.encoder_architecture` names no file.
    """
    settings = config.retrieval
    if settings.kind == "none":
        return None
    try:
        path = text_encoder.encoder_directory(settings.encoder) / "config.json"
    except UserError as error:
        if not Path(settings.encoder_architecture).is_file():
            raise UserError(
                f"{error} Or name its config.json, such as "
                "retrieval.encoder_architecture=configs/models/e5-base-v2.json"
            ) from None
        path = Path(settings.encoder_architecture)
    sizes = replace(
        text_encoder.EncoderConfig.from_hf(read_json(path)), dtype=settings.encoder_dtype
    )
    return sizes, *text_encoder.abstract_params(sizes)


def _first_file(*paths: str | Path) -> Path | None:
    return next((Path(path) for path in paths if path and Path(path).is_file()), None)


def shapes_of(tree: Tree) -> Tree:
    """The same without shardings."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _with_dtype(tree: Tree, dtype: Any) -> Tree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), tree)


def shard_bytes(tree: Tree) -> int:
    """Bytes of a tree on one device; arrays without a sharding are whole on each."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        shape = sharding.shard_shape(leaf.shape) if sharding is not None else leaf.shape
        total += math.prod(shape) * jnp.dtype(leaf.dtype).itemsize
    return total


def matmul_parameters(recipe: Abstract) -> int:
    """N of 6ND: the parameters that multiply activations; no token table (unless it is the head too), norm or bias."""
    counted = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        join(shapes_of(recipe.trained), shapes_of(recipe.frozen))
    ):
        name = jax.tree_util.keystr(path)
        table = "embed_tokens" in name
        if "kernel" in name or "lora" in name or (table and recipe.decoder.tie_embeddings):
            counted += math.prod(leaf.shape)
    return counted
