"""The demo: its own figures from records made by hand, and the whole of it on a toy policy and a few passages."""

import json
from dataclasses import replace

import pytest
from retrieval.tiny_encoder import tiny_embedder
from rollout.toys import PROTOCOL, ROLLOUT, make_policy, make_tokenizer

from psearch_jax import demo
from psearch_jax.config import (
    AlgorithmConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    RetrievalConfig,
    TrainerConfig,
)
from psearch_jax.evaluation.tables import LABELS
from psearch_jax.metrics_log import read_lines
from psearch_jax.models.weights import save_hf_directory
from psearch_jax.questions.question import Question, question_row
from psearch_jax.retrieval import searcher
from psearch_jax.retrieval.passages import Hit, Passage
from psearch_jax.rollout.engine import Engine


def question(name, queries, needs, *, kind="parallelizable", unseen=False) -> Question:
    metadata = {"kind": kind, "unseen": unseen, "queries": queries, "needs": needs}
    return Question(id=name, text="a b", golden_answers=("1",), kind=kind, metadata=metadata)


class Fixed:
    """Finds the same passage ids for a query whatever happens."""

    fingerprint = "fixed"

    def __init__(self, found):
        self.found, self.asked, self.stats = found, [], searcher.SearchStats()

    def search(self, queries, k):
        self.asked += queries
        return [[Hit(Passage(id, "t", "x"), 1.0) for id in self.found[q][:k]] for q in queries]


def test_retrieval_recall_counts_each_subquery_once():
    questions = [
        question("1", [["p", "q"]], [["P", "Q"]]),
        question("2", [["p"], ["r"]], [["P"], ["R"]], kind="bridge"),
        question("3", [["s"]], [["S"]], kind="single"),
    ]
    # r is found in fourth place, which is too late; s is not found.
    backend = Fixed({"p": ["P"], "q": ["x", "y", "Q"], "r": ["x", "y", "z", "R"], "s": ["P"]})
    assert demo.retrieval_recall(backend, questions) == 0.5
    assert backend.asked == ["p", "q", "r", "s"]
    assert demo.retrieval_recall(backend, questions, k=4) == 0.75


def record(name, kind, *, em=False, well_formed=True, turns=()):
    """A results line: `turns` are (queries, ids found for each)."""
    results = [
        {"queries": queries, "passages": [[{"id": id} for id in ids] for ids in found]}
        for queries, found in turns
    ]
    return {"id": name, "kind": kind, "em": em, "well_formed": well_formed, "results": results}


