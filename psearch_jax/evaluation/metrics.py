"""What is measured of an episode, and how sure we are of its mean.

Intervals are percentile bootstrap intervals (Efron, 1979): questions are drawn with replacement, all
metrics share the draws, and draws are whole questions, so several samples of one question stay together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from psearch_jax.errors import UserError
from psearch_jax.questions.question import KINDS
from psearch_jax.rewards import answers
from psearch_jax.rewards.decomposition import distinct_queries
from psearch_jax.rollout.episode import Episode, Role

#: Numbers of a record that are averaged. Booleans average to shares.
METRICS = (
    "em",
    "f1",
    "turns",
    "searches",
    "subqueries",
    "distinct_queries",
    "decomposed",
    "policy_tokens",
    "observation_tokens",
    "prompt_tokens",
    "well_formed",
    "answered",
    "invalid_turns",
    "failed_searches",
)
_CELLS = 1 << 22  # resampled counts that are in memory at one time


def episode_facts(
    episode: Episode,
    *,
    decode: Callable[[Sequence[int]], str],
    well_formed: Callable[[Episode], bool],
) -> dict[str, Any]:
    """What was played, without a judgement of the answer.

    Args:
      episode: a finished episode.
      decode: token ids to text, special tokens kept.
      well_formed: the protocol's judgement of the policy turns.

    Returns:
      A JSON object: the `question`, the `answer` (None if there is none), the numbers of `METRICS` but `em`
      and `f1`, the `end_reason`, `segments` ([role, text] in order, role "prompt", "policy" or
      "observation") and `results` (a search turn each: its `queries` and for each query its `passages`).
    """
    searches = episode.searches
    return {
        "question": episode.question.text,
        "answer": episode.answer,
        "turns": len(episode.turns),
        "searches": len(searches),
        "subqueries": episode.subqueries,
        "distinct_queries": distinct_queries(episode),
        "decomposed": bool(searches and len(searches[0].queries) >= 2),
        "policy_tokens": episode.count(Role.POLICY),
        "observation_tokens": episode.count(Role.OBSERVATION),
        "prompt_tokens": episode.count(Role.PROMPT),
        "well_formed": bool(well_formed(episode)),
        "answered": episode.answer is not None,
        "invalid_turns": sum(1 for turn in episode.turns if turn.kind == "invalid"),
        "failed_searches": sum(turn.failed for turn in episode.turns),
        "end_reason": episode.end_reason,
        "segments": segments(episode, decode),
        "results": [
            {
                "queries": list(turn.queries),
                "passages": [
                    [
                        {
                            "id": hit.passage.id,
                            "title": hit.passage.title,
                            "text": hit.passage.text,
                            "score": round(float(hit.score), 4),
                        }
                        for hit in hits
                    ]
                    for hits in turn.hits
                ],
            }
            for turn in searches
        ],
    }


def episode_record(
    episode: Episode,
    *,
    decode: Callable[[Sequence[int]], str],
    well_formed: Callable[[Episode], bool],
    sample: int = 0,
) -> dict[str, Any]:
    """One line of a results file: `episode_facts`, identification (`id`, `sample` of the question, `kind`,
    `unseen`), the `golden_answers` and the scores `em` and `f1` of the answer that the policy gave."""
    question = episode.question
    golden, answer = question.golden_answers, episode.answer
    return {
        "id": question.id,
        "sample": sample,
        "kind": question.kind,
        "unseen": question.metadata.get("unseen"),
        "golden_answers": list(golden),
        "em": answers.exact_match(answer, golden),
        "f1": answers.f1(answer, golden),
        **episode_facts(episode, decode=decode, well_formed=well_formed),
    }


def segments(episode: Episode, decode: Callable[[Sequence[int]], str]) -> list[list[str]]:
    """The episode as [role, text] pairs, one a run of tokens with equal role."""
    parts: list[list[str]] = []
    start = 0
    for stop in range(1, len(episode.ids) + 1):
        if stop == len(episode.ids) or episode.roles[stop] != episode.roles[start]:
            role = Role(episode.roles[start]).name.lower()
            parts.append([role, decode(episode.ids[start:stop])])
            start = stop
    return parts


def _values(
    records: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> tuple[list[str], Float[np.ndarray, "questions metrics"]]:
    """Question ids in order of appearance, and the mean of each metric over a question's samples."""
    rows: dict[str, list[list[float]]] = {}
    for record in records:
        rows.setdefault(record["id"], []).append([float(record[name]) for name in names])
    values_QxM = np.array([np.mean(samples, axis=0) for samples in rows.values()], np.float64)
    return list(rows), values_QxM.reshape(len(rows), len(names))


