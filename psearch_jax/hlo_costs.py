"""What a TPU program costs one chip, read from the compiler's optimised text: cycles, collectives, matmul FLOPs.

The text is one chip's share of the program, scheduled. Every operation of its main line carries the cycles that the
compiler expects (`estimated_cycles`, memory traffic included), except collectives and Pallas kernels. A loop's body is
counted as often as it runs. All of it is an estimate, for comparing recipes before there is a chip to measure on.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from psearch_jax.hlo_text import (
    Computation,
    Instruction,
    branches,
    byte_size,
    called,
    first_group,
    parse,
    shapes,
    trip_count,
)

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


@dataclass(kw_only=True)
class HloCosts:
    """One chip's costs of one call.

    cycles: of everything on the main line but collectives and kernels.
    flops: of matmuls and convolutions, padding left out.
    waiting: seconds of collectives that nothing runs beside.
    hidden: seconds of collectives that start early, beside computation; `exposed` is what of them is longer than
      the computation of their block.
    kernels: calls of Pallas kernels, whose cycles the compiler does not tell.
    copies: times that an array of at least `watch` bytes is made anew, not updated where it lies.
    bytes_moved: kind of collective → bytes that the chip receives.
    """

    cycles: float = 0.0
    flops: float = 0.0
    waiting: float = 0.0
    hidden: float = 0.0
    exposed: float = 0.0
    kernels: float = 0.0
    copies: float = 0.0
    bytes_moved: dict[str, float] = field(default_factory=dict)

    def add(self, other: HloCosts, times: float = 1.0) -> None:
        """Add `times` calls of another block."""
        for name in ("cycles", "flops", "waiting", "hidden", "exposed", "kernels", "copies"):
            setattr(self, name, getattr(self, name) + times * getattr(other, name))
        for kind, count in other.bytes_moved.items():
            self.bytes_moved[kind] = self.bytes_moved.get(kind, 0.0) + times * count

    def seconds(self, clock_hz: float) -> float:
        """Of the chip: its cycles, the collectives it waits for and what its work does not hide. No kernels."""
        return self.cycles / clock_hz + self.waiting + self.exposed


#: (kind, devices of one group, bytes that each receives) → seconds.
LinkTime = Callable[[str, Sequence[int], float], float]


#: Operations that write no array of their own; a program updates in place by the last three, alone or as the end of
#: a fusion. (Where their operand is still needed, the compiler puts a `copy` before them.)
NO_NEW_ARRAY = frozenset(
    (
        *("parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call"),
        *("optimization-barrier", "copy-done", "async-done", "dynamic-update-slice", "scatter"),
    )
)


def makes_new_array(
    instruction: Instruction, computations: dict[str, Computation], watch: int
) -> bool:
    """Whether an operation of the main line writes an array of at least `watch` bytes that is not updated in place."""
    if not any(
        byte_size(f"{kind}[{','.join(map(str, dims))}]") >= watch
        for kind, dims in shapes(instruction.type)
    ):
        return False
    if instruction.opcode not in ("fusion", "async-start"):
        return instruction.opcode not in NO_NEW_ARRAY
    for name in called(instruction, "calls"):
        inside = computations[name]
        if makes_new_array(inside.instructions[inside.root], computations, watch):
            return True
    return False


def hlo_costs(
    text: str, *, clock_hz: float, link_time: LinkTime, while_steps: int = 1, watch: int = 0
) -> HloCosts:
    """Costs of the entry computation.

    Args:
      text: `compiled.as_text()`.
      clock_hz: cycles a second.
      link_time: seconds of a collective, from its kind, the devices of its first group and the bytes that each of
        them receives.
      while_steps: how often a loop runs whose number of steps depends on data.
      watch: bytes of the arrays whose copies are counted; 0: of none.
    """
    computations, entry = parse(text)
    devices = int(found[1]) if (found := re.search(r"num_partitions=(\d+)", text)) else 1

    @functools.cache
    def block(name: str) -> HloCosts:
        """A computation of the main line: the entry, a loop's body, a branch."""
        computation, costs, nested = computations[name], HloCosts(), HloCosts()
        for instruction in computation.instructions.values():
            opcode = instruction.opcode
            if opcode == "while":
                steps = trip_count(instruction, computation, computations)
                (body,) = called(instruction, "body")
                nested.add(block(body), while_steps if steps is None else steps)
            elif opcode == "conditional":
                costs_of = [block(branch) for branch in branches(instruction)]
                nested.add(max(costs_of, key=lambda branch: branch.seconds(clock_hz)))
            elif opcode == "call":
                for inner in called(instruction, "to_apply"):
                    nested.add(block(inner))
            else:
                found = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
                costs.cycles += float(found[1]) if found else 0.0
                operation(instruction, computation, costs)
                costs.copies += bool(watch and makes_new_array(instruction, computations, watch))
        # What was started early is hidden behind the work of the block, as far as that reaches.
        costs.exposed = max(0.0, costs.hidden - (costs.cycles + nested.cycles) / clock_hz)
        costs.add(nested)
        return costs

    def operation(
        instruction: Instruction,
        computation: Computation,
        costs: HloCosts,
        beside: bool = False,
        scattered: bool = False,
    ) -> None:
        """Add FLOPs and collectives of one operation and of what is fused into it.

        `beside`: it is fused with computation that runs meanwhile; `scattered`: an all-reduce of which each chip
        keeps its own part, which is a reduce-scatter.
        """
        opcode, attributes = instruction.opcode, instruction.attributes
        if opcode in ("fusion", "async-start"):
            for name in called(instruction, "calls"):
                scatter = name.startswith("all-reduce-scatter")
                for inner in computations[name].instructions.values():
                    operation(inner, computations[name], costs, not scatter, scatter)
        elif opcode in ("convolution", "dot"):
            costs.flops += matmul_flops(instruction, computation)
        elif opcode == "custom-call" and "tpu_custom_call" in attributes:
            costs.kernels += 1
        kind = opcode.removesuffix("-start")
        if kind not in COLLECTIVES:
            return
        # Cut up and fused with several pieces of computation, a collective is written down in each of them.
        piece = re.search(r'async_collective_fusion_config":\{"flag_start":"(-?\d+)"', attributes)
        if piece and piece[1] != "-1":
            return
        group = first_group(attributes, devices)
        kind = "reduce-scatter" if scattered else kind
        received = bytes_received(kind, instruction, computation, len(group))
        if received:
            costs.bytes_moved[kind] = costs.bytes_moved.get(kind, 0.0) + received
            duration = link_time(kind, group, received)
            if beside or opcode.endswith("-start"):
                costs.hidden += duration
            else:
                costs.waiting += duration

    return block(entry)


