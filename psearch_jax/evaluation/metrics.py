"""What is measured over a results file, and how sure we are of its mean.

Intervals are percentile bootstrap intervals (Efron, 1979): questions are drawn with replacement, all
metrics share the draws, and draws are whole questions, so several samples of one question stay together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from psearch_jax.questions.question import KINDS

#: Numbers of a record that are averaged. Booleans average to shares. A record may lack one (None): it is averaged
#: over those that have it.
METRICS = (
    *("em", "f1", "substring", "tolerant", "judge"),
    *("gold_recall", "all_gold"),
    *("turns", "calls", "searches", "subqueries", "distinct_queries", "decomposed"),
    *("policy_tokens", "observation_tokens", "prompt_tokens"),
    *("well_formed", "answered", "invalid_turns", "truncated", "failed_searches"),
)
_CELLS = 1 << 22  # resampled counts that are in memory at one time


def values_of(
    records: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> tuple[list[str], Float[np.ndarray, "questions metrics"]]:
    """Question ids in order of appearance, and the mean of each metric over a question's samples (NaN where none of
    them has it)."""
    rows: dict[str, list[list[float]]] = {}
    for record in records:
        given = (record.get(name) for name in names)
        values = [math.nan if value is None else float(value) for value in given]
        rows.setdefault(record["id"], []).append(values)
    values_QxM = np.array([_mean(samples) for samples in rows.values()], np.float64)
    return list(rows), values_QxM.reshape(len(rows), len(names))


def _mean(samples: list[list[float]]) -> Float[np.ndarray, " metrics"]:
    """Over the samples that have a metric."""
    values_SxM = np.array(samples, np.float64)
    if len(samples) == 1:
        return values_SxM[0]
    known = ~np.isnan(values_SxM)
    if known.all():
        return values_SxM.mean(axis=0)
    totals = np.where(known, values_SxM, 0.0).sum(axis=0)
    return np.where(known.any(axis=0), totals / np.maximum(known.sum(axis=0), 1), np.nan)


def resampled_means(
    values_QxM: Float[np.ndarray, "questions metrics"], draws: int, seed: int
) -> Float[np.ndarray, "draws metrics"]:
    """Means of `draws` bootstrap samples of the rows, float64; NaN values are left out of them.

    How often each row was drawn is counted first, so that a mean is one row of a matrix product.
    """
    count = len(values_QxM)
    rng = np.random.default_rng(seed)
    block = max(1, _CELLS // max(1, count))
    known = ~np.isnan(values_QxM)
    filled = values_QxM if known.all() else np.where(known, values_QxM, 0.0)
    means = []
    for start in range(0, draws, block):
        size = min(block, draws - start)
        drawn = rng.integers(0, count, (size, count)) + count * np.arange(size)[:, None]
        times_BxQ = np.bincount(drawn.ravel(), minlength=size * count).reshape(size, count)
        times_BxQ = times_BxQ.astype(np.float64)
        with np.errstate(invalid="ignore"):  # a draw may hold no known value of a rare metric
            divisor = count if known.all() else times_BxQ @ known.astype(np.float64)
            means.append(times_BxQ @ filled / divisor)
    return np.concatenate(means)


def interval_of(draws_B: Float[np.ndarray, " draws"]) -> list[float]:
    """The middle 95 % of the draws."""
    low, high = np.nanpercentile(draws_B, (2.5, 97.5))
    return [float(low), float(high)]


def bootstrap_interval(
    values: Iterable[float], *, draws: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the mean of independent values."""
    values_Qx1 = np.array(list(values), np.float64)[:, None]
    if not len(values_Qx1):
        raise ValueError("an interval needs at least one value")
    low, high = interval_of(resampled_means(values_Qx1, draws, seed)[:, 0])
    return low, high


