"""Reading the optimised HLO text of a compiled program: computations, instructions, loops, device groups."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

WIDTHS = {"pred": 1, "s4": 1, "u4": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}
WIDTHS |= {"f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8, "c64": 8, "c128": 16}


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One line: `%name = type opcode(operands), attributes`."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    literal: str  # what stands between the parentheses


@dataclass(frozen=True, kw_only=True)
class Computation:
    """A block of instructions by name, in order."""

    instructions: dict[str, Instruction]
    root: str


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Computations by name, and the name of the entry."""
    computations: dict[str, Computation] = {}
    entry, name, root = "", "", ""
    instructions: dict[str, Instruction] = {}
    for line in _whole_lines(text):
        if line.startswith(("%", "ENTRY")) and line.rstrip().endswith("{"):
            name = line.removeprefix("ENTRY ").lstrip("%").split(" ", 1)[0]
            entry = name if line.startswith("ENTRY") else entry
            instructions, root = {}, ""
        elif line.rstrip() == "}" and name:
            computations[name], name = Computation(instructions=instructions, root=root), ""
        elif name and " = " in line:
            instruction = _parse_line(line)
            instructions[instruction.name] = instruction
            if line.startswith("  ROOT"):
                root = instruction.name
    return computations, entry


def _whole_lines(text: str) -> Iterator[str]:
    """Lines, with those joined that an attribute with a line break in it has torn."""
    held = ""
    for line in text.splitlines():
        begins = line.startswith(("%", "ENTRY", "  %", "  ROOT")) or line.rstrip() in ("}", "")
        if begins and held:
            yield held
            held = ""
        held = f"{held} {line}" if held else line
    yield held


def _parse_line(line: str) -> Instruction:
    left, _, right = line.strip().partition(" = ")
    kind, rest = _until_space(right)
    opcode, _, rest = rest.partition("(")
    inside, attributes = _balanced(rest)
    inside_plain = re.sub(r"/\*.*?\*/", "", inside)
    return Instruction(
        name=left.removeprefix("ROOT ").lstrip("%"),
        type=re.sub(r"/\*.*?\*/", "", kind),
        opcode=opcode.strip(),
        operands=tuple(re.findall(r"%([\w.\-]+)", inside_plain)),
        attributes=attributes,
        literal=inside_plain,
    )


def _until_space(text: str) -> tuple[str, str]:
    """A type, which may be a tuple in parentheses, and what follows."""
    if not text.startswith("("):
        kind, _, rest = text.partition(" ")
        return kind, rest
    inside, rest = _balanced(text[1:])
    return f"({inside})", rest.lstrip()


def _balanced(text: str) -> tuple[str, str]:
    """What is before the parenthesis that closes one already open, and what is after it."""
    depth = 1
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return text[: found.start()], text[found.end() :]
    return text, ""


def called(instruction: Instruction, key: str) -> list[str]:
    """The computation that an attribute names, if it is there."""
    found = re.search(rf"\b{key}=%?([\w.\-]+)", instruction.attributes)
    return [found[1]] if found else []


def branches(instruction: Instruction) -> list[str]:
    """The computations of a conditional."""
    found = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
    if found:
        return re.findall(r"%?([\w.\-]+)", found[1])
    return [
        *called(instruction, "true_computation"),
        *called(instruction, "false_computation"),
    ]


def shapes(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """(element type, dims) of every array in a type."""
    found = re.findall(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]", text)
    return [(kind, tuple(int(n) for n in dims.split(",") if n)) for kind, dims in found]


def byte_size(text: str) -> int:
    """Bytes of all arrays in a type."""
    return sum(WIDTHS.get(kind, 1) * math.prod(dims) for kind, dims in shapes(text))


def first_group(attributes: str, devices: int) -> tuple[int, ...]:
    """The devices of the first group of a collective."""
    pairs = re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", attributes)
    if pairs:
        return int(pairs[1]), int(pairs[2])
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", attributes)
    if listed:
        return tuple(int(n) for n in listed[1].split(","))
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota:
        ids = np.arange(int(iota[1]) * int(iota[2])).reshape([int(n) for n in iota[3].split(",")])
        if iota[4]:
            ids = ids.transpose([int(n) for n in iota[4].split(",")])
        return tuple(ids.reshape(int(iota[1]), int(iota[2]))[0].tolist())
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", attributes)
    if mesh:
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        used = set(re.findall(r"'([^']+)'", mesh[2]))
        ids = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
        picked = ids[tuple(slice(None) if name in used else 0 for name in sizes)]
        return tuple(picked.reshape(-1).tolist())
    return tuple(range(devices))


def trip_count(
    loop: Instruction, around: Computation, computations: dict[str, Computation]
) -> int | None:
    """How often a loop runs, or None when that depends on data."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
    if known:
        return int(known[1])
    condition = computations[called(loop, "condition")[0]]
    body = computations[called(loop, "body")[0]]
    initial = around.instructions.get(loop.operands[0])

    def value(name: str, inside: Computation) -> int | None:
        """An integer constant, written there or carried into the loop."""
        instruction = inside.instructions.get(name)
        if instruction is None:
            return None
        if instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.literal):
            return int(instruction.literal)
        if instruction.opcode in ("copy", "bitcast", "convert"):
            return value(instruction.operands[0], inside)
        index = _index(instruction)
        if index is not None and inside is not around and initial is not None:
            carried = body.instructions[body.root]
            if inside is condition or _passes(body, carried, index):
                return _at(initial, index, around, value)
        return None

    test = condition.instructions[condition.root]
    if test.opcode != "compare" or "direction=LT" not in test.attributes:
        return None
    counter = _index(condition.instructions[test.operands[0]])
    carried = body.instructions[body.root]
    limit = value(test.operands[1], condition)
    if counter is None or limit is None or initial is None or carried.opcode != "tuple":
        return None
    limit_index = _index(condition.instructions[test.operands[1]])
    if limit_index is not None and not _passes(body, carried, limit_index):
        return None
    start = _at(initial, counter, around, value)
    moved = body.instructions[carried.operands[counter]]
    steps = [value(name, body) for name in moved.operands] if moved.opcode == "add" else []
    step = next((n for n in steps if n), 1)
    return None if start is None else max(0, -(-(limit - start) // step))


def _index(instruction: Instruction) -> int | None:
    found = re.search(r"\bindex=(\d+)", instruction.attributes)
    return int(found[1]) if found and instruction.opcode == "get-tuple-element" else None


def _passes(body: Computation, carried: Instruction, index: int) -> bool:
    """Whether a loop hands element `index` on as it came."""
    if index >= len(carried.operands):
        return False
    return _index(body.instructions[carried.operands[index]]) == index


def _at(
    initial: Instruction,
    index: int,
    around: Computation,
    value: Callable[[str, Computation], int | None],
) -> int | None:
    if initial.opcode != "tuple" or index >= len(initial.operands):
        return None
    return value(initial.operands[index], around)
