"""Rewards in which the form of an episode plays a part."""

from __future__ import annotations

from psearch_jax.config import ProtocolConfig, RewardConfig
from psearch_jax.questions.question import Question
from psearch_jax.rewards.answers import exact_match, f1
from psearch_jax.rollout.episode import Episode
from psearch_jax.rollout.protocol import well_formed


def format_bonus(
    protocol: ProtocolConfig, episode: Episode, *, right: bool, weight: float
) -> float:
    """ParallelSearch's r_f: −weight if right but badly formatted, +weight if wrong but well formatted, else 0."""
    valid = well_formed(protocol, episode)
    if right == valid:
        return 0.0
    return weight if valid else -weight


def search_r1_format_parts(
    config: RewardConfig, protocol: ProtocolConfig, episode: Episode, question: Question
) -> dict[str, float]:
    """Search-R1's reward with format (its v0.3): one of the five `search_r1_scores`.

    Right and well formed, right only, well formed only, neither, no answer. The parts are em (0 or 1) and the
    difference between the score and it.
    """
    right = exact_match(episode.answer, question.golden_answers)
    valid = well_formed(protocol, episode)
    both, right_only, valid_only, neither, silent = config.search_r1_scores
    if episode.answer is None:
        score = silent
    elif right:
        score = both if valid else right_only
    else:
        score = valid_only if valid else neither
    return {"em": float(right), "format": score - float(right)}


def research_parts(
    config: RewardConfig, protocol: ProtocolConfig, episode: Episode, question: Question
) -> dict[str, float]:
    """ReSearch's reward as its code computes it: 0 if the format is bad, the episode did not end by itself or no
    answer is found; else F1 if that is above 0; else `research_format`."""
    if episode.end_reason != "answer" or not well_formed(protocol, episode):
        return {"f1": 0.0, "format": 0.0}
    score = f1(episode.answer, question.golden_answers)
    return {"f1": score, "format": 0.0 if score else config.research_format}


def research_paper_parts(
    config: RewardConfig, protocol: ProtocolConfig, episode: Episode, question: Question
) -> dict[str, float]:
    """ReSearch's reward by the formula of its paper: F1 if that is above 0, whatever the format; else
    `research_format` for a well-formed episode and 0 for any other."""
    score = f1(episode.answer, question.golden_answers)
    bonus = not score and well_formed(protocol, episode)
    return {"f1": score, "format": config.research_format if bonus else 0.0}
