"""Where the results of an evaluation lie, and how they are put together for `summary.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from psearch_jax.errors import UserError
from psearch_jax.metrics_log import write_atomically

SUMMARY = "summary.json"
ROWS = "rows"
SAMPLED = ".sampled"  # row NAME's sampled episodes are in NAME.sampled.jsonl


def rows_file(run_directory: str | os.PathLike[str], name: str) -> Path:
    """Where the lines of a row are."""
    return Path(run_directory) / ROWS / f"{name}.jsonl"


def row_summary(greedy: dict[str, Any], sampled: dict[str, Any] | None = None) -> dict[str, Any]:
    """A row of `summary.json`: the greedy summary, and of the sampled one `em_sampled` with its interval,
    `turns_sampled` and, under "sampled", everything."""
    row = dict(greedy)
    if sampled is not None:
        row["em_sampled"] = sampled["em"]
        row["turns_sampled"] = sampled["turns"]
        row["intervals"] = {
            **greedy.get("intervals", {}),
            "em_sampled": sampled["intervals"]["em"],
            "turns_sampled": sampled["intervals"]["turns"],
        }
        row["sampled"] = sampled
    return row


def read_summary(run_directory: str | os.PathLike[str]) -> dict[str, Any]:
    """`summary.json` of a run directory, empty if there is none.

    Raises:
      UserError: the file is damaged.
    """
    path = Path(run_directory) / SUMMARY
    if not path.exists():
        return {}
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(summary, dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise UserError(
            f"{path} is not a JSON object ({error}); remove it and evaluate again."
        ) from error
    return summary


def write_summary(run_directory: str | os.PathLike[str], summary: Mapping[str, Any]) -> None:
    """Writes `summary.json` whole or not at all."""
    text = json.dumps(summary, ensure_ascii=False, indent=2, allow_nan=False)
    write_atomically(Path(run_directory) / SUMMARY, text + "\n")


def add_row(
    run_directory: str | os.PathLike[str], row: str, summary: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Puts the summary of one evaluation into `summary.json`, beside the row's other decoding mode.

    Returns:
      All rows of the file.
    """
    whole = read_summary(run_directory)
    rows = whole.setdefault("rows", {})
    old = rows.get(row, {})
    if summary["mode"] == "greedy":
        rows[row] = row_summary(summary, old.get("sampled"))
    elif old:
        rows[row] = row_summary(old, summary)
    else:  # only sampled so far: nothing is reported as greedy
        rows[row] = {"em_sampled": summary["em"], "turns_sampled": summary["turns"],
                     "questions": summary["questions"], "sampled": summary,
                     "intervals": {"em_sampled": summary["intervals"]["em"]}}  # fmt: skip
    write_summary(run_directory, whole)
    return rows


def counts_line(name: str, summary: dict[str, Any]) -> str:
    """One line that says what was scored and how sure it is (law 12)."""
    low, high = summary["intervals"]["em"]
    return (
        f"{name} ({summary['mode']}): {summary['right']} of {summary['episodes']} episodes over "
        f"{summary['questions']} questions right, EM {summary['em']:.3f} "
        f"[{low:.3f}, {high:.3f}], {summary['turns']:.2f} turns, {summary['searches']:.2f} searches"
    )
