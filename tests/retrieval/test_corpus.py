"""Corpora are read strictly, written whole, and told apart."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psearch_jax.errors import UserError
from psearch_jax.retrieval.corpus import (
    corpus_fingerprint,
    iter_corpus,
    read_corpus,
    write_corpus,
)
from psearch_jax.retrieval.passages import Passage

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)
TITLE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n"))


def lines(path: Path, *rows: str | bytes) -> Path:
    path.write_bytes(b"\n".join(r.encode() if isinstance(r, str) else r for r in rows))
    return path


def test_both_forms_of_flashrag_are_read(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "c.jsonl",
        b"\xef\xbb\xbf" + b'{"id": 7, "contents": "\\"Lyon\\"\\nA city.\\nOn the Saone."}',
        "",
        '{"id": "b", "title": "Turin", "text": "Another."}',
        '{"id": "c", "title": null, "text": "No title."}',
        '{"id": "d", "title": "x", "text": "y", "contents": "no quotes\\nhere"}',
    )
    assert read_corpus(path) == [
        Passage("7", "Lyon", "A city.\nOn the Saone."),
        Passage("b", "Turin", "Another."),
        Passage("c", "", "No title."),
        Passage("d", "", "no quotes\nhere"),
    ]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{not json", "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
        ("[1]", "not list"),
        ('{"contents": "x"}', '"id" is missing'),
        ('{"id": true, "contents": "x"}', '"id" must be'),
        ('{"id": "a"}', 'neither "contents" nor "text"'),
        ('{"id": "a", "contents": 3}', '"contents" must be a string, not 3'),
        ('{"id": "a", "text": "x", "title": 3}', '"title" must be a string'),
        ('{"id": "a", "contents": "\\"T\\"\\n "}', "no text"),
        ('{"id": "a", "contents": "\\ud800"}', "surrogate"),
        ('{"id": "first", "contents": "y"}', "the id 'first' was used in line 1"),
        (b'{"id": "a", "contents": "\xff"}', "byte 25 is not UTF-8"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: str | bytes, says: str) -> None:
    path = lines(tmp_path / "c.jsonl", '{"id": "first", "contents": "x"}', bad)
    with pytest.raises(UserError) as caught:
        read_corpus(path)
    assert f"{path}, line 2: " in str(caught.value)
    assert says in str(caught.value)


def test_missing_empty_and_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_corpus(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="cannot be read"):
        read_corpus(tmp_path)
    with pytest.raises(UserError, match="holds no passages"):
        read_corpus(lines(tmp_path / "empty.jsonl", "", "  "))


def test_a_data_set_of_the_datasets_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "mine").mkdir()
    for split, text in (("train", "one"), ("test", "two")):
        row = {"id": split, "contents": f'"T"\n{text}'}
        lines(tmp_path / "mine" / f"{split}.jsonl", json.dumps(row))
    assert read_corpus(f"hf:{tmp_path / 'mine'}") == [Passage("train", "T", "one")]
    assert read_corpus(f"hf:{tmp_path / 'mine'}@test") == [Passage("test", "T", "two")]
    for wrong in (tmp_path / "missing", f"{tmp_path / 'mine'}@dev"):
        with pytest.raises(UserError, match="hf:.* cannot be read .*check NAME"):
            read_corpus(f"hf:{wrong}")


def test_reading_is_lazy(tmp_path: Path) -> None:
    path = lines(tmp_path / "c.jsonl", '{"id": "a", "contents": "x"}', "broken")
    assert next(iter_corpus(path)).id == "a"


@settings(deadline=None, max_examples=50)
@given(rows=st.lists(st.tuples(TITLE, TEXT), min_size=1, max_size=5))
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]
) -> None:
    path = tmp_path_factory.mktemp("corpus") / "new" / "c.jsonl"
    passages = [Passage(str(i), title, text) for i, (title, text) in enumerate(rows)]
    write_corpus(path, passages)
    assert read_corpus(path) == passages
    assert [set(json.loads(row)) for row in path.read_text("utf-8").split("\n")[:-1]] == [
        {"id", "contents"}
    ] * len(rows)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    write_corpus(path, [Passage("a", "A", "x")])
    before = path.read_bytes()
    with pytest.raises(ValueError, match="breaks its contents"):
        write_corpus(path, [Passage("b", "B", "y"), Passage("c", "two\nlines", "z")])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_writing_where_it_cannot_be_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write_corpus(tmp_path / "file" / "c.jsonl", [Passage("a", "A", "x")])


def test_fingerprint_sees_every_field_and_the_order() -> None:
    base = [Passage("a", "T", "x"), Passage("b", "U", "y")]
    others = [
        [Passage("A", "T", "x"), base[1]],
        [Passage("a", "TT", "x"), base[1]],
        [Passage("a", "T", "xx"), base[1]],
        [Passage("aT", "", "x"), base[1]],
        [Passage("a", "", "Tx"), base[1]],
        base[::-1],
        base[:1],
    ]
    prints = {corpus_fingerprint(passages) for passages in (base, *others)}
    assert len(prints) == len(others) + 1
    assert corpus_fingerprint(list(base)) == corpus_fingerprint(base)
