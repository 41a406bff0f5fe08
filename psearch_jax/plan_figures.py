"""Compiling one planned program for a TPU slice and reading off its figures, with a cache by content."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from psearch_jax.errors import UserError
from psearch_jax.hlo_costs import hlo_costs
from psearch_jax.planned_programs import PlannedProgram
from psearch_jax.program_costs import Flops, jaxpr_flops
from psearch_jax.topologies import GIB, Slice, link_dimensions

#: Changes when what is read off a program does.
FORMAT = "1"

#: The compiler tells no cycles for Pallas kernels; they are taken to reach this share of the chip's peak.
KERNEL_SHARE = 0.4

#: Seconds that a collective takes for each further chip of its ring, however little it moves.
HOP_SECONDS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One program on one chip, unless it says otherwise. Times are estimates.

    needed_bytes: what the compiler says that a program needs which it refuses, else 0; then there are no other
    figures from the compiler.
    """

    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0
    temporary_bytes: int = 0
    code_bytes: int = 0
    needed_bytes: int = 0
    flops: float = 0.0  # of one call over all chips, counted in the jaxpr with loop lengths
    kernel_flops: float = 0.0  # of these, inside Pallas kernels
    kernel_calls: float = 0.0  # of Pallas kernels over all chips, by the jaxpr
    kernel_bytes: float = (
        0.0  # that attention kernels read of a cache, over all chips, where it is full
    )
    chip_flops: float = 0.0  # matmuls that this chip computes, counted in the compiled program; kernels not included
    cycles: float = 0.0
    waiting_seconds: float = 0.0  # for collectives
    exposed_seconds: float = 0.0  # of collectives beside computation that is shorter than they are
    kernels: float = 0.0  # calls of Pallas kernels on this chip, counted in the compiled program
    moved: dict[str, float] = field(default_factory=dict)  # collective → bytes received
    # Times that an array as large as `PlannedProgram.in_place` is written anew on this chip; None: not looked for.
    copies: float | None = None
    compile_seconds: float = 0.0

    @property
    def hbm_bytes(self) -> int:
        """What the program needs in memory, its arguments included."""
        if self.needed_bytes:
            return self.needed_bytes
        kept = self.argument_bytes + self.output_bytes - self.alias_bytes
        return kept + self.temporary_bytes + self.code_bytes

    @property
    def moved_bytes(self) -> float:
        """By all collectives."""
        return sum(self.moved.values())

    def seconds(self, slice_: Slice) -> float:
        """The compiler's cycles, our time of collectives, and kernels at `KERNEL_SHARE` of the peak or at the speed of
        the memory that they read, whichever is longer."""
        chip = slice_.chip
        kernels = self.kernel_flops / (KERNEL_SHARE * chip.peak_flops)
        kernels = max(kernels, self.kernel_bytes / chip.hbm_bandwidth) / slice_.chips
        own = self.cycles / chip.clock_hz + self.waiting_seconds + self.exposed_seconds
        return own + kernels

    def repeated(self, slice_: Slice) -> float:
        """How often the matmuls are computed over all chips, 1 where no chip repeats the work of another."""
        matmuls = self.flops - self.kernel_flops
        return self.chip_flops * slice_.chips / matmuls if matmuls else 1.0

    def kernels_repeated(self, slice_: Slice) -> float:
        """The same for calls of Pallas kernels: what the compiled program runs over what was counted."""
        return self.kernels * slice_.chips / self.kernel_calls if self.kernel_calls else 1.0


