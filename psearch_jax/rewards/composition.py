"""Rewards by name, and their weighted sum."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache

from psearch_jax import processes
from psearch_jax.config import JudgeConfig, ProtocolConfig, RewardConfig, RewardParts
from psearch_jax.errors import UserError
from psearch_jax.questions.question import Question
from psearch_jax.rewards.answers import exact_match, f1, substring_match
from psearch_jax.rewards.decomposition import (
    gated_parts,
    parallel_search_paper_parts,
    parallel_search_parts,
)
from psearch_jax.rewards.format import (
    research_paper_parts,
    research_parts,
    search_r1_format_parts,
)
from psearch_jax.rewards.gain import gain_parts
from psearch_jax.rewards.judge import AnswerJudge, Case, Judge, Verdict
from psearch_jax.rollout.episode import Episode
from psearch_jax.rollout.protocol import well_formed

#: A part that is a count and no summand: how many of an episode's judgements are the fallback.
FAILED = "judge_failed"


@dataclass(frozen=True)
class Reward:
    """What an episode earned: the sum, and the parts that it is the sum of (but for the count `judge_failed`)."""

    total: float
    parts: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Group:
    """What a reward may look at: the episodes of one group, all about one question. It reads policy turns only
    (law 2). `verdicts` has one for every case that the judge was asked about."""

    config: RewardConfig
    protocol: ProtocolConfig
    episodes: Sequence[Episode]
    question: Question
    verdicts: Mapping[Case, Verdict] = field(default_factory=dict)


RewardFunction = Callable[[Group], list[dict[str, float]]]


def _exact_match(group: Group) -> list[dict[str, float]]:
    """Search-R1's reward: 1 for an exact match, else 0."""
    golds = group.question.golden_answers
    return [{"em": float(exact_match(episode.answer, golds))} for episode in group.episodes]


def _f1(group: Group) -> list[dict[str, float]]:
    golds = group.question.golden_answers
    return [{"f1": f1(episode.answer, golds)} for episode in group.episodes]


def _substring(group: Group) -> list[dict[str, float]]:
    golds = group.question.golden_answers
    return [{"substring": float(substring_match(e.answer, golds))} for e in group.episodes]


def _format(group: Group) -> list[dict[str, float]]:
    """1 for a well-formed episode, whatever it answers."""
    return [{"format": float(well_formed(group.protocol, episode))} for episode in group.episodes]


def _gated(group: Group) -> list[dict[str, float]]:
    return gated_parts(group.config, group.episodes, group.question)


def _each(
    parts: Callable[[RewardConfig, ProtocolConfig, Episode, Question], dict[str, float]],
) -> RewardFunction:
    """A reward that looks at one episode at a time."""

    def reward(group: Group) -> list[dict[str, float]]:
        return [
            parts(group.config, group.protocol, episode, group.question)
            for episode in group.episodes
        ]

    return reward


def _judge(group: Group) -> list[dict[str, float]]:
    """1 for an exact match, else what the judge says; 0 without an answer."""
    rows = []
    golds = group.question.golden_answers
    for episode in group.episodes:
        case = _case(episode, group.question)
        sure = Verdict(value=float(exact_match(episode.answer, golds)))
        verdict = group.verdicts[case] if case else sure
        rows.append({"judge": verdict.value, FAILED: float(verdict.failed)})
    return rows


def _composed(group: Group) -> list[dict[str, float]]:
    """The sum of `parts`, each times its weight and under its own name: that of the reward, with those of its parts
    behind it where it has several."""
    rows: list[dict[str, float]] = [{} for _ in group.episodes]
    for name, weight in _weights(group.config).items():
        for row, parts in zip(rows, REWARDS[name](group), strict=True):
            summands = [part for part in parts if part != FAILED]
            for part in summands:
                row[name if len(summands) == 1 else f"{name}_{part}"] = weight * parts[part]
            if FAILED in parts:
                row[FAILED] = parts[FAILED]
    return rows


