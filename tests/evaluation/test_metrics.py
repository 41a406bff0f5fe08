"""Scores of an episode, and intervals against closed forms and simulation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from evaluation.made_up import records
from hypothesis import given, settings
from hypothesis import strategies as st

from psearch_jax.errors import UserError
from psearch_jax.evaluation.metrics import (
    METRICS,
    bootstrap_interval,
    compare,
    episode_record,
    resampled_means,
    segments,
    summarize,
)
from psearch_jax.questions.question import Question
from psearch_jax.retrieval.passages import Hit, Passage
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
    assert set(METRICS) <= set(line)


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


def test_a_paired_difference_uses_the_pairs():
    """b is right wherever a is and once more: unpaired noise cancels, the difference is never negative."""
    a = [line(i, i % 2) for i in range(40)]
    b = [line(i, 1 if i == 0 else i % 2) for i in reversed(range(40))]
    result = compare(a, b, draws=400)
    assert result["difference"] == pytest.approx(1 / 40)
    assert (result["improved"], result["worsened"]) == (1, 0)
    low, high = result["difference_interval"]
    assert low == 0.0
    assert high <= 4 / 40


def test_a_ratio_of_means_is_no_mean_of_ratios():
    a = [line(0, 1, turns=1), line(1, 1, turns=3)]
    b = [line(0, 1, turns=3), line(1, 1, turns=1), line(2, 0, turns=9)]
    result = compare(a, b, "turns", draws=200)
    assert result["ratio"] == pytest.approx(1.0)
    assert result["unpaired"] == 1
    assert result["questions"] == 2
    # Draws: (first, first) 3, mixed 1, (second, second) 1/3.
    assert result["ratio_interval"] == pytest.approx([1 / 3, 3.0])


def test_a_ratio_over_zero_is_not_given():
    result = compare([line(0, 0)], [line(0, 1)], draws=10)
    assert result["ratio"] is None
    assert result["ratio_interval"] is None


def test_results_without_a_common_question_are_refused():
    with pytest.raises(UserError, match="no question of kind bridge in common"):
        compare([line(0, 1)], [line(0, 1)], kind="bridge")


@settings(max_examples=25, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(0, 5))
def test_a_result_against_itself_differs_by_nothing(ems, seed):
    lines = [line(i, em) for i, em in enumerate(ems)]
    result = compare(lines, lines, draws=40, seed=seed)
    assert result["difference"] == 0.0
    assert result["difference_interval"] == [0.0, 0.0]
