"""One page a run: tables, figures and an episode viewer in a single HTML file without outside references.

What is read under the run directory (all of it optional, but something must be there):
  summary.json            facts of the run and, under "rows", a summary a row
  rows/ROW.jsonl          a line a question, greedy (`evaluate`); without a summary, rows are counted from here
  rows/ROW.sampled.jsonl  the same, sampled
  ROW/metrics.jsonl       training metrics of a row's run; `metrics.jsonl` itself for a plain training run
  ROW/episodes.jsonl      some episodes of each training step with their rewards and advantages; likewise
What is written:
  report.html, figures/NAME.png (and NAME.svg inside the page), tables/NAME.csv
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from psearch_jax.errors import UserError
from psearch_jax.evaluation import figures, tables
from psearch_jax.evaluation.episode_viewer import viewer_data
from psearch_jax.evaluation.metrics import summarize
from psearch_jax.evaluation.results import ROWS, SAMPLED, read_summary, row_summary
from psearch_jax.metrics_log import (
    EPISODES_FILE,
    METRICS_FILE,
    explained_disk_errors,
    read_lines,
    read_metrics,
    write_atomically,
)

REPORT = "report.html"


@dataclass
class RunResults:
    """What a run directory holds: records and curves by row, and the summary."""

    directory: Path
    summary: dict[str, Any] = field(default_factory=dict)
    greedy: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    sampled: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    curves: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    training: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        """The row summaries: those of `summary.json`, else counted from the lines."""
        rows = dict(self.summary.get("rows", {}))
        for name, records in self.greedy.items():
            if name not in rows and records:
                sampled = self.sampled.get(name)
                rows[name] = row_summary(
                    summarize(records), summarize(sampled) if sampled else None
                )
        return rows


def read_run(run_directory: str | os.PathLike[str]) -> RunResults:
    """Reads what is there.

    Raises:
      UserError: the directory does not exist, holds no results, or a file in it is damaged.
    """
    directory = Path(run_directory)
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory; name the directory of a finished run.")
    run = RunResults(directory)
    run.summary = read_summary(directory)
    for path in sorted((directory / ROWS).glob("*.jsonl")):
        name = path.name.removesuffix(".jsonl")
        if name.endswith(SAMPLED):
            run.sampled[name.removesuffix(SAMPLED)] = read_lines(path)
        else:
            run.greedy[name] = read_lines(path)
    if (directory / METRICS_FILE).exists():
        run.curves[directory.resolve().name] = read_metrics(directory)
    for path in sorted(directory.glob(f"*/{METRICS_FILE}")):
        run.curves[path.parent.name] = read_metrics(path.parent)
    run.curves = {name: steps for name, steps in run.curves.items() if steps}
    for path in (directory / EPISODES_FILE, *sorted(directory.glob(f"*/{EPISODES_FILE}"))):
        if lines := read_lines(path):
            run.training[path.parent.resolve().name] = lines
    if not (run.rows or run.curves):
        raise UserError(
            f"{directory} holds neither results (summary.json, {ROWS}/*.jsonl) nor training metrics; "
            "train or evaluate first."
        )
    return run


def write_report(run_directory: str | os.PathLike[str]) -> Path:
    """Writes the report of a run with its figures and tables and returns the page's path."""
    run = read_run(run_directory)
    rows = run.rows
    shown_tables = [
        table
        for table in (
            tables.overall(rows) if rows else None,
            tables.by_kind(rows) if any(row.get("kinds") for row in rows.values()) else None,
            tables.by_dataset(rows),
            tables.evidence(rows),
            tables.comparisons(run.greedy, run.sampled),
            tables.by_novelty(rows),
        )
        if table is not None
    ]
    drawings = [
        drawing
        for drawing in (
            figures.accuracy_figure(rows),
            figures.cost_figure(rows),
            figures.token_figure(rows),
            figures.curves_figure(run.curves),
        )
        if drawing is not None
    ]
    with explained_disk_errors(run.directory):
        for folder in ("figures", "tables"):
            (run.directory / folder).mkdir(exist_ok=True)
        for drawing in drawings:
            (run.directory / "figures" / f"{drawing.name}.png").write_bytes(drawing.png)
    for table in shown_tables:
        write_atomically(run.directory / "tables" / f"{table.name}.csv", table.to_csv())
    if run.curves:
        write_atomically(run.directory / "tables" / "curves.csv", tables.curve_table(run.curves))
    page = run.directory / REPORT
    write_atomically(page, _render(run, shown_tables, drawings))
    return page


def _render(
    run: RunResults, shown_tables: Sequence[tables.Table], drawings: Sequence[figures.Drawing]
) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("psearch_jax.evaluation"),
        autoescape=True,  # questions, passages and answers are anybody's text
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        name=run.directory.resolve().name,
        facts=facts(run.summary),
        parts=_in_order(shown_tables, drawings),
        viewer=viewer_data(run.greedy, run.training),
        row_colours={name.replace("_", "-"): style[0] for name, style in figures.STYLES.items()},
    )


def _in_order(
    shown_tables: Sequence[tables.Table], drawings: Sequence[figures.Drawing]
) -> list[tables.Table | figures.Drawing]:
    """Tables and figures in the order of the page: what came out, by kind, how it was learned."""
    order = (
        *("results", "comparisons", "cost", "tokens", "datasets", "kinds", "accuracy"),
        *("evidence", "novelty", "curves"),
    )
    return sorted([*shown_tables, *drawings], key=lambda part: order.index(part.name))


def facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The run's own numbers as (heading, value)."""
    shown = []
    if "seconds" in summary:
        shown.append(("Wall time", f"{summary['seconds'] / 60:.1f} min"))
    if "peak_rss_bytes" in summary:
        shown.append(("Peak memory", f"{summary['peak_rss_bytes'] / 1e9:.2f} GB"))
    questions = {row.get("questions", 0) for row in summary.get("rows", {}).values()} - {0}
    if questions:
        shown.append(("Test questions", " or ".join(f"{n:,}" for n in sorted(questions))))
    if summary.get("retrieval_top3") is not None:
        shown.append(("Needed passage in top 3", f"{summary['retrieval_top3']:.1%}"))
    checks = summary.get("warm_start_checks") or {}
    for key, heading in (
        ("well_formed", "Warm start: well formed"),
        ("copy_unseen", "Warm start: unseen names copied"),
        ("compare_in_context", "Warm start: comparisons right"),
    ):
        if checks.get(key) is not None:
            shown.append((heading, f"{checks[key]:.1%}"))
    return shown