REWARDS: dict[str, RewardFunction] = {
    "exact_match": _exact_match,
    "f1": _f1,
    "substring": _substring,
    "format": _format,
    "search_r1_format": _each(search_r1_format_parts),
    "research": _each(research_parts),
    "research_paper": _each(research_paper_parts),
    "parallel_search": _each(parallel_search_parts),
    "parallel_search_paper": _each(parallel_search_paper_parts),
    "gated": _gated,
    "gain": _each(gain_parts),
    "judge": _judge,
    "composed": _composed,
}


def score_group(
    config: RewardConfig,
    protocol: ProtocolConfig,
    episodes: Sequence[Episode],
    question: Question,
    *,
    judge: AnswerJudge | None = None,
) -> list[Reward]:
    """Judge the episodes of one group, all about `question`: `score_groups` for a single one."""
    return score_groups(config, protocol, [episodes], [question], judge=judge)[0]


def score_groups(
    config: RewardConfig,
    protocol: ProtocolConfig,
    groups: Sequence[Sequence[Episode]],
    questions: Sequence[Question],
    *,
    judge: AnswerJudge | None = None,
) -> list[list[Reward]]:
    """Judge the episodes of several groups. A judge model is asked about all of them in one batch.

    Args:
      groups: the episodes of each group; all of a group are about its question.
      judge: in place of the one that `config.judge` describes, which is kept from call to call.

    Raises:
      UserError: `config.name` is not the name of a reward, or a judge cannot be set up.
    """
    if config.name not in REWARDS:
        raise UserError(f"reward.name is {config.name!r}; use one of {', '.join(sorted(REWARDS))}.")
    verdicts: dict[Case, Verdict] = {}
    if "judge" in (_weights(config) if config.name == "composed" else (config.name,)):
        cases = [
            case
            for episodes, question in zip(groups, questions, strict=True)
            for episode in episodes
            if (case := _case(episode, question))
        ]
        judge = judge or _open_judge(config.judge)
        verdicts = dict(zip(cases, judge.judge(cases), strict=True))
    return [
        [
            Reward(sum(value for part, value in parts.items() if part != FAILED), parts)
            for parts in REWARDS[config.name](
                Group(
                    config=config,
                    protocol=protocol,
                    episodes=episodes,
                    question=question,
                    verdicts=verdicts,
                )
            )
        ]
        for episodes, question in zip(groups, questions, strict=True)
    ]


def score_together(
    config: RewardConfig,
    protocol: ProtocolConfig,
    groups: Sequence[Sequence[Episode]],
    questions: Sequence[Question],
) -> list[list[Reward]]:
    """`score_groups` by all processes of a run: each judges its share, and all get the same. A collective.

    A judge may change its mind; so no episode is judged twice, and no two processes learn from different rewards.
    """
    if processes.count() == 1:
        return score_groups(config, protocol, groups, questions)
    own = score_groups(config, protocol, processes.share(groups), processes.share(questions))
    told = json.dumps([[(reward.total, reward.parts) for reward in group] for group in own])
    shares = [json.loads(text) for text in processes.gather(told)]
    return [[Reward(*reward) for reward in group] for group in processes.interleave(shares)]


def _weights(config: RewardConfig) -> dict[str, float]:
    """Name → weight of the parts that have one."""
    every = {part.name: getattr(config.parts, part.name) for part in fields(RewardParts)}
    return {name: weight for name, weight in every.items() if weight}


def _case(episode: Episode, question: Question) -> Case | None:
    """What a judge has to decide about an episode; nothing where there is no answer or an exact match."""
    answer = episode.answer
    if not answer or exact_match(answer, question.golden_answers):
        return None
    return Case(question=question.text, golden_answers=question.golden_answers, answer=answer)


@lru_cache(maxsize=4)
def _open_judge(config: JudgeConfig) -> Judge:
    return Judge(config=config)
