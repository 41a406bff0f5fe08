"""A plan for a reader: JSON, a table in the terminal, and one line of the table of recipes."""

from __future__ import annotations

import json as json_format
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from psearch_jax.config import Config
from psearch_jax.plan_arithmetic import gib
from psearch_jax.plan_figures import KERNEL_SHARE
from psearch_jax.planning import RESERVE, Plan, PlannedCost
from psearch_jax.planning import plan as make_plan

#: What `Resident` calls things → what a reader is told.
NAMES = {
    "parameters": "parameters, float32",
    "optimizer": "optimiser state",
    "frozen": "frozen parameters",
    "reference": "reference policy",
    "critic": "critic with its optimiser",
    "rollout_parameters": "parameters of the rollout",
    "cache": "KV cache",
    "encoder": "text encoder",
}


def run(config: Config, topology: str = "", *, json: bool = False) -> Plan:
    """`psearch plan`: plan and print. Progress goes to standard error."""
    # Planning computes nothing; an accelerator of this machine is left to others.
    jax.config.update("jax_platforms", "cpu")
    progress = Console(stderr=True, highlight=False)
    # A line stays one line in a log, however narrow: a program's name and what became of it belong together.
    note = partial(progress.print, style="dim", markup=False, soft_wrap=True)
    made = make_plan(config, topology, note)
    if json:
        print(json_format.dumps(as_json(made), indent=2))
    else:
        print_plan(made)
    return made


def verdict(plan: Plan) -> str:
    """One sentence."""
    fullest = plan.fullest
    share = f"{gib(fullest.total_bytes)} of {gib(plan.usable_bytes)} ({fullest.program.name})"
    if not plan.fits:
        return f"does not fit: {share}"
    if plan.headroom < RESERVE:
        return f"fits with less than {RESERVE:.0%} to spare: {share}"
    return f"fits: {share}"


def as_json(plan: Plan) -> dict[str, Any]:
    """Everything, as plain values. Bytes are those of the fullest chip; FLOPs those of one call over all chips."""
    resident = plan.recipe.resident
    return {
        "fits": plan.fits,
        "headroom": round(plan.headroom, 4),
        "programs": {cost.program.name: _program(plan, cost) for cost in plan.costs},
        "rollout_slots": plan.rollout_slots,
        "rollout_slots_method": "extrapolated",
        "verdict": verdict(plan),
        "target": plan.target,
        "method": "compiled" if plan.slice else "arithmetic",
        "chips": plan.devices,
        "usable_bytes": plan.usable_bytes,
        "fullest": plan.fullest.program.name,
        "resident_bytes": asdict(resident),
        "rollout_slots_of_recipe": plan.recipe.config.rollout.slots,
        "changes": [
            {
                "settings": change.settings,
                "costs": change.why,
                "saves_bytes": change.saves,
                "enough": change.enough,
            }
            for change in plan.changes
        ],
    }


def _program(plan: Plan, cost: PlannedCost) -> dict[str, Any]:
    found = cost.figures
    told: dict[str, Any] = {
        "what": cost.program.what,
        "hbm_bytes": found.hbm_bytes,
        "total_bytes": cost.total_bytes,
        "argument_bytes": found.argument_bytes,
        "temporary_bytes": found.temporary_bytes,
        "code_bytes": found.code_bytes,
        "flops": found.flops,
        "seconds_estimate": _rounded(cost.seconds),
        "utilisation_estimate": _rounded(cost.utilisation),
        "collective_bytes": found.moved,
    }
    if found.copies is not None:
        told["cache_copies"] = found.copies
    if cost.over_6nd is not None:
        told["reference_flops"] = cost.reference_flops
        told["flops_over_6nd"] = _rounded(cost.over_6nd)
        told["model_utilisation_estimate"] = _rounded(cost.model_utilisation)
    if plan.slice:
        told["matmuls_repeated"] = _rounded(found.repeated(plan.slice))
        told["kernels_repeated"] = _rounded(found.kernels_repeated(plan.slice))
        told["compile_seconds"] = found.compile_seconds
    return told


