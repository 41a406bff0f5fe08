import json

import numpy as np
import pytest

from psearch_jax.errors import UserError
from psearch_jax.questions.question import Question, question_row
from psearch_jax.questions.readers import jsonl_rows, merge, read_flashrag, read_rows, subset
from psearch_jax.questions.rows import kind_of, question_of


def write(path, *lines):
    path.write_bytes(
        b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines)
    )
    return path


def row(**changes):
    return json.dumps(
        {"id": "a", "question": "Who?", "golden_answers": ["me"], "metadata": {}} | changes
    )


def test_rows_are_read_in_order_with_ids_unique_by_construction(tmp_path):
    path = write(tmp_path / "dev.jsonl", row(), "", row(id="b", golden_answers=["x", "y"]))
    first, second = read_flashrag(path)
    assert (first.id, second.id) == ("dev:a", "dev:b")
    assert second.golden_answers == ("x", "y")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "line 2: not JSON"),
        (b"\xff\xfe", "line 2: not UTF-8"),
        (b"[1]", "line 2: not a JSON object"),
        (row(id="b", question=" "), 'line 2: "question" is missing or empty'),
        (row(id="b", golden_answers=[]), 'line 2: "golden_answers"'),
        (row(id="b", golden_answers=[None]), 'line 2: "golden_answers"'),
        (row(id="b", metadata=[1]), 'line 2: "metadata"'),
        (row(), "line 2: the question 'dev:a' was there before (dev.jsonl, line 1)"),
        (row(question="Other?"), None),
    ],
)
def test_a_bad_line_is_named_with_its_file(tmp_path, line, said):
    path = write(tmp_path / "dev.jsonl", row(), line)
    with pytest.raises(UserError) as caught:
        read_flashrag(path)
    said = (
        said or "line 2: the id 'dev:a' was used before (dev.jsonl, line 1); this one is 'dev:a~2'"
    )
    assert said in str(caught.value) and "dev.jsonl" in str(caught.value)


def test_an_empty_or_missing_file_is_an_error(tmp_path):
    with pytest.raises(UserError, match="holds no questions"):
        read_flashrag(write(tmp_path / "empty.jsonl", ""))
    with pytest.raises(UserError, match="cannot be read"):
        read_flashrag(tmp_path / "missing.jsonl")


@pytest.mark.parametrize(
    ("metadata", "kind"),
    [
        ({"type": "comparison"}, "parallelizable"),
        ({"type": "compositional"}, "bridge"),
        ({"type": "bridge_comparison"}, "mixed"),
        ({"kind": "mixed"}, "mixed"),
        ({}, "single"),
        ({"type": "new"}, "unknown"),
    ],
)
def test_kinds_follow_the_data_sets_types(metadata, kind):
    assert kind_of(metadata) == kind


def test_what_is_written_is_read_back(tmp_path):
    question = Question(
        id="7", text="Où?", golden_answers=("là", "ici"), kind="bridge", metadata={"kind": "bridge"}
    )
    path = write(tmp_path / "q.jsonl", json.dumps(question_row(question), ensure_ascii=False))
    (back,) = read_flashrag(path)
    assert (back.id, back.text, back.golden_answers, back.kind) == (
        "q:7",
        "Où?",
        ("là", "ici"),
        "bridge",
    )


def test_hotpotqa_types_of_the_paper(shared_data):
    questions = read_flashrag(shared_data / "hotpotqa_dev_types.jsonl")
    kinds = [question.kind for question in questions]
    assert (len(kinds), kinds.count("bridge"), kinds.count("parallelizable")) == (7405, 5918, 1487)


# -- bad rows cost nothing but themselves


