"""`make demo`: the whole ring on real facts, from the packaged policy to a table and a page.

    runs/demo/<row>/          a training run: checkpoints, metrics, configuration
    runs/demo/rows/           a JSONL line a question and row
    runs/demo/summary.json    what the table shows
    runs/demo/report.html     curves, tables and episodes

A second run, or one after Ctrl-C, takes up what is there: index, checkpoints and lines.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from psearch_jax.assembly import (
    Policy,
    keep_compiled_programs,
    open_backend,
    open_engine,
    open_policy,
)
from psearch_jax.config import Config, SamplingConfig
from psearch_jax.display import Display
from psearch_jax.evaluation.baselines import closed_book_prompts, rag_prompts, without_search
from psearch_jax.evaluation.evaluate import evaluate, parameters_fingerprint
from psearch_jax.evaluation.report import write_report
from psearch_jax.evaluation.results import SAMPLED, row_summary, rows_file, write_summary
from psearch_jax.metrics_log import MetricsLog, read_lines
from psearch_jax.models.weights import save_hf_directory
from psearch_jax.questions.question import Question
from psearch_jax.questions.sources import load_questions
from psearch_jax.retrieval.searcher import NoSearcher, SearchBackend, recall_at_k
from psearch_jax.rollout.engine import Engine
from psearch_jax.rollout.environment import SearchEnvironment
from psearch_jax.run_record import save_run_record
from psearch_jax.trainer import Trainer

#: Trained rows and their rewards.
REWARDS = {"em_reward": "exact_match", "parallel_search": "parallel_search", "gated": "gated"}
WARM_START = "warm_start"


def peak_memory() -> int:
    """The largest resident size of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def retrieval_recall(backend: SearchBackend, questions: Sequence[Question], k: int = 3) -> float:
    """The share of scripted sub-queries whose needed passage is among the best k; each distinct one counts once."""
    needed: dict[str, str] = {}
    for question in questions:
        hops = zip(question.metadata["queries"], question.metadata["needs"], strict=True)
        for queries, needs in hops:
            needed.update(zip(queries, needs, strict=True))
    return recall_at_k(backend, list(needed), [{passage} for passage in needed.values()], k)


def warm_start_checks(
    records: Sequence[Mapping[str, Any]], questions: Sequence[Question]
) -> dict[str, float]:
    """What the warm start must be able to do, read from its greedy episodes.

    well_formed: episodes in the protocol's form. copy_unseen: first-turn sub-queries about unseen entities that name
    them to the letter. compare_in_context: right answers to comparisons whose needed passages were all retrieved.
    """
    by_id = {question.id: question for question in questions}
    copied: list[bool] = []
    compared: list[bool] = []
    for record in records:
        meta = by_id[record["id"]].metadata
        results = record["results"]
        if meta["unseen"] and results:
            copied += [query in meta["queries"][0] for query in results[0]["queries"]]
        shown = {p["id"] for turn in results for found in turn["passages"] for p in found}
        needed = {need for hop in meta["needs"] for need in hop}
        if record["kind"] in ("parallelizable", "mixed") and needed <= shown:
            compared.append(bool(record["em"]))
    return {
        "well_formed": _mean([bool(record["well_formed"]) for record in records]),
        "copy_unseen": _mean(copied),
        "compare_in_context": _mean(compared),
    }