def resampled_means(
    values_QxM: Float[np.ndarray, "questions metrics"], draws: int, seed: int
) -> Float[np.ndarray, "draws metrics"]:
    """Means of `draws` bootstrap samples of the rows, float64.

    How often each row was drawn is counted first, so that a mean is one row of a matrix product.
    """
    count = len(values_QxM)
    rng = np.random.default_rng(seed)
    block = max(1, _CELLS // max(1, count))
    means = []
    for start in range(0, draws, block):
        size = min(block, draws - start)
        drawn = rng.integers(0, count, (size, count)) + count * np.arange(size)[:, None]
        times_BxQ = np.bincount(drawn.ravel(), minlength=size * count).reshape(size, count)
        means.append(times_BxQ.astype(np.float64) @ values_QxM / count)
    return np.concatenate(means)


def _interval(draws_B: Float[np.ndarray, " draws"]) -> list[float]:
    """The middle 95 % of the draws."""
    low, high = np.percentile(draws_B, (2.5, 97.5))
    return [float(low), float(high)]


def bootstrap_interval(
    values: Iterable[float], *, draws: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the mean of independent values."""
    values_Qx1 = np.array(list(values), np.float64)[:, None]
    if not len(values_Qx1):
        raise ValueError("an interval needs at least one value")
    low, high = _interval(resampled_means(values_Qx1, draws, seed)[:, 0])
    return low, high


def _means(records: Sequence[Mapping[str, Any]], draws: int, seed: int) -> dict[str, Any]:
    """Counts, means and intervals of some records."""
    ids, values_QxM = _values(records, METRICS)
    summary: dict[str, Any] = {"questions": len(ids), "episodes": len(records)}
    if not ids:
        return summary
    means_M = values_QxM.mean(axis=0)
    draws_BxM = resampled_means(values_QxM, draws, seed)
    summary.update({name: float(mean) for name, mean in zip(METRICS, means_M, strict=True)})
    summary["right"] = int(sum(bool(record["em"]) for record in records))
    summary["intervals"] = {name: _interval(draws_BxM[:, m]) for m, name in enumerate(METRICS)}
    return summary


def summarize(
    records: Sequence[Mapping[str, Any]], *, draws: int = 2000, seed: int = 0
) -> dict[str, Any]:
    """Means with 95 % intervals over all records, and the same by kind and by `unseen`.

    Returns:
      {"questions", "episodes", "right", every metric of `METRICS`, "intervals": {metric: [low, high]},
      "end_reasons": {reason: count}, "kinds": {kind: the same numbers}, "unseen" and "seen": the same
      numbers, where the questions say which they are}.
    """
    summary = _means(records, draws, seed)
    reasons = [record["end_reason"] for record in records]
    summary["end_reasons"] = {reason: reasons.count(reason) for reason in sorted(set(reasons))}
    kinds = {record["kind"] for record in records}
    order = [kind for kind in KINDS if kind in kinds] + sorted(kinds - set(KINDS))
    summary["kinds"] = {
        kind: _means([record for record in records if record["kind"] == kind], draws, seed)
        for kind in order
    }
    for name, flag in (("unseen", True), ("seen", False)):
        part = [record for record in records if record.get("unseen") is flag]
        if part:
            summary[name] = _means(part, draws, seed)
    return summary


def compare(
    baseline: Sequence[Mapping[str, Any]],
    other: Sequence[Mapping[str, Any]],
    metric: str = "em",
    *,
    kind: str | None = None,
    draws: int = 2000,
    seed: int = 0,
) -> dict[str, Any]:
    """Paired bootstrap of `other` against `baseline` over the questions that both contain.

    Returns:
      {"metric", "kind", "questions", "unpaired" (ids in only one of the two), "baseline", "other" (means),
      "difference" (other − baseline) with "difference_interval", "ratio" (other ÷ baseline, of the means)
      with "ratio_interval" (None where the baseline's mean is 0), "improved", "worsened" (question counts)}.

    Raises:
      UserError: there is no question in common.
    """

    def of_kind(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        return [record for record in records if kind is None or record["kind"] == kind]

    ids_a, a_Qx1 = _values(of_kind(baseline), (metric,))
    ids_b, b_Qx1 = _values(of_kind(other), (metric,))
    at = {question: row for row, question in enumerate(ids_b)}
    pairs = [(row, at[question]) for row, question in enumerate(ids_a) if question in at]
    if not pairs:
        where = f" of kind {kind}" if kind else ""
        raise UserError(
            f"the two results have no question{where} in common ({len(ids_a)} and {len(ids_b)} "
            "questions); compare results over the same question file."
        )
    rows_a, rows_b = np.array(pairs).T
    ab_Qx2 = np.stack([a_Qx1[rows_a, 0], b_Qx1[rows_b, 0]], axis=1)
    draws_Bx2 = resampled_means(ab_Qx2, draws, seed)
    mean_a, mean_b = (float(mean) for mean in ab_Qx2.mean(axis=0))
    positive = bool((draws_Bx2[:, 0] > 0).all())
    return {
        "metric": metric,
        "kind": kind,
        "questions": len(pairs),
        "unpaired": len(ids_a) + len(ids_b) - 2 * len(pairs),
        "baseline": mean_a,
        "other": mean_b,
        "difference": mean_b - mean_a,
        "difference_interval": _interval(draws_Bx2[:, 1] - draws_Bx2[:, 0]),
        "ratio": mean_b / mean_a if mean_a > 0 else None,
        "ratio_interval": _interval(draws_Bx2[:, 1] / draws_Bx2[:, 0]) if positive else None,
        "improved": int((ab_Qx2[:, 1] > ab_Qx2[:, 0]).sum()),
        "worsened": int((ab_Qx2[:, 1] < ab_Qx2[:, 0]).sum()),
    }
