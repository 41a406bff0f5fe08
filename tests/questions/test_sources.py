"""What `data.questions` may name, read from files that the tests write: no network, no hub."""

import json
import sys

import pyarrow
import pytest
from pyarrow import parquet

from psearch_jax.config import DataConfig
from psearch_jax.errors import UserError
from psearch_jax.questions.sources import load, load_questions
from psearch_jax.questions.suites import GROUPS, SUITES, suites_named


def rows(count, **more):
    return [
        {"id": f"test_{i}", "question": f"Who is {i}?", "golden_answers": [str(i)], **more}
        for i in range(count)
    ]


def write(path, given):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return path


def data(questions, **changes):
    return DataConfig(questions=str(questions), **changes)


def test_a_directory_holds_a_file_a_split(tmp_path):
    write(tmp_path / "train.jsonl", rows(3))
    parquet.write_table(pyarrow.Table.from_pylist(rows(2)), tmp_path / "dev.parquet")
    assert [q.id for q in load_questions(data(tmp_path), "train")] == [
        f"train:test_{i}" for i in range(3)
    ]
    assert [q.dataset for q in load_questions(data(tmp_path), "dev")] == ["dev", "dev"]
    with pytest.raises(UserError, match=r"test\.jsonl cannot be read"):
        load_questions(data(tmp_path), "test")


def test_search_r1_s_parquet(tmp_path):
    """Two sources with the same row ids; `ground_truth` as an object, as pyarrow stores it."""
    given = [
        {
            "id": f"train_{i}",
            "question": f"Who is {i}?",
            "golden_answers": [str(i)],
            "data_source": source,
            "prompt": [{"role": "user", "content": "p"}],
            "reward_model": {"style": "rule", "ground_truth": {"target": [str(i)]}},
            "extra_info": {"split": "train", "index": i},
        }
        for source in ("nq", "hotpotqa")
        for i in range(3)
    ]
    path = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(given), path)
    loaded = load(data(path), "train")
    assert not loaded.problems
    assert [q.id for q in loaded.questions][:4] == [
        "nq:train_0", "nq:train_1", "nq:train_2", "hotpotqa:train_0",
    ]  # fmt: skip
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(UserError, match=r"bad\.parquet cannot be read"):
        load(data(tmp_path / "bad.parquet"), "train")


def test_several_sources_at_once_and_a_subset_of_each(tmp_path):
    one, two = write(tmp_path / "one.jsonl", rows(9)), write(tmp_path / "two.jsonl", rows(9))
    together = load_questions(data(f"{one}, {two}", subset=4), "test")
    assert [q.dataset for q in together] == ["one"] * 4 + ["two"] * 4


def test_bad_rows_are_skipped_with_a_warning_or_refused(tmp_path, caplog):
    path = write(tmp_path / "q.jsonl", [*rows(2), {"question": "No answer?"}])
    assert len(load_questions(data(path), "test")) == 2
    assert (
        "2 questions; 1 rows left out, 0 mended: q.jsonl, line 3: there is no column" in caplog.text
    )
    with pytest.raises(UserError, match="1 rows left out.*data.bad_rows=skip"):
        load(data(path, bad_rows="refuse"), "test")
    # A line that is no row at all is an error unless it is asked to be passed over: the file may be torn.
    with path.open("a", encoding="utf-8") as stream:
        stream.write('{"question": "Cut o')
    with pytest.raises(UserError, match=r"q\.jsonl, line 4.*data\.bad_rows=skip"):
        load(data(path), "test")
    assert len(load(data(path, bad_rows="skip"), "test").questions) == 2
    with pytest.raises(UserError, match="of 1 rows none is one: none.jsonl, line 1"):
        load(data(write(tmp_path / "none.jsonl", [{"question": "No answer?"}])), "test")


