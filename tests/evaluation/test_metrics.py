"""Scores of an episode, and intervals against closed forms and simulation."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from evaluation.made_up import records
from hypothesis import given
from hypothesis import strategies as st

from psearch_jax.evaluation.evaluate import judged
from psearch_jax.evaluation.metrics import (
    METRICS,
    bootstrap_interval,
    pass_at,
    resampled_means,
    summarize,
)
from psearch_jax.evaluation.records import (
    episode_facts,
    episode_record,
    policy_tokens,
    scored,
    segments,
)
from psearch_jax.questions.question import Question
from psearch_jax.retrieval.passages import Hit, Passage
from psearch_jax.rewards.judge import Verdict
from psearch_jax.rollout.episode import Episode, Turn


def spell(ids):
    return "".join(chr(i) for i in ids)


@pytest.fixture
def episode() -> Episode:
    hits = (Hit(Passage("p1", "Lyon", "population Lyon"), 0.91234),)
    question = Question(
        id="q1",
        text="Lyon or Turin?",
        golden_answers=("Turin", "Torino"),
        kind="parallelizable",
        metadata={"unseen": True},
    )
    text = (("Q\n", 0), ("<search>", 1), ("info", 2), ("<answer>the Turin.", 1))
    return Episode(
        question=question,
        group=0,
        member=0,
        ids=[ord(c) for part, _ in text for c in part],
        roles=[role for part, role in text for _ in part],
        turns=[
            Turn(
                kind="search", start=2, stop=10, text="", queries=("Lyon", "lyon "), hits=(hits, ())
            ),
            Turn(kind="answer", start=14, stop=32, text="", answer="the Turin."),
        ],
        end_reason="answer",
    )


def test_a_record_counts_what_was_played(episode):
    line = episode_record(episode, decode=spell, well_formed=lambda e: e is episode, sample=3)
    expected = {
        "id": "q1", "sample": 3, "kind": "parallelizable", "unseen": True, "answer": "the Turin.",
        "em": True, "f1": 1.0, "turns": 2, "searches": 1, "subqueries": 2, "distinct_queries": 1,
        "decomposed": True, "prompt_tokens": 2, "policy_tokens": 26, "observation_tokens": 4,
        "well_formed": True, "answered": True, "invalid_turns": 0, "end_reason": "answer",
        "calls": 2, "truncated": False, "substring": True, "tolerant": True, "gold_recall": None, "all_gold": None,
    }  # fmt: skip
    assert {key: line[key] for key in expected} == expected
    assert line["segments"] == [
        ["prompt", "Q\n"],
        ["policy", "<search>"],
        ["observation", "info"],
        ["policy", "<answer>the Turin."],
    ]
    assert line["results"] == [
        {
            "queries": ["Lyon", "lyon "],
            "passages": [
                [{"id": "p1", "title": "Lyon", "text": "population Lyon", "score": 0.9123}],
                [],
            ],
        }
    ]
    assert set(METRICS) - {"judge"} <= set(line)


def test_law_02_an_answer_in_the_prompt_is_no_answer(episode):
    """Only policy turns answer: without one, the gold answer in prompt and passages scores nothing."""
    episode.turns.pop()
    line = episode_record(episode, decode=lambda ids: "<answer>Turin</answer>", well_formed=bool)
    assert line["answer"] is None
    assert not line["em"]
    assert line["f1"] == 0.0
    assert not line["answered"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2)), max_size=30))
def test_segments_lose_and_move_nothing(letters):
    episode = Episode(
        question=Question(id="q", text="", golden_answers=("a",)),
        group=0,
        member=0,
        ids=[ord(letter) for letter, _ in letters],
        roles=[role for _, role in letters],
    )
    parts = segments(episode, spell)
    names = ("prompt", "policy", "observation")
    assert [(c, names.index(role)) for role, text in parts for c in text] == letters
    assert all(a[0] != b[0] for a, b in itertools.pairwise(parts))


def test_resampled_means_have_the_known_mean_and_variance():
    """Bootstrap means of n values: their mean is the sample mean, their variance the population one ÷ n."""
    values = np.array([[0.0, 3.0], [1.0, 3.0], [1.0, 3.0], [5.0, 3.0]])
    means = resampled_means(values, 40_000, seed=1)
    assert means[:, 0].mean() == pytest.approx(1.75, abs=0.02)
    assert means[:, 0].var() == pytest.approx(values[:, 0].var() / 4, rel=0.03)
    np.testing.assert_allclose(means[:, 1], 3.0)


def test_resampling_draws_every_outcome_with_its_probability():
    """Two values: both drawn equal with probability 1/4 each, mixed with 1/2."""
    means = resampled_means(np.array([[0.0], [1.0]]), 20_000, seed=0)[:, 0]
    for outcome, share in ((0.0, 0.25), (0.5, 0.5), (1.0, 0.25)):
        assert (means == outcome).mean() == pytest.approx(share, abs=0.015)


def test_intervals_cover_at_the_stated_rate():
    """300 simulated evaluations of 150 questions with true EM 0.6: about 95 % of intervals hold it."""
    rng = np.random.default_rng(3)
    covered = 0
    for trial in range(300):
        low, high = bootstrap_interval((rng.random(150) < 0.6).tolist(), draws=500, seed=trial)
        covered += low <= 0.6 <= high
    assert 0.91 <= covered / 300 <= 0.98


def test_samples_of_one_question_stay_together():
    """Ten copies of each answer are no new evidence: the interval is that of the questions."""
    once = records("rag", 80)
    often = [line | {"sample": sample} for line in once for sample in range(10)]
    one, ten = summarize(once, draws=300), summarize(often, draws=300)
    assert ten["episodes"] == 800
    assert ten["questions"] == 80
    assert ten["intervals"]["em"] == pytest.approx(one["intervals"]["em"])


def test_a_summary_counts_by_kind_and_by_novelty():
    lines = records("em_reward", 40)
    summary = summarize(lines, draws=50)
    assert (
        summary["questions"] == sum(part["questions"] for part in summary["kinds"].values()) == 40
    )
    assert summary["right"] == sum(line["em"] for line in lines)
    assert summary["em"] == pytest.approx(np.mean([line["em"] for line in lines]))
    assert summary["seen"]["questions"] == summary["unseen"]["questions"] == 20
    bridge = [line["turns"] for line in lines if line["kind"] == "bridge"]
    assert summary["kinds"]["bridge"]["turns"] == pytest.approx(np.mean(bridge))
    low, high = summary["intervals"]["em"]
    assert low <= summary["em"] <= high
    assert summarize(lines, draws=50) == summary


def line(number, em, turns=2, kind="single"):
    return {"id": f"q{number}", "em": em, "turns": turns, "kind": kind}


# -- metrics that not every record has


def test_gold_passages_are_found_by_title_or_by_id(episode):
    def recall(**metadata):
        changed = dataclasses.replace(episode.question, metadata=metadata)
        line = scored(changed, episode_facts(episode, decode=spell, well_formed=bool))
        return line["gold_recall"], line["all_gold"]

    assert recall(gold_titles=["lyon ", "Turin"]) == (0.5, False)
    assert recall(gold_titles=["Lyon"]) == (1.0, True)
    assert recall(needs=[["p1"], ["p2", "p3"]]) == (pytest.approx(1 / 3), False)
    assert recall(gold_titles=["p1"]) == (0.0, False)
    assert recall() == (None, None)


def test_a_metric_is_averaged_over_the_records_that_have_it():
    lines = [
        {**record, "all_gold": all_gold}
        for record, all_gold in zip(
            records("rag", 60), [None] * 20 + [True] * 10 + [False] * 30, strict=True
        )
    ]
    summary = summarize(lines, draws=400)
    assert summary["all_gold"] == 0.25
    low, high = summary["intervals"]["all_gold"]
    assert 0.05 < low < 0.25 < high < 0.45
    without = summarize(records("rag", 60), draws=400)
    assert "all_gold" not in without and "judge_failed" not in without
    # The other metrics do not notice.
    assert without["em"] == summary["em"]
    assert without["intervals"]["em"] == summary["intervals"]["em"]


def test_data_sets_are_counted_apart_and_their_mean_is_plain():
    """900 questions at 0 and 100 at 1: the mean over questions is .1, over data sets .5."""
    lines = [line(i, 0) | {"dataset": "large"} for i in range(900)]
    lines += [line(900 + i, 1) | {"dataset": "small"} for i in range(100)]
    lines = [made | {"end_reason": "answer", "f1": float(made["em"])} for made in lines]
    summary = summarize(lines, draws=50)
    assert summary["em"] == pytest.approx(0.1)
    assert summary["dataset_mean"]["em"] == 0.5
    assert summary["dataset_mean"]["intervals"]["em"] == [0.5, 0.5]
    assert (summary["datasets"]["small"]["em"], summary["datasets"]["small"]["questions"]) == (
        1.0,
        100,
    )
    assert "datasets" not in summarize(lines[:900], draws=50)


def test_pass_at_k_counts_every_choice_of_k_samples():
    """Against the share of all k-subsets that hold a right sample, counted one by one."""
    rng = np.random.default_rng(0)
    right = rng.random((5, 6)) < 0.3
    lines = [
        {"id": f"q{q}", "sample": s, "em": bool(right[q, s])} for q in range(5) for s in range(6)
    ]
    result = pass_at(lines, draws=50)
    assert set(result) == {"1", "2", "4", "6"}
    for k in (1, 2, 4, 6):
        every = [
            any(right[q, list(c)]) for q in range(5) for c in itertools.combinations(range(6), k)
        ]
        assert result[str(k)]["em"] == pytest.approx(np.mean(every))
    assert result["6"]["questions"] == 5


def test_a_judge_s_failures_are_counted_and_keep_their_lines():
    class Half:
        def judge(self, cases):
            return [
                Verdict(value=0.0, failed=True) if i % 2 else Verdict(value=1.0)
                for i in range(len(cases))
            ]

    lines = [
        {**made, "answer": None if i == 0 else made["answer"]}
        for i, made in enumerate(records("rag", 9))
    ]
    got = judged(Half(), lines)
    assert [made["judge"] for made in got] == [0.0] + [1.0, 0.0] * 4
    assert [made["judge_failed"] for made in got] == [False] + [False, True] * 4
    summary = summarize(got, draws=20)
    assert (summary["judge_failed"], summary["judge"]) == (4, pytest.approx(4 / 9))


def test_tokens_of_the_policy_stand_with_their_log_probabilities(episode):
    """Two policy segments; a character of two tokens stands with its last one."""
    episode.logprobs = [-0.5 if role == 1 else 0.0 for role in episode.roles]
    parts = policy_tokens(episode, lambda ids: "\ufffd" if ids == [ord("T")] else spell(ids))
    assert ["".join(text for text, _ in part) for part in parts] == [
        "<search>",
        "<answer>the Turin.",
    ]
    assert ["Tu", -1.0] in parts[1] and ["r", -0.5] in parts[1]
    assert sum(p for part in parts for _, p in part) == pytest.approx(sum(episode.logprobs))