def test_bad_rows_are_named_and_counted_and_nothing_else_is_lost(tmp_path):
    path = write(
        tmp_path / "mixed.jsonl",
        row(id="1"),
        b"[1]",
        row(id="2", golden_answers=[]),
        row(id="3", golden_answers=[1889, 2.0, True, 1.5]),
        row(id="4", golden_answers=["x", None, ""]),
        '{"id": "5", "question": "No column?"}',
        row(id="6", golden_answers=None),
        row(id="1"),  # the same once more
        row(id="1", question="Another one?"),
        row(id="1", question="A third?"),
        row(id="7", golden_answers="alone"),
    )
    loaded = read_rows(jsonl_rows(path), "mixed")
    assert {q.id: q.golden_answers for q in loaded.questions} == {
        "mixed:1": ("me",),
        "mixed:3": ("1889", "2", "yes", "1.5"),
        "mixed:4": ("x",),
        "mixed:1~2": ("me",),
        "mixed:1~3": ("me",),
        "mixed:7": ("alone",),
    }
    assert loaded.lost == 5
    counts = loaded.counts()
    assert (counts["questions"], counts["rows_left_out"], counts["rows_mended"]) == (6, 5, 3)
    assert counts["named"] == [
        "mixed.jsonl, line 2: not a JSON object",
        'mixed.jsonl, line 3: "golden_answers" is not a list with at least one answer',
        "mixed.jsonl, line 5: 2 of 3 answers is null or empty and was left out",
        "mixed.jsonl, line 6: there is no column of answers (golden_answers, answers, answer or reward_model)",
        'mixed.jsonl, line 7: "golden_answers" is not a list with at least one answer',
        "mixed.jsonl, line 8: the question 'mixed:1' was there before (mixed.jsonl, line 1)",
        "mixed.jsonl, line 9: the id 'mixed:1' was used before (mixed.jsonl, line 1); this one is 'mixed:1~2' now",
        "mixed.jsonl, line 10: the id 'mixed:1' was used before (mixed.jsonl, line 1); this one is 'mixed:1~3' now",
    ]
    assert "6 questions; 5 rows left out, 3 mended: mixed.jsonl, line 2" in loaded.report()


# -- the shapes of published rows


@pytest.mark.parametrize(
    ("reward_model", "answers"),
    [
        ({"style": "rule", "ground_truth": {"target": ["a", "b"]}}, ("a", "b")),
        ({"ground_truth": {"target": np.array(["a", "b"], object)}}, ("a", "b")),
        ({"ground_truth": {"target": "a"}}, ("a",)),
        ({"ground_truth": ["a", "b"]}, ("a", "b")),
        ({"ground_truth": np.array(["a"], object)}, ("a",)),
        ({"ground_truth": "a"}, ("a",)),
        ({"ground_truth": '{"target": ["a", "b"]}'}, ("a", "b")),
        ({"ground_truth": 1962}, ("1962",)),
        ('{"ground_truth": {"target": ["a"]}}', ("a",)),
    ],
)
def test_every_shape_of_search_r1_s_ground_truth(reward_model, answers):
    """Row ids restart for each source in that file, so the source is part of the id."""
    given = {
        "id": "train_0",
        "question": "Who?",
        "data_source": "nq",
        "prompt": [{"role": "user", "content": "Who?"}],
        "reward_model": reward_model,
        "extra_info": {"split": "train", "index": 0},
    }
    question = question_of(given, dataset="train", number=1)
    assert question.golden_answers == answers
    assert (question.id, question.dataset) == ("nq:train_0", "nq")
    assert question.metadata["prompt"] == [{"role": "user", "content": "Who?"}]
    del given["id"]
    assert question_of(given, dataset="train", number=1).id == "nq:train_0"


