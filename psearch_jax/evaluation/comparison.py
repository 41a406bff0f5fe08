"""Two results over the same questions: how they differ, how sure that is, and where."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from psearch_jax.errors import UserError
from psearch_jax.evaluation.metrics import interval_of, resampled_means, values_of
from psearch_jax.evaluation.results import ROWS, SAMPLED
from psearch_jax.metrics_log import read_lines
from psearch_jax.questions.question import KINDS

#: What answers cost.
COSTS = ("calls", "searches", "subqueries", "policy_tokens", "observation_tokens")
QUALITY = ("em", "f1", "substring", "tolerant", "judge", "all_gold")


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

    ids_a, a_Qx1 = values_of(of_kind(baseline), (metric,))
    ids_b, b_Qx1 = values_of(of_kind(other), (metric,))
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
    ab_Qx2 = ab_Qx2[~np.isnan(ab_Qx2).any(axis=1)]  # a metric that a question lacks
    if not len(ab_Qx2):
        raise UserError(f"no question of the two results has the metric {metric}.")
    draws_Bx2 = resampled_means(ab_Qx2, draws, seed)
    mean_a, mean_b = (float(mean) for mean in ab_Qx2.mean(axis=0))
    positive = bool((draws_Bx2[:, 0] > 0).all())
    return {
        "metric": metric,
        "kind": kind,
        "questions": len(ab_Qx2),
        "unpaired": len(ids_a) + len(ids_b) - 2 * len(pairs),
        "baseline": mean_a,
        "other": mean_b,
        "difference": mean_b - mean_a,
        "difference_interval": interval_of(draws_Bx2[:, 1] - draws_Bx2[:, 0]),
        "ratio": mean_b / mean_a if mean_a > 0 else None,
        "ratio_interval": interval_of(draws_Bx2[:, 1] / draws_Bx2[:, 0]) if positive else None,
        "improved": int((ab_Qx2[:, 1] > ab_Qx2[:, 0]).sum()),
        "worsened": int((ab_Qx2[:, 1] < ab_Qx2[:, 0]).sum()),
    }


def mcnemar(gained: int, lost: int) -> float:
    """The two-sided exact p-value of McNemar's test: how likely so uneven a split of the questions that changed is,
    were gaining and losing equally likely (a binomial test with probability 1/2)."""
    changed, fewer = gained + lost, min(gained, lost)
    if gained == lost:
        return 1.0
    tail = sum(math.comb(changed, k) for k in range(fewer + 1))
    # Whole numbers until here: 2 ** -changed alone would be 0 beyond a thousand.
    return min(1.0, 2 * tail / (1 << changed))


def flipped(
    baseline: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The questions that only `other` answers right, and those that only `baseline` does.

    With several samples a question counts as right when more than half of them are.
    """
    before, after = _right(baseline), _right(other)
    answers_a = {record["id"]: record.get("answer") for record in reversed(baseline)}
    gained: list[dict[str, Any]] = []
    lost: list[dict[str, Any]] = []
    seen: set[str] = set()
    for record in other:
        identity = record["id"]
        if identity in seen or identity not in before or before[identity] == after[identity]:
            continue
        seen.add(identity)
        line = {
            "id": identity,
            "kind": record["kind"],
            "question": record.get("question"),
            "golden_answers": record.get("golden_answers"),
            "baseline": answers_a[identity],
            "other": record.get("answer"),
        }
        (gained if after[identity] else lost).append(line)
    return gained, lost


def _right(records: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Question id → whether it is answered right."""
    ids, values_Qx1 = values_of(records, ("em",))
    return {
        identity: bool(value > 0.5) for identity, value in zip(ids, values_Qx1[:, 0], strict=True)
    }


def compare_runs(
    baseline: Sequence[Mapping[str, Any]],
    other: Sequence[Mapping[str, Any]],
    *,
    draws: int = 2000,
    seed: int = 0,
) -> dict[str, Any]:
    """Everything that `psearch compare` says.

    Returns:
      {"questions", "unpaired", "quality" and "cost" ({metric: what `compare` gives}), "mcnemar" ({"gained", "lost",
      "p"}), "kinds" and (with several) "datasets" ({name: the same again}), "flipped" ({"gained": [question],
      "lost": [question]})}.

    Raises:
      UserError: there is no question in common.
    """
    result = _part(baseline, other, draws, seed)
    for name, key, order in (
        ("kinds", "kind", KINDS),
        ("datasets", "dataset", ()),
    ):
        found = dict.fromkeys(record.get(key) or "" for record in baseline)
        values = [v for v in order if v in found] + [v for v in found if v not in order]
        if name == "datasets" and len(values) < 2:
            continue
        result[name] = {}
        for value in values:
            a, b = ([r for r in rows if (r.get(key) or "") == value] for rows in (baseline, other))
            if {r["id"] for r in a} & {r["id"] for r in b}:
                result[name][value] = _part(a, b, draws, seed)
    gained, lost = flipped(baseline, other)
    result["flipped"] = {"gained": gained, "lost": lost}
    return result


def _part(
    baseline: Sequence[Mapping[str, Any]],
    other: Sequence[Mapping[str, Any]],
    draws: int,
    seed: int,
) -> dict[str, Any]:
    numbers: dict[str, dict[str, Any]] = {"quality": {}, "cost": {}}
    for group, names in (("quality", QUALITY), ("cost", COSTS)):
        for metric in names:
            if all(any(r.get(metric) is not None for r in rows) for rows in (baseline, other)):
                numbers[group][metric] = compare(baseline, other, metric, draws=draws, seed=seed)
    gained, lost = (len(lines) for lines in flipped(baseline, other))
    em = numbers["quality"]["em"]
    return {
        "questions": em["questions"],
        "unpaired": em["unpaired"],
        **numbers,
        "mcnemar": {"gained": gained, "lost": lost, "p": mcnemar(gained, lost)},
    }


def result_lines(named: str) -> tuple[str, list[dict[str, Any]]]:
    """A row's name and lines. `named` is a results file, a run directory with one greedy row (or one of its own
    name), or DIRECTORY:ROW.

    Raises:
      UserError: there are no such results, or several that could be meant.
    """
    path, row = Path(named), ""
    if not path.exists() and ":" in named:
        folder, _, row = named.rpartition(":")
        path = Path(folder)
    if path.is_file():
        return path.stem, _some(path)
    files = sorted((path / ROWS).glob("*.jsonl"))
    names = [file.name.removesuffix(".jsonl") for file in files]
    greedy = [name for name in names if not name.endswith(SAMPLED)]
    own = path.resolve().name
    if not row:
        row = own if own in names else greedy[0] if len(greedy) == 1 else ""
    if row not in names:
        said = f"the rows {', '.join(names)}" if names else "no results"
        raise UserError(
            f"{named}: {path} holds {said}; evaluate it first, or name a row as {path}:ROW."
        )
    return row, _some(path / ROWS / f"{row}.jsonl")


def _some(path: Path) -> list[dict[str, Any]]:
    lines = read_lines(path)
    if not lines or not all("id" in line and "em" in line for line in lines):
        raise UserError(
            f"{path} holds no results of an evaluation; name another file or evaluate again."
        )
    return lines
