"""Evaluation: every question is played and scored, a JSONL line each, and counted (law 12).

Layout under the run directory: `rows/NAME.jsonl` holds the lines, `rows/NAME.settings.json` says what was
played. Both are enough to go on after a kill: lines that exist are not played again, and lines of another
policy, another decoding mode or other questions are refused instead of being mixed in.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from psearch_jax.assembly import keep_compiled_programs, open_backend, open_engine, open_policy
from psearch_jax.config import Config, ProtocolConfig, SamplingConfig
from psearch_jax.display import Display
from psearch_jax.errors import UserError
from psearch_jax.evaluation.baselines import policy_prompts
from psearch_jax.evaluation.metrics import episode_record, summarize
from psearch_jax.evaluation.results import SAMPLED, add_row, counts_line, rows_file
from psearch_jax.metrics_log import LineFile, read_lines, write_atomically
from psearch_jax.questions.question import Question
from psearch_jax.questions.world import load_questions
from psearch_jax.rollout.engine import Engine
from psearch_jax.rollout.episode import Episode, Request
from psearch_jax.rollout.protocol import well_formed


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
    samples: int = 1,
    seed: int = 0,
    draws: int = 2000,
    chunk: int = 512,
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
      protocol: of the episodes, if not the engine's; baselines use `without_search(engine.protocol)`.
      prompts: questions to prompt texts; the policy's own prompt if None.
      samples: episodes a question; more than one makes sense when sampling.
      seed: of the sampling key and of the bootstrap. An episode depends on its question's place and its
        sample number only, so a resumed evaluation equals an unbroken one.
      draws: bootstrap draws.
      chunk: episodes between two writes; what a kill loses at most.
      stale: what to do with lines that were played under other settings.
      on_progress: called with (episodes done, episodes in all).

    Returns:
      `metrics.summarize` of all lines with the settings under "settings" and the "mode".

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
    texts = prompts(questions) if prompts else policy_prompts(protocol, questions, engine.tokenizer)
    settings["prompts"] = _digest(texts)
    path = rows_file(run_directory, name)
    _begin(path, settings, stale)

    known = {question.id for question in questions}
    done = {(line["id"], line["sample"]) for line in read_lines(path) if line["id"] in known}
    todo = [
        (group, member)
        for group, question in enumerate(questions)
        for member in range(samples)
        if (question.id, member) not in done
    ]
    total = len(questions) * samples
    if on_progress:
        on_progress(total - len(todo), total)

    def valid(episode: Episode) -> bool:
        return well_formed(protocol, episode)

    key = jax.random.key(seed)
    with LineFile(path) as lines:
        for start in range(0, len(todo), chunk):
            part = todo[start : start + chunk]
            requests = [
                Request(
                    question=questions[group],
                    prompt_ids=engine.encode(texts[group]),
                    group=group,
                    member=member,
                )
                for group, member in part
            ]
            episodes = engine.rollout(
                params, requests, key=key, sampling=sampling, protocol=protocol
            )
            lines.write(
                *(
                    episode_record(
                        episode, decode=engine.decode_text, well_formed=valid, sample=member
                    )
                    for episode, (_, member) in zip(episodes, part, strict=True)
                )
            )
            if on_progress:
                on_progress(total - len(todo) + start + len(part), total)

    records = read_lines(path)
    scored = {(record["id"], record["sample"]) for record in records}
    if len(records) != total or len(scored) != total:
        raise UserError(
            f"{path} holds {len(records)} lines for {total} episodes; remove it and evaluate again."
        )
    return {
        "mode": settings["mode"],
        **summarize(records, draws=draws, seed=seed),
        "settings": settings,
    }


def run(config: Config) -> dict[str, Any]:
    """`psearch eval`: scores a policy on the configured split and returns the row's summary.

    The policy is the one that the run directory's training left (`policy/`), else `config.policy`. The row has
    the run directory's name; `summary.json` there gets it, greedy and sampled rows side by side.
    """
    directory, settings = Path(config.run_directory), config.evaluation
    trained = directory / "policy"
    source = str(trained) if (trained / "config.json").is_file() else config.policy
    sampling = dataclasses.replace(config.sampling, temperature=settings.temperature)
    row = directory.resolve().name
    name = row if settings.temperature == 0 else row + SAMPLED
    keep_compiled_programs(config)
    with Display() as display:
        display.phase(f"opening policy {source} and index")
        policy = open_policy(source)
        engine = open_engine(config, policy, open_backend(config.retrieval))
        questions = load_questions(config.data.questions, settings.split)
        display.phase(f"evaluating {name} on {settings.split}")
        summary = evaluate(
            engine,
            policy.params,
            questions[: settings.limit or None],
            sampling=sampling,
            run_directory=directory,
            name=name,
            policy=parameters_fingerprint(policy.params),
            seed=settings.seed,
            draws=settings.bootstrap,
            on_progress=display.update,
        )
        rows = add_row(directory, row, summary)
        display.note(counts_line(name, summary))
        display.table({"rows": {row: rows[row]}})
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
    text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _begin(path: Path, settings: dict[str, Any], stale: str) -> None:
    """Makes sure that the lines at `path`, if any, were played under these settings."""
    beside = path.with_suffix(".settings.json")
    if path.exists():
        try:
            old = json.loads(beside.read_text(encoding="utf-8"))
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
    write_atomically(beside, json.dumps(settings, indent=2) + "\n")
