"""What a person sees while a command works: a live display on a terminal, plain lines elsewhere.

A bar never stands still: its clock and spinner go on at four frames a second while the program computes,
and where no total is known the bar sweeps. Drawing happens on rich's refresh thread, from numbers that
were already on the host, so it costs the run well under one per cent of a core.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from io import TextIOBase
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from psearch_jax.metrics_log import as_number, decomposition, flatten

FRAMES_A_SECOND = 4.0
QUIET_SECONDS = 10.0  # plain mode: at most one progress line in this time
HISTORY = 40  # steps in a sparkline
BLOCKS = "▁▂▃▄▅▆▇█"

#: Metrics of a step that are shown: its name, heading, format.
STEP_COLUMNS = (
    ("reward", "reward", "{:.3f}"),
    ("em", "EM", "{:.3f}"),
    ("turns", "turns", "{:.2f}"),
    ("search_rate", "search rate", "{:.2f}"),
    ("decomposed", "decomposed", "{:.2f}"),
    ("tokens_per_second", "tokens/s", "{:,.0f}"),
)
#: Columns of a result table: heading, key of the summary, digits.
ALL_COLUMNS = (
    ("EM", "em", 3),
    ("EM sampled", "em_sampled", 3),
    ("turns", "turns", 2),
    ("searches", "searches", 2),
    ("queries", "subqueries", 2),
    ("tokens", "policy_tokens", 0),
)
KIND_COLUMNS = (
    ("EM", "em", 3),
    ("turns", "turns", 2),
    ("searches", "searches", 2),
    ("queries", "subqueries", 2),
    ("decomposed", "decomposed", 2),
)
SPARKLINES = 5  # the first so many of them get a sparkline


def sparkline(values: Sequence[float]) -> str:
    """The values as a row of eighth blocks between their own minimum and maximum."""
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in finite)


def duration(seconds: float) -> str:
    """Seconds as `42 s`, `3 min 05 s` or `2 h 10 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class Display:
    """Phases with progress, training steps and result tables; a context manager.

    Only one phase is open at a time; opening the next one, or leaving the context, closes it.
    """

    def __init__(self, *, stream: TextIOBase | None = None, live: bool | None = None) -> None:
        """Args:
        stream: where to write; standard output if None.
        live: draw a live display; None draws one only if the stream is a terminal.
        """
        self._console = Console(
            file=stream or sys.stdout, highlight=False, force_terminal=True if live else None
        )
        self.live = self._console.is_terminal if live is None else live
        self._progress = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=32),
            TextColumn("{task.fields[count]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=self._console,
            auto_refresh=False,
        )
        self._live: Live | None = None
        self._task: TaskID | None = None
        self._title = ""
        self._last_values = ""
        self._total: float | None = None
        self._done = 0.0
        self._first: tuple[float, float] | None = None  # units and time of the first report
        self._started = self._last_line = 0.0
        self._steps: deque[dict[str, float]] = deque(maxlen=HISTORY)
        self._kinds: dict[str, float] = {}
        self._step_clock: deque[tuple[int, float]] = deque(maxlen=8)

    def __enter__(self) -> Display:
        if self.live:
            self._live = Live(
                get_renderable=self._render,
                console=self._console,
                refresh_per_second=FRAMES_A_SECOND,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close_phase(done=kind is None)
        if self._live is not None:
            self._live.stop()
            self._live = None

    def note(self, text: str) -> None:
        """Prints one line above the live part."""
        self._console.print(Text(text), soft_wrap=True)

    def phase(self, title: str, total: float | None = None) -> None:
        """Begins a phase of `total` units (None: not known; the bar sweeps)."""
        self._close_phase(done=True)
        self._title, self._total, self._done, self._first = title, total, 0.0, None
        self._started = self._last_line = time.monotonic()
        self._step_clock.clear()
        self._kinds = {}
        if self.live:
            self._task = self._progress.add_task(title, total=total, count=self._count())
        else:
            self._say(f"{title} …")

    def advance(self, units: float = 1, *, total: float | None = None) -> None:
        """Counts `units` as done; `total` corrects the total."""
        self.update(self._done + units, total)

    def update(self, done: float, total: float | None = None) -> None:
        """Sets the units done so far; made to be passed as an `on_progress(done, total)` callback."""
        self._done = done
        if (
            self._first is None
        ):  # of a run that goes on, what was done before says nothing about now
            self._first = (done, time.monotonic())
        if total is not None:
            self._total = total
        if self._task is not None:
            self._progress.update(
                self._task, completed=done, total=self._total, count=self._count()
            )
        elif not self.live and self._title:
            now = time.monotonic()
            if now - self._last_line >= QUIET_SECONDS:
                self._last_line = now
                self._say(f"{self._title}: {self._count()}{self._eta(now)}")

    def _count(self) -> str:
        if self._total is None:
            return f"{self._done:,.0f}" if self._done else ""
        return f"{self._done:,.0f}/{self._total:,.0f}"

    def _eta(self, now: float) -> str:
        done, since = self._first or (0.0, now)
        if not self._total or self._done <= done:
            return ""
        left = (now - since) * (self._total - self._done) / (self._done - done)
        return f", {duration(left)} left"

    def _close_phase(self, *, done: bool) -> None:
        if not self._title:
            return
        took = duration(time.monotonic() - self._started)
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None
        count = f" ({self._count()})" if self._count() else ""
        mark = "✓" if done else "✗"
        last = f" | {self._last_values}" if self.live and self._last_values else ""
        self._say(f"{mark} {self._title}{count}: {took}" + ("" if done else ", stopped") + last)
        self._title = self._last_values = ""
        self._steps.clear()

    def _say(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def step(self, run: str, step: int, total: int, metrics: Mapping[str, Any]) -> None:
        """Shows one training step of `run`: `step` of `total` are done, with these metrics (host numbers)."""
        if self._title != run:
            self.phase(run, total)
        flat = flatten(metrics)
        values = {
            heading: value
            for name, heading, _ in STEP_COLUMNS
            if (value := as_number(flat.get(name))) is not None
        }
        self._kinds = decomposition(flat)
        self._steps.append({"step": float(step), **values})
        now = time.monotonic()
        self._step_clock.append((step, now))
        left = self._seconds_left(step, total, now)
        parts = [
            f"{heading} {form.format(values[heading])}"
            for _, heading, form in STEP_COLUMNS
            if heading in values
        ]
        if self._kinds:
            shares = (f"{kind} {share:.2f}" for kind, share in self._kinds.items())
            parts.append(f"decomposed by kind: {', '.join(shares)}")
        self._last_values = " | ".join(parts)
        if self.live:
            self.update(step, total)
            return
        self._done, self._total = step, total
        eta = f" | {duration(left)} left" if left is not None else ""
        self._say(f"{run} {step}/{total} | {self._last_values}{eta}")

    def _seconds_left(self, step: int, total: int, now: float) -> float | None:
        """From the last few steps, so that compiling in the first one does not spoil the estimate."""
        first, then = self._step_clock[0]
        if step <= first:
            return None
        return (now - then) / (step - first) * (total - step)

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self._steps:
            parts.append(self._step_table())
        if self._task is not None:
            parts.append(self._progress.get_renderable())
        return Group(*parts)

    def _step_table(self) -> RenderableType:
        steps = list(self._steps)
        columns = [(label, form) for _, label, form in STEP_COLUMNS if label in steps[-1]]
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("step", justify="right")
        for label, _ in columns:
            table.add_column(label, justify="right")
        for values in steps[-5:]:
            cells = [
                form.format(values[label]) if label in values else "" for label, form in columns
            ]
            table.add_row(f"{values['step']:.0f}", *cells)
        lines = Table.grid(padding=(0, 2))
        for label, form in columns[:SPARKLINES]:
            past = [values[label] for values in steps if label in values]
            lines.add_row(
                Text(label, style="dim"),
                Text(sparkline(past), style="cyan"),
                Text(f"{form.format(past[0])} → {form.format(past[-1])}"),
            )
        parts: list[RenderableType] = [table, Text(), lines]
        if self._kinds:
            shares = "   ".join(f"{kind} {share:.2f}" for kind, share in self._kinds.items())
            parts.append(Text.assemble(("decomposed by kind   ", "dim"), shares))
        return Group(*parts, Text())

    def table(self, summary: Mapping[str, Any]) -> None:
        """Prints the rows of a `summary.json`, within 80 columns: the same on a terminal and in a log."""
        rows = summary.get("rows", {})
        self._print_rows("all questions", rows, ALL_COLUMNS)
        kind = {
            name: row["kinds"]["parallelizable"]
            for name, row in rows.items()
            if row.get("kinds", {}).get("parallelizable", {}).get("questions")
        }
        if kind:
            self._print_rows("parallelizable", kind, KIND_COLUMNS)
        self._say("Greedy unless it says sampled; ± is half the 95 % bootstrap interval.")

    def _print_rows(
        self,
        title: str,
        rows: Mapping[str, Mapping[str, Any]],
        columns: Sequence[tuple[str, str, int]],
    ) -> None:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column(title, no_wrap=True)
        for heading, _, _ in columns:
            table.add_column(heading, justify="right", no_wrap=True)
        for name, row in rows.items():
            intervals = row.get("intervals", {})
            cells = []
            for _, key, digits in columns:
                cell = f"{row[key]:.{digits}f}" if row.get(key) is not None else "–"
                if key in ("em", "em_sampled") and key in intervals:
                    low, high = intervals[key]
                    cell += f" ±{(high - low) / 2:.3f}"
                cells.append(cell)
            table.add_row(Text(name), *cells)
        self._console.print(table, Text())
