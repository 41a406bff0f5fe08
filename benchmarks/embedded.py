"""The embedded comparison over several seeds: one warm start, three rewards, the whole test split.

    .venv/bin/python benchmarks/embedded.py --json            three seeds, about 35 minutes on two cores
    .venv/bin/python benchmarks/embedded.py --seeds 1         one seed

Each seed is a demo of its own under runs/embedded/seed_N, resumed if it was interrupted. Comparisons pair the
questions within every seed and resample (question, seed) pairs together.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from psearch_jax import demo
from psearch_jax.config_files import resolve
from psearch_jax.evaluation.metrics import compare
from psearch_jax.evaluation.results import SAMPLED, rows_file
from psearch_jax.metrics_log import read_lines, write_atomically

#: name → (row, baseline row, kind, decoding mode suffix)
COMPARISONS = {
    "parallel_search_vs_search_r1": ("parallel_search", "em_reward", "parallelizable", ""),
    "gated_vs_search_r1": ("gated", "em_reward", "parallelizable", ""),
    "search_r1_vs_warm_start": ("em_reward", "warm_start", None, ""),
    "search_r1_vs_warm_start_sampled": ("em_reward", "warm_start", None, SAMPLED),
}


def pooled(directories: list[Path], name: str) -> list[dict[str, Any]]:
    """The lines of a row from every seed, ids made unique by the seed."""
    return [
        line | {"id": f"{directory.name}/{line['id']}"}
        for directory in directories
        for line in read_lines(rows_file(directory, name))
    ]


def summarise(directories: list[Path], summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the seeds with every seed's value beside them, and the pooled comparisons."""
    recipes: dict[str, Any] = {}
    for row in summaries[0]["rows"]:
        rows = [summary["rows"][row] for summary in summaries if row in summary["rows"]]
        recipes[row] = {
            key: {
                "mean": statistics.fmean(values),
                "seeds": values,
            }
            for key in ("em", "em_sampled", "turns", "subqueries", "policy_tokens")
            if (values := [r[key] for r in rows if key in r])
        }
        for key in ("em", "turns"):
            recipes[row][f"{key}_by_kind"] = {
                kind: statistics.fmean(r["kinds"][kind][key] for r in rows)
                for kind in rows[0]["kinds"]
            }
    comparisons = {}
    for name, (row, baseline, kind, mode) in COMPARISONS.items():
        lines = pooled(directories, baseline + mode), pooled(directories, row + mode)
        em, turns = (compare(*lines, metric, kind=kind) for metric in ("em", "turns"))
        comparisons[name] = {
            "em_difference": em["difference"],
            "em_interval": em["difference_interval"],
            "turns_ratio": turns["ratio"],
            "turns_interval": turns["ratio_interval"],
        }
    return {"seeds": len(summaries), "recipes": recipes, "comparisons": comparisons}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print nothing but the result")
    arguments = parser.parse_args()
    config, _ = resolve(["configs/embedded/demo.yaml"])
    directories, summaries = [], []
    for seed in range(arguments.seeds):
        directory = Path("runs/embedded") / f"seed_{seed}"
        summaries.append(
            demo.run(
                replace(
                    config,
                    run_directory=str(directory),
                    trainer=replace(config.trainer, seed=seed),
                    data=replace(config.data, seed=seed),
                    evaluation=replace(config.evaluation, seed=seed),
                ),
                quiet=arguments.json,
                trained_only=seed > 0,
            )
        )
        directories.append(directory)
    result = summarise(directories, summaries)
    text = json.dumps(result, indent=1)
    write_atomically(Path("runs/embedded/summary.json"), text + "\n")
    print(text)


if __name__ == "__main__":
    main()
