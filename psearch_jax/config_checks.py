"""Values that cannot be, and combinations that cannot work, found before anything is started (law 11)."""

from __future__ import annotations

import math
import string
from collections.abc import Iterator, Mapping
from typing import Any

from psearch_jax.config import Config
from psearch_jax.errors import UserError
from psearch_jax.questions.question import KINDS

#: Settings with a fixed list of values.
CHOICES: dict[str, tuple[str, ...]] = {
    "retrieval.embed": ("text", "contents"),
    "retrieval.kind": ("scann", "exact", "none"),
    "rollout.dtype": ("float32", "bfloat16"),
    "reward.name": ("exact_match", "parallel_search", "gated"),
    "optimizer.name": ("adam", "muon"),
    "optimizer.schedule": ("constant", "cosine", "linear"),
    "algorithm.advantage": ("grpo",),
    "algorithm.aggregation": ("token_mean",),
    "evaluation.split": ("train", "dev", "test"),
}

#: Settings that must be above zero. Every other number may be zero, and only `ANY_SIGN` below it.
ABOVE_ZERO = frozenset(
    (
        *("mesh.fsdp", "mesh.tensor", "retrieval.embed_batch_tokens"),
        *("protocol.max_subqueries", "protocol.top_k", "protocol.observation_tokens"),
        *("protocol.turn_tokens", "sampling.top_p", "rollout.slots", "rollout.context"),
        *("rollout.decode_block", "optimizer.learning_rate", "optimizer.adam_learning_rate"),
        *("algorithm.minibatches", "algorithm.row_length", "algorithm.micro_rows"),
        *("algorithm.logprob_chunk", "trainer.questions_per_step", "trainer.group_size"),
        *("trainer.checkpoint_every", "trainer.keep", "supervised.rows_per_step"),
        *("supervised.row_length", "supervised.micro_rows", "supervised.checkpoint_every"),
        *("supervised.keep", "supervised.check_every", "supervised.steps_per_world"),
        *("supervised.architecture.vocab_size", "supervised.architecture.hidden_size"),
        *("supervised.architecture.intermediate_size", "supervised.architecture.num_layers"),
        *("supervised.architecture.num_heads", "supervised.architecture.num_kv_heads"),
        *("supervised.architecture.head_dim",),
    )
)
ANY_SIGN = frozenset(("mesh.data",))
#: Shares, which end at 1.
SHARES = frozenset(
    (
        *("sampling.top_p", "optimizer.b1", "optimizer.b2", "algorithm.clip_low"),
        *("supervised.real_share", "supervised.drill_share", "supervised.drill_shared"),
    )
)