def _mean(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else 0.0


class Demo:
    """The steps of the demo over one engine, so that nothing is compiled twice."""

    def __init__(self, config: Config, display: Display) -> None:
        self.config, self.display = config, display
        self.directory = Path(config.run_directory)
        display.phase("writing the world and opening the policy")
        self.policy: Policy = open_policy(config.policy)
        self.questions = load_questions(config.data, config.evaluation.split)
        if config.evaluation.limit:
            self.questions = self.questions[: config.evaluation.limit]
        self.training = load_questions(config.data, "train")
        display.phase("building the index", 1)
        self.backend = open_backend(config.retrieval, display.update)
        self.engine: Engine = open_engine(config, self.policy, self.backend)
        display.phase("compiling")
        self.engine.warm_up(self.policy.params)
        self.rows: dict[str, dict[str, Any]] = {}

    def score(
        self,
        row: str,
        params: Any,
        *,
        sampled: bool = False,
        **options: Any,
    ) -> None:
        """Evaluate a row greedily, and at temperature 1 if asked for."""
        settings = self.config.evaluation
        modes = [(row, SamplingConfig(temperature=settings.temperature))]
        if sampled:
            modes.append((row + SAMPLED, self.config.sampling))
        results = []
        for name, sampling in modes:
            self.display.phase(f"evaluating {name}", len(self.questions))
            results.append(
                evaluate(
                    self.engine,
                    params,
                    self.questions,
                    sampling=sampling,
                    run_directory=self.directory,
                    name=name,
                    policy=parameters_fingerprint(params),
                    seed=settings.seed,
                    draws=settings.bootstrap,
                    stale="replace",
                    on_progress=self.display.update,
                    **options,
                )
            )
        self.rows[row] = row_summary(*results)

    def baselines(self) -> None:
        """The rows that are not trained here."""
        params, protocol = self.policy.params, self.engine.protocol
        self.score(WARM_START, params, sampled=True)
        short = without_search(protocol)
        self.score(
            "closed_book",
            params,
            protocol=short,
            prompts=lambda questions: closed_book_prompts(
                protocol, questions, self.policy.tokenizer
            ),
        )
        self.score(
            "rag",
            params,
            protocol=short,
            prompts=lambda questions: rag_prompts(self.engine, questions),
        )
        searching = self.engine.environment
        self.engine.environment = SearchEnvironment(backend=NoSearcher(), retries=0)
        try:
            self.score("index_off", params)
        finally:
            self.engine.environment = searching

    def train(self, row: str, reward: str) -> Any:
        """One GRPO run; returns its parameters."""
        directory = self.directory / row
        config = replace(
            self.config,
            run_directory=str(directory),
            reward=replace(self.config.reward, name=reward),
        )
        save_run_record(config, directory)
        trainer = Trainer(config, self.engine, self.policy.params, self.training)
        resumed = trainer.resume()
        steps = config.trainer.steps
        with MetricsLog(
            directory,
            resumed_step=trainer.done if resumed else None,
            tracking=self.config.tracking,
        ) as log:

            def on_step(step: int, metrics: Mapping[str, Any]) -> None:
                log.write(step, metrics)
                self.display.step(row, step, steps, metrics)

            trainer.run(on_step)
        save_hf_directory(
            directory / "policy",
            self.policy.config,
            trainer.params,
            tokenizer=self.policy.tokenizer,
            generation=self.policy.generation,
        )
        return trainer.params

    def summary(self, seconds: float) -> dict[str, Any]:
        """What `summary.json` holds."""
        records = read_lines(rows_file(self.directory, WARM_START))
        return {
            "seconds": round(seconds, 1),
            "peak_rss_bytes": peak_memory(),
            "questions": len(self.questions),
            "passages": self.passages,
            "seed": self.config.trainer.seed,
            "rows": self.rows,
            "retrieval_top3": retrieval_recall(self.backend, self.questions),
            "warm_start_checks": warm_start_checks(records, self.questions),
        }

    @property
    def passages(self) -> int:
        """How many passages the index holds."""
        return len(self.backend.index) if hasattr(self.backend, "index") else 0


def run(
    config: Config,
    *,
    quiet: bool = False,
    trained_only: bool = False,
    rewards: Mapping[str, str] = REWARDS,
) -> dict[str, Any]:
    """Run the demo and write `summary.json`, the rows and the report; returns the summary.

    `quiet` sends the display to the standard error stream as plain lines. `trained_only` leaves out the rows that do
    not depend on the seed of the training. `rewards`: trained row → its reward.
    """
    began = time.monotonic()
    keep_compiled_programs(config)
    save_run_record(config, config.run_directory)
    with Display(stream=sys.stderr, live=False) if quiet else Display() as display:
        demo = Demo(config, display)
        if trained_only:
            demo.score(WARM_START, demo.policy.params, sampled=True)
        else:
            demo.baselines()
        for row, reward in rewards.items():
            demo.score(row, demo.train(row, reward), sampled=True)
        summary = demo.summary(time.monotonic() - began)
        write_summary(config.run_directory, summary)
        display.phase("writing the report")
        page = write_report(config.run_directory)
        display.table(summary)
        display.note(f"report: {page}")
        display.note('try: .venv/bin/psearch ask "Which city has more inhabitants, Lyon or Turin?"')
    return summary
