"""Evaluation with a real engine and a policy of one page: nothing is lost, doubled or mixed up."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from rollout.toys import FOLLOWS, PROTOCOL, ROLLOUT, Corpus, make_policy, make_tokenizer

from psearch_jax import cli
from psearch_jax.config import DataConfig, SamplingConfig
from psearch_jax.errors import UserError
from psearch_jax.evaluation.baselines import (
    closed_book_prompts,
    policy_prompts,
    rag_prompts,
    without_search,
)
from psearch_jax.evaluation.evaluate import evaluate, parameters_fingerprint
from psearch_jax.evaluation.players import EngineUse
from psearch_jax.evaluation.results import (
    add_row,
    counts_line,
    read_summary,
    row_summary,
    rows_file,
)
from psearch_jax.metrics_log import read_lines
from psearch_jax.questions.question import Question
from psearch_jax.questions.sources import load_questions
from psearch_jax.rollout.engine import Engine
from psearch_jax.rollout.episode import Episode, Turn

GREEDY, SAMPLED = SamplingConfig(temperature=0.0), SamplingConfig(temperature=1.0)
QUESTIONS = [
    Question(
        id=f"q{i}",
        text="abc"[i % 3] * (1 + i % 2),
        golden_answers=("a",),
        kind=("single", "bridge")[i % 2],
    )
    for i in range(7)
]


@pytest.fixture(scope="module")
def toy():
    tokenizer = make_tokenizer("whole")
    config, graphdef, params = make_policy(tokenizer, FOLLOWS["whole"])
    backend = Corpus()
    engine = Engine(graphdef, config, tokenizer, PROTOCOL, backend, ROLLOUT)
    return SimpleNamespace(engine=engine, params=params, backend=backend)


def play(toy, directory, **changes):
    options = {
        "sampling": GREEDY, "run_directory": directory, "name": "row", "policy": "p1",
        "draws": 50, "chunk": 3, "questions": QUESTIONS,
    } | changes  # fmt: skip
    return evaluate(toy.engine, toy.params, **options)


def untimed(text):
    """The lines without the seconds that they took."""
    lines = [json.loads(line) for line in text.splitlines()]
    assert all(line.pop("seconds") > 0 for line in lines)
    return lines


def test_law_12_every_question_is_scored_also_in_the_last_partial_batch(toy, tmp_path):
    progress = []
    summary = play(toy, tmp_path, on_progress=lambda done, total: progress.append((done, total)))
    lines = read_lines(rows_file(tmp_path, "row"))
    assert [line["id"] for line in lines] == [question.id for question in QUESTIONS]
    assert summary["questions"] == summary["episodes"] == 7
    assert progress == [(done, 7) for done in range(8)]
    assert summary["mode"] == "greedy"
    assert summary["settings"]["sampling"]["temperature"] == 0.0
    low, high = summary["intervals"]["em"]
    assert counts_line("row", summary) == (
        f"row (greedy): {summary['right']} of 7 episodes over 7 questions right, "
        f"EM {summary['em']:.3f} [{low:.3f}, {high:.3f}], {summary['turns']:.2f} turns, "
        f"{summary['searches']:.2f} searches"
    )


@pytest.mark.parametrize("kept", [0, 2, 5])
def test_law_13_a_killed_evaluation_ends_with_the_same_lines(toy, tmp_path, kept):
    """Sampled, two episodes a question, cut in the middle of a line."""
    options = {"sampling": SAMPLED, "samples": 2, "seed": 5}
    whole = play(toy, tmp_path / "whole", **options)
    path = rows_file(tmp_path / "cut", "row")
    play(toy, tmp_path / "cut", **options)
    expected = path.read_text()
    lines = expected.splitlines(keepends=True)
    path.write_text("".join(lines[:kept]) + lines[kept][:40])
    again = play(toy, tmp_path / "cut", **options)
    whole.pop("engine"), again.pop("engine")  # seconds differ
    assert again == whole
    assert untimed(path.read_text()) == untimed(expected)
    assert whole["questions"] == 7
    assert whole["episodes"] == 14
    first, second = (line["segments"] for line in read_lines(path)[:2])
    assert first != second


def test_a_finished_evaluation_plays_nothing(toy, tmp_path, monkeypatch):
    first = play(toy, tmp_path)
    monkeypatch.setattr(toy.engine, "rollout", lambda *a, **k: pytest.fail("played again"))
    assert first["engine"]["rollouts"] == 3 and 0 < first["engine"]["occupancy"] <= 1
    assert play(toy, tmp_path) == first  # the engine's figures of then, too


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"policy": "p2"}, "policy"),
        ({"sampling": SAMPLED}, "mode, sampling"),
        ({"questions": QUESTIONS[:5]}, "prompts, questions"),
        ({"protocol": without_search(PROTOCOL)}, "protocol"),
        ({"baseline": "rag"}, "baseline"),
    ],
)
def test_lines_of_other_settings_are_not_mixed_in(toy, tmp_path, change, named):
    play(toy, tmp_path)
    with pytest.raises(UserError, match=rf"different: {named}\)"):
        play(toy, tmp_path, **change)
    replaced = play(toy, tmp_path, stale="replace", **change)
    assert replaced["questions"] == len(read_lines(rows_file(tmp_path, "row")))


def test_law_11_duplicate_and_missing_questions_are_named(toy, tmp_path):
    with pytest.raises(UserError, match="'q1' occurs twice"):
        play(toy, tmp_path, questions=[*QUESTIONS, QUESTIONS[1]])
    with pytest.raises(UserError, match="no questions"):
        play(toy, tmp_path, questions=[])


def test_a_row_joins_greedy_and_sampled(toy, tmp_path):
    greedy = play(toy, tmp_path)
    sampled = play(toy, tmp_path, name="row.sampled", sampling=SAMPLED)
    row = row_summary(greedy, sampled)
    assert (row["em"], row["em_sampled"]) == (greedy["em"], sampled["em"])
    assert row["intervals"]["em_sampled"] == sampled["intervals"]["em"]
    assert "em_sampled" not in greedy["intervals"]
    json.dumps(row, allow_nan=False)


@pytest.mark.parametrize("order", [("greedy", "sampled"), ("sampled", "greedy")])
def test_summary_json_joins_both_modes_in_any_order(tmp_path, order):
    modes = {
        mode: {
            "mode": mode,
            "em": em,
            "turns": 2.0,
            "questions": 4,
            "intervals": {"em": [0.0, em], "turns": [2.0, 2.0]},
        }
        for mode, em in (("greedy", 0.5), ("sampled", 0.25))
    }
    for mode in order:
        add_row(tmp_path, "gated", modes[mode])
    assert read_summary(tmp_path)["rows"]["gated"] == row_summary(modes["greedy"], modes["sampled"])


def test_fingerprints_tell_parameters_apart(toy):
    other = make_policy(make_tokenizer("whole"), FOLLOWS["whole"], seed=1)[2]
    again = make_policy(make_tokenizer("whole"), FOLLOWS["whole"])[2]
    assert parameters_fingerprint(toy.params) == parameters_fingerprint(again)
    assert parameters_fingerprint(toy.params) != parameters_fingerprint(other)


def test_baseline_prompts(toy):
    """Exact texts; the retrieved ones come from one search of all questions and look like any observation."""
    two = [QUESTIONS[0], QUESTIONS[1]]
    assert policy_prompts(PROTOCOL, two) == ["a\n", "bb\n"]
    assert closed_book_prompts(PROTOCOL, two) == [
        "a\n<think>recall</think>",
        "bb\n<think>recall</think>",
    ]
    toy.backend.calls.clear()
    assert rag_prompts(toy.engine, two) == [
        "a\n<information>1:a a\na b\n</information>\n",
        "bb\n<information>1:bb a\nbb b\n</information>\n",
    ]
    assert toy.backend.calls == [["a", "bb"]]


def test_law_02_baselines_search_nothing_and_answer_for_themselves(toy, tmp_path):
    """Passages in the prompt are PROMPT tokens: they make no search turn, no sub-query and no answer."""
    toy.backend.calls.clear()
    summary = play(
        toy,
        tmp_path,
        protocol=without_search(PROTOCOL),
        prompts=lambda questions: rag_prompts(toy.engine, questions),
    )
    assert (summary["searches"], summary["subqueries"], summary["turns"]) == (0.0, 0.0, 1.0)
    assert summary["observation_tokens"] == 0.0
    assert len(toy.backend.calls) == 1
    roles = {
        role for line in read_lines(rows_file(tmp_path, "row")) for role, _ in line["segments"]
    }
    assert roles == {"prompt", "policy"}


def test_the_command_scores_a_file_with_a_bad_row_and_goes_on_after_a_cut(tmp_path, capsys):
    """`psearch eval --json` with the packaged policy and no index: everything but what it finds."""
    rows = [
        {
            "id": i,
            "question": f"Which city has more inhabitants, {a} or Turin?",
            "golden_answers": [a],
        }
        for i, a in enumerate(("Lyon", "Porto", "Graz"))
    ]
    path = tmp_path / "few.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"question": "No answer?"}]))
    command = [
        "eval", f"run_directory={tmp_path / 'run'}", f"data.questions={path}", "--json",
        "retrieval.kind=none", "rollout.slots=2", "rollout.context=128", "rollout.decode_block=8",
        "rollout.window_buckets=[128]", "rollout.append_buckets=[32]", "protocol.observation_tokens=60",
        "protocol.max_search_turns=1", "protocol.turn_tokens=24", "evaluation.bootstrap=50", "compile_cache=",
    ]  # fmt: skip
    assert cli.main(command) == 0
    out, err = capsys.readouterr()
    row = json.loads(out)["run"]
    assert (row["questions"], row["mode"]) == (3, "greedy")
    assert row["reading"]["rows_left_out"] == 1
    assert "few.jsonl, line 4" in row["reading"]["named"][0]
    assert "1 rows left out" in err and "of 3 episodes over 3 questions right" in err
    lines = rows_file(tmp_path / "run", "run")
    whole = lines.read_text()
    lines.write_text(whole[: whole.rindex('"segments"')])
    assert cli.main(command) == 0
    again = json.loads(capsys.readouterr().out)["run"]
    assert again.pop("engine")["rollouts"] == 2 and row.pop("engine")["rollouts"] == 1
    assert again == row
    assert untimed(lines.read_text()) == untimed(whole)
    assert (lines.parent / "run.yaml").is_file()


def test_law_12_no_question_of_hotpotqa_is_lost_through_a_kill_and_a_partial_batch(
    toy, tmp_path, shared_data, monkeypatch
):
    """7,405 questions in chunks of 1,000, killed in the fourth and again within a line: each is there once."""
    data = DataConfig(questions=f"suite:hotpotqa={shared_data / 'hotpotqa_dev_types.jsonl'}")
    questions = load_questions(data, "test")
    rollouts = []

    def rollout(params, requests, **options):
        rollouts.append(len(requests))
        # Whatever ends first: the lines of a finished file are in the order of the questions.
        order = range(len(requests))[:: -1 if len(rollouts) == 5 else 1]
        for place in order:
            request = requests[place]
            if len(rollouts) == 4 and place == 500:
                raise KeyboardInterrupt
            episode = Episode(
                question=request.question,
                group=request.group,
                member=request.member,
                ids=[1],
                roles=[1],
                logprobs=[0.0],
                turns=[Turn(kind="answer", start=0, stop=1, text="", answer="yes")],
                end_reason="answer",
            )
            options["on_end"](place, episode)

    monkeypatch.setattr(toy.engine, "rollout", rollout)
    monkeypatch.setattr(toy.engine, "encode", lambda text: (1,))
    stats = {
        "decode_steps": 1,
        "decode_rows": 4,
        "forwarded": {"policy": 1},
        "seconds": {"total": 0.1},
    }
    monkeypatch.setattr(toy.engine, "stats", stats)
    options = {"questions": questions, "chunk": 1000, "draws": 20}
    with pytest.raises(KeyboardInterrupt):
        play(toy, tmp_path, **options)
    path = rows_file(tmp_path, "row")
    text = path.read_text()
    assert text.count("\n") == 3500
    path.write_text(text[:-200])
    summary = play(toy, tmp_path, **options)
    assert rollouts == [1000] * 7 + [906]
    assert [line["id"] for line in read_lines(path)] == [question.id for question in questions]
    assert (summary["questions"], summary["episodes"]) == (7405, 7405)
    kinds = {kind: part["questions"] for kind, part in summary["kinds"].items()}
    assert kinds == {"parallelizable": 1487, "bridge": 5918}
    yes = sum(question.golden_answers == ("yes",) for question in questions)
    assert summary["right"] == yes


def test_the_engine_s_figures_are_those_of_all_parts(tmp_path):
    """Two parts add up, a call without anything to play says the same, and lines played anew start from nothing."""
    stats = {
        "decode_steps": 10,
        "decode_rows": 4,
        "forwarded": {"policy": 36},
        "seconds": {"total": 0.0},
    }
    path = tmp_path / "row.jsonl"
    use = EngineUse(path)
    use.add(stats)
    use.keep()
    path.write_text("{}\n")
    use = EngineUse(path)
    use.add(stats | {"forwarded": {"policy": 32}})
    use.beside(lambda number: None)(1)
    use.keep()
    figures = use.figures()
    assert (figures["rollouts"], figures["occupancy"]) == (2, pytest.approx(68 / 80))
    use = EngineUse(path)
    use.keep()
    assert use.figures() == figures
    path.unlink()
    assert EngineUse(path).figures()["rollouts"] == 0