@pytest.mark.parametrize(
    ("given", "kind", "answers", "titles"),
    [
        # HotpotQA and 2Wiki on the hub
        (
            {"_id": "x", "question": "q", "answer": "yes", "type": "comparison",
             "supporting_facts": {"title": ["A", "B", "A"], "sent_id": [0, 0, 1]}},
            "parallelizable", ("yes",), ["A", "B"],
        ),
        (
            {"id": "x", "question": "q", "answer": "y", "type": "bridge_comparison",
             "supporting_facts": [["A", 0], ["B", 1]]},
            "mixed", ("y",), ["A", "B"],
        ),
        # FlashRAG's HotpotQA keeps them in its metadata
        (
            {"id": "x", "question": "q", "golden_answers": ["y"],
             "metadata": {"type": "bridge", "supporting_facts": {"title": ["A"], "sent_id": [0]}}},
            "bridge", ("y",), ["A"],
        ),
        # MuSiQue
        (
            {"id": "3hop2__1_2_3", "question": "q", "answer": "y", "answer_aliases": ["z", "y"],
             "paragraphs": [{"title": "A", "is_supporting": True}, {"title": "B", "is_supporting": False}]},
            "mixed", ("y", "z"), ["A"],
        ),
        # TriviaQA, PopQA, NQ-open, Bamboogle, MultiHop-RAG
        (
            {"question_id": "x", "question": "q", "answer": {"value": "Y", "aliases": ["Y", "Why"]}},
            "single", ("Y", "Why"), None,
        ),
        ({"id": 7, "question": "q", "possible_answers": '["Y", "Why"]'}, "single", ("Y", "Why"), None),
        ({"question": "q", "answer": ["Y", "[1]"]}, "single", ("Y", "[1]"), None),
        ({"Question": "q", "Answer": "Y"}, "single", ("Y",), None),
        (
            {"query": "q", "answer": "Yes", "question_type": "comparison_query",
             "evidence_list": [{"title": "A", "fact": "f"}, {"title": "B"}]},
            "parallelizable", ("Yes",), ["A", "B"],
        ),
        # Natural Questions in full, as the hub has it and as TFDS does
        (
            {"id": 3, "question": {"text": "q", "tokens": ["q"]},
             "annotations": {"short_answers": [{"text": ["Y"]}, {"text": []}, {"text": ["Why"]}]}},
            "single", ("Y", "Why"), None,
        ),
        (
            {"id": 3, "question": {"text": b"q"}, "annotations": {"short_answers": {"text": [[b"Y"], []]}}},
            "single", ("Y",), None,
        ),
        # TFDS gives bytes and arrays
        ({"id": b"x", "question": b"q", "answers": np.array([b"\xc3\xa9"], object)}, "single", ("é",), None),
    ],
)  # fmt: skip
def test_rows_as_the_benchmarks_were_published(given, kind, answers, titles):
    question = question_of(given, dataset="d", number=1)
    assert (question.text, question.kind, question.golden_answers) == ("q", kind, answers)
    assert question.metadata.get("gold_titles") == titles
    assert "supporting_facts" not in question.metadata


# -- ids and subsets


def make(dataset, number, text="q"):
    return Question(
        id=f"{dataset}:{number}", text=f"{text}{number}", golden_answers=("a",), dataset=dataset
    )


def test_data_sets_together_keep_ids_apart():
    one = read_rows([("p", json.loads(row()))], "dev")
    two = read_rows([("p", json.loads(row(question="Another?")))], "dev")
    whole = merge([one, two])
    assert [q.id for q in whole.questions] == ["dev:a", "dev:a~2"]
    assert whole.problems[0].lost is False


def test_a_subset_is_the_same_whatever_the_order_and_lies_in_a_larger_one():
    questions = [make(d, i) for d in ("one", "two") for i in range(40)]
    small = subset(questions, 5)
    assert [sum(q.dataset == d for q in small) for d in ("one", "two")] == [5, 5]
    assert {q.id for q in subset(questions[::-1], 5)} == {q.id for q in small}
    assert set(map(id, small)) <= set(map(id, subset(questions, 9)))
    assert subset(questions, 0) == questions and subset(questions, 100) == questions
    positions = [questions.index(q) for q in small]
    assert positions == sorted(positions)
