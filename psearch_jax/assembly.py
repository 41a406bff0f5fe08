"""From a configuration to the things that a command works with: policy, searcher, engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from transformers import PreTrainedTokenizerFast

from psearch_jax.config import Config, RetrievalConfig
from psearch_jax.errors import UserError
from psearch_jax.models.decoder import DecoderConfig
from psearch_jax.models.weights import load_hf_directory
from psearch_jax.questions.world import embedded_directory
from psearch_jax.retrieval.corpus import read_corpus
from psearch_jax.retrieval.searcher import NoSearcher, SearchBackend, open_searcher
from psearch_jax.rollout.engine import Engine

#: Where the package keeps the policy that `policy: embedded` means.
EMBEDDED_POLICY = Path(__file__).parent / "policies" / "embedded"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A policy as it was read: float32 parameters, and what is needed to run and to save it."""

    config: DecoderConfig
    graphdef: nnx.GraphDef
    params: nnx.State
    tokenizer: Any


def keep_compiled_programs(config: Config) -> None:
    """Keep what XLA compiles on disk, so that the same command starts in seconds the next time."""
    if config.compile_cache:
        jax.config.update("jax_compilation_cache_dir", str(Path(config.compile_cache).absolute()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def open_policy(source: str) -> Policy:
    """Read a Hugging Face directory with weights and tokenizer, or the package's own for `embedded`.

    Raises:
      UserError: the directory or its tokenizer is missing or unreadable.
    """
    directory = EMBEDDED_POLICY if source == "embedded" else Path(source)
    if not (directory / "config.json").is_file():
        raise UserError(
            f"policy {source!r}: there is no config.json in {directory}; give a Hugging Face directory, or "
            "make one with `psearch sft configs/embedded/warm_start.yaml`."
        )
    config, graphdef, params = load_hf_directory(directory)
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"policy {source!r}: its tokenizer cannot be read ({reason}); {directory} needs a tokenizer.json."
        ) from error
    return Policy(config=config, graphdef=graphdef, params=params, tokenizer=tokenizer)


def open_backend(
    config: RetrievalConfig, progress: Callable[[int, int], None] | None = None
) -> SearchBackend:
    """The search that a configuration asks for, over its corpus or the embedded world's.

    `progress` is called with (passages embedded, passages) while an index is built.
    """
    if config.kind == "none":
        return NoSearcher()
    path = embedded_directory() / "corpus.jsonl" if config.corpus == "embedded" else config.corpus
    return open_searcher(config, read_corpus(path), progress)


def open_engine(config: Config, policy: Policy, backend: SearchBackend) -> Engine:
    """A rollout engine for the policy."""
    return Engine(
        policy.graphdef,
        policy.config,
        policy.tokenizer,
        config.protocol,
        backend,
        config.rollout,
        retries=config.retrieval.retries,
    )
