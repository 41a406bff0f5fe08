"""Several processes as one run: start, agreement, and arrays that no process holds whole.

With one process everything here is free of cost and changes nothing. What travels between processes is text
(JSON where it has structure); nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding

from psearch_jax.errors import UserError

T = TypeVar("T")
#: Seconds without a sign of life after which a process counts as dead; the runtime then ends the others.
HEARTBEAT = 30


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a process stands in a run of several: the first one's address, how many there are, and which this is."""

    coordinator: str
    processes: int
    process: int


def start(
    coordinator: str = "", processes: int = 0, process: int = -1, *, patience: int = 120
) -> bool:
    """Join the other processes of this run, before any device is used. Returns whether there are others.

    With arguments: as they say. Without: as a TPU slice of several hosts or SLURM's variables say; and where there is
    neither, this process is alone.

    Args:
      coordinator: host:port, of process 0. processes: how many. process: which of them this is, from 0.
      patience: seconds to wait for the others.

    Raises:
      UserError: arguments that do not fit together, or nobody answers at the coordinator's address.
    """
    given = (bool(coordinator), processes > 0, process >= 0)
    if any(given) and not all(given):
        raise UserError(
            "--coordinator HOST:PORT, --processes N and --process I belong together: give all three, or none on a TPU "
            "slice and under SLURM"
        )
    place = Place(coordinator=coordinator, processes=processes, process=process)
    if not coordinator:
        slurm = from_slurm(os.environ)
        if slurm is None:
            return _start_tpu(os.environ, patience)
        place = slurm
    _check_place(place)
    if place.processes == 1:
        return False
    _wait_for_coordinator(place, patience)
    _join(
        patience,
        coordinator_address=place.coordinator,
        num_processes=place.processes,
        process_id=place.process,
        # Else SLURM's number of the task would become the only device of a task that has all of them.
        cluster_detection_method="deactivate",
    )
    return True


