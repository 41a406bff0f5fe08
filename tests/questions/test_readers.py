import json

import pytest

from psearch_jax.errors import UserError
from psearch_jax.questions.question import Question
from psearch_jax.questions.readers import kind_of, question_row, read_flashrag


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
        (row(), "line 2: the id 'dev:a' was used in line 1"),
    ],
)
def test_a_bad_line_is_named_with_its_file(tmp_path, line, said):
    path = write(tmp_path / "dev.jsonl", row(), line)
    with pytest.raises(UserError) as caught:
        read_flashrag(path)
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