def check(config: Config, flat: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    """Raise a `UserError` for the first value or combination that cannot work.

    Args:
      config: what to check.
      flat: the same as dotted key → value.
      origins: dotted key → where its value came from; the sentence names it.
    """
    for key, value in flat.items():
        problem = _value_problem(key, value)
        if problem:
            raise UserError(f"{origins[key]}: {key} {problem}")
    for keys, problem in _impossible(config):
        places = ", ".join(f"{key} from {origins[key]}" for key in keys)
        raise UserError(f"{problem} ({places})")


def _value_problem(key: str, value: Any) -> str | None:
    """What is wrong with one value by itself."""
    if key in CHOICES and value not in CHOICES[key]:
        return f"is {value!r}, but must be one of {', '.join(CHOICES[key])}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if not math.isfinite(value):
        return f"is {value}, but must be a finite number"
    if key in ABOVE_ZERO and value <= 0:
        return f"is {value}, but must be above 0"
    if key not in ANY_SIGN and value < 0:
        return f"is {value}, but must be at least 0"
    if key in SHARES and value > 1:
        return f"is {value}, but must be at most 1"
    return None


def _impossible(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """(keys, sentence) of each combination that cannot work."""
    yield from _impossible_shapes(config)
    yield from _impossible_training(config)
    yield from _impossible_supervised(config)
    yield from _impossible_protocol(config)


def _impossible_shapes(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    rollout = config.rollout
    for name in ("append_buckets", "window_buckets"):
        buckets = getattr(rollout, name)
        if not buckets or list(buckets) != sorted(set(buckets)) or buckets[0] < 1:
            yield (
                (f"rollout.{name}",),
                f"rollout.{name} is {list(buckets)}, but must be sizes above 0 in rising order",
            )
            return
    if rollout.window_buckets[-1] < rollout.context:
        yield (
            ("rollout.window_buckets", "rollout.context"),
            f"the largest of rollout.window_buckets is {rollout.window_buckets[-1]}, which is smaller than "
            f"rollout.context={rollout.context}: add a bucket of that size",
        )
    if rollout.append_buckets[-1] > rollout.context:
        yield (
            ("rollout.append_buckets", "rollout.context"),
            f"the largest of rollout.append_buckets is {rollout.append_buckets[-1]}, which is larger than "
            f"rollout.context={rollout.context}: remove it",
        )
    for key, size in (
        ("protocol.turn_tokens", config.protocol.turn_tokens),
        ("protocol.observation_tokens", config.protocol.observation_tokens),
    ):
        if size >= rollout.context:
            yield (
                (key, "rollout.context"),
                f"{key}={size} leaves no room in rollout.context={rollout.context}",
            )


def _impossible_training(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    trainer, algorithm = config.trainer, config.algorithm
    if algorithm.advantage == "grpo" and trainer.group_size < 2:
        yield (
            ("trainer.group_size", "algorithm.advantage"),
            f"trainer.group_size={trainer.group_size}, but algorithm.advantage=grpo compares the members "
            f"of a group: use 2 or more",
        )
    episodes = trainer.questions_per_step * trainer.group_size
    if episodes % algorithm.minibatches:
        yield (
            ("trainer.questions_per_step", "trainer.group_size", "algorithm.minibatches"),
            f"{trainer.questions_per_step} questions × {trainer.group_size} members are {episodes} "
            f"episodes, which algorithm.minibatches={algorithm.minibatches} does not divide",
        )
    if algorithm.row_length < config.rollout.context:
        yield (
            ("algorithm.row_length", "rollout.context"),
            f"algorithm.row_length={algorithm.row_length} cannot hold an episode of "
            f"rollout.context={config.rollout.context} tokens",
        )
    if config.sampling.temperature == 0:
        yield (
            ("sampling.temperature",),
            "sampling.temperature=0 plays the members of a group alike, so nothing can be learned from "
            "them: use a temperature above 0 (evaluation.temperature is the one that may be greedy)",
        )
    kinds = set(trainer.kinds) - set(KINDS)
    if kinds:
        yield (
            ("trainer.kinds",),
            f"trainer.kinds has {sorted(kinds)[0]!r}, but the kinds are {', '.join(KINDS)}",
        )


def _impossible_supervised(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    settings, sizes = config.supervised, config.supervised.architecture
    if sizes.num_heads % sizes.num_kv_heads:
        yield (
            ("supervised.architecture.num_heads", "supervised.architecture.num_kv_heads"),
            f"supervised.architecture.num_heads={sizes.num_heads} is not a multiple of "
            f"num_kv_heads={sizes.num_kv_heads}",
        )
    if len(settings.styles) != 4 or min(settings.styles) < 0 or sum(settings.styles) <= 0:
        yield (
            ("supervised.styles",),
            f"supervised.styles is {list(settings.styles)}, but must be four shares, none below 0 "
            f"(sequential, parallel, without search, passages given)",
        )


def _impossible_protocol(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    protocol = config.protocol
    names = ("think", "search", "information", "answer")
    tags = [tag for name in names for tag in getattr(protocol, name)]
    if "" in tags or len(set(tags)) < len(tags):
        yield (
            tuple(f"protocol.{name}" for name in names),
            f"the protocol's tags must be eight different texts, not {tags}",
        )
    if not protocol.separator and protocol.max_subqueries > 1:
        yield (
            ("protocol.separator", "protocol.max_subqueries"),
            f"protocol.separator is empty, so a search holds one query, but protocol.max_subqueries is "
            f"{protocol.max_subqueries}: set it to 1 or name a separator",
        )
    for name, allowed, needed in (
        ("prompt", {"question"}, {"question"}),
        ("label", {"query_number", "query"}, set()),
        ("passage", {"title", "text", "number"}, {"text"}),
    ):
        pattern = getattr(protocol, name)
        try:
            used = {
                field for _, field, _, _ in string.Formatter().parse(pattern) if field is not None
            }
        except ValueError as error:
            yield (f"protocol.{name}",), f"protocol.{name} is not a format text: {error}"
            continue
        if not needed <= used <= allowed:
            yield (
                (f"protocol.{name}",),
                f"protocol.{name} is {pattern!r}, but its fields are "
                f"{', '.join('{' + field + '}' for field in sorted(allowed))}",
            )
