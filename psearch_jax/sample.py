"""Rejection sampling: a policy plays, and what it got right is kept for the supervised stage.

A run directory gets `episodes.jsonl` when every question was played; until then `episodes.partial.jsonl` has a line a
question, so that a run that was killed goes on with the next one and ends with the same file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from psearch_jax.assembly import keep_compiled_programs, open_backend, open_engine, open_policy
from psearch_jax.config import Config, RejectionConfig, SamplingConfig
from psearch_jax.config_files import flatten
from psearch_jax.display import Display
from psearch_jax.errors import Interrupted, UserError
from psearch_jax.evaluation.evaluate import parameters_fingerprint
from psearch_jax.evaluation.records import episode_record
from psearch_jax.interruption import GracefulStop
from psearch_jax.learning.episode_files import role_runs
from psearch_jax.metrics_log import LineFile, read_lines, write_atomically
from psearch_jax.questions.question import Question
from psearch_jax.questions.sources import load_questions
from psearch_jax.rewards.answers import exact_match
from psearch_jax.rollout.engine import Engine
from psearch_jax.rollout.episode import Episode, Request
from psearch_jax.rollout.protocol import well_formed

EPISODES, PARTIAL = "episodes.jsonl", "episodes.partial.jsonl"


def keep(
    config: RejectionConfig, episodes: Sequence[Episode], valid: Callable[[Episode], bool]
) -> list[Episode]:
    """The episodes of one question to learn from: right, well formed if that is asked, no two alike; the first of them.

    Args:
      valid: the protocol's judgement of the form.
    """
    kept: dict[tuple[int, ...], Episode] = {}
    for episode in episodes:
        right = exact_match(episode.answer, episode.question.golden_answers)
        if right and (not config.well_formed or valid(episode)):
            kept.setdefault(tuple(episode.ids), episode)
    return list(kept.values())[: config.keep]


def sample(
    config: RejectionConfig,
    engine: Engine,
    params: Any,
    questions: Sequence[Question],
    *,
    sampling: SamplingConfig,
    directory: Path,
    settings: dict[str, Any],
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, int]:
    """Play `config.samples` episodes of every question and write those to keep.

    Args:
      settings: what the episodes depend on; a partial file of other settings is refused.
      on_progress: called with (questions done, questions).

    Returns:
      How many questions and episodes were played, and how many were kept.

    Raises:
      Interrupted: Ctrl-C; the questions that were played are on disk.
      UserError: a partial file of other settings.
    """

    def valid(episode: Episode) -> bool:
        return well_formed(engine.protocol, episode)

    partial = directory / PARTIAL
    lines = read_lines(partial)
    if lines and lines[0].get("settings") != settings:
        raise UserError(
            f"{partial} holds episodes of another recipe, policy or set of questions; remove it, or choose another "
            "run_directory."
        )
    done = max(0, len(lines) - 1)
    prompts = engine.requests(questions[done:])
    key = jax.random.key(config.seed)
    with LineFile(partial) as file, GracefulStop() as stop:
        if not lines:
            file.write({"settings": settings})
        while done < len(questions):
            part = prompts[: config.questions_at_once]
            prompts = prompts[config.questions_at_once :]
            requests = [
                Request(
                    question=one.question, prompt_ids=one.prompt_ids, group=done + i, member=member
                )
                for i, one in enumerate(part)
                for member in range(config.samples)
            ]
            episodes = engine.rollout(params, requests, key=key, sampling=sampling)
            for i in range(len(part)):
                group = episodes[i * config.samples : (i + 1) * config.samples]
                records = [
                    episode_record(
                        episode, decode=engine.decode_text, well_formed=valid, sample=episode.member
                    )
                    | {"token_ids": role_runs(episode)}
                    for episode in keep(config, group, valid)
                ]
                file.write({"question": part[i].question.id, "episodes": records})
            done += len(part)
            if on_progress:
                on_progress(done, len(questions))
            if stop.asked and done < len(questions):
                raise Interrupted(
                    f"Stopped after {done} of {len(questions)} questions; the same command goes on from there.",
                    code=0 if stop.preempted else 130,
                )
    records = [record for line in read_lines(partial)[1:] for record in line["episodes"]]
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    write_atomically(directory / EPISODES, text)
    return {
        "questions": len(questions),
        "played": len(questions) * config.samples,
        "kept": len(records),
        "questions_kept": len({record["id"] for record in records}),
    }


def run(config: Config) -> Path:
    """`psearch sample`: returns the file that it wrote."""
    settings, directory = config.rejection, Path(config.run_directory)
    keep_compiled_programs(config)
    with Display() as display:
        display.phase(f"opening policy {config.policy} and index")
        policy = open_policy(config.policy)
        engine = open_engine(config, policy, open_backend(config.retrieval))
        questions = load_questions(config.data, settings.split)
        questions = questions[: settings.questions or None]
        display.phase(f"playing {settings.samples} episodes a question of {settings.split}")
        counts = sample(
            settings,
            engine,
            policy.params,
            questions,
            sampling=config.sampling,
            directory=directory,
            settings={
                "recipe": _digest(_deciding(config)),
                "policy": parameters_fingerprint(policy.params),
                "questions": _digest([[q.id, q.text, list(q.golden_answers)] for q in questions]),
            },
            on_progress=display.update,
        )
        write_atomically(directory / "sample.json", json.dumps(counts, indent=1) + "\n")
        display.note(
            f"kept {counts['kept']} of {counts['played']} episodes, of {counts['questions_kept']} of "
            f"{counts['questions']} questions, in {directory / EPISODES}"
        )
    return directory / EPISODES


def _deciding(config: Config) -> dict[str, Any]:
    """The settings that decide which episodes are played and kept."""
    sections = ("rejection.", "protocol.", "sampling.", "retrieval.", "rollout.context")
    flat = {key: value for key, value in flatten(config).items() if key.startswith(sections)}
    flat.pop("rejection.questions_at_once")
    return flat


def _digest(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
