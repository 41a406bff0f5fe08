"""The embedded comparison over several seeds: one warm start, four rewards, the whole test split.

    .venv/bin/python benchmarks/embedded.py --json            three seeds, about 50 minutes on two cores
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
from psearch_jax.evaluation.comparison import compare
from psearch_jax.evaluation.results import SAMPLED, rows_file
from psearch_jax.metrics_log import read_lines, write_atomically

#: Recipe (configs/embedded) → its row in a demo's directory.
RECIPES = {
    "search_r1": "em_reward",
    "research": "research",
    "parallel_search": "parallel_search",
    "gated": "gated",
}
#: Row → reward of what is trained a seed.
REWARDS = demo.REWARDS | {"research": "research"}
#: name → (row, baseline row, kind, decoding mode suffix)
COMPARISONS = {
    "parallel_search_vs_search_r1": ("parallel_search", "em_reward", "parallelizable", ""),
    "gated_vs_search_r1": ("gated", "em_reward", "parallelizable", ""),
    "gated_vs_parallel_search": ("gated", "parallel_search", None, ""),
} | {
    f"{recipe}_vs_warm_start{name}": (row, "warm_start", None, mode)
    for recipe, row in RECIPES.items()
    for name, mode in (("", ""), ("_sampled", SAMPLED))
}


def pooled(directories: list[Path], name: str) -> list[dict[str, Any]]:
    """The lines of a row from every seed, ids made unique by the seed."""
    return [
        line | {"id": f"{directory.name}/{line['id']}"}
        for directory in directories
        for line in read_lines(rows_file(directory, name))
    ]


def figures(row: dict[str, Any], warm: dict[str, Any]) -> dict[str, Any]:
    """Of one recipe and seed: scores, means an episode, and the warm start's scores beside them."""
    return {
        "em": row["em"],
        "em_warm_start": warm["em"],
        "em_sampled": row["em_sampled"],
        "em_sampled_warm_start": warm["em_sampled"],
        "em_by_kind": {kind: values["em"] for kind, values in row["kinds"].items()},
        "turns": row["turns"],
        "turns_by_kind": {kind: values["turns"] for kind, values in row["kinds"].items()},
        "subqueries": row["subqueries"],
        "tokens": row["policy_tokens"],
    }


def summarise(directories: list[Path], summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """Every recipe's figures a seed, and the comparisons pooled over the seeds."""
    recipes = {
        recipe: [
            figures(summary["rows"][row], summary["rows"]["warm_start"]) for summary in summaries
        ]
        for recipe, row in RECIPES.items()
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


def table(result: dict[str, Any]) -> str:
    """The table of the README: means over the seeds, and the pooled comparisons below it."""
    lines = [
        "| recipe | EM greedily | EM sampled | turns | turns, parallelizable | sub-queries | policy tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    for recipe, seeds in result["recipes"].items():
        mean = {
            key: statistics.fmean(seed[key] for seed in seeds)
            for key in ("em", "em_sampled", "turns", "subqueries", "tokens")
        }
        parallel = statistics.fmean(seed["turns_by_kind"]["parallelizable"] for seed in seeds)
        lines.append(
            f"| {recipe} | {mean['em']:.3f} | {mean['em_sampled']:.3f} | {mean['turns']:.2f} | {parallel:.2f} "
            f"| {mean['subqueries']:.2f} | {mean['tokens']:.0f} |"
        )
    lines += ["", "| comparison, paired | EM, points | turns, ratio |", "|---|---|---|"]
    for name, values in result["comparisons"].items():
        low, high = (100 * bound for bound in values["em_interval"])
        fewer, more = values["turns_interval"]
        lines.append(
            f"| {name} | {100 * values['em_difference']:+.1f} [{low:+.1f}, {high:+.1f}] "
            f"| {values['turns_ratio']:.3f} [{fewer:.3f}, {more:.3f}] |"
        )
    return "\n".join(lines) + "\n"


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
                rewards=REWARDS,
            )
        )
        directories.append(directory)
    result = summarise(directories, summaries)
    text = json.dumps(result, indent=1)
    write_atomically(Path("runs/embedded/summary.json"), text + "\n")
    write_atomically(Path("runs/embedded/table.md"), table(result))
    print(text if arguments.json else table(result))


if __name__ == "__main__":
    main()
