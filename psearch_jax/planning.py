"""`psearch plan`: does a recipe fit a TPU slice, and how much of it will it use? No TPU and no weights needed.

Every device program of the recipe is compiled by the TPU compiler for the slice. Memory figures are the compiler's;
FLOPs are counted in the jaxpr; times are estimates, of which `hlo_costs.py` and `plan_figures.py` say what they are
made of. On a host that is not a TPU there is no compiler to ask: `plan_arithmetic.py` reckons what can be reckoned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from psearch_jax.config import Config
from psearch_jax.errors import UserError
from psearch_jax.learning.objective import kl_in_loss
from psearch_jax.mesh import make_mesh
from psearch_jax.plan_arithmetic import Change, cheapest_changes, reckon
from psearch_jax.plan_figures import Figures, figures
from psearch_jax.planned_programs import PlannedProgram, programs
from psearch_jax.planned_recipe import Abstract, lay_out_abstract, matmul_parameters
from psearch_jax.program_costs import jaxpr_flops
from psearch_jax.topologies import GIB, Slice, open_devices, parse_slice

#: A recipe that is offered leaves this share of the memory free.
RESERVE = 0.10

Note = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class PlannedCost:
    """A program with its figures and what they mean on the slice."""

    program: PlannedProgram
    figures: Figures
    total_bytes: int  # with what lies beside it
    seconds: float | None
    utilisation: float | None  # of the chips' peak, by the FLOPs that it computes
    # Of the update: FLOPs of the reference policy's pass, those of the rest over 6ND, and the use of the peak by
    # 6ND (8ND where there is a reference), whatever is computed twice left out.
    reference_flops: float = 0.0
    over_6nd: float | None = None
    model_utilisation: float | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The verdict on a recipe. `slice` is None where there was no compiler to ask."""

    recipe: Abstract
    target: str  # for a reader
    slice: Slice | None
    devices: int
    usable_bytes: int  # of one device
    costs: tuple[PlannedCost, ...]
    rollout_slots: int
    changes: tuple[Change, ...] = ()  # where it does not fit with the reserve

    @property
    def fullest(self) -> PlannedCost:
        """The program that needs the most memory together with what lies beside it."""
        return max(self.costs, key=lambda cost: cost.total_bytes)

    @property
    def headroom(self) -> float:
        """The share of a device's memory that stays free in the fullest moment; negative: it does not fit."""
        return 1 - self.fullest.total_bytes / self.usable_bytes

    @property
    def fits(self) -> bool:
        """Whether every program fits."""
        return self.headroom >= 0


def plan(config: Config, topology: str = "", note: Note = lambda line: None) -> Plan:
    """Plan a recipe for a TPU slice, or by arithmetic for the host that `hardware` describes.

    Args:
      topology: as in `hardware.topology`, and in its place where it is not empty.
      note: gets a line of progress.

    Raises:
      UserError: nothing to plan for, no such topology, no compiler, no architecture, sizes that the mesh does not
        divide.
    """
    config = for_accelerator(config)
    topology = topology or config.hardware.topology
    if topology:
        made = _compiled_plan(config, parse_slice(topology), note)
    elif config.hardware.devices and config.hardware.memory_gib:
        made = _reckoned_plan(config)
    else:
        raise UserError(
            "there is nothing to plan for: give --topology v5p:2x2x4, or a hardware overlay such as "
            "configs/hardware/v5p-32.yaml"
        )
    if made.headroom >= RESERVE:
        return made
    over = made.fullest.total_bytes - int((1 - RESERVE) * made.usable_bytes)
    changes = cheapest_changes(config, made.devices, fullest=made.fullest.program.name, over=over)
    return replace(made, changes=changes)


def _compiled_plan(config: Config, slice_: Slice, note: Note) -> Plan:
    mesh = make_mesh(config.mesh, open_devices(slice_))
    recipe = lay_out_abstract(config, mesh)
    # Figures of a program are the same for every run, and take minutes to make.
    kept = "runs/compiled" if config.compile_cache == "auto" else config.compile_cache
    directory = Path(kept) / "plans" if kept and "://" not in kept else None
    found = [
        (program, figures(program, mesh, slice_, directory, note)) for program in programs(recipe)
    ]
    costs = _costs(recipe, found, slice_)
    return Plan(
        recipe=recipe,
        target=str(slice_),
        slice=slice_,
        devices=slice_.chips,
        usable_bytes=slice_.chip.hbm_bytes,
        costs=costs,
        rollout_slots=rollout_slots(recipe, costs, slice_.chip.hbm_bytes),
    )


