"""The parts of benchmarks/two_wiki.py that need no language model."""

import json

from benchmarks.two_wiki import PARALLEL, ROWS, retrieval_rows, shown
from psearch_jax.config_files import resolve
from psearch_jax.evaluation.baselines import BASELINES
from psearch_jax.evaluation.metrics import summarize
from psearch_jax.questions.question import Question
from psearch_jax.retrieval.passages import Hit, Passage

QUESTIONS = [
    Question(
        id=f"q{i}",
        text=f"about {i}?",
        golden_answers=("a",),
        metadata={"gold_titles": [f"A{i}", f"B{i}"]},
    )
    for i in range(4)
]


class Titles:
    """A title finds its passage; a question finds its A, and from the sixth hit on its B where its number is even."""

    def search(self, queries, k):
        def find(query):
            if query.startswith("about"):
                number = query.split()[1].rstrip("?")
                titles = [
                    f"A{number}",
                    *["x"] * 4,
                    "x" if int(number) % 2 else f"B{number}",
                    "x",
                    "x",
                ]
            else:
                titles = [query]
            return [Hit(Passage(title, title, "t"), 1.0) for title in titles[:k]]

        return [find(query) for query in queries]


def test_retrieval_alone():
    rows = retrieval_rows(Titles(), QUESTIONS)
    assert rows["question"]["all_gold_rate"] == 0.0
    assert rows["question"]["gold_recall"] == 0.5
    assert rows["question"]["top_8"]["all_gold_rate"] == 0.5
    assert rows["gold_titles"]["all_gold_rate"] == 1.0
    assert rows["gold_titles"]["interval"] == [1.0, 1.0]
    assert (rows["question"]["questions"], rows["question"]["k"]) == (4, 3)


def test_a_row_has_its_numbers_and_intervals():
    from evaluation.made_up import records

    lines = [{**line, "all_gold": True, "gold_recall": 1.0} for line in records("rag", 12)]
    row = shown({**summarize(lines, draws=20), "mode": "greedy", "engine": {"occupancy": 0.9}})
    assert {"em", "f1", "all_gold_rate", "calls", "subqueries", "questions"} <= set(row)
    assert row["intervals"]["em"][0] <= row["em"] <= row["intervals"]["em"][1]
    json.dumps(row, allow_nan=False)


def test_every_baseline_is_a_row_and_the_recipe_resolves(root, monkeypatch):
    monkeypatch.chdir(root)
    config, _ = resolve(["configs/two_wiki.yaml"])
    assert set(ROWS) == {"retrieval", PARALLEL, *BASELINES}
    assert config.protocol.max_subqueries > 1 and config.protocol.chat
    longest = config.protocol.observation_tokens + 3 * config.protocol.turn_tokens
    assert longest < config.rollout.context