def figures(
    program: PlannedProgram,
    mesh: Mesh,
    slice_: Slice,
    directory: Path | None,
    note: Callable[[str], None] = lambda line: None,
) -> Figures:
    """Compile a program, or take its figures from the cache.

    Args:
      directory: where figures are kept under a hash of the program, the topology and the compiler's version;
        None: nowhere.
      note: gets one line before and one after compiling.
    """
    traced = program.function.trace(*program.arguments, **program.options)
    counted = _counted(jaxpr_flops(traced.jaxpr.jaxpr, while_steps=program.while_steps))
    lowered = traced.lower()
    path = directory / f"{_content(lowered, program, slice_)}.json" if directory else None
    kept = _read(path) if path is not None else None
    complete = kept is not None and (kept.copies is not None or kept.needed_bytes)
    if kept is not None and (complete or not program.in_place):
        note(f"{program.name}: {program.what} (kept from an earlier plan)")
        return dataclasses.replace(kept, **counted)
    note(f"{program.name}: {program.what}, compiling …")
    start = time.monotonic()
    found = _compiled(lowered, program, mesh, slice_)
    spent = round(time.monotonic() - start, 1)
    found = dataclasses.replace(found, compile_seconds=spent, **counted)
    note(f"{program.name}: compiled in {found.compile_seconds:.0f} s")
    if path is not None:
        _write(path, found)
    return found


def _counted(flops: Flops) -> dict[str, Any]:
    """What of a program's figures is counted in its jaxpr: anew each time, it is not worth keeping."""
    return {
        "flops": flops.total,
        "kernel_flops": flops.kernel,
        "kernel_calls": flops.kernel_calls,
        "kernel_bytes": flops.kernel_bytes,
    }


def _compiled(lowered: Any, program: PlannedProgram, mesh: Mesh, slice_: Slice) -> Figures:
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        return Figures(needed_bytes=needed_bytes(str(error), program.name, slice_))
    memory = compiled.memory_analysis()
    costs = hlo_costs(
        compiled.as_text(),
        clock_hz=slice_.chip.clock_hz,
        link_time=link_time(mesh, slice_),
        while_steps=program.while_steps,
        watch=program.in_place,
    )
    return Figures(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        chip_flops=costs.flops,
        cycles=costs.cycles,
        waiting_seconds=costs.waiting,
        exposed_seconds=costs.exposed,
        kernels=costs.kernels,
        moved=costs.bytes_moved,
        copies=costs.copies if program.in_place else None,
    )


def needed_bytes(message: str, name: str, slice_: Slice) -> int:
    """The amount that the compiler names when a program does not fit its chip.

    Raises:
      UserError: the message is about something else.
    """
    if "RESOURCE_EXHAUSTED" in message and "memory" in message.lower():
        amounts = [
            float(number) * {"K": 2**10, "M": 2**20, "G": GIB, "T": 2**40}[unit]
            for number, unit in re.findall(r"(\d+(?:\.\d+)?)([KMGT])\b", message)
        ]
        return int(max([*amounts, slice_.chip.hbm_bytes + 1]))
    raise UserError(
        f"the TPU compiler refuses the program {name!r} for {slice_}: {message.splitlines()[0]}"
    )


def link_time(mesh: Mesh, slice_: Slice) -> Callable[[str, Sequence[int], float], float]:
    """Seconds of a collective.

    Rings run along as many dimensions of the slice as the group extends in, one link each, in one direction; a
    permute is one of a pair in both directions.
    """
    devices = list(mesh.devices.flat)

    def seconds(kind: str, group: Sequence[int], received: float) -> float:
        links = link_dimensions([devices[index].coords for index in group])
        if kind == "collective-permute":
            return received / (2 * slice_.chip.link_bandwidth) + HOP_SECONDS
        return received / (links * slice_.chip.link_bandwidth) + HOP_SECONDS * (len(group) - 1)

    return seconds


def _content(lowered: Any, program: PlannedProgram, slice_: Slice) -> str:
    digest = hashlib.sha256()
    for part in (
        lowered.as_text(),
        slice_.topology,
        str(program.while_steps),
        jax.__version__,
        importlib.metadata.version("libtpu"),
        FORMAT,
    ):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def _read(path: Path) -> Figures | None:
    """A file that is torn or of another make is as good as none."""
    try:
        return Figures(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _write(path: Path, found: Figures) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        json.dump(dataclasses.asdict(found), stream)
    os.replace(temporary, path)
