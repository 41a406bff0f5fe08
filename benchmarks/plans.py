"""The table of recipes at scale: every pair of model and hardware that is offered, planned.

    .venv/bin/python benchmarks/plans.py              print the table (hours the first time, seconds from the cache)
    .venv/bin/python benchmarks/plans.py --write      and put it into docs/recipes.md and README.md
    .venv/bin/python benchmarks/plans.py --only v6e-16 --json

Needs the TPU compiler (pip install 'psearch_jax[tpu]'), no TPU. A pair that does not fit with a tenth to spare ends
the command with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from psearch_jax import plan_report, planning
from psearch_jax.config_files import resolve
from psearch_jax.metrics_log import write_atomically

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
BEGIN, END = "<!-- plans -->", "<!-- /plans -->"

#: Model, overlays of the recipe for it, hardware.
OFFERED: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("Qwen2.5-3B", ("models/qwen2.5-3b",), "v5e-16"),
    ("Qwen2.5-3B", ("models/qwen2.5-3b",), "v6e-16"),
    ("Llama-3.2-3B", ("models/llama-3.2-3b",), "v5e-16"),
    ("Qwen2.5-7B", ("models/qwen2.5-7b",), "v5p-32"),
    ("Qwen2.5-32B", ("models/qwen2.5-32b",), "v5p-32"),
    ("Qwen2.5-7B", ("models/qwen2.5-7b",), "v6e-16"),
    ("Qwen2.5-7B", ("models/qwen2.5-7b",), "gpu-8"),
)


def files(overlays: tuple[str, ...], hardware: str) -> list[str]:
    """The recipe files of a pair, in order."""
    names = ("parallel_search", *overlays, f"hardware/{hardware}")
    return [str(CONFIGS / f"{name}.yaml") for name in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="pairs whose model or hardware holds this text")
    parser.add_argument("--json", action="store_true", help="whole plans in place of the table")
    parser.add_argument(
        "--write", action="store_true", help="put the table into docs/recipes.md and README.md"
    )
    options = parser.parse_args()
    os.chdir(ROOT)  # the overlays name files from here
    plans, rows = {}, []
    for model, overlays, hardware in OFFERED:
        if options.only not in f"{model} on {hardware}":
            continue
        print(f"{model} on {hardware}", file=sys.stderr)
        config, _ = resolve(files(overlays, hardware))
        plan = planning.plan(config, note=lambda line: print(f"  {line}", file=sys.stderr))
        print(f"  {plan_report.verdict(plan)}", file=sys.stderr, flush=True)
        plans[f"{model} on {hardware}"] = plan
        rows.append(plan_report.row(model, hardware, plan))
    table = plan_report.markdown(rows)
    if options.json:
        print(
            json.dumps({name: plan_report.as_json(plan) for name, plan in plans.items()}, indent=2)
        )
    else:
        print(table)
    if options.write:
        for path in (ROOT / "docs" / "recipes.md", ROOT / "README.md"):
            text = path.read_text(encoding="utf-8")
            before, after = text.split(BEGIN)[0], text.split(END)[1]
            write_atomically(path, f"{before}{BEGIN}\n{table}\n{END}{after}")
    return 0 if all(plan.headroom >= planning.RESERVE for plan in plans.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
