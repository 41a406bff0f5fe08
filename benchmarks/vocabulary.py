"""Does the update's memory depend on the size of the vocabulary? (Law 8.) From the TPU compiler, without a TPU.

    .venv/bin/python benchmarks/vocabulary.py --json      about four minutes on one core, seconds from the cache

The update of Qwen2.5-7B on a v5p-32 is compiled with a vocabulary of 32,000 and with one of 151,936 tokens; compared
are the temporaries of a chip. Of one micro-batch the float32 logits alone would be 37 GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from psearch_jax.config_files import resolve
from psearch_jax.mesh import make_mesh
from psearch_jax.plan_figures import figures
from psearch_jax.planned_programs import programs
from psearch_jax.planned_recipe import lay_out_abstract
from psearch_jax.planning import for_accelerator
from psearch_jax.topologies import open_devices, parse_slice

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ("parallel_search", "models/qwen2.5-7b", "hardware/v5p-32")


def temporaries(vocabulary: int, directory: Path) -> int:
    """Bytes of temporaries of the update on a chip."""
    published = json.loads((ROOT / "configs/models/qwen2.5-7b.json").read_text(encoding="utf-8"))
    path = directory / f"{vocabulary}.json"
    path.write_text(json.dumps(published | {"vocab_size": vocabulary}), encoding="utf-8")
    config, _ = resolve([f"configs/{name}.yaml" for name in RECIPE])
    config = for_accelerator(replace(config, architecture=str(path)))
    slice_ = parse_slice(config.hardware.topology)
    mesh = make_mesh(config.mesh, open_devices(slice_))
    update = next(p for p in programs(lay_out_abstract(config, mesh)) if p.name == "update")
    kept = Path("runs/compiled/plans")
    found = figures(update, mesh, slice_, kept, lambda line: print(line, file=sys.stderr))
    return found.temporary_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print nothing but the result")
    parser.parse_args()
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as directory:
        small, large = (temporaries(size, Path(directory)) for size in (32_000, 151_936))
    print(json.dumps({"temporaries": {"32000": small, "151936": large}, "ratio": large / small}))


if __name__ == "__main__":
    main()