def bytes_received(
    kind: str, instruction: Instruction, computation: Computation, members: int
) -> float:
    """Bytes that one chip receives when the collective runs around rings of `members` chips."""
    if members < 2 and kind != "collective-permute":
        return 0.0
    operands = sum(
        byte_size(computation.instructions[name].type)
        for name in instruction.operands
        if name in computation.instructions
    )
    share = (members - 1) / max(1, members)
    if kind == "all-gather":
        return operands * (members - 1.0)
    if kind == "all-reduce":
        return 2.0 * operands * share
    return operands * (1.0 if kind == "collective-permute" else share)


def matmul_flops(instruction: Instruction, computation: Computation) -> float:
    """2 a multiply-add of a dot or convolution; positions in the padding of a window are not counted."""
    result = math.prod(shapes(instruction.type)[0][1])
    names = instruction.operands
    if any(name not in computation.instructions for name in names[:2]):
        return 0.0
    left, right = (shapes(computation.instructions[name].type)[0][1] for name in names[:2])
    if instruction.opcode == "dot":
        found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        axes = [int(n) for n in found[1].split(",") if n] if found else []
        return 2.0 * result * math.prod(left[axis] for axis in axes)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if not labels:
        return 0.0
    out = dict(zip(labels[3], shapes(instruction.type)[0][1], strict=True))
    kernel = dict(zip(labels[2], right, strict=True))
    image = dict(zip(labels[1], left, strict=True))
    window = _window(instruction.attributes)
    flops = 2.0 * out["b"] * out["f"] * kernel["i"]
    for position, label in enumerate(sorted(name for name in out if name.isdigit())):
        options = {key: values[position] for key, values in window.items()}
        flops *= _valid(image[label], kernel[label], out[label], options)
    return flops


def _window(attributes: str) -> dict[str, list[str]]:
    found = re.search(r"window=\{([^}]*)\}", attributes)
    pairs = [pair.split("=") for pair in found[1].split()] if found else []
    return {key: value.split("x") for key, value in pairs if key != "rhs_reversal"}


def _valid(image: int, kernel: int, out: int, options: dict[str, str]) -> float:
    """Pairs of output and kernel positions that meet an element of the image."""
    stride = int(options.get("stride", 1))
    low = int(options.get("pad", "0_0").split("_")[0])
    spread, dilation = int(options.get("lhs_dilate", 1)), int(options.get("rhs_dilate", 1))
    if low == 0 and "pad" not in options and spread == 1:
        return float(out * kernel)
    places = np.arange(out)[:, None] * stride + np.arange(kernel) * dilation - low
    inside = (places >= 0) & (places < (image - 1) * spread + 1) & (places % spread == 0)
    return float(inside.sum())