def from_slurm(environment: Mapping[str, str]) -> Place | None:
    """The place of a task of `srun`, one task a host; None where there is no such task or only one."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    if any(name not in environment for name in names) or environment[names[2]] == "1":
        return None
    # The first host of "node7", "node[003-007,9],other" or "a,b".
    hosts = re.match(r"([^\[,]+)(?:\[([^,\]-]+))?", environment["SLURM_STEP_NODELIST"])
    assert hosts is not None, "an empty list of hosts"
    # A port of the dynamic range that jobs of one host do not share.
    port = 61440 + int(environment["SLURM_JOB_ID"]) % 4096
    return Place(
        coordinator=f"{hosts[1]}{hosts[2] or ''}:{port}",
        processes=int(environment["SLURM_STEP_NUM_TASKS"]),
        process=int(environment["SLURM_PROCID"]),
    )


def _start_tpu(environment: Mapping[str, str], patience: int) -> bool:
    """Join the hosts of a TPU slice, whose metadata JAX reads by itself."""
    platforms = environment.get("JAX_PLATFORMS") or "tpu"
    if "tpu" not in platforms or not any(Path("/dev").glob("accel*")) | _has_vfio():
        return False
    try:
        _join(patience)
    except ValueError:  # JAX finds no coordinator: one host
        return False
    return jax.process_count() > 1


def _has_vfio() -> bool:
    return any(path.name.isdecimal() for path in Path("/dev/vfio").glob("*"))


def _check_place(place: Place) -> None:
    host, _, port = place.coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"the coordinator is {place.coordinator!r}, but must be HOST:PORT")
    if not place.process < place.processes:
        raise UserError(
            f"--process is {place.process}, but with --processes {place.processes} must be below that"
        )


def _wait_for_coordinator(place: Place, patience: int) -> None:
    """Find out with a plain connection what would otherwise end as a crash of the runtime."""
    host, _, port = place.coordinator.rpartition(":")
    try:
        socket.getaddrinfo(host, int(port))
    except (OSError, OverflowError) as error:
        raise UserError(
            f"the coordinator's address {place.coordinator} cannot be found ({error}); it is HOST:PORT of process 0"
        ) from error
    if place.process == 0:
        try:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("", int(port)))
        except (OSError, OverflowError) as error:
            raise UserError(
                f"port {port} of the coordinator {place.coordinator} cannot be used here ({error}); name "
                "another to all processes"
            ) from error
        return
    until = time.monotonic() + patience
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() >= until:
                raise UserError(
                    f"no process answers at the coordinator's address {place.coordinator} ({error}); start process 0 "
                    "there, or mend the address"
                ) from error
        time.sleep(0.5)


def _join(patience: int, **arguments: Any) -> None:
    try:
        jax.distributed.initialize(
            initialization_timeout=patience,
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=HEARTBEAT,
            **arguments,
        )
    except RuntimeError as error:
        raise UserError(
            f"the processes of this run did not come together within {patience} s "
            f"({str(error).splitlines()[0]}); start all of them with the same command"
        ) from error


@contextmanager
def explained() -> Iterator[None]:
    """In a run of several processes, end with a sentence where the devices report that another one is gone.

    The process ends at once: whoever waited for the others in an orderly shutdown would wait for the dead.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if count() == 1:
            raise
        print(
            f"error: process {index()} of {count()} stops, as it lost another one ({str(error).splitlines()[0]}); "
            "start all of them again with the same command: the run goes on from its last checkpoint",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


def check_agreement(values: Mapping[str, Any]) -> None:
    """Compare a configuration (dotted key → value) with that of the other processes. A collective.

    Raises:
      UserError: on every process, where they differ; the sentence names the first key.
    """
    texts = gather(json.dumps(values, sort_keys=True, default=str))
    first = json.loads(texts[0])
    for number, text in enumerate(texts):
        other = json.loads(text)
        differing = [key for key in {**first, **other} if first.get(key) != other.get(key)]
        if differing:
            key = differing[0]
            raise UserError(
                f"the processes of this run disagree about the configuration: {key} is {first.get(key)!r} in process 0 "
                f"and {other.get(key)!r} in process {number}; start all with the same command"
            )


def count() -> int:
    """Processes of this run."""
    return jax.process_count()


def index() -> int:
    """Which of them this is, from 0."""
    return jax.process_index()


def is_first() -> bool:
    """Whether this process does what is done once: writing files, talking to the terminal."""
    return index() == 0


def share(items: Sequence[T]) -> list[T]:
    """The items that fall to this process; `interleave` puts all of them together again."""
    return list(items[index() :: count()])


def interleave(shares: Sequence[Sequence[T]]) -> list[T]:
    """The inverse of `share`, given the share of every process."""
    total = sum(map(len, shares))
    return [shares[i % len(shares)][i // len(shares)] for i in range(total)]


def gather(text: str) -> list[str]:
    """The text of every process, in their order. A collective: all call it at the same place."""
    if count() == 1:
        return [text]
    own = np.frombuffer(text.encode(), np.uint8)
    sizes_P = np.asarray(multihost_utils.process_allgather(np.int32(own.size))).reshape(-1)
    # Few shapes, each of which is a program.
    padded = np.zeros(1 << max(8, int(sizes_P.max()).bit_length()), np.uint8)
    padded[: own.size] = own
    texts_PxN = np.asarray(multihost_utils.process_allgather(padded)).reshape(count(), -1)
    return [row[:size].tobytes().decode() for row, size in zip(texts_PxN, sizes_P, strict=True)]


def from_first(text: str) -> str:
    """The first process's text, on every process. A collective."""
    return gather(text)[0]


def agree(wish: bool) -> bool:
    """Whether any process wishes it. A collective."""
    return wish if count() == 1 else "1" in gather("1" if wish else "0")


def place(array: np.ndarray, where: Sharding) -> jax.Array:
    """An array that every process has whole, laid out over the devices of all of them."""
    if count() == 1:
        return jax.device_put(array, where)
    return jax.make_array_from_callback(array.shape, where, lambda part: array[part])


def to_host(array: Any) -> np.ndarray:
    """A device array as NumPy, also where its parts lie with several processes. A collective there."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        if array.is_fully_replicated:
            return np.asarray(array.addressable_data(0))
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)