def test_warm_start_checks_look_at_the_right_episodes():
    questions = [
        question("seen", [["p", "q"]], [["P", "Q"]]),
        question("copied", [["p", "q"]], [["P", "Q"]], unseen=True),
        question("garbled", [["p", "q"]], [["P", "Q"]], unseen=True),
        question("silent", [["p", "q"]], [["P", "Q"]], unseen=True),
        question("hop", [["p"], ["q"]], [["P"], ["Q"]], kind="bridge", unseen=True),
    ]
    records = [
        # All passages found, one query misspelt (a seen question: copying is not judged), wrong.
        record("seen", "parallelizable", turns=[(["p", "qq"], [["P"], ["x", "Q"]])]),
        # Found over two turns and right.
        record("copied", "parallelizable", em=True, turns=[(["q"], [["Q"]]), (["p"], [["P"]])]),
        # One of two queries misspelt; a passage is missing, so the right answer does not count.
        record("garbled", "parallelizable", em=True, turns=[(["p", "Q?"], [["P"], ["x"]])]),
        # No search: nothing to judge but the form.
        record("silent", "parallelizable", well_formed=False),
        # A bridge: its first query is judged, its answer is no comparison.
        record("hop", "bridge", em=True, turns=[(["p"], [["P"]]), (["zzz"], [["Q"]])]),
    ]
    assert demo.warm_start_checks(records, questions) == {
        "well_formed": 0.8,
        "copy_unseen": 0.75,  # q, p and the bridge's p; not "Q?"
        "compare_in_context": 0.5,  # "copied" yes, "seen" no
    }
    assert demo.warm_start_checks(records[3:4], questions) == {
        "well_formed": 0.0, "copy_unseen": 0.0, "compare_in_context": 0.0,
    }  # fmt: skip


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A recipe whose policy, corpus, questions and encoder are toys, on the mesh of all eight devices."""
    tokenizer = make_tokenizer("whole")
    follows = [
        ("\n </information> </think>", "<search> <answer>"),
        ("<search> ##", "b c"),
        ("b c", "</search> ##"),
        ("<answer>", "1 2"),
        ("1 2", "</answer>"),
    ]
    decoder, _, params = make_policy(tokenizer, follows)
    save_hf_directory(tmp_path / "policy", decoder, params, tokenizer=tokenizer)
    with (tmp_path / "corpus.jsonl").open("w") as file:
        for name in ("b", "c", "b c", "a"):
            file.write(json.dumps({"id": name.upper(), "contents": f'"{name}"\n{name}'}) + "\n")
    for split, count in (("train", 3), ("test", 4)):
        with (tmp_path / f"{split}.jsonl").open("w") as file:
            for i in range(count):
                row = question(str(i), [["b", "c"]], [["B", "C"]], unseen=i % 2 == 1)
                file.write(json.dumps(question_row(row)) + "\n")
    monkeypatch.setattr(searcher, "load_embedder", lambda *given, **wanted: tiny_embedder())
    return Config(
        run_directory=str(tmp_path / "demo"),
        compile_cache="",
        policy=str(tmp_path / "policy"),
        data=DataConfig(questions=str(tmp_path)),
        retrieval=RetrievalConfig(
            corpus=str(tmp_path / "corpus.jsonl"), kind="exact", directory=str(tmp_path / "index")
        ),
        protocol=PROTOCOL,
        rollout=replace(ROLLOUT, append_buckets=(32,), window_buckets=(96,)),
        algorithm=AlgorithmConfig(row_length=96, micro_rows=8, logprob_chunk=256),
        trainer=TrainerConfig(steps=2, questions_per_step=2, group_size=4, checkpoint_every=1),
        evaluation=EvaluationConfig(bootstrap=20),
    )


@pytest.mark.slow
def test_the_demo_writes_every_row_and_a_second_run_takes_them_up(
    config, tmp_path, capsys, monkeypatch
):
    first = demo.run(config, quiet=True)
    rows = {
        "warm_start",
        "closed_book",
        "rag",
        "index_off",
        "em_reward",
        "parallel_search",
        "gated",
    }
    assert set(first["rows"]) == rows <= set(LABELS)  # the report has a name for each
    sampled = {name for name, row in first["rows"].items() if "em_sampled" in row}
    assert sampled == {"warm_start", "em_reward", "parallel_search", "gated"}
    assert all(row["questions"] == 4 for row in first["rows"].values())
    assert (first["questions"], first["passages"], first["retrieval_top3"]) == (4, 4, 1.0)
    assert first["rows"]["closed_book"]["searches"] == 0
    directory = tmp_path / "demo"
    for row in demo.REWARDS:
        assert [line["step"] for line in read_lines(directory / row / "metrics.jsonl")] == [1, 2]
        assert (directory / row / "policy" / "config.json").is_file()
        assert (directory / row / "config.yaml").is_file()
    written = json.loads((directory / "summary.json").read_text())
    assert written["rows"].keys() == rows
    assert "<html" in (directory / "report.html").read_text()
    output = capsys.readouterr()
    assert output.out == "" and "evaluating gated" in output.err

    lines = {path.name: path.read_bytes() for path in (directory / "rows").glob("*.jsonl")}
    assert len(lines) == 11
    monkeypatch.setattr(Engine, "rollout", None)  # nothing is played a second time
    again = demo.run(config, quiet=True)
    assert again["rows"] == first["rows"]
    after = {path.name: path.read_bytes() for path in (directory / "rows").glob("*.jsonl")}
    assert after == lines