def test_suites_find_local_files_first(tmp_path):
    write(tmp_path / "nq_test_1000.jsonl", rows(2))
    write(tmp_path / "hotpotqa" / "dev.jsonl", rows(2, metadata={"type": "comparison"}))
    write(tmp_path / "2wiki101_questions.jsonl", rows(1))
    write(tmp_path / "musique_dev.jsonl", rows(1))
    found = load_questions(
        data("suite:nq,suite:hotpotqa,suite:2wiki,suite:musique", directory=str(tmp_path)), "test"
    )
    assert [(q.id, q.kind) for q in found] == [
        ("nq:test_0", "single"),
        ("nq:test_1", "single"),
        ("hotpotqa:test_0", "parallelizable"),
        ("hotpotqa:test_1", "parallelizable"),
        ("2wikimultihopqa:test_0", "unknown"),
        ("musique:test_0", "bridge"),
    ]
    named = write(tmp_path / "elsewhere.jsonl", rows(1))
    (question,) = load_questions(data(f"suite:bamboogle={named}"), "test")
    assert (question.dataset, question.kind) == ("bamboogle", "bridge")
    write(tmp_path / "nq_test_2.jsonl", rows(1))
    with pytest.raises(UserError, match="could all be meant"):
        load_questions(data("suite:nq", directory=str(tmp_path)), "test")


def test_suites_by_name():
    assert {suite.name for suite in suites_named("seven")} == set(GROUPS["seven"]) < set(SUITES)
    assert suites_named("2wiki")[0].split("test") == "dev"
    with pytest.raises(UserError, match="'hotpot' is not known; there are nq, triviaqa"):
        suites_named("hotpot")


def test_a_data_set_of_the_datasets_library_from_a_local_directory(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write(tmp_path / "mine" / "train.jsonl", rows(2))
    write(tmp_path / "mine" / "validation.jsonl", rows(3))
    found = load_questions(data(f"hf:{tmp_path / 'mine'}"), "dev")
    assert [q.text for q in found] == ["Who is 0?", "Who is 1?", "Who is 2?"]
    assert len(load_questions(data(f"hf:{tmp_path / 'mine'}@train[:1]"), "dev")) == 1
    with pytest.raises(UserError, match="no split 'test', only train, validation"):
        load_questions(data(f"hf:{tmp_path / 'mine'}"), "test")
    with pytest.raises(UserError, match="hf:.*missing.* cannot be read"):
        load_questions(data(f"hf:{tmp_path / 'missing'}"), "test")


def test_tfds_without_tensorflow(tmp_path):
    import tensorflow_datasets as tfds

    class TinyQa(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")
        code_path = None  # no checksums beside this file

        def _info(self):
            text = tfds.features.Text()
            features = {"id": text, "question": text, "answers": tfds.features.Sequence(text)}
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, manager):
            return {"validation": self._generate_examples()}

        def _generate_examples(self):
            for i in range(3):
                yield str(i), {"id": f"v{i}", "question": f"Où est {i}?", "answers": ["là", "ici"]}

    TinyQa(data_dir=tmp_path, file_format="array_record").download_and_prepare()
    found = load_questions(data(f"tfds:{tmp_path / 'tiny_qa' / '1.0.0'}"), "dev")
    assert sorted(q.text for q in found) == [f"Où est {i}?" for i in range(3)]
    assert found[0].golden_answers == ("là", "ici")
    assert "tensorflow" not in sys.modules
    with pytest.raises(UserError, match="tfds:no_such_set cannot be read"):
        load_questions(data("tfds:no_such_set"), "dev")


def test_every_file_of_the_benchmarks_is_read_whole(shared_data):
    """Counts as SOURCES.md gives them; HotpotQA's types as the ParallelSearch paper does."""
    loaded = load(data("suite:seven", directory=str(shared_data)), "test")
    assert not loaded.problems
    counts = {n: sum(q.dataset == n for q in loaded.questions) for n in GROUPS["seven"]}
    assert counts == {
        "nq": 1000, "triviaqa": 1000, "popqa": 1000, "hotpotqa": 7405, "2wikimultihopqa": 101,
        "musique": 2417, "bamboogle": 125,
    }  # fmt: skip
    assert len({q.id for q in loaded.questions}) == sum(counts.values())
    kinds = [q.kind for q in loaded.questions if q.dataset == "hotpotqa"]
    assert (kinds.count("bridge"), kinds.count("parallelizable")) == (5918, 1487)
