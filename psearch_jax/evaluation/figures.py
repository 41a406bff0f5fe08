"""The figures of a report: one drawing each, as PNG for papers and as inline SVG for the page.

Colours in the SVG are CSS variables of the page, so a figure is read in light and dark alike. A row keeps
its colour (Okabe and Ito's colour-blind-safe set), its marker and its line style in every figure.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from psearch_jax.evaluation.tables import KIND_ORDER, label_of, ordered
from psearch_jax.metrics_log import as_number, decomposition

INK, MUTED, GRID, PAPER = "#1f2328", "#6e7681", "#e4e7eb", "#fffffe"
#: Colour, marker and line style of a row.
STYLES = {
    "closed_book": ("#8c8c8b", "X", "-"),
    "index_off": ("#5a5a59", "P", "-"),
    "rag": ("#cc79a7", "v", "-"),
    "warm_start": ("#e69f00", "D", "-"),
    "em_reward": ("#0072b2", "o", "-"),
    "parallel_search": ("#d55e00", "s", (0, (5, 1.5))),
    "gated": ("#009e73", "^", (0, (1.5, 1.2))),
}
SPARE = (
    *(("#56b4e9", "o", "-"), ("#882255", "s", "-."), ("#999933", "^", ":"), ("#44aa99", "D", "--")),
    *(("#aa4499", "v", "-."), ("#117733", "P", ":"), ("#661100", "X", "--"), ("#6699cc", "<", "-")),
)
#: Drawing colour → CSS variable.
VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", PAPER: "--paper"} | {
    style[0]: f"--row-{name.replace('_', '-')}" for name, style in STYLES.items()
}
SMOOTHING = 5  # steps of the running mean of a curve


@dataclass(frozen=True)
class Drawing:
    """A figure with its caption; `svg` is safe to inline, `png` the file's bytes."""

    name: str
    title: str
    caption: str
    svg: str
    png: bytes


def style_of(row: str, rows: Sequence[str]) -> tuple[str, str, Any]:
    """Colour, marker and line style of a row; rows without a fixed style take a spare one in order."""
    if row in STYLES:
        return STYLES[row]
    others = [name for name in ordered(list(rows)) if name not in STYLES]
    return SPARE[others.index(row) % len(SPARE)]


def _draw(name: str, title: str, caption: str, figure: Figure) -> Drawing:
    import matplotlib

    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=160, facecolor=PAPER)
    svg = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        FigureCanvasSVG(figure).print_svg(svg, metadata={"Date": None, "Creator": None})
    return Drawing(name, title, caption, _inline(svg.getvalue(), name, title), png.getvalue())


def _inline(svg: str, name: str, title: str) -> str:
    """SVG for a page: no prolog, metadata or outside names, ids of its own, the page's font and colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'\s(xmlns(:\w+)?|version|width|height)="[^"]*"', "", svg.split(">", 1)[0]) + (
        ">" + svg.split(">", 1)[1]
    )
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-")
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1; font-family: inherit", svg)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg


def _axes(figure: Figure, rows: int = 1, columns: int = 1, **options: Any) -> list[Axes]:
    """Axes with two thin spines and a quiet grid."""
    grid = figure.subplots(rows, columns, squeeze=False, **options)
    for axes in grid.flat:
        axes.set_facecolor("none")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axes.spines[side].set_color(GRID)
        axes.tick_params(colors=MUTED, labelsize=9, length=0)
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
    return list(grid.flat)


def _new(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_alpha(0.0)
    return figure


def _running_mean(values: Sequence[float]) -> list[float]:
    """The mean of each value and the up to `SMOOTHING` − 1 before it."""
    return [float(np.mean(values[max(0, i + 1 - SMOOTHING) : i + 1])) for i in range(len(values))]


def curves_figure(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> Drawing | None:
    """Reward, EM, turns and decomposition by step, a line a run; None without any logged step."""
    panels: list[tuple[str, Callable[[Mapping[str, Any]], float | None]]] = [
        ("Reward (each run's own)", lambda step: as_number(step.get("reward"))),
        ("Exact match", lambda step: as_number(step.get("em"))),
        ("Generation turns", lambda step: as_number(step.get("turns"))),
        ("Decomposed, parallelizable", lambda step: decomposition(step).get("parallelizable")),
    ]
    if not any(panels[3][1](step) is not None for steps in curves.values() for step in steps):
        panels[3] = ("Decomposed, all kinds", lambda step: as_number(step.get("decomposed")))
    if not any(curves.values()):
        return None
    figure = _new(9.2, 5.6)
    for axes, (title, read) in zip(_axes(figure, 2, 2), panels, strict=True):
        axes.set_title(title, fontsize=10.5, color=INK, loc="left")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
        for run in ordered(list(curves)):
            points = [
                (step["step"], value) for step in curves[run] if (value := read(step)) is not None
            ]
            if not points:
                continue
            steps, values = zip(*points, strict=True)
            colour, _, line = style_of(run, list(curves))
            axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.3)
            axes.plot(
                steps,
                _running_mean(values),
                color=colour,
                linewidth=2.0,
                linestyle=line,
                label=label_of(run),
            )
    for axes in figure.axes[2:]:
        axes.set_xlabel("Training step", fontsize=9.5, color=MUTED)
    drawn = max((axes.get_legend_handles_labels() for axes in figure.axes), key=lambda h: len(h[0]))
    _legend(figure, *drawn)
    return _draw(
        "curves",
        "Training curves",
        f"Thin: every step. Bold: running mean of {SMOOTHING} steps. Sampled episodes of the "
        "training questions.",
        figure,
    )


def _legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    if len(labels) > 1:
        figure.legend(
            handles,
            labels,
            loc="outside upper left",
            ncols=min(4, len(labels)),
            frameon=False,
            fontsize=9.5,
            labelcolor=INK,
            handlelength=2.6,
        )


def _errors(numbers: Mapping[str, Any], key: str) -> list[list[float]] | None:
    """Lengths of the interval's two arms, as matplotlib wants them."""
    interval = numbers.get("intervals", {}).get(key)
    if interval is None:
        return None
    value = numbers[key]
    return [[max(0.0, value - interval[0])], [max(0.0, interval[1] - value)]]


