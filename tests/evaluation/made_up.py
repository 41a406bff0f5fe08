"""Made-up results of the right shape: what a demo run leaves behind, without a run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from psearch_jax.evaluation.metrics import summarize
from psearch_jax.evaluation.results import SAMPLED, row_summary, rows_file

KINDS = ("parallelizable", "bridge", "mixed", "single")
CITIES = ("Lyon", "Turin", "Porto", "Graz", "Ghent", "Malmö", "Split", "Łódź", "Cork", "Bergen")
#: Chance of a right answer, of a parallel first search, and how many turns without one.
ROWS = {
    "closed_book": (0.12, 0.0, 1),
    "rag": (0.38, 0.0, 1),
    "warm_start": (0.62, 0.3, 3),
    "em_reward": (0.78, 0.35, 3),
    "parallel_search": (0.79, 0.95, 3),
    "gated": (0.80, 0.85, 3),
}


def record(
    number: int, kind: str, right: bool, queries: list[list[str]], rng: np.random.Generator
) -> dict[str, Any]:
    """One line of a results file."""
    one, two = (CITIES[i] for i in rng.permutation(len(CITIES))[:2])
    answer = one if right else two
    segments = [["prompt", f"Which city has more inhabitants, {one} or {two}?\n"]]
    results = []
    for turn in queries:
        searched = [query.format(one=one, two=two) for query in turn]
        segments.append(
            ["policy", f"<think>population</think><search>{'##'.join(searched)}</search>"]
        )
        passages = [
            [
                {
                    "id": f"city-{query.split()[-1]}-{rank}",
                    "title": query.split()[-1],
                    "text": f"{query} 10^5×{len(query) / 3 + rank:.2f}, city in France",
                    "score": round(0.9 - 0.1 * rank, 4),
                }
                for rank in range(3)
            ]
            for query in searched
        ]
        lines = "".join(
            f"{at}:" + "\n".join(hit["text"] for hit in hits) + "\n"
            for at, hits in enumerate(passages, start=1)
        )
        segments.append(["observation", f"<information>{lines}</information>"])
        results.append({"queries": searched, "passages": passages})
    segments.append(["policy", f"<think>10^5×5.22 {one}</think><answer>{answer}</answer>"])
    flat = [query for turn in results for query in turn["queries"]]
    return {
        "id": f"{kind}-{number}",
        "sample": 0,
        "kind": kind,
        "unseen": bool(number % 2),
        "question": segments[0][1].strip(),
        "golden_answers": [one],
        "answer": answer,
        "em": right,
        "f1": float(right),
        "substring": right,
        "tolerant": right,
        "turns": len(queries) + 1,
        "searches": len(queries),
        "subqueries": len(flat),
        "distinct_queries": len(set(flat)),
        "decomposed": bool(queries and len(queries[0]) > 1),
        "policy_tokens": 18 * (len(queries) + 1),
        "observation_tokens": 60 * len(queries),
        "prompt_tokens": 14,
        "well_formed": True,
        "answered": True,
        "invalid_turns": 0,
        "failed_searches": 0,
        "end_reason": "answer",
        "calls": len(queries) + 1,
        "segments": segments,
        "tokens": [
            [[piece, -0.01 * (at % 90)] for at, piece in enumerate(re.findall(r"\W*\w+\W*", text))]
            for role, text in segments
            if role == "policy"
        ],
        "results": results,
    }


def records(row: str, count: int, *, easier: float = 0.0, seed: int = 0) -> list[dict[str, Any]]:
    """`count` lines of a row."""
    chance, parallel, turns = ROWS[row]
    rng = np.random.default_rng([seed, *row.encode()])
    lines = []
    for number in range(count):
        kind = KINDS[number % 4]
        together = kind == "parallelizable" and rng.random() < parallel
        queries = [["population of {one}", "population of {two}"]]
        if not together:
            queries = [["population of {one}"], ["population of {two}"]][: turns - 1]
        right = rng.random() < chance + easier + 0.1 * (kind == "single")
        lines.append(record(number, kind, bool(right), queries if turns > 1 else [], rng))
    return lines


def write_run(directory: Path, count: int = 120, steps: int = 30, draws: int = 200) -> Path:
    """A whole run directory: rows, sampled rows, training metrics and the summary."""
    summary: dict[str, Any] = {
        "seconds": 1043.0,
        "peak_rss_bytes": 4.1e9,
        "retrieval_top3": 0.957,
        "warm_start_checks": {"well_formed": 0.97, "copy_unseen": 0.96, "compare_in_context": 0.88},
        "rows": {},
    }
    for row in ROWS:
        greedy, sampled = records(row, count), records(row, count, easier=-0.1, seed=1)
        for name, lines in ((row, greedy), (row + SAMPLED, sampled)):
            path = rows_file(directory, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        summary["rows"][row] = row_summary(
            summarize(greedy, draws=draws), summarize(sampled, draws=draws)
        )
    rng = np.random.default_rng(5)
    for at, row in enumerate(("em_reward", "parallel_search", "gated")):
        (directory / row).mkdir()
        with (directory / row / "metrics.jsonl").open("w", encoding="utf-8") as file:
            for step in range(1, steps + 1):
                share = step / steps
                metrics = {
                    "step": step,
                    "reward": 0.4 + 0.4 * at * share + 0.05 * rng.normal(),
                    "em": 0.45 + 0.25 * share + 0.05 * rng.normal(),
                    "turns": 2.8 - 0.5 * at * share + 0.1 * rng.normal(),
                    "search_rate": min(1.0, 0.8 + share),
                    "kinds": {"parallelizable": {"decomposed": min(1.0, 0.3 + 0.35 * at * share)}},
                    "tokens_per_second": 4000 + 100 * rng.normal(),
                }
                file.write(json.dumps(metrics) + "\n")
        with (directory / row / "episodes.jsonl").open("w", encoding="utf-8") as file:
            for step in range(1, steps + 1):
                for at, line in enumerate(records("gated", 4, seed=step)):
                    made = {"step": step, "reward": 0.1 * at, "advantage": at - 1.5, **line}
                    file.write(json.dumps(made) + "\n")
    (directory / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return directory
