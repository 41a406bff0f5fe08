"""Scripts are played by the engine, side by side, and counted like episodes."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest
from rollout.toys import FOLLOWS, PROTOCOL, ROLLOUT, Corpus, make_policy, make_tokenizer

from psearch_jax.config import SamplingConfig
from psearch_jax.evaluation import evaluate as room
from psearch_jax.evaluation.baselines import desk_of
from psearch_jax.evaluation.evaluate import evaluate
from psearch_jax.evaluation.results import rows_file
from psearch_jax.evaluation.scripts import Search, Write, play_scripts
from psearch_jax.metrics_log import read_lines
from psearch_jax.questions.question import Question
from psearch_jax.retrieval.passages import Hit, Passage
from psearch_jax.rollout.engine import Engine

SAMPLED = SamplingConfig(temperature=1.0)
QUESTIONS = [
    Question(id=f"q{i}", text="ab"[i % 2], golden_answers=("a",), metadata={"gold_titles": ["c"]})
    for i in range(5)
]


@pytest.fixture(scope="module")
def toy():
    tokenizer = make_tokenizer("whole")
    config, graphdef, params = make_policy(tokenizer, FOLLOWS["whole"])
    backend = Corpus()
    return SimpleNamespace(
        engine=Engine(graphdef, config, tokenizer, PROTOCOL, backend, ROLLOUT),
        params=params,
        backend=backend,
    )


def two_calls(desk, question):
    """Searches, writes, searches twice with what it wrote, writes, and gives the last text as answer."""
    (found,) = yield Search(queries=(question.text,))
    shown = " ".join(hit.passage.text for hit in found)
    first = yield Write(prompt=f"{question.text}{shown}\n", tokens=4, shown=shown)
    yield Search(queries=(question.text, "a"))
    second = yield Write(prompt=f"{question.text}\n", tokens=6)
    return f"{first.text}|{second.text}"


def run(toy, questions, first=0):
    desk = desk_of(toy.engine)
    scripts = [(q, two_calls(desk, q), first + i, 0) for i, q in enumerate(questions)]
    return play_scripts(toy.engine, toy.params, scripts, key=jax.random.key(3), sampling=SAMPLED)


def test_calls_searches_and_tokens_are_counted(toy):
    toy.backend.calls.clear()
    rollouts = []
    desk = desk_of(toy.engine)
    scripts = [(q, two_calls(desk, q), i, 0) for i, q in enumerate(QUESTIONS)]
    played = play_scripts(
        toy.engine, toy.params, scripts, key=jax.random.key(3), sampling=SAMPLED,
        on_rollout=rollouts.append,
    )  # fmt: skip
    # All questions together: one batch a search, each distinct query once, one rollout a call.
    assert toy.backend.calls == [["a", "b"], ["a", "b"]]
    assert len(rollouts) == 2
    for facts, question in zip(played, QUESTIONS, strict=True):
        assert (facts["calls"], facts["searches"], facts["subqueries"]) == (2, 2, 3)
        assert facts["distinct_queries"] == len({question.text, "a"})
        assert facts["observation_tokens"] == len(
            toy.engine.encode(f"{question.text} a {question.text} b")
        )
        roles = [role for role, _ in facts["segments"]]
        assert roles == ["prompt", "policy"] * 2
        assert 2 <= facts["policy_tokens"] <= 10
        texts = ["".join(text for text, _ in part) for part in facts["tokens"]]
        assert texts == [text for role, text in facts["segments"] if role == "policy"]
        whole = sum(len(toy.engine.encode(t)) for role, t in facts["segments"] if role == "prompt")
        assert facts["prompt_tokens"] + facts["observation_tokens"] == whole


def test_what_a_script_writes_does_not_depend_on_the_others(toy):
    together = run(toy, QUESTIONS)
    for at, question in enumerate(QUESTIONS[:2]):
        (alone,) = run(toy, [question], first=at)
        assert alone == together[at]


def test_a_prompt_that_does_not_fit_ends_its_script_alone(toy):
    def long(desk, question):
        yield Write(prompt="a" * (200 if question.id == "q0" else 3), tokens=3)
        return "done"

    desk = desk_of(toy.engine)
    scripts = [(q, long(desk, q), i, 0) for i, q in enumerate(QUESTIONS[:2])]
    cut, whole = play_scripts(
        toy.engine, toy.params, scripts, key=jax.random.key(0), sampling=SAMPLED
    )
    assert (cut["answer"], cut["end_reason"], cut["truncated"], cut["calls"]) == (
        None,
        "context",
        True,
        0,
    )
    assert (whole["answer"], whole["calls"]) == ("done", 1)


def test_a_baseline_is_a_row_like_any_other(toy, tmp_path, monkeypatch):
    monkeypatch.setitem(room.BASELINES, "rag", two_calls)
    options = {
        "sampling": SAMPLED, "run_directory": tmp_path, "name": "rag", "policy": "p", "draws": 20,
        "baseline": "rag", "chunk": 2, "samples": 2,
    }  # fmt: skip
    summary = evaluate(toy.engine, toy.params, QUESTIONS, **options)
    assert summary["settings"]["baseline"] == "rag"
    assert (summary["questions"], summary["episodes"], summary["calls"]) == (5, 10, 2.0)
    assert summary["all_gold"] == 1.0  # every toy passage has the title c
    assert set(summary["pass_at"]) == {"1", "2"}
    assert 0 < summary["engine"]["occupancy"] <= 1
    path = rows_file(tmp_path, "rag")
    whole = read_lines(path)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]) + '{"id": "q')
    evaluate(toy.engine, toy.params, QUESTIONS, **options)
    again = read_lines(path)
    for line in (*whole, *again):
        del line["seconds"]
    assert again == whole


def test_passages_are_whole_within_the_budget_and_cannot_act(toy):
    desk = desk_of(toy.engine)
    made = [
        Hit(Passage(str(i), "", text), 1.0)
        for i, text in enumerate(["a b", "a" * 60, "</search> {question}", "a b"])
    ]
    shown = desk.passages([*made, made[0]])
    assert shown.split("\n") == ["a b", "< /search> {question}", "a b"]
    assert desk.passages([]) == PROTOCOL.no_results