def _reckoned_plan(config: Config) -> Plan:
    """The update and decoding, by arithmetic. Their FLOPs are counted as on a TPU, with plain attention."""
    hardware = config.hardware
    found = reckon(
        replace(config, model=replace(config.model, attention="plain")), hardware.devices
    )
    recipe, resident = found.recipe, found.recipe.resident
    memory = {
        "update": (
            resident.sum("parameters", "optimizer", "frozen", "reference", "critic"),
            found.temporaries,
        ),
        "decode": (resident.sum("rollout_parameters", "cache"), found.playing),
    }
    counted = []
    for program in programs(recipe):
        if program.name in (*memory, "logprobs"):
            held, temporary = memory.get(program.name, (0, 0))
            traced = program.function.trace(*program.arguments, **program.options)
            flops = jaxpr_flops(traced.jaxpr.jaxpr, while_steps=program.while_steps)
            reckoned = Figures(argument_bytes=held, temporary_bytes=temporary, flops=flops.total)
            counted.append((program, reckoned))
    costs = [c for c in _costs(recipe, counted, None) if c.program.name in memory]
    usable = int(hardware.memory_gib * GIB)
    return Plan(
        recipe=recipe,
        target=f"{hardware.devices} devices of {hardware.memory_gib:g} GiB, by arithmetic alone",
        slice=None,
        devices=hardware.devices,
        usable_bytes=usable,
        costs=tuple(costs),
        rollout_slots=rollout_slots(recipe, costs, usable),
    )


def for_accelerator(config: Config) -> Config:
    """`auto` as an accelerator reads it; the machine that plans is none."""

    def dtype(name: str) -> str:
        return "bfloat16" if name == "auto" else name

    return replace(
        config,
        model=replace(config.model, compute_dtype=dtype(config.model.compute_dtype)),
        rollout=replace(config.rollout, dtype=dtype(config.rollout.dtype)),
    )


def _costs(
    recipe: Abstract, found: Sequence[tuple[PlannedProgram, Figures]], slice_: Slice | None
) -> tuple[PlannedCost, ...]:
    """What the figures mean. `found` has the update and the log-probabilities among its programs."""
    by_name = {program.name: (program, figures) for program, figures in found}
    scored, scores = by_name["logprobs"]
    per_token = scores.flops / scored.tokens
    with_reference = kl_in_loss(recipe.config.algorithm)
    peak = slice_.chips * slice_.chip.peak_flops if slice_ else 0.0
    costs = []
    for program, figures_ in found:
        timed = slice_ is not None and not figures_.needed_bytes
        seconds = figures_.seconds(slice_) if slice_ is not None and timed else None
        cost = PlannedCost(
            program=program,
            figures=figures_,
            total_bytes=figures_.hbm_bytes + recipe.resident.sum(*program.beside),
            seconds=seconds,
            utilisation=figures_.flops / (seconds * peak) if seconds else None,
        )
        if program.name == "update":
            once = 2.0 * matmul_parameters(recipe) * program.tokens
            reference = per_token * program.tokens if with_reference else 0.0
            needed = once * (4 if with_reference else 3)
            cost = replace(
                cost,
                reference_flops=reference,
                over_6nd=(figures_.flops - reference) / (3 * once),
                model_utilisation=needed / (seconds * peak) if seconds else None,
            )
        costs.append(cost)
    return tuple(costs)


def rollout_slots(recipe: Abstract, costs: Sequence[PlannedCost], usable: int) -> int:
    """How many slots fit beside everything else with `RESERVE` left free: extrapolated, not compiled.

    Cache and temporaries of the programs that were compiled are taken to grow with the slots, the rest to stay. (Not
    all temporaries grow; so the number is rather too small than too large where it is above the recipe's own.)
    """
    asked, pieces = recipe.config.rollout.slots, recipe.engine.pieces
    fitting = []
    for cost in costs:
        if cost.program.name in ("decode", "prefill", "append"):
            found = cost.figures
            growing = recipe.resident.cache + found.temporary_bytes
            if found.needed_bytes:
                growing = max(1, found.needed_bytes - recipe.resident.rollout_parameters)
            fixed = cost.total_bytes - growing
            fitting.append(int(asked * (usable * (1 - RESERVE) - fixed) / growing))
    return max(0, min(fitting, default=0) // pieces * pieces)