def _means(records: Sequence[Mapping[str, Any]], draws: int, seed: int) -> dict[str, Any]:
    """Counts, means and intervals of some records."""
    names = [name for name in METRICS if any(r.get(name) is not None for r in records)]
    ids, values_QxM = values_of(records, names)
    summary: dict[str, Any] = {"questions": len(ids), "episodes": len(records)}
    if not ids:
        return summary
    means_M = np.nanmean(values_QxM, axis=0)
    draws_BxM = resampled_means(values_QxM, draws, seed)
    summary.update({name: float(mean) for name, mean in zip(names, means_M, strict=True)})
    summary["right"] = int(sum(bool(record["em"]) for record in records))
    summary["intervals"] = {name: interval_of(draws_BxM[:, m]) for m, name in enumerate(names)}
    return summary


def summarize(
    records: Sequence[Mapping[str, Any]], *, draws: int = 2000, seed: int = 0
) -> dict[str, Any]:
    """Means with 95 % intervals over all records, and the same by kind, by data set and by `unseen`.

    Returns:
      {"questions", "episodes", "right", every metric of `METRICS` that is there, "intervals": {metric: [low, high]},
      "end_reasons": {reason: count}, "kinds": {kind: the same numbers}, "unseen" and "seen": the same
      numbers, where the questions say which they are}. With several data sets, "datasets": {name: the same numbers}
      and "dataset_mean", the plain mean of theirs. With several samples a question, "pass_at": {k: {"em",
      "interval"}}. Where a judge was asked, "judge_failed", the number of its failures.
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
    datasets = dict.fromkeys(record.get("dataset", "") for record in records)
    if len(datasets) > 1:
        parts = [[r for r in records if r.get("dataset", "") == name] for name in datasets]
        summary["datasets"] = {
            name: _means(part, draws, seed) for name, part in zip(datasets, parts, strict=True)
        }
        summary["dataset_mean"] = mean_of_datasets(parts, draws=draws, seed=seed)
    if len(records) > summary["questions"]:
        summary["pass_at"] = pass_at(records, draws=draws, seed=seed)
    if any(record.get("judge") is not None for record in records):
        summary["judge_failed"] = sum(bool(record.get("judge_failed")) for record in records)
    return summary


def mean_of_datasets(
    parts: Sequence[Sequence[Mapping[str, Any]]],
    names: Sequence[str] = ("em", "f1"),
    *,
    draws: int = 2000,
    seed: int = 0,
) -> dict[str, Any]:
    """The plain mean over data sets, as published tables have it; questions are drawn within their data set."""
    values = [values_of(part, names)[1] for part in parts]
    means_M = np.mean([np.nanmean(value, axis=0) for value in values], axis=0)
    draws_BxM = np.mean(
        [resampled_means(value, draws, seed + at) for at, value in enumerate(values)], axis=0
    )
    numbers: dict[str, Any] = {name: float(mean) for name, mean in zip(names, means_M, strict=True)}
    numbers["intervals"] = {name: interval_of(draws_BxM[:, m]) for m, name in enumerate(names)}
    return numbers


def pass_at(
    records: Sequence[Mapping[str, Any]], *, draws: int = 2000, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """The chance that at least one of k samples is right, for k = 1, 2, 4, … and all samples of a question.

    Of n samples with c right it is 1 − C(n−c, k) ÷ C(n, k), which is unbiased (Chen et al., 2021); questions with
    fewer than k samples are left out of pass@k.
    """
    right: dict[str, list[bool]] = {}
    for record in records:
        right.setdefault(record["id"], []).append(bool(record["em"]))
    most = max(map(len, right.values()), default=0)
    result = {}
    for k in sorted({most, *(2**i for i in range(most.bit_length()) if 2**i <= most)}):
        chances = [
            1.0 - math.comb(len(r) - sum(r), k) / math.comb(len(r), k)
            for r in right.values()
            if len(r) >= k
        ]
        interval = bootstrap_interval(chances, draws=draws, seed=seed)
        result[str(k)] = {
            "em": float(np.mean(chances)),
            "interval": list(interval),
            "questions": len(chances),
        }
    return result
