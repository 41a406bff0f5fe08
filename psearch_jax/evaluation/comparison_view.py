"""`psearch compare`: two results side by side, for people or as JSON."""

from __future__ import annotations

import json as json_text
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from psearch_jax.evaluation.comparison import compare_runs

_SHOWN = 5  # flipped questions of each sort


def show(
    name_a: str,
    lines_a: Sequence[Mapping[str, Any]],
    name_b: str,
    lines_b: Sequence[Mapping[str, Any]],
    *,
    json: bool = False,
) -> dict[str, Any]:
    """Writes the comparison of B with A to standard output and returns it."""
    result = {"baseline": name_a, "other": name_b, **compare_runs(lines_a, lines_b)}
    if json:
        sys.stdout.write(json_text.dumps(result, ensure_ascii=False) + "\n")
        return result
    console = Console(highlight=False)
    console.width = max(console.width, 100)  # a narrower table would lose its numbers
    parts = {"all questions": result, **result["kinds"], **result.get("datasets", {})}
    console.print(Text(f"{name_b} against {name_a}"))
    console.print(_quality(parts), Text())
    console.print(_cost(result), Text())
    for title, key in (("only", "gained"), ("no longer", "lost")):
        flips = result["flipped"][key]
        console.print(Text(f"{len(flips)} questions that {name_b} {title} answers right"))
        for line in flips[:_SHOWN]:
            answers = f"{line['baseline'] or 'no answer'} → {line['other'] or 'no answer'}"
            console.print(Text(f"  {line['question']}  {answers}"), soft_wrap=True)
    return result


def _quality(parts: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("", "n", "EM", "difference in points", "gained", "lost", "McNemar p", "calls"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, part in parts.items():
        em, test = part["quality"]["em"], part["mcnemar"]
        low, high = em["difference_interval"]
        calls = part["cost"].get("calls", {}).get("ratio")
        table.add_row(
            Text(name),
            f"{part['questions']:,}",
            f"{em['baseline']:.3f} → {em['other']:.3f}",
            f"{100 * em['difference']:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]",
            str(test["gained"]),
            str(test["lost"]),
            f"{test['p']:.2g}",
            f"{calls:.2f} ×" if calls else "–",
        )
    return table


def _cost(result: Mapping[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("an episode", "before", "after", "ratio"):
        table.add_column(heading, justify="left" if heading == "an episode" else "right")
    for name, numbers in {**result["quality"], **result["cost"]}.items():
        ratio = numbers["ratio_interval"]
        table.add_row(
            Text(name.replace("_", " ")),
            f"{numbers['baseline']:.3f}",
            f"{numbers['other']:.3f}",
            f"{numbers['ratio']:.3f} [{ratio[0]:.3f}, {ratio[1]:.3f}]" if ratio else "–",
        )
    return table
