"""From a configuration to the things that a command works with: policy, searcher, engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerFast

from psearch_jax.config import Config, ModelConfig, RetrievalConfig
from psearch_jax.errors import UserError
from psearch_jax.mesh import Layout
from psearch_jax.models import gguf_files
from psearch_jax.models.decoder import abstract_params, init_adapters
from psearch_jax.models.decoder_config import DecoderConfig, on_mesh
from psearch_jax.models.gguf_tokenizer import read_tokenizer
from psearch_jax.models.lora import LoraSpec, join
from psearch_jax.models.weights import check_vocabulary, load_hf_directory, read_config, read_json
from psearch_jax.questions.world import embedded_directory
from psearch_jax.retrieval.collection_search import SearchOptions, open_index
from psearch_jax.retrieval.corpus import read_corpus
from psearch_jax.retrieval.searcher import (
    NoSearcher,
    SearchBackend,
    local_mesh,
    open_reranker,
    open_searcher,
)
from psearch_jax.rollout.engine import Engine
from psearch_jax.rollout.sizing import choose_slots

#: Where the package keeps the policy that `policy: embedded` means.
EMBEDDED_POLICY = Path(__file__).parent / "policies" / "embedded"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A policy as it was read: float32 parameters, and what is needed to run and to save it."""

    config: DecoderConfig
    graphdef: nnx.GraphDef
    params: nnx.State
    tokenizer: Any
    generation: Mapping[str, Any] | None = None  # its generation_config.json


def compile_cache(config: Config) -> str:
    """Where compiled programs are kept: a directory, or a bucket's address; empty: nowhere."""
    place = config.compile_cache
    if place == "auto":
        place = str(Path(config.run_directory) / "compiled")
    return place if "://" in place or not place else str(Path(place).absolute())


def keep_compiled_programs(config: Config) -> None:
    """Keep what XLA compiles on disk, so that the same command starts in seconds the next time."""
    if place := compile_cache(config):
        jax.config.update("jax_compilation_cache_dir", place)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def open_policy(source: str, *, dtype: Any = jnp.float32, mesh: Mesh | None = None) -> Policy:
    """Read a policy with its tokenizer; parameters come out in `dtype`, born on the mesh if there is one.

    source: a Hugging Face directory, a .gguf file, the name of a policy that an installed package carries
    (`gguf_files.PACKAGED`), or `embedded` for the package's own.

    Raises:
      UserError: files are missing or unreadable, or do not fit together.
    """
    if source in gguf_files.PACKAGED or source.endswith(".gguf"):
        return _open_gguf(source, dtype, mesh)
    return _open_hf(source, dtype, mesh)


def _open_gguf(source: str, dtype: Any, mesh: Mesh | None) -> Policy:
    path = gguf_files.packaged_file(source) if source in gguf_files.PACKAGED else Path(source)
    file = gguf_files.read_gguf(path)
    tokenizer = read_tokenizer(file.metadata, path)
    check_vocabulary(file.values["vocab_size"], tokenizer, source)
    config, graphdef, params = gguf_files.load_gguf(file, dtype, mesh)
    return Policy(config=config, graphdef=graphdef, params=params, tokenizer=tokenizer)


def _open_hf(source: str, dtype: Any, mesh: Mesh | None) -> Policy:
    directory = EMBEDDED_POLICY if source == "embedded" else Path(source)
    if not (directory / "config.json").is_file():
        raise UserError(
            f"policy {source!r}: there is no config.json in {directory}; give a Hugging Face directory, a .gguf "
            f"file, one of {', '.join(gguf_files.PACKAGED)}, or make a policy with `psearch sft "
            "configs/embedded/warm_start.yaml`."
        )
    config = read_config(directory)
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"policy {source!r}: its tokenizer cannot be read ({reason}); {directory} needs a tokenizer.json."
        ) from error
    check_vocabulary(config.vocab_size, tokenizer, source)
    config, graphdef, params = load_hf_directory(directory, dtype, mesh)
    generation = directory / "generation_config.json"
    return Policy(
        config=config,
        graphdef=graphdef,
        params=params,
        tokenizer=tokenizer,
        generation=read_json(generation) if generation.is_file() else None,
    )


