"""`psearch runs`: states, steps and scores of directories that the tests write."""

import json
import os
import time

import pytest
from evaluation.made_up import write_run

from psearch_jax.errors import UserError
from psearch_jax.evaluation.runs import describe_run, find_runs, show
from psearch_jax.run_lock import held


@pytest.fixture
def directory(tmp_path):
    write_run(tmp_path / "demo", count=8, steps=3, draws=10)
    stopped = tmp_path / "stopped"
    stopped.mkdir()
    (stopped / "metrics.jsonl").write_text('{"step": 1, "em": 0.2}\n{"step": 2, "em": 0.1}\n{"st')
    (stopped / "run.jsonl").write_text(json.dumps({"config": {"trainer.steps": 9}}) + "\n")
    taught = tmp_path / "taught"
    taught.mkdir()
    (taught / "metrics.jsonl").write_text('{"step": 4, "loss": 0.2}\n')
    both = {"trainer.steps": 9, "supervised.steps": 70}
    (taught / "run.jsonl").write_text(json.dumps({"config": both}) + "\n")
    old = time.time() - 7200
    for file in stopped.iterdir():
        os.utime(file, (old, old))
    done = tmp_path / "done"
    (done / "policy").mkdir(parents=True)
    (done / "policy" / "config.json").write_text("{}")
    (done / "metrics.jsonl").write_text('{"step": 5, "em": 0.5}\n')
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "summary.json").write_text("[1]")
    (tmp_path / "other").mkdir()
    return tmp_path


def test_every_run_is_listed_with_its_state_and_best_score(directory, capsys):
    runs = {run["run"].removeprefix(f"{directory}/"): run for run in show(directory, json=True)}
    assert len(json.loads(capsys.readouterr().out)) == len(runs)
    assert set(runs) == {
        "demo", "demo/em_reward", "demo/parallel_search", "demo/gated", "stopped", "taught", "done",
        "broken",
    }  # fmt: skip
    states = {name: run["state"] for name, run in runs.items()}
    assert states == {
        "demo": "evaluated", "demo/em_reward": "running", "demo/parallel_search": "running",
        "demo/gated": "running", "stopped": "stopped", "taught": "running", "done": "finished",
        "broken": "damaged",
    }  # fmt: skip
    assert (runs["stopped"]["step"], runs["stopped"]["steps"]) == (2, 9)
    assert (runs["taught"]["step"], runs["taught"]["steps"]) == (4, 70)
    assert runs["stopped"]["best"] == {"row": "step 1", "em": 0.2, "mode": "training"}
    best = json.loads((directory / "demo" / "summary.json").read_text())["rows"]
    top = max(best, key=lambda name: best[name]["em"])
    assert (runs["demo"]["best"]["row"], runs["demo"]["best"]["em"]) == (top, best[top]["em"])
    assert "not a JSON object" in runs["broken"]["problem"]
    show(directory)
    shown = capsys.readouterr().out
    assert "2/9" in shown and "damaged" in shown


def test_a_run_grows_old(directory):
    path = directory / "demo" / "gated"
    assert describe_run(path, now=time.time() + 3600)["state"] == "stopped"


def test_a_run_whose_directory_is_held_is_running(directory):
    path = directory / "stopped"
    with held(path):
        assert describe_run(path)["state"] == "running"
    assert describe_run(path)["state"] == "stopped"
    path = directory / "demo" / "gated"
    with held(path):
        pass
    assert (
        describe_run(path)["state"] == "stopped"
    )  # it was written a moment ago, but nobody holds it


def test_nothing_there(tmp_path, capsys):
    assert find_runs(tmp_path) == []
    show(tmp_path)
    assert "no runs under" in capsys.readouterr().out
    with pytest.raises(UserError, match="is not a directory"):
        show(tmp_path / "missing")
