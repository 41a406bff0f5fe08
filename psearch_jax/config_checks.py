"""Values that cannot be, and combinations that cannot work, found before anything is started (law 11)."""

from __future__ import annotations

import math
import string
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any
from urllib.parse import urlsplit

from psearch_jax.config import (
    AlgorithmConfig,
    ArchitectureConfig,
    CollapseConfig,
    Config,
    RetrievalConfig,
    RewardConfig,
    RewardParts,
    SupervisedConfig,
)
from psearch_jax.config_values import ABOVE_ZERO, ANY_SIGN, CHOICES, SHARES
from psearch_jax.errors import UserError
from psearch_jax.questions.question import KINDS


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
    yield from _impossible_retrieval(config)
    yield from _impossible_training(config)
    yield from _impossible_algorithm(config)
    yield from _impossible_supervised(config)
    yield from _impossible_protocol(config)
    yield from _impossible_reward(config)
    yield from _impossible_evaluation(config)
    if config.tracking.wandb_name and not config.tracking.wandb_project:
        yield (
            ("tracking.wandb_name", "tracking.wandb_project"),
            "tracking.wandb_name is read only beside tracking.wandb_project, which is empty: name a project",
        )


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
    if rollout.slots and rollout.decode_rows > rollout.slots:
        yield (
            ("rollout.decode_rows", "rollout.slots"),
            f"rollout.decode_rows={rollout.decode_rows} is more than rollout.slots={rollout.slots}: make it "
            "smaller, or 0 for all slots",
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


def _given(config: Config, key: str) -> bool:
    """Whether a setting of the search is other than its default."""
    name = key.removeprefix("retrieval.")
    return bool(getattr(config.retrieval, name) != getattr(RetrievalConfig(), name))


def _impossible_retrieval(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    retrieval = config.retrieval
    sources = {
        "retrieval.index": bool(retrieval.index),
        "retrieval.urls": bool(retrieval.urls),
        "retrieval.web.engine": bool(retrieval.web.engine),
        "retrieval.kind": retrieval.kind == "none",
    }
    chosen = tuple(key for key, given in sources.items() if given)
    if len(chosen) > 1:
        yield (
            chosen,
            "a search is one of an index, servers, a web engine and none: leave all but one out",
        )
    local = [
        key for key in ("retrieval.device_matrix", "retrieval.reranker") if _given(config, key)
    ]
    if local and (retrieval.urls or retrieval.web.engine):
        yield (
            (*local, *chosen),
            f"{local[0]} is of an index in this process; give it to the server (psearch serve) instead",
        )
    if retrieval.disk_cache and not retrieval.urls:
        yield (
            ("retrieval.disk_cache",),
            "retrieval.disk_cache keeps results of retrieval.urls, and none are named: leave it empty",
        )
    if retrieval.device_matrix != "none" and not retrieval.index and retrieval.kind != "exact":
        yield (
            ("retrieval.device_matrix", "retrieval.kind"),
            f"retrieval.device_matrix={retrieval.device_matrix} is searched exactly, and retrieval.kind is "
            f"{retrieval.kind}: set it to exact",
        )


def _impossible_training(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    trainer, algorithm = config.trainer, config.algorithm
    if config.model.param_dtype != "float32" and not config.model.lora_rank:
        yield (
            ("model.param_dtype", "model.lora_rank"),
            "model.param_dtype=bfloat16 is for parameters that adapters leave frozen: an update of the size of a "
            "learning rate is lost in it; set model.lora_rank, or use float32",
        )
    if algorithm.advantage in ("grpo", "rloo") and trainer.group_size < 2:
        yield (
            ("trainer.group_size", "algorithm.advantage"),
            f"trainer.group_size={trainer.group_size}, but algorithm.advantage={algorithm.advantage} compares the "
            f"members of a group: use 2 or more",
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
    collapse, usual = trainer.collapse, CollapseConfig()
    if not looked_for(collapse):
        for name in ("window", "returns", "rate_factor"):
            if getattr(collapse, name) != getattr(usual, name):
                yield (
                    (f"trainer.collapse.{name}",),
                    f"trainer.collapse.{name} is set, but no sign of a collapse is looked for: set one, such as "
                    "trainer.collapse.entropy_below=0.01, or remove it",
                )
    kinds = set(trainer.kinds) - set(KINDS)
    if kinds:
        yield (
            ("trainer.kinds",),
            f"trainer.kinds has {sorted(kinds)[0]!r}, but the kinds are {', '.join(KINDS)}",
        )


def looked_for(collapse: CollapseConfig) -> bool:
    """Whether any sign of a collapse is."""
    signs = ("entropy_below", "gap_above", "search_rate_below", "invalid_above", "reward_drop")
    return any(getattr(collapse, name) for name in signs)


#: Settings that an algorithm reads only beside another → (that setting, the values of it that read them).
_BESIDE: dict[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(("gamma", "gae_lambda", "value_clip"), ("advantage", ("gae",))),
    **dict.fromkeys(("critic_learning_rate", "critic_warmup_steps"), ("advantage", ("gae",))),
    "critic": ("advantage", ("gae",)),
    "value_coefficient": ("critic", ("shared",)),
    "refill_rounds": ("advantage", ("grpo", "rloo")),
    "clip_dual": ("loss", ("clipped", "gspo")),
    "correction": ("old_logprobs", ("trainer",)),
    **dict.fromkeys(
        ("correction_cap", "correction_low", "correction_high"),
        ("correction", ("token", "sequence")),
    ),
    "fixed_length": ("aggregation", ("fixed_length",)),
    # Of a number, any but 0.
    **dict.fromkeys(("kl_estimator", "kl_place", "kl_target"), ("kl_coefficient", ())),
    "kl_horizon": ("kl_target", ()),
    "overlong_penalty": ("overlong_buffer", ()),
}


def _impossible_algorithm(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """A setting that nothing reads beside the others, and bounds that contradict each other."""
    algorithm, usual = config.algorithm, AlgorithmConfig()
    for name, (other, values) in _BESIDE.items():
        value, beside = getattr(algorithm, name), getattr(algorithm, other)
        if value != getattr(usual, name) and not (beside in values if values else beside):
            needed = f"{other}={' or '.join(values)}" if values else f"{other} above 0"
            yield (
                (f"algorithm.{name}", f"algorithm.{other}"),
                f"algorithm.{name}={value} is read only beside algorithm.{needed}, and that is {beside}: change it, "
                f"or remove algorithm.{name}",
            )
    for name in ("critic_learning_rate", "critic_warmup_steps"):
        if algorithm.critic == "shared" and getattr(algorithm, name) != getattr(usual, name):
            yield (
                (f"algorithm.{name}", "algorithm.critic"),
                f"algorithm.{name} is of a critic with an optimiser of its own, but algorithm.critic=shared has the "
                "policy's: remove it, or set algorithm.critic=separate",
            )
    if algorithm.advantage == "rloo" and algorithm.normalize_std:
        yield (
            ("algorithm.normalize_std", "algorithm.advantage"),
            "algorithm.advantage=rloo divides by no standard deviation: set algorithm.normalize_std=false",
        )
    if 0 < algorithm.clip_dual <= 1 + algorithm.clip_high:
        yield (
            ("algorithm.clip_dual", "algorithm.clip_high"),
            f"algorithm.clip_dual={algorithm.clip_dual} must be above 1 + algorithm.clip_high="
            f"{1 + algorithm.clip_high}, where the usual clip acts (3 is usual), or 0 for none",
        )
    if 0 < algorithm.correction_high < 1:
        yield (
            ("algorithm.correction_high",),
            f"algorithm.correction_high={algorithm.correction_high} would leave out tokens on which rollout and "
            "trainer agree, whose ratio is 1: set it above 1, or 0 for no bound",
        )
    if algorithm.aggregation == "fixed_length" and not algorithm.fixed_length:
        yield (
            ("algorithm.aggregation", "algorithm.fixed_length"),
            "algorithm.aggregation=fixed_length divides by algorithm.fixed_length, which is 0: set it, to the most "
            "policy tokens of an episode for instance",
        )
    if algorithm.overlong_buffer >= config.rollout.context:
        yield (
            ("algorithm.overlong_buffer", "rollout.context"),
            f"algorithm.overlong_buffer={algorithm.overlong_buffer} leaves no length without a penalty in "
            f"rollout.context={config.rollout.context}: make it smaller",
        )


def _impossible_supervised(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    settings, sizes = config.supervised, config.supervised.architecture
    if settings.start and sizes != ArchitectureConfig():
        yield (
            ("supervised.start",),
            f"supervised.architecture gives sizes, but supervised.start={settings.start!r} brings its own: "
            "remove one of the two",
        )
    if settings.widen_to and not settings.start:
        yield (
            ("supervised.widen_to",),
            f"supervised.widen_to={settings.widen_to} widens the policy in supervised.start, which is empty: "
            "name one, or set supervised.architecture.intermediate_size",
        )
    scripted = ("styles", "real_share", "steps_per_world", "drill_steps", "drill_share")
    weights = ("drill_shared", "answer_weight", "observation_weight")
    for name in (*scripted, *weights):
        if settings.episodes and getattr(settings, name) != getattr(SupervisedConfig(), name):
            yield (
                (f"supervised.{name}", "supervised.episodes"),
                f"supervised.{name} is of scripted episodes, but supervised.episodes={settings.episodes!r} names a "
                "file of others: remove one of the two",
            )
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
    tags = [tag.strip() for name in names for tag in getattr(protocol, name)]
    if "" in tags or len(set(tags)) < len(tags):
        yield (
            tuple(f"protocol.{name}" for name in names),
            f"the protocol's tags must be eight different texts, not {tags}",
        )
    if protocol.query_form == "text" and not protocol.separator and protocol.max_subqueries > 1:
        yield (
            ("protocol.separator", "protocol.max_subqueries"),
            f"protocol.separator is empty, so a search holds one query, but protocol.max_subqueries is "
            f"{protocol.max_subqueries}: set it to 1 or name a separator",
        )
    if protocol.feedback_always and not protocol.feedback:
        yield (
            ("protocol.feedback_always", "protocol.feedback"),
            "protocol.feedback_always has nothing to say: protocol.feedback is empty; write one, or set it to false",
        )
    if "{question}" not in protocol.prompt:
        yield (
            ("protocol.prompt",),
            f"protocol.prompt is {protocol.prompt!r}, but its fields are {{question}}, which must stand in it",
        )
    if protocol.prompt_file and protocol.prompt_column:
        yield (
            ("protocol.prompt_file", "protocol.prompt_column"),
            "protocol.prompt_file and protocol.prompt_column both replace the prompt: leave one of them empty",
        )
    for name, allowed, needed in (
        ("label", {"query_number", "query"}, set()),
        ("passage", {"title", "text", "number", "contents"}, {"text", "contents"}),
    ):
        pattern = getattr(protocol, name)
        try:
            used = {
                field for _, field, _, _ in string.Formatter().parse(pattern) if field is not None
            }
        except ValueError as error:
            yield (f"protocol.{name}",), f"protocol.{name} is not a format text: {error}"
            continue
        if not used <= allowed or (needed and not used & needed):
            yield (
                (f"protocol.{name}",),
                f"protocol.{name} is {pattern!r}, but its fields are "
                f"{', '.join('{' + field + '}' for field in sorted(allowed))}"
                + (f", one of {' and '.join(sorted(needed))} among them" if needed else ""),
            )


#: Settings that only some rewards read → those rewards.
_READ_BY: dict[str, tuple[str, ...]] = {
    "lambda_decomposition": ("parallel_search", "parallel_search_paper"),
    "alpha_decomposition": ("parallel_search", "parallel_search_paper"),
    "lambda_search": ("parallel_search", "parallel_search_paper"),
    "lambda_format": ("parallel_search", "parallel_search_paper"),
    "search_r1_scores": ("search_r1_format",),
    "research_format": ("research", "research_paper"),
    "gated_turns": ("gated",),
    "gated_subqueries": ("gated",),
    "gain_weight": ("gain",),
    "gain_waste": ("gain",),
}


def _impossible_reward(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """A reward that adds up nothing, a setting that no chosen reward reads, a judge that cannot be reached."""
    reward, usual = config.reward, RewardConfig()
    weighted = [part.name for part in fields(RewardParts) if getattr(reward.parts, part.name)]
    if reward.name == "composed" and not weighted:
        yield (
            ("reward.name",),
            "reward.name=composed adds up reward.parts, but each of them has weight 0: give one a weight, as in "
            "reward.parts.exact_match=1.0",
        )
    if reward.name != "composed" and weighted:
        yield (
            ("reward.name", f"reward.parts.{weighted[0]}"),
            f"reward.parts.{weighted[0]} has a weight, but reward.name={reward.name} does not read the parts: set "
            "reward.name=composed, or remove the weight",
        )
    chosen = set(weighted) if reward.name == "composed" else {reward.name}
    for name, readers in _READ_BY.items():
        if getattr(reward, name) != getattr(usual, name) and not chosen & set(readers):
            yield (
                (f"reward.{name}", "reward.name"),
                f"reward.{name} is set, but only {' and '.join(readers)} read it: remove it, or choose such a reward",
            )
    if not all(map(math.isfinite, reward.search_r1_scores)):
        yield (
            ("reward.search_r1_scores",),
            f"reward.search_r1_scores is {list(reward.search_r1_scores)}, but must be finite numbers",
        )
    judge = reward.judge
    if judge.endpoint:
        address = urlsplit(judge.endpoint)
        if address.scheme not in ("http", "https") or not address.netloc or "@" in address.netloc:
            yield (
                ("reward.judge.endpoint",),
                "reward.judge.endpoint must be an address like http://host:8000/v1, without a name or password in it",
            )
    if "judge" in chosen and not (judge.endpoint and judge.model):
        yield (
            ("reward.judge.endpoint", "reward.judge.model"),
            "a judge needs reward.judge.endpoint and reward.judge.model: name both",
        )


def _impossible_evaluation(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    settings, judge = config.evaluation, config.reward.judge
    if settings.samples > 1 and settings.temperature == 0:
        yield (
            ("evaluation.samples", "evaluation.temperature"),
            f"evaluation.samples={settings.samples} plays the same greedy episode again and again: set "
            "evaluation.temperature above 0",
        )
    if settings.judge and not (judge.endpoint and judge.model):
        yield (
            ("evaluation.judge", "reward.judge.endpoint", "reward.judge.model"),
            "evaluation.judge needs reward.judge.endpoint and reward.judge.model: name both",
        )