def accuracy_figure(rows: Mapping[str, Mapping[str, Any]]) -> Drawing | None:
    """EM of every row over all questions and for every kind, with intervals."""
    kinds = [
        kind for kind in KIND_ORDER if any(kind in row.get("kinds", {}) for row in rows.values())
    ]
    names = ordered([name for name, row in rows.items() if "em" in row])
    if not names:
        return None
    panels: list[tuple[str, Callable[[str], Mapping[str, Any]]]] = [
        ("All questions", lambda name: rows[name])
    ]
    panels += [
        (kind.capitalize(), lambda name, kind=kind: rows[name].get("kinds", {}).get(kind, {}))
        for kind in kinds
    ]
    figure = _new(9.2, 0.9 + 0.36 * len(names))
    with_samples = any("em_sampled" in row for row in rows.values())
    for axes, (title, read) in zip(
        _axes(figure, 1, len(panels), sharey=True, sharex=True), panels, strict=True
    ):
        axes.set_title(title, fontsize=10.5, color=INK, loc="left")
        for place, name in enumerate(names):
            numbers = read(name)
            if "em" not in numbers:
                continue
            colour, marker, _ = style_of(name, names)
            axes.errorbar(
                numbers["em"],
                place,
                xerr=_errors(numbers, "em"),
                color=colour,
                marker=marker,
                markersize=6,
                linewidth=1.6,
            )
            if "em_sampled" in numbers:
                axes.plot(
                    numbers["em_sampled"],
                    place,
                    marker=marker,
                    markersize=6,
                    markerfacecolor=PAPER,
                    color=colour,
                    linestyle="none",
                )
        axes.set_yticks(range(len(names)), [label_of(name) for name in names])
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", labelsize=9.5, labelcolor=INK)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=3))
    figure.axes[0].set_ylim(len(names) - 0.5, -0.5)
    figure.supxlabel("Exact match", fontsize=9.5, color=MUTED)
    hollow = " Hollow: sampled at the temperature of training." if with_samples else ""
    return _draw(
        "accuracy",
        "Exact match by question kind",
        f"Filled: greedy decoding, with 95 % bootstrap intervals.{hollow}",
        figure,
    )


def cost_figure(rows: Mapping[str, Mapping[str, Any]]) -> Drawing | None:
    """EM against generation turns: all questions, and parallelizable ones."""
    parts: list[_Panel] = [
        (
            "Parallelizable questions",
            "Generation turns an episode",
            lambda row: row.get("kinds", {}).get("parallelizable", {}),
            "turns",
        ),
        ("All questions", "Generation turns an episode", lambda row: row, "turns"),
    ]
    return _against(
        rows,
        parts,
        "cost",
        "Quality against cost",
        "Up and to the left is better: more right answers from fewer turns of the policy. Greedy "
        "decoding, 95 % bootstrap intervals.",
    )


def token_figure(rows: Mapping[str, Mapping[str, Any]]) -> Drawing | None:
    """EM against what was written and what was read."""
    parts: list[_Panel] = [
        ("Written", "Policy tokens an episode", lambda row: row, "policy_tokens"),
        ("Read", "Retrieved tokens an episode", lambda row: row, "observation_tokens"),
    ]
    return _against(
        rows,
        parts,
        "tokens",
        "Quality against tokens",
        "All questions, greedy decoding, 95 % bootstrap intervals.",
    )


#: Title, label of the axis, where the numbers are, and which of them is the cost.
_Panel = tuple[str, str, Callable[[Mapping[str, Any]], Mapping[str, Any]], str]


def _against(
    rows: Mapping[str, Mapping[str, Any]],
    parts: Sequence[_Panel],
    name: str,
    title: str,
    caption: str,
) -> Drawing | None:
    """EM against a cost, a panel each; None without any numbers."""
    names = ordered([row for row in rows if "em" in rows[row]])
    parts = [part for part in parts if any({"em", part[3]} <= set(part[2](rows[n])) for n in names)]
    if not parts:
        return None
    figure = _new(9.2, 3.9)
    grid = _axes(figure, 1, len(parts), sharey=True)
    for axes, (heading, label, read, cost) in zip(grid, parts, strict=True):
        axes.set_title(heading, fontsize=10.5, color=INK, loc="left")
        axes.set_xlabel(label, fontsize=9.5, color=MUTED)
        for row in names:
            numbers = read(rows[row])
            if not {"em", cost} <= set(numbers):
                continue
            colour, marker, _ = style_of(row, names)
            axes.errorbar(
                numbers[cost],
                numbers["em"],
                xerr=_errors(numbers, cost),
                yerr=_errors(numbers, "em"),
                color=colour,
                marker=marker,
                markersize=7,
                linewidth=1.2,
                linestyle="none",
                label=label_of(row),
            )
        axes.margins(0.12)
    figure.axes[0].set_ylabel("Exact match", fontsize=9.5, color=MUTED)
    _legend(figure, *figure.axes[-1].get_legend_handles_labels())
    return _draw(name, title, caption, figure)
