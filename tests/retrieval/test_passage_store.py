"""Passages on disk: the same as they were written, mapped, and no id twice."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from psearch_jax.errors import UserError
from psearch_jax.retrieval import passage_store
from psearch_jax.retrieval.corpus import BadRows, corpus_fingerprint, iter_corpus, read_corpus
from psearch_jax.retrieval.passage_store import JoinedPassages, PassageStore, write_store
from psearch_jax.retrieval.passages import Passage

PASSAGES = [Passage(f"p{i}", f"Título {i}", f"text {i}\nand more") for i in range(11)]
ROWS = [{"id": p.id, "title": p.title, "text": p.text} for p in PASSAGES]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def write_kind(directory: Path, kind: str) -> Path:
    path = directory / f"corpus.{kind}"
    if kind == "jsonl":
        path.write_bytes(LINES)
    elif kind == "gz":
        path.write_bytes(gzip.compress(LINES))
    elif kind == "zst":
        with pa.CompressedOutputStream(str(path), "zstd") as stream:
            stream.write(LINES)
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    elif kind == "directory":
        path.mkdir()
        pq.write_table(pa.Table.from_pylist(ROWS[:6]), path / "0.parquet")
        pq.write_table(pa.Table.from_pylist(ROWS[6:]), path / "1.parquet")
    else:
        import datasets

        datasets.Dataset.from_list(ROWS).save_to_disk(str(path))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "gz", "zst", "parquet", "directory", "dataset"])
def test_every_kind_of_file_gives_the_same_passages(tmp_path: Path, kind: str) -> None:
    assert read_corpus(write_kind(tmp_path, kind)) == PASSAGES


@pytest.mark.parametrize("kind", ["gz", "zst", "parquet"])
def test_a_file_that_breaks_off_is_named(tmp_path: Path, kind: str) -> None:
    path = write_kind(tmp_path, kind)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match="cannot be read beyond"):
        read_corpus(path)


def test_a_stated_number_of_bad_rows_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(LINES + b'{"id": "x"}\n' + b"\xff\n" + b'{"id": "p3", "text": "again"}\n')
    bad = BadRows(allowed=3)
    assert list(iter_corpus(path, bad)) == PASSAGES
    assert [problem.split(":")[0] for problem in bad.problems] == ["line 12", "line 13", "line 14"]
    with pytest.raises(UserError, match="line 14, beyond the 2 allowed"):
        list(iter_corpus(path, BadRows(allowed=2)))


def test_a_dataset_of_splits_asks_for_one(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "dataset_dict.json").write_text("{}")
    with pytest.raises(UserError, match="give one of them: .*train"):
        read_corpus(tmp_path)


def test_a_store_gives_back_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passage_store, "ROWS", 4)
    path = tmp_path / "p.arrow"
    assert write_store(path, iter(PASSAGES)) == (11, corpus_fingerprint(PASSAGES))
    store = PassageStore(path)
    assert list(store) == PASSAGES == [store[i] for i in range(11)]
    assert list(store.ids()) == [p.id for p in PASSAGES]
    joined = JoinedPassages([store, [Passage("z", "Z", "last")], store])
    assert len(joined) == 23
    assert [joined[i].id for i in (0, 10, 11, 12, 22)] == ["p0", "p10", "z", "p0", "p10"]
    for outside in (-1, 11):
        with pytest.raises(IndexError):
            store[outside]
    assert [p.name for p in tmp_path.iterdir()] == ["p.arrow"]


def test_an_id_that_stands_twice_is_refused(tmp_path: Path) -> None:
    twins = [*PASSAGES, Passage("p4", "other", "text")]
    with pytest.raises(UserError, match="'p4' is that of passage 5 and of passage 12"):
        write_store(tmp_path / "p.arrow", twins)
    assert not (tmp_path / "p.arrow").exists()


def test_a_foreign_or_broken_store_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.arrow"
    with pytest.raises(UserError, match="cannot be read"):
        PassageStore(path)
    path.write_bytes(b"not Arrow")
    with pytest.raises(UserError, match="cannot be read"):
        PassageStore(path)
    table = pa.table({"a": [1]})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(UserError, match="not written by psearch_jax"):
        PassageStore(path)