def lay_out(policy: Policy, config: Config, mesh: Mesh | None) -> Policy:
    """The policy as a recipe trains and plays it: on its mesh, with the adapters that `model.lora_rank` asks for.

    Raises:
      UserError: sizes that the mesh does not divide, or adapters that cannot be.
    """
    decoder = on_mesh(replace(policy.config, lora=lora_spec(config.model)), Layout(mesh))
    graphdef, _ = abstract_params(decoder)
    params = policy.params
    if decoder.lora is not None:
        fresh = init_adapters(decoder, jax.random.key(config.trainer.seed))
        params = join(fresh, params)
    return replace(policy, config=decoder, graphdef=graphdef, params=params)


def lora_spec(model: ModelConfig) -> LoraSpec | None:
    """The adapters that a recipe asks for."""
    if not model.lora_rank:
        return None
    return LoraSpec(
        rank=model.lora_rank, alpha=model.lora_alpha, projections=model.lora_projections
    )


def open_backend(
    config: RetrievalConfig, progress: Callable[[int, int], None] | None = None
) -> SearchBackend:
    """The search that a configuration asks for, over its corpus or the embedded world's.

    `progress` is called with (passages embedded, passages) while an index is built.
    """
    if config.kind == "none":
        return NoSearcher()
    if config.urls:
        return _open_remote(config)
    if config.web.engine:
        from psearch_jax.retrieval.web_engines import WebSearcher

        return WebSearcher(config.web, cache_size=config.cache_size, patience=config.timeout)
    if config.index:
        options = SearchOptions(
            cache_size=config.cache_size,
            device_matrix=config.device_matrix,
            mesh=local_mesh() if config.device_matrix != "none" else None,
            reranker=open_reranker(config),
            rerank_depth=config.rerank_depth,
        )
        return open_index(config.index, options)
    path = embedded_directory() / "corpus.jsonl" if config.corpus == "embedded" else config.corpus
    return open_searcher(config, read_corpus(path), progress)


def _open_remote(config: RetrievalConfig) -> SearchBackend:
    """The client of `retrieval.urls`; its packages are those of the extra `serve`."""
    from psearch_jax.retrieval.client import RemoteSearcher

    token = os.environ.get(config.token_variable, "") if config.token_variable else ""
    if config.token_variable and not token:
        raise UserError(
            f"retrieval.token_variable names the environment variable {config.token_variable}, which is not set; set "
            "it, or leave the setting empty if the servers want no token."
        )
    return RemoteSearcher(
        config.urls,
        dialect=config.dialect,
        cache_size=config.cache_size,
        disk_cache=config.disk_cache,
        timeout=config.call_timeout,
        patience=config.timeout,
        token=token,
    )


def open_engine(
    config: Config,
    policy: Policy,
    backend: SearchBackend,
    mesh: Mesh | None = None,
    *,
    training: bool = False,
) -> Engine:
    """A rollout engine for the policy, on the first device unless a mesh is given. Its `sizing` says how many slots it
    has and why; `training`: leave room for what a learner will hold beside it.

    Raises:
      UserError: `rollout.slots` asks for more than fits; the sentence says how many do.
    """
    layout = Layout(mesh if mesh is not None and mesh.size > 1 else None, "rollout")
    rollout, sizing = choose_slots(
        config.rollout,
        policy.config,
        layout,
        episodes=config.trainer.questions_per_step * config.trainer.group_size,
        reserved=_held_by_learner(config, policy) if training else 0,
    )
    engine = Engine(
        policy.graphdef,
        policy.config,
        policy.tokenizer,
        config.protocol,
        backend,
        rollout,
        retries=config.retrieval.retries,
        timeout=config.retrieval.timeout,
        concurrency=config.retrieval.concurrency,
        mesh=mesh,
    )
    engine.sizing = sizing
    return engine


def _held_by_learner(config: Config, policy: Policy) -> int:
    """Bytes of a device beside the parameters that are there: the learner's copy, its moments, the reference of the KL
    term, and what the engine computes with."""
    own = sum(
        leaf.addressable_shards[0].data.nbytes
        for leaf in jax.tree.leaves(policy.params)
        if isinstance(leaf, jax.Array)
    )
    return own * (4 + (config.algorithm.kl_coefficient > 0))
