"""The tables of a report, as data: shown in HTML, written as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from psearch_jax.errors import UserError
from psearch_jax.evaluation.comparison import compare

#: Rows in the order in which they are shown; others follow by name.
LABELS = {
    "direct": "Direct answer",
    "cot": "Chain of thought",
    "r1": "R1 without search",
    "closed_book": "Closed book",
    "index_off": "Index switched off",
    "rag": "RAG, one query",
    "ircot": "IRCoT",
    "iter_retgen": "Iter-RetGen",
    "search_o1": "Search-o1",
    "parallel_prompt": "Parallel prompt, untrained",
    "rejection": "Rejection sampling",
    "supervised": "Supervised",
    "warm_start": "Warm start",
    "em_reward": "EM reward",
    "parallel_search": "ParallelSearch reward",
    "gated": "Gated reward",
    "research": "ReSearch reward",
}
KIND_ORDER = ("parallelizable", "bridge", "mixed", "single", "unknown")

#: (other, baseline, kind or None for all, decoding) of the paired comparisons.
COMPARISONS: tuple[tuple[str, str, str | None, str], ...] = (
    ("em_reward", "warm_start", None, "sampled"),
    ("em_reward", "warm_start", None, "greedy"),
    ("parallel_search", "em_reward", "parallelizable", "greedy"),
    ("parallel_search", "em_reward", None, "greedy"),
    ("gated", "em_reward", "parallelizable", "greedy"),
    ("gated", "em_reward", None, "greedy"),
    ("gated", "parallel_search", "parallelizable", "greedy"),
)


@dataclass(frozen=True)
class Cell:
    """A number as it is shown, its exact value and its 95 % interval."""

    text: str
    value: float | str | None = None
    interval: tuple[float, float] | None = None
    interval_text: str = ""


@dataclass(frozen=True)
class Table:
    """A table: `groups` are headings over several columns (title, width)."""

    name: str
    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]
    groups: Sequence[tuple[str, int]] = field(default_factory=tuple)

    def to_csv(self) -> str:
        """The exact values; a column with intervals is followed by its `low` and `high`."""
        names: list[str] = []
        headings = [title for title, width in self.groups for _ in range(width)]
        for at, column in enumerate(self.columns):
            names.append(f"{headings[at]}: {column}" if headings else column)
        wide = [
            any(cells[at].interval is not None for _, cells in self.rows)
            for at in range(len(names))
        ]
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        header = ["row"]
        for name, has in zip(names, wide, strict=True):
            header += [name, f"{name} low", f"{name} high"] if has else [name]
        writer.writerow(header)
        for label, cells in self.rows:
            line: list[Any] = [label]
            for cell, has in zip(cells, wide, strict=True):
                line.append("" if cell.value is None else cell.value)
                if has:
                    line += list(cell.interval or ("", ""))
            writer.writerow(line)
        return out.getvalue()


def label_of(row: str) -> str:
    """A row's name for people."""
    return LABELS.get(row, row.replace("_", " ").capitalize())


def ordered(rows: Sequence[str]) -> list[str]:
    """Known rows first, in their order."""
    return [row for row in LABELS if row in rows] + sorted(set(rows) - set(LABELS))


def number(value: Any, form: str = ".3f") -> Cell:
    """A cell for a value that may be missing."""
    if value is None:
        return Cell("–")
    return Cell(format(value, form), float(value))


def measured(numbers: Mapping[str, Any], key: str, form: str = ".3f") -> Cell:
    """A metric of a summary with its interval."""
    value = numbers.get(key)
    if value is None:
        return Cell("–")
    low_high = numbers.get("intervals", {}).get(key)
    if low_high is None:
        return number(value, form)
    low, high = low_high
    return Cell(
        format(value, form),
        float(value),
        (low, high),
        f"{format(low, form)} – {format(high, form)}",
    )


def _signed(points: float) -> str:
    """One decimal with its sign, a real minus."""
    return f"{points:+.1f}".replace("-", "−")


