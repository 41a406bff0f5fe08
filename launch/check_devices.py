"""See what a run would find: devices, free memory, the mesh, and a collective over all devices.

    python launch/check_devices.py [--mesh data=-1,fsdp=4,tensor=2] [--json] [--dry-run]
    python launch/check_devices.py --coordinator HOST:PORT --processes 2 --process 0

To be run on every host of a slice at the same time. Exit code 2, with a sentence, where something does not fit.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any


def main() -> int:
    """The command line; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mesh", default="data=-1", help="axis=size, separated by commas")
    parser.add_argument("--coordinator", default="")
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--process", type=int, default=-1)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done")
    options = parser.parse_args()
    if options.dry_run:
        print(f"would list the devices, lay out {options.mesh} and add up one number a device")
        return 0
    from psearch_jax.errors import UserError

    try:
        told = look(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(told))
    else:
        for name, value in told.items():
            print(f"{name}: {value}")
    return 0 if told["collective_right"] else 1


def look(options: argparse.Namespace) -> dict[str, Any]:
    """What there is, as numbers."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from psearch_jax import processes
    from psearch_jax.config import MeshConfig
    from psearch_jax.errors import UserError
    from psearch_jax.mesh import AXES, make_mesh

    try:
        sizes = {k: int(v) for k, _, v in (w.partition("=") for w in options.mesh.split(","))}
        config = MeshConfig(**sizes)
    except (TypeError, ValueError) as error:
        raise UserError(f"--mesh is {options.mesh!r}, but must be like fsdp=4,tensor=2") from error
    processes.start(options.coordinator, options.processes, options.process)
    mesh = make_mesh(config)
    size = mesh.size
    array = processes.place(
        np.arange(size, dtype=np.float32), NamedSharding(mesh, PartitionSpec(AXES))
    )
    total = jax.jit(jnp.sum)
    right = float(total(array)) == size * (size - 1) / 2
    began = time.perf_counter()
    total(array).block_until_ready()
    memory = [device.memory_stats() or {} for device in jax.local_devices()]
    free = [m["bytes_limit"] - m["bytes_in_use"] for m in memory if "bytes_limit" in m]
    return {
        "process": processes.index(),
        "processes": processes.count(),
        "devices": jax.device_count(),
        "local_devices": [str(device) for device in jax.local_devices()],
        "kind": jax.devices()[0].device_kind,
        "mesh": dict(mesh.shape),
        "free_gib": round(min(free) / 2**30, 2) if free else None,
        "collective_right": right,
        "collective_milliseconds": round(1000 * (time.perf_counter() - began), 3),
    }


if __name__ == "__main__":
    sys.exit(main())
