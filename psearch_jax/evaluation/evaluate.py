"""Evaluation: every question is played and scored, a JSONL line each, and counted (law 12).

Layout under the run directory: `rows/NAME.jsonl` holds the lines, `rows/NAME.settings.json` says what was
played. Both are enough to go on after a kill: lines that exist are not played again, and lines of another
policy, another decoding mode or other questions are refused instead of being mixed in.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json as json_text
import os
import sys
import time
from collections.abc import Callable, Sequence
from io import TextIOBase
from pathlib import Path
from typing import Any, Literal, cast

import jax
import numpy as np

from psearch_jax.assembly import keep_compiled_programs, open_backend, open_engine, open_policy
from psearch_jax.config import Config, ProtocolConfig, SamplingConfig
from psearch_jax.config_files import to_yaml
from psearch_jax.display import Display
from psearch_jax.errors import UserError
from psearch_jax.evaluation.baselines import BASELINES, policy_prompts
from psearch_jax.evaluation.metrics import summarize
from psearch_jax.evaluation.players import EngineUse, Part, episode_player, script_player
from psearch_jax.evaluation.records import scored
from psearch_jax.evaluation.results import SAMPLED, add_row, counts_line, rows_file
from psearch_jax.metrics_log import LineFile, read_lines, write_atomically
from psearch_jax.questions.question import Question
from psearch_jax.questions.sources import load
from psearch_jax.rewards.judge import AnswerJudge, Case, Judge, Verdict
from psearch_jax.rollout.engine import Engine

_JUDGED = 32  # answers that a judge is asked about at a time


def parameters_fingerprint(params: Any) -> str:
    """Sixteen hexadecimal digits that identify a pytree of parameters by its paths, shapes and bytes.

    Leaves are fetched one at a time.
    """
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        value = np.asarray(jax.device_get(leaf))
        digest.update(f"{jax.tree_util.keystr(path)}{value.shape}{value.dtype}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()[:16]


def evaluate(
    engine: Engine,
    params: Any,
    questions: Sequence[Question],
    *,
    sampling: SamplingConfig,
    run_directory: str | os.PathLike[str],
    name: str,
    policy: str,
    protocol: ProtocolConfig | None = None,
    prompts: Callable[[Sequence[Question]], list[str]] | None = None,
    baseline: str = "",
    judge: AnswerJudge | None = None,
    samples: int = 1,
    seed: int = 0,
    draws: int = 2000,
    chunk: int = 0,
    stale: Literal["refuse", "replace"] = "refuse",
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Plays and scores all questions; resumes what an earlier call left.

    Args:
      engine: plays the episodes.
      params: the policy's parameters.
      questions: the whole split; ids must be unique.
      sampling: temperature 0 is greedy. The mode becomes part of the result.
      run_directory: lines go to its `rows/NAME.jsonl`.
      name: of the row; by convention sampled rows end in `.sampled`.
      policy: identity of the parameters, e.g. `parameters_fingerprint(params)`.
      protocol: of the episodes, if not the engine's; prompts that give the answer turn alone use
        `without_search(engine.protocol)`.
      prompts: questions to prompt texts; the policy's own prompt if None.
      baseline: a script of `BASELINES` that is played instead of the policy's episode; it has its own prompts.
      judge: asked about every answer; its score and whether it failed stand beside the others.
      samples: episodes a question; more than one makes sense when sampling.
      seed: of the sampling key and of the bootstrap. An episode depends on its question's place and its
        sample number only, so a resumed evaluation equals an unbroken one.
      draws: bootstrap draws.
      chunk: episodes in one rollout. 0: sixteen for every slot, since the slots run empty at its end. Each has its
        line as soon as it has ended, so that a kill loses those that were being played.
      stale: what to do with lines that were played under other settings.
      on_progress: called with (episodes done, episodes in all).

    Returns:
      `metrics.summarize` of all lines with the settings under "settings", the "mode", and under "engine" figures of
      what was played: occupancy of the slots, seconds, and the share of them outside the engine.

    Raises:
      UserError: no or duplicate questions, a damaged results file, or stale lines.
    """
    _check_questions(questions)
    protocol = protocol or engine.protocol
    settings = {
        "mode": "greedy" if sampling.temperature == 0 else "sampled",
        "sampling": dataclasses.asdict(sampling),
        "samples": samples,
        "seed": seed,
        "policy": policy,
        "protocol": _digest(dataclasses.asdict(protocol)),
        "questions": _digest([[q.id, q.text, list(q.golden_answers)] for q in questions]),
    }
    if baseline:
        settings["baseline"] = baseline
    else:
        texts = (
            prompts(questions) if prompts else policy_prompts(protocol, questions, engine.tokenizer)
        )
        settings["prompts"] = _digest(texts)
    if judge is not None:
        settings["judge"] = judge.config.model if isinstance(judge, Judge) else type(judge).__name__
    path = rows_file(run_directory, name)
    _begin(path, settings, stale)
    key, use = jax.random.key(seed), EngineUse(path)
    if baseline:
        play = script_player(engine, params, questions, BASELINES[baseline], key, sampling, use)
    else:
        play = episode_player(engine, params, questions, texts, key, sampling, protocol, use)

    known = {question.id for question in questions}
    done = {(line["id"], line["sample"]) for line in read_lines(path) if line["id"] in known}
    todo = [
        (group, member)
        for group, question in enumerate(questions)
        for member in range(samples)
        if (question.id, member) not in done
    ]
    total = len(questions) * samples
    writer = _Writer(questions, total - len(todo), total, judge, use, on_progress)
    size = chunk or 16 * engine.rollout_config.slots
    with LineFile(path) as lines:
        for start in range(0, len(todo), size):
            writer.begin(todo[start : start + size], lines)
            play(writer.part, writer.ended)
            writer.flush()
    use.keep()

    records = _in_order(path, questions)
    found = {(record["id"], record["sample"]) for record in records}
    if len(records) != total or len(found) != total:
        raise UserError(
            f"{path} holds {len(records)} lines for {total} episodes; remove it and evaluate again."
        )
    return {
        "mode": settings["mode"],
        **summarize(records, draws=draws, seed=seed),
        "settings": settings,
        "engine": use.figures(),
    }


