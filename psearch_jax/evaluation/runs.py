"""`psearch runs`: what lies under a directory of runs, how far each has come, and its best score."""

from __future__ import annotations

import datetime
import json as json_text
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from psearch_jax.errors import UserError
from psearch_jax.evaluation.results import ROWS, SUMMARY, read_summary
from psearch_jax.metrics_log import METRICS_FILE, as_number, read_metrics
from psearch_jax.run_lock import in_use

_DEPTH = 3
_QUIET = (
    900.0  # seconds without a new line after which a run that is not finished counts as stopped
)


def find_runs(directory: Path) -> list[Path]:
    """Directories up to three levels down that hold a record, metrics or results of a run."""
    marks = ("run.jsonl", METRICS_FILE, SUMMARY, ROWS)
    found = []
    level = [directory]
    for _ in range(_DEPTH + 1):
        found += [path for path in level if any((path / mark).exists() for mark in marks)]
        level = [
            child
            for path in level
            for child in sorted(path.iterdir())
            if child.is_dir() and not child.is_symlink() and child.name not in (ROWS, "checkpoints")
        ]
    return sorted(found)


def describe_run(path: Path, *, now: float | None = None) -> dict[str, Any]:
    """One run.

    Returns:
      {"run", "state" ("finished", "running", "stopped", "evaluated", "new" or "damaged"), "step" and "steps" (None
      where it does not train), "best" ({"row", "em", "mode"}: of its results, else the best step of its training),
      "changed" (seconds since 1970), "problem" (what is damaged)}.

    A run counts as running while a process holds its directory; one without a lock, while its metrics have grown
    within the last 15 minutes.
    """
    now = time.time() if now is None else now
    run: dict[str, Any] = {"run": str(path), "problem": None}
    try:
        metrics = read_metrics(path)
        rows = read_summary(path).get("rows", {})
    except UserError as error:
        metrics, rows, run["problem"] = [], {}, str(error)
    # A supervised run plays no episodes, and has a number of steps of its own.
    supervised = bool(metrics) and "em" not in metrics[-1]
    steps = _steps(path, "supervised.steps" if supervised else "trainer.steps")
    step = int(metrics[-1].get("step", 0)) if metrics else None
    files = [path / name for name in (METRICS_FILE, SUMMARY, "run.jsonl", ROWS)]
    changed = max((file.stat().st_mtime for file in files if file.exists()), default=0.0)
    if run["problem"]:
        state = "damaged"
    elif held := in_use(path):
        state = "running"
    elif (path / "policy" / "config.json").is_file():
        state = "finished"
    elif metrics or (path / "checkpoints").is_dir():
        quiet = held is False or now - changed >= _QUIET
        state = "stopped" if quiet else "running"
    else:
        state = "evaluated" if rows or (path / ROWS).is_dir() else "new"
    trains = step is not None or (path / "checkpoints").is_dir()
    return {
        **run,
        "state": state,
        "step": step,
        "steps": steps if trains else None,
        "best": _best(rows, metrics),
        "changed": changed,
    }


def _steps(path: Path, name: str) -> int | None:
    """A number of the newest start's configuration."""
    try:
        last = (path / "run.jsonl").read_text(encoding="utf-8").strip().splitlines()[-1]
        return int(json_text.loads(last)["config"][name])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _best(rows: dict[str, Any], metrics: list[dict[str, Any]]) -> dict[str, Any] | None:
    scores = [
        {"row": name, "em": row[key], "mode": mode}
        for name, row in rows.items()
        for key, mode in (("em", "greedy"), ("em_sampled", "sampled"))
        if row.get(key) is not None
    ]
    greedy = [score for score in scores if score["mode"] == "greedy"]
    steps = [
        {"row": f"step {step.get('step')}", "em": em, "mode": "training"}
        for step in metrics
        if (em := as_number(step.get("em"))) is not None
    ]
    return max(greedy or scores or steps, key=lambda score: score["em"], default=None)


def show(directory: Path, *, json: bool = False) -> list[dict[str, Any]]:
    """Writes the list to standard output, newest first, and returns it.

    Raises:
      UserError: the directory is not there.
    """
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory; name one that holds runs.")
    runs = sorted(map(describe_run, find_runs(directory)), key=lambda run: -run["changed"])
    if json:
        sys.stdout.write(json_text.dumps(runs, ensure_ascii=False) + "\n")
        return runs
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("run", "state", "step", "best EM", "of", "changed"):
        table.add_column(heading, justify="right" if heading in ("step", "best EM") else "left")
    for run in runs:
        best = run["best"]
        total = f"/{run['steps']}" if run["steps"] else ""
        when = datetime.datetime.fromtimestamp(run["changed"]).strftime("%Y-%m-%d %H:%M")
        table.add_row(
            Text(run["run"]),
            Text(run["state"]),
            f"{run['step']}{total}" if run["step"] is not None else "–",
            f"{best['em']:.3f}" if best else "–",
            Text(f"{best['row']} ({best['mode']})" if best else ""),
            when,
        )
    console = Console(highlight=False)
    console.print(table if runs else Text(f"no runs under {directory}"))
    for run in runs:
        if run["problem"]:
            console.print(Text(f"{run['run']}: {run['problem']}"), soft_wrap=True)
    return runs
