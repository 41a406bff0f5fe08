"""Two results over the same questions, against closed forms, SciPy and simulation."""

import json

import numpy as np
import pytest
from evaluation.made_up import records, write_run
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from psearch_jax import cli
from psearch_jax.errors import UserError
from psearch_jax.evaluation.comparison import (
    compare,
    compare_runs,
    flipped,
    mcnemar,
    result_lines,
)
from psearch_jax.evaluation.comparison_view import show


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


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 400), st.integers(0, 400))
def test_mcnemar_equals_scipy_s_binomial_test(gained, lost):
    expected = binomtest(gained, gained + lost, 0.5).pvalue if gained + lost else 1.0
    assert mcnemar(gained, lost) == pytest.approx(expected, rel=1e-9)


def test_mcnemar_of_large_counts_is_still_a_number():
    assert mcnemar(2000, 2000) == 1.0
    assert mcnemar(2000, 1000) == pytest.approx(binomtest(2000, 3000, 0.5).pvalue, rel=1e-9)
    assert mcnemar(0, 10) == pytest.approx(2 / 1024)


def test_paired_intervals_cover_at_the_stated_rate():
    """200 simulated pairs of runs over 150 questions, .5 and .6 right and correlated: the true difference is .1."""
    rng = np.random.default_rng(4)
    covered = 0
    for trial in range(200):
        u = rng.random(150)
        v = np.where(rng.random(150) < 0.5, u, rng.random(150))
        a = [line(i, bool(x < 0.5)) for i, x in enumerate(u)]
        b = [line(i, bool(x < 0.6)) for i, x in enumerate(v)]
        low, high = compare(a, b, draws=300, seed=trial)["difference_interval"]
        covered += low <= 0.1 <= high
    assert 0.90 <= covered / 200 <= 0.985


def test_flipped_questions_are_named():
    a = [line(i, em) | {"answer": f"a{i}"} for i, em in enumerate((1, 0, 1, 0))]
    b = [line(i, em) | {"answer": f"b{i}"} for i, em in enumerate((1, 1, 0, 0))]
    gained, lost = flipped(a, b[::-1])
    assert [(f["id"], f["baseline"], f["other"]) for f in gained] == [("q1", "a1", "b1")]
    assert [f["id"] for f in lost] == ["q2"]


def test_a_comparison_holds_every_kind_and_cost():
    a, b = records("em_reward", 80), records("parallel_search", 80)
    result = compare_runs(a, b, draws=100)
    assert set(result["kinds"]) == {"parallelizable", "bridge", "mixed", "single"}
    assert "datasets" not in result
    test = result["mcnemar"]
    assert (test["gained"], test["lost"]) == tuple(
        len(result["flipped"][k]) for k in ("gained", "lost")
    )
    assert sum(part["mcnemar"]["gained"] for part in result["kinds"].values()) == test["gained"]
    parallel = result["kinds"]["parallelizable"]["cost"]["searches"]
    assert parallel["ratio"] < 0.7
    assert {"em", "f1"} <= set(result["quality"])
    json.dumps(result, allow_nan=False)


def test_results_are_found_by_directory_row_or_file(tmp_path, capsys):
    run = write_run(tmp_path / "demo", count=12, steps=2)
    assert result_lines(f"{run}:gated")[0] == "gated"
    name, lines = result_lines(str(run / "rows" / "rag.jsonl"))
    assert (name, len(lines)) == ("rag", 12)
    with pytest.raises(UserError, match="the rows closed_book, closed_book.sampled"):
        result_lines(str(run))
    with pytest.raises(UserError, match="no results"):
        result_lines(str(tmp_path))
    with pytest.raises(UserError, match="holds no results of an evaluation"):
        result_lines(str(run / "gated" / "metrics.jsonl"))
    result = show("rag", lines, *result_lines(f"{run}:gated"), json=True)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(result))
    show("rag", lines, *result_lines(f"{run}:gated"))
    shown = capsys.readouterr().out
    assert "gated against rag" in shown and "parallelizable" in shown and "McNemar" in shown


def test_the_commands_print_one_json_object(tmp_path, capsys):
    run = write_run(tmp_path / "demo", count=12, steps=2)
    assert cli.main(["compare", f"{run}:rag", f"{run}:gated", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["baseline"], printed["other"], printed["questions"]) == ("rag", "gated", 12)
    assert cli.main(["compare", str(run), f"{run}:gated"]) == 2
    assert "name a row as" in capsys.readouterr().err
    assert cli.main(["runs", str(tmp_path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 4