class _Writer:
    """Scores what has ended and writes its line at once."""

    def __init__(
        self,
        questions: Sequence[Question],
        done: int,
        total: int,
        judge: AnswerJudge | None,
        use: EngineUse,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self.questions, self.judge, self.use = questions, judge, use
        self.done, self.total, self.on_progress = done, total, on_progress
        self.part: Part = ()
        self.waiting: list[dict[str, Any]] = []
        self.last = time.monotonic()
        if on_progress:
            on_progress(done, total)

    def begin(self, part: Part, lines: LineFile) -> None:
        """A part is played next."""
        self.part, self.lines = part, lines

    def ended(self, place: int, facts: dict[str, Any]) -> None:
        """The facts of an episode of the part. Its seconds are those since the line before it, so that they add up
        to those of the whole evaluation, however many are played at one time."""
        group, member = self.part[place]
        now = time.monotonic()
        seconds, self.last = round(now - self.last, 4), now
        line = scored(self.questions[group], facts, sample=member)
        self.waiting.append({**line, "seconds": seconds})
        if self.judge is None or len(self.waiting) >= _JUDGED:
            self.flush()

    def flush(self) -> None:
        """Write the lines that wait for the judge."""
        records = self.waiting
        if self.judge is not None:
            records = judged(self.judge, records)
        self.lines.write(*records)
        self.done += len(records)
        self.waiting = []
        if records and self.on_progress:
            self.on_progress(self.done, self.total)


def _in_order(path: Path, questions: Sequence[Question]) -> list[dict[str, Any]]:
    """The lines of a finished results file in the order of the questions, in which they are left there: so a file does
    not show whether it was written in one go."""
    records = read_lines(path)
    places = {question.id: place for place, question in enumerate(questions)}

    def place_of(record: dict[str, Any]) -> tuple[int, int]:
        return places.get(record["id"], len(places)), record["sample"]

    ordered = sorted(records, key=place_of)
    if ordered != records:
        text = "".join(json_text.dumps(r, ensure_ascii=False) + "\n" for r in ordered)
        write_atomically(path, text)
    return ordered


def judged(judge: AnswerJudge, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines with `judge` (what the answer is worth) and `judge_failed`. No answer is worth nothing, unasked."""
    asked = [record for record in records if record["answer"]]
    cases = [
        Case(
            question=record["question"],
            golden_answers=tuple(record["golden_answers"]),
            answer=record["answer"],
        )
        for record in asked
    ]
    verdicts = iter(judge.judge(cases) if cases else [])
    lines = []
    for record in records:
        verdict = next(verdicts) if record["answer"] else Verdict(value=0.0)
        lines.append({**record, "judge": verdict.value, "judge_failed": verdict.failed})
    return lines


def run(config: Config, *, json: bool = False) -> dict[str, Any]:
    """`psearch eval`: scores a policy on the configured split and returns the row's summary.

    The policy is the one that the run directory's training left (`policy/`), else `config.policy`. The row has
    the run directory's name, or the baseline's; `summary.json` there gets it, greedy and sampled rows side by side.
    With `json` the row is printed as one JSON object and everything else goes to the standard error stream.
    """
    directory, settings = Path(config.run_directory), config.evaluation
    trained = directory / "policy"
    source = str(trained) if (trained / "config.json").is_file() else config.policy
    sampling = dataclasses.replace(config.sampling, temperature=settings.temperature)
    row = settings.baseline or directory.resolve().name
    name = row if settings.temperature == 0 else row + SAMPLED
    keep_compiled_programs(config)
    beside = Display(stream=cast(TextIOBase, sys.stderr), live=False) if json else Display()
    with beside as display:
        loaded = load(config.data, settings.split)  # the cheapest to fail comes first
        if loaded.problems:
            display.note(f"{config.data.questions}: {loaded.report()}")
        display.phase(f"opening policy {source} and index")
        policy = open_policy(source)
        engine = open_engine(config, policy, open_backend(config.retrieval))
        display.note(str(engine.sizing))
        display.phase(f"evaluating {name} on {settings.split}")
        summary = evaluate(
            engine,
            policy.params,
            loaded.questions[: settings.limit or None],
            sampling=sampling,
            run_directory=directory,
            name=name,
            policy=parameters_fingerprint(policy.params),
            baseline=settings.baseline,
            judge=Judge(config=config.reward.judge) if settings.judge else None,
            samples=settings.samples,
            seed=settings.seed,
            draws=settings.bootstrap,
            on_progress=display.update,
        )
        summary["reading"] = loaded.counts()
        write_atomically(rows_file(directory, name).with_suffix(".yaml"), to_yaml(config))
        rows = add_row(directory, row, summary)
        display.note(counts_line(name, summary))
        display.table({"rows": {row: rows[row]}})
    if json:
        sys.stdout.write(json_text.dumps({row: rows[row]}, ensure_ascii=False) + "\n")
    return rows[row]


def _check_questions(questions: Sequence[Question]) -> None:
    if not questions:
        raise UserError("there are no questions to evaluate; check the split and its file.")
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise UserError(
                f"question id {question.id!r} occurs twice in the questions to evaluate; make ids "
                "unique."
            )
        seen.add(question.id)


def _digest(value: Any) -> str:
    text = json_text.dumps(value, ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _begin(path: Path, settings: dict[str, Any], stale: str) -> None:
    """Makes sure that the lines at `path`, if any, were played under these settings."""
    beside = path.with_suffix(".settings.json")
    if path.exists():
        try:
            old = json_text.loads(beside.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            old = {}
        if old != settings:
            changed = sorted(key for key in settings if old.get(key) != settings[key])
            if stale == "refuse":
                raise UserError(
                    f"{path} holds results of other settings (different: {', '.join(changed)}); "
                    "remove it or choose another run directory."
                )
            path.unlink()
    write_atomically(beside, json_text.dumps(settings, indent=2) + "\n")