def overall(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """Every row over all questions."""
    columns = (
        ("EM, greedy", "em", ".3f"),
        ("EM, sampled", "em_sampled", ".3f"),
        ("F1", "f1", ".3f"),
        ("Turns", "turns", ".2f"),
        ("Searches", "searches", ".2f"),
        ("Sub-queries", "subqueries", ".2f"),
        ("Parallel", "decomposed", ".2f"),
        ("Policy tokens", "policy_tokens", ".0f"),
        ("Retrieved tokens", "observation_tokens", ".0f"),
        ("Well formed", "well_formed", ".3f"),
    )
    with_interval = {"em", "em_sampled", "turns"}
    lines = []
    for name in ordered(list(rows)):
        cells = [
            measured(rows[name], key, form)
            if key in with_interval
            else number(rows[name].get(key), form)
            for _, key, form in columns
        ]
        lines.append((label_of(name), [*cells, number(rows[name].get("questions"), ",.0f")]))
    return Table(
        "results",
        "All questions",
        "Means an episode, greedy decoding unless a column says sampled; 95 % bootstrap intervals "
        "over questions. Parallel: share of episodes whose first search holds two or more sub-queries.",
        [title for title, _, _ in columns] + ["Questions"],
        lines,
    )


def by_kind(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """EM and turns of every row for every question kind."""
    present = {kind for row in rows.values() for kind in row.get("kinds", {})}
    kinds = [kind for kind in KIND_ORDER if kind in present] + sorted(present - set(KIND_ORDER))
    lines = []
    for name in ordered(list(rows)):
        cells = []
        for kind in kinds:
            numbers = rows[name].get("kinds", {}).get(kind, {})
            cells += [
                measured(numbers, "em"),
                number(numbers.get("turns"), ".2f"),
                number(numbers.get("decomposed"), ".2f"),
            ]
        lines.append((label_of(name), cells))
    counts = {
        kind: max(row.get("kinds", {}).get(kind, {}).get("questions", 0) for row in rows.values())
        for kind in kinds
    }
    return Table(
        "kinds",
        "By question kind",
        "Greedy decoding. Parallelizable questions need facts that do not depend on each other, "
        "bridge questions need one answer for the next query, mixed questions both. Parallel: share "
        "of episodes whose first search holds two or more sub-queries.",
        ["EM", "Turns", "Parallel"] * len(kinds),
        lines,
        [(f"{kind}, n = {counts[kind]:,}", 3) for kind in kinds],
    )


def by_dataset(rows: Mapping[str, Mapping[str, Any]]) -> Table | None:
    """EM of every row on every data set, and the plain mean over them; None where no row has several."""
    names = list(dict.fromkeys(n for row in rows.values() for n in row.get("datasets", {})))
    if not names:
        return None
    lines = []
    for row in ordered([name for name in rows if rows[name].get("datasets")]):
        parts = rows[row]["datasets"]
        cells = [measured(parts.get(name, {}), "em") for name in names]
        lines.append((label_of(row), [*cells, measured(rows[row]["dataset_mean"], "em")]))
    counts = {
        name: max(
            row.get("datasets", {}).get(name, {}).get("questions", 0) for row in rows.values()
        )
        for name in names
    }
    return Table(
        "datasets",
        "By data set",
        "Exact match, greedy decoding; 95 % bootstrap intervals over questions. The mean is the plain one of the data "
        "sets, whatever their sizes.",
        [*(f"{name}, n = {counts[name]:,}" for name in names), "Mean"],
        lines,
    )


def evidence(rows: Mapping[str, Mapping[str, Any]]) -> Table | None:
    """How answers are judged beside EM, and how much of the gold evidence was retrieved; None for older results."""
    columns = (
        ("Substring", "substring", ".3f"),
        ("Tolerant EM", "tolerant", ".3f"),
        ("Judge", "judge", ".3f"),
        ("Gold passages found", "gold_recall", ".3f"),
        ("All of them found", "all_gold", ".3f"),
        ("Calls", "calls", ".2f"),
        ("Distinct queries", "distinct_queries", ".2f"),
        ("Answered", "answered", ".3f"),
        ("Invalid turns", "invalid_turns", ".3f"),
        ("Cut off", "truncated", ".3f"),
    )
    there = [c for c in columns if any(row.get(c[1]) is not None for row in rows.values())]
    if not any(key == "substring" for _, key, _ in there):
        return None
    return Table(
        "evidence",
        "Answers and evidence",
        "Greedy decoding, means an episode. Tolerant EM also forgives accents, hyphens and full stops. Gold passages: "
        "the share that was retrieved of those that hold the facts, where the data set names them.",
        [title for title, _, _ in there],
        [
            (label_of(row), [measured(rows[row], key, form) for _, key, form in there])
            for row in ordered(list(rows))
        ],
    )


def by_novelty(rows: Mapping[str, Mapping[str, Any]]) -> Table | None:
    """EM on questions about entities of the training questions and about others; None if unmarked."""
    if not any("unseen" in row or "seen" in row for row in rows.values()):
        return None
    lines = [
        (
            label_of(name),
            [
                cell
                for part in ("seen", "unseen")
                for cell in (
                    measured(rows[name].get(part, {}), "em"),
                    number(rows[name].get(part, {}).get("questions"), ",.0f"),
                )
            ],
        )
        for name in ordered(list(rows))
    ]
    return Table(
        "novelty",
        "Seen and unseen entities",
        "Greedy decoding. Unseen: no training question or demonstration names the entities.",
        ["EM", "Questions"] * 2,
        lines,
        [("seen", 2), ("unseen", 2)],
    )


def comparisons(
    greedy: Mapping[str, Sequence[Mapping[str, Any]]],
    sampled: Mapping[str, Sequence[Mapping[str, Any]]],
) -> Table | None:
    """Paired differences of EM and ratios of turns; None if no pair of rows is there."""
    lines = []
    for other, baseline, kind, mode in COMPARISONS:
        records = sampled if mode == "sampled" else greedy
        if other not in records or baseline not in records:
            continue
        try:
            em = compare(records[baseline], records[other], "em", kind=kind)
            turns = compare(records[baseline], records[other], "turns", kind=kind)
        except UserError:  # this kind does not occur
            continue
        low, high = em["difference_interval"]
        ratio = Cell("–")
        if turns["ratio"] is not None and turns["ratio_interval"] is not None:
            ratio_low, ratio_high = turns["ratio_interval"]
            ratio = Cell(
                f"{turns['ratio']:.2f} ×",
                turns["ratio"],
                (ratio_low, ratio_high),
                f"{ratio_low:.2f} – {ratio_high:.2f}",
            )
        lines.append(
            (
                f"{label_of(other)} against {label_of(baseline)}",
                [
                    Cell(kind or "all", kind or "all"),
                    Cell(mode, mode),
                    number(em["questions"], ",.0f"),
                    Cell(
                        f"{_signed(100 * em['difference'])} points",
                        100 * em["difference"],
                        (100 * low, 100 * high),
                        f"{_signed(100 * low)} to {_signed(100 * high)}",
                    ),
                    number(em["improved"], ".0f"),
                    number(em["worsened"], ".0f"),
                    ratio,
                ],
            )
        )
    if not lines:
        return None
    return Table(
        "comparisons",
        "Paired comparisons",
        "The same questions under both policies; 95 % paired bootstrap intervals. Gained and lost "
        "count questions whose EM rose and fell.",
        ["Kind", "Decoding", "Questions", "EM difference", "Gained", "Lost", "Turns ratio"],
        lines,
    )


def curve_table(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """CSV of all training metrics: a line a run and step, a column a metric that any run logged."""
    names = sorted({name for steps in curves.values() for step in steps for name in step})
    columns = ["step"] + [name for name in names if name != "step"]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["run", *columns])
    for run in ordered(list(curves)):
        for step in curves[run]:
            writer.writerow([run, *("" if step.get(c) is None else step[c] for c in columns)])
    return out.getvalue()
