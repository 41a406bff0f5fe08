"""TPU slices by name, and what a chip of each kind can hold and do: facts for `psearch plan`, no device needed.

A topology is written as the compiler writes it, `v5p:2x2x4`, or as the cloud sells it, `v5p-32`. Slice names of
v4 and v5p count TensorCores, two a chip; those of v5e and v6e count chips.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from psearch_jax.errors import UserError

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One kind of chip. Bytes and rates are per chip.

    hbm_bytes is what the compiler lets a program use, less than what is sold (libtpu 0.0.42 names it when a program
    does not fit). peak_flops (bfloat16) and hbm_bandwidth are the vendor's. link_bandwidth is one interconnect link
    in one direction, nine tenths of the vendor's figure, as is usually reached. clock_hz turns the compiler's cycles
    into seconds: peak_flops over the FLOPs a cycle that its largest matmuls are given (checked in the tests).
    """

    name: str
    cores: int
    named_by_cores: bool
    dims: int
    hbm_bytes: int
    peak_flops: float
    hbm_bandwidth: float
    link_bandwidth: float
    clock_hz: float


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v4",
            cores=2,
            named_by_cores=True,
            dims=3,
            hbm_bytes=int(30.75 * GIB),
            peak_flops=275e12,
            hbm_bandwidth=1228e9,
            link_bandwidth=45e9,
            clock_hz=1.05e9,
        ),
        Chip(
            name="v5e",
            cores=1,
            named_by_cores=False,
            dims=2,
            hbm_bytes=int(15.75 * GIB),
            peak_flops=197e12,
            hbm_bandwidth=819e9,
            link_bandwidth=45e9,
            clock_hz=1.5e9,
        ),
        Chip(
            name="v5p",
            cores=2,
            named_by_cores=True,
            dims=3,
            hbm_bytes=int(95.74 * GIB),
            peak_flops=459e12,
            hbm_bandwidth=2765e9,
            link_bandwidth=90e9,
            clock_hz=1.75e9,
        ),
        Chip(
            name="v6e",
            cores=1,
            named_by_cores=False,
            dims=2,
            hbm_bytes=int(31.25 * GIB),
            peak_flops=918e12,
            hbm_bandwidth=1640e9,
            link_bandwidth=90e9,
            clock_hz=1.75e9,
        ),
    )
}

#: Chips → the shape in which such a slice is usually sold. Plans begin at a whole host.
SHAPES_2D = {4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16)}
SHAPES_2D |= {256: (16, 16)}
SHAPES_3D = {4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4), 64: (4, 4, 4)}
SHAPES_3D |= {128: (4, 4, 8), 256: (4, 8, 8), 512: (8, 8, 8)}


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A slice of a pod, by its shape."""

    chip: Chip
    shape: tuple[int, ...]

    @property
    def chips(self) -> int:
        """How many chips, which is how many devices JAX shows."""
        return math.prod(self.shape)

    @property
    def topology(self) -> str:
        """As the compiler writes it: v5p:2x2x4."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def name(self) -> str:
        """As the cloud sells it: v5p-32."""
        count = self.chips * (self.chip.cores if self.chip.named_by_cores else 1)
        return f"{self.chip.name}-{count}"

    def __str__(self) -> str:
        return f"{self.name} ({self.topology}, {self.chips} chip{'s' if self.chips > 1 else ''})"


def parse_slice(text: str) -> Slice:
    """Read `v5p:2x2x4` or `v5p-32`.

    Raises:
      UserError: no such chip, or a shape or size that is not sold; the sentence says what there is.
    """
    match = re.fullmatch(r"(\w+)(?::(\d+(?:x\d+)*)|-(\d+))", text.strip())
    if not match or match[1] not in CHIPS:
        raise UserError(
            f"there is no topology {text!r}: write it as v5p:2x2x4 or as v5p-32; the chips are {', '.join(CHIPS)}"
        )
    chip = CHIPS[match[1]]
    if match[2]:
        shape = tuple(int(size) for size in match[2].split("x"))
        if len(shape) != chip.dims or min(shape) < 1:
            example = "4x4" if chip.dims == 2 else "2x2x4"
            raise UserError(
                f"there is no topology {text!r}: a {chip.name} slice has {chip.dims} dimensions, "
                f"as in {chip.name}:{example}"
            )
        return Slice(chip=chip, shape=shape)
    count, unit = int(match[3]), chip.cores if chip.named_by_cores else 1
    shapes = SHAPES_2D if chip.dims == 2 else SHAPES_3D
    if count % unit or count // unit not in shapes:
        sold = ", ".join(f"{chip.name}-{chips * unit}" for chips in shapes)
        raise UserError(f"there is no slice {text!r}: the sizes are {sold}")
    return Slice(chip=chip, shape=shapes[count // unit])


def open_devices(slice_: Slice) -> Sequence[Any]:
    """The slice's devices as the compiler knows them: programs can be compiled for them, not run.

    Sets a few of libtpu's environment variables, so that it does not look for a TPU on this machine.

    Raises:
      UserError: libtpu is not installed, or it does not make slices of this shape.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "planning needs the TPU compiler, libtpu, which is not installed: "
            "pip install 'psearch_jax[tpu]' (no TPU is needed)"
        )
    for name, value in (
        ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),  # several plans at a time: none of them opens a device
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("TPU_ACCELERATOR_TYPE", slice_.name),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
        ("TPU_WORKER_ID", "0"),
    ):
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    options: dict[str, Any] = {}
    if slice_.chip.name == "v4":
        options["chip_config_name"] = "megacore"  # both cores of a chip are one device, as in a run
    try:
        described = topologies.get_topology_desc(
            platform="tpu", topology_name=slice_.topology, **options
        )
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0].partition(": ")[2] or str(error)
        raise UserError(
            f"the compiler has no topology {slice_.topology!r} ({reason}): name one that is sold, "
            f"such as {' or '.join(_sold(slice_.chip))}"
        ) from None
    return described.devices


def _sold(chip: Chip) -> list[str]:
    shapes = SHAPES_2D if chip.dims == 2 else SHAPES_3D
    return [f"{chip.name}:{'x'.join(map(str, shapes[chips]))}" for chips in (16, 32, 64)]


def link_dimensions(coords: Sequence[Sequence[int]]) -> int:
    """In how many dimensions of the torus a group of chips extends, at least 1: its rings can use as many links."""
    return max(1, sum(len(set(axis)) > 1 for axis in zip(*coords, strict=True)))