def _rounded(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.4g}")


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Two tables and the verdict."""
    console = console or Console()
    console.print(f"\n[bold]{plan.target}[/bold], figures of one device")
    memory = Table(box=None, pad_edge=False)
    memory.add_column("in memory")
    memory.add_column("GiB", justify="right")
    for name, what in NAMES.items():
        if count := getattr(plan.recipe.resident, name):
            memory.add_row(what, gib(count).removesuffix(" GiB"))
    console.print(memory)
    console.print()
    table = Table(box=None, pad_edge=False)
    table.add_column("program")
    for title in ("own GiB", "temp.", "with all", "PFLOPs", "moved GB", "est. s", "est. use"):
        table.add_column(title, justify="right")
    for cost in plan.costs:
        found = cost.figures
        table.add_row(
            cost.program.name,
            gib(found.hbm_bytes).removesuffix(" GiB"),
            "–" if found.needed_bytes else gib(found.temporary_bytes).removesuffix(" GiB"),
            gib(cost.total_bytes).removesuffix(" GiB"),
            f"{found.flops / 1e15:.3g}",
            "–" if cost.seconds is None else f"{found.moved_bytes / 1e9:.3g}",
            "–" if cost.seconds is None else f"{cost.seconds:.3g}",
            "–" if cost.utilisation is None else f"{cost.utilisation:.0%}",
        )
    console.print(table)
    for cost in plan.costs:
        console.print(f"[dim]{cost.program.name}: {cost.program.what}[/dim]", highlight=False)
    update = next(cost for cost in plan.costs if cost.over_6nd is not None)
    console.print(
        f"\nupdate: {update.over_6nd:.2f} × 6ND"
        + (", the reference policy's pass left out" if update.reference_flops else "")
        + (f"; {update.model_utilisation:.0%} of peak by need" if update.model_utilisation else ""),
        highlight=False,
    )
    console.print(
        f"rollout slots: {plan.recipe.config.rollout.slots} asked for, {plan.rollout_slots} fit with "
        f"{RESERVE:.0%} to spare (extrapolated)",
        highlight=False,
    )
    decode = next(cost for cost in plan.costs if cost.program.name == "decode").figures
    if decode.copies is not None:
        copied = f"copied {decode.copies:g} times a call" if decode.copies else "updated in place"
        console.print(f"KV cache while decoding: {copied}", highlight=False)
    colour = "green" if plan.headroom >= RESERVE else "yellow" if plan.fits else "red"
    console.print(f"[bold {colour}]{verdict(plan)}[/bold {colour}]", highlight=False)
    for change in plan.changes:
        suffices = "enough" if change.enough else "not enough by itself"
        console.print(
            f"  {change.settings}  saves {gib(change.saves)} by arithmetic, {suffices} ({change.why})",
            highlight=False,
        )
    if plan.slice:
        console.print(
            "[dim]Memory is what the TPU compiler says. FLOPs are counted in the program with loop lengths. Times are "
            f"estimates: the compiler's cycles, collectives at link speed, kernels at {KERNEL_SHARE:.0%} of peak "
            "or at the memory's speed.[/dim]"
        )
    else:
        console.print(
            "[dim]No compiler was asked: parameters, states and caches are exact, temporaries a guess, times "
            "unknown.[/dim]"
        )


#: Columns of `row`.
COLUMNS = (
    *("model", "hardware", "fullest program", "GiB a chip", "free", "slots", "fit"),
    *("update", "MFU", "× 6ND", "moves", "decode"),
)


def row(model: str, hardware: str, plan: Plan) -> tuple[str, ...]:
    """One line of the table of recipes."""
    costs = {cost.program.name: cost for cost in plan.costs}
    update, decode = costs["update"], costs["decode"]
    unknown = update.seconds is None or decode.seconds is None
    speed = decode.program.tokens / decode.seconds if decode.seconds else 0.0
    return (
        model,
        hardware,
        plan.fullest.program.name,
        gib(plan.fullest.total_bytes).removesuffix(" GiB"),
        f"{plan.headroom:.0%}",
        str(plan.recipe.config.rollout.slots),
        str(plan.rollout_slots),
        "–" if unknown else f"{update.seconds:.0f} s",
        "–" if unknown else f"{update.model_utilisation:.0%}",
        f"{update.over_6nd:.2f}",
        "–" if unknown else f"{update.figures.moved_bytes / 1e12:.2f} TB",
        "–" if unknown else f"{speed:,.0f} tokens/s",
    )


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Rows under `COLUMNS` as a Markdown table."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
