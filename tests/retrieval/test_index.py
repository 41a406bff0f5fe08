"""Indexes: built whole or not at all, checked when loaded, never a wrong passage."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from retrieval.samples import clustered_vectors, exact_index
from retrieval.tiny_encoder import tiny_embedder

from psearch_jax.config import RetrievalConfig
from psearch_jax.errors import UserError
from psearch_jax.retrieval import index as index_module
from psearch_jax.retrieval.index import build_index, load_index, open_or_build
from psearch_jax.retrieval.manifest import MANIFEST
from psearch_jax.retrieval.neighbours import ScannNeighbours, scann_parameters
from psearch_jax.retrieval.passages import Passage

WORDS = [
    "population",
    "area",
    "capital",
    "currency",
    "of",
    "Lyon",
    "Turin",
    "France",
    "Italy",
    "city",
    "river",
    "old",
    "large",
]


def passages(count: int) -> list[Passage]:
    rng = np.random.default_rng(1)
    return [
        Passage(f"p{i}", f"T{i}", f"{' '.join(rng.choice(WORDS, 4))} number{i}")
        for i in range(count)
    ]


def config(directory: Path, **changes: object) -> RetrievalConfig:
    return replace(RetrievalConfig(directory=str(directory), kind="exact"), **changes)


def directories(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def test_scores_by_hand() -> None:
    index = exact_index(np.array([[1, 0], [0, 1], [0.6, 0.8], [0, 1]], np.float32))
    ids, scores = index.search_vectors(np.array([[0, 1], [1, 0]], np.float32), 3)
    assert ids.tolist() == [[1, 3, 2], [0, 2, 1]]
    np.testing.assert_allclose(scores, [[1, 1, 0.8], [1, 0.6, 0]], atol=1e-7)


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 60),
    distinct=st.integers(1, 60),
    k=st.integers(1, 20),
    kind=st.sampled_from(["exact", "scann"]),
    seed=st.integers(0, 99),
)
def test_results_equal_a_full_stable_sort(
    count: int, distinct: int, k: int, kind: str, seed: int
) -> None:
    """Many equal vectors: ties must be broken by passage order; fewer than k when there are fewer."""
    rng = np.random.default_rng(seed)
    vectors_NxE = clustered_vectors(distinct, 8, seed)[rng.integers(0, distinct, count)]
    queries_QxE = clustered_vectors(5, 8, seed + 1)
    index = exact_index(vectors_NxE)
    if kind == "scann":
        neighbours = ScannNeighbours.build(vectors_NxE, scann_parameters(count, 8))
        index = replace(index, neighbours=neighbours)
    ids, scores = index.search_vectors(queries_QxE, k)
    assert ids.shape == (5, min(k, count))
    for row in range(5):
        products = (vectors_NxE * queries_QxE[row]).sum(1, dtype=np.float64)
        expected = np.argsort(-products, kind="stable")[:k]
        assert ids[row].tolist() == expected.tolist()
        assert np.array_equal(scores[row], products[expected])


def test_vectors_that_do_not_fit_are_refused() -> None:
    index = exact_index(clustered_vectors(5, 8, 0))
    with pytest.raises(ValueError, match="not finite"):
        index.search_vectors(np.full((1, 8), np.nan, np.float32), 1)
    with pytest.raises(ValueError, match="vectors of 8"):
        index.search_vectors(np.ones((1, 7), np.float32), 1)
    with pytest.raises(ValueError, match="k >= 1"):
        index.search_vectors(np.ones((1, 8), np.float32), 0)
    assert index.search_vectors(np.ones((0, 8), np.float32), 3)[0].shape == (0, 3)


def test_built_once_then_loaded(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    corpus = passages(50)
    first = open_or_build(corpus, tiny_embedder(), config(tmp_path, kind="scann"))
    again = open_or_build(corpus, tiny_embedder(calls=calls), config(tmp_path, kind="scann"))
    assert not calls
    assert again.manifest == first.manifest
    assert directories(tmp_path) == [first.fingerprint]
    assert set(first.manifest.versions) == {"psearch_jax", "numpy", "scann"}
    texts = [passage.text for passage in corpus]
    assert np.array_equal(first.vectors_NxE, tiny_embedder().embed(texts))
    ids, _ = again.search_vectors(np.asarray(again.vectors_NxE[:50]), 1)
    assert ids[:, 0].tolist() == list(range(50))


def test_the_fingerprint_changes_with_everything_that_changes_results(tmp_path: Path) -> None:
    corpus, base = passages(20), config(tmp_path)
    prints = [
        open_or_build(corpus, tiny_embedder(), base).fingerprint,
        open_or_build(corpus[:-1], tiny_embedder(), base).fingerprint,
        open_or_build(corpus[::-1], tiny_embedder(), base).fingerprint,
        open_or_build(corpus, tiny_embedder(fingerprint="tiny-2"), base).fingerprint,
        open_or_build(corpus, tiny_embedder(), replace(base, embed="contents")).fingerprint,
        open_or_build(corpus, tiny_embedder(), replace(base, embed_without="a")).fingerprint,
        open_or_build(corpus, tiny_embedder(), replace(base, kind="scann")).fingerprint,
    ]
    assert len(set(prints)) == len(prints)
    other_batches = open_or_build(corpus, tiny_embedder(batch_tokens=64), base)
    assert other_batches.fingerprint == prints[0]


def test_another_kind_takes_the_vectors_over(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    corpus = passages(30)
    exact = open_or_build(corpus, tiny_embedder(), config(tmp_path))
    scann = open_or_build(corpus, tiny_embedder(calls=calls), config(tmp_path, kind="scann"))
    assert not calls
    assert np.array_equal(exact.vectors_NxE, scann.vectors_NxE)


def test_damaged_vectors_are_not_taken_over(tmp_path: Path) -> None:
    corpus = passages(30)
    exact = open_or_build(corpus, tiny_embedder(), config(tmp_path))
    kept = np.array(exact.vectors_NxE)
    data = bytearray((tmp_path / exact.fingerprint / "vectors.npy").read_bytes())
    data[-3] ^= 255
    (tmp_path / exact.fingerprint / "vectors.npy").write_bytes(bytes(data))
    scann = open_or_build(corpus, tiny_embedder(), config(tmp_path, kind="scann"))
    assert np.array_equal(scann.vectors_NxE, kept)


def damage(path: Path, how: str) -> None:
    manifest = json.loads((path / MANIFEST).read_text())
    if how == "truncated":
        (path / "vectors.npy").write_bytes((path / "vectors.npy").read_bytes()[:-10])
    elif how == "changed":
        data = (path / "scann" / "dataset.npy").read_bytes()
        (path / "scann" / "dataset.npy").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif how == "file gone":
        (path / "scann" / "scann_config.pb").unlink()
    elif how == "no manifest":
        (path / MANIFEST).unlink()
    elif how == "manifest cut":
        (path / MANIFEST).write_text(json.dumps(manifest)[:-20])
    elif how == "key gone":
        (path / MANIFEST).write_text(json.dumps({k: manifest[k] for k in manifest if k != "dims"}))
    elif how == "edited":
        (path / MANIFEST).write_text(json.dumps(manifest | {"encoder_hash": "other"}))
    elif how == "foreign":
        (path / MANIFEST).write_text(json.dumps({"producer": "somebody else"}))
    elif how == "newer":
        (path / MANIFEST).write_text(json.dumps(manifest | {"format_version": 99}))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("truncated", "vectors.npy has .* bytes instead of"),
        ("changed", "scann/dataset.npy was changed"),
        ("file gone", "scann/scann_config.pb is missing"),
        ("no manifest", "is not an index of psearch_jax"),
        ("manifest cut", "cannot be read"),
        ("key gone", "is incomplete"),
        ("edited", "contradicts its own fingerprint"),
        ("foreign", "was not written by psearch_jax"),
        ("newer", "format version 99"),
    ],
)
def test_damage_is_told_in_a_sentence(tmp_path: Path, how: str, says: str) -> None:
    corpus, wanted = passages(10), config(tmp_path, kind="scann")
    path = tmp_path / open_or_build(corpus, tiny_embedder(), wanted).fingerprint
    damage(path, how)
    with pytest.raises(UserError, match=says) as caught:
        open_or_build(corpus, tiny_embedder(), wanted)
    assert str(path) in str(caught.value)
    assert "remove the directory" in str(caught.value) or "another place" in str(caught.value)


def test_an_index_under_anothers_name_is_refused(tmp_path: Path) -> None:
    first = open_or_build(passages(10), tiny_embedder(), config(tmp_path)).fingerprint
    second = open_or_build(passages(11), tiny_embedder(), config(tmp_path)).fingerprint
    os.rename(tmp_path / first, tmp_path / "kept")
    os.rename(tmp_path / second, tmp_path / first)
    with pytest.raises(UserError, match="holds the index"):
        open_or_build(passages(10), tiny_embedder(), config(tmp_path))


def test_no_index_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not an index"):
        load_index(tmp_path / "nothing")


def test_another_scann_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = open_or_build(passages(10), tiny_embedder(), config(tmp_path, kind="scann"))
    monkeypatch.setattr(index_module, "scann_version", lambda: "9.9")
    with pytest.raises(UserError, match=r"ScaNN 9\.9 is installed|9\.9 is installed"):
        load_index(tmp_path / built.fingerprint)


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"kind": "faiss"}, "retrieval.kind is 'faiss'"), ({"embed": "all"}, "retrieval.embed")],
)
def test_bad_configuration(tmp_path: Path, changes: dict[str, str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        open_or_build(passages(3), tiny_embedder(), config(tmp_path, **changes))


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no passages"):
        open_or_build([], tiny_embedder(), config(tmp_path))


def test_a_disk_that_fills_up_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = open_or_build(passages(20), tiny_embedder(), config(tmp_path))
    real_save = np.save

    def full(stream: object, array: np.ndarray) -> None:
        real_save(stream, array[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(UserError, match=r"disk is full.*retrieval\.directory"):
        open_or_build(passages(30), tiny_embedder(), config(tmp_path))
    assert directories(tmp_path) == [kept.fingerprint]
    load_index(tmp_path / kept.fingerprint)


def test_too_little_space_is_seen_before_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(index_module.shutil, "disk_usage", lambda path: usage)
    calls: list[tuple[int, int]] = []
    with pytest.raises(UserError, match="disk is full"):
        open_or_build(passages(30), tiny_embedder(calls=calls), config(tmp_path))
    assert not calls


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        open_or_build(passages(3), tiny_embedder(), config(tmp_path / "file"))


def test_two_builds_at_once(tmp_path: Path) -> None:
    corpus = passages(5)

    def build_another(done: int, total: int) -> None:
        with pytest.raises(UserError, match="Another process is building"):
            build_index(corpus, tiny_embedder(), tmp_path, config(tmp_path))

    assert build_index(corpus, tiny_embedder(), tmp_path, config(tmp_path), build_another)


KILLED = """
import sys
from pathlib import Path
from retrieval.test_index import config, index_module, open_or_build, passages
from retrieval.tiny_encoder import tiny_embedder
index_module.SHARD_TEXTS = 64
root = Path(sys.argv[1])
open_or_build(passages(600), tiny_embedder(batch_tokens=256, seconds=0.05), config(root))
"""


def test_law_13_a_killed_build_leaves_nothing_and_goes_on(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "SHARD_TEXTS", 64)
    whole = open_or_build(
        passages(600), tiny_embedder(batch_tokens=256), config(tmp_path / "whole")
    )
    place = tmp_path / "killed"
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}"}
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(place)], env=environment)
    try:
        deadline = time.monotonic() + 600
        while len(list(place.glob(".*.building/shards/*.npz"))) < 3:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert [name for name in directories(place) if not name.startswith(".")] == []
    calls: list[tuple[int, int]] = []
    resumed = open_or_build(
        passages(600), tiny_embedder(batch_tokens=256, calls=calls), config(place)
    )
    uninterrupted = sum(rows for rows, _ in whole_calls())
    assert 0 < sum(rows for rows, _ in calls) <= uninterrupted - 3 * 64
    assert np.array_equal(resumed.vectors_NxE, whole.vectors_NxE)
    assert directories(place) == [resumed.fingerprint]


def whole_calls() -> list[tuple[int, int]]:
    calls: list[tuple[int, int]] = []
    texts = [passage.text for passage in passages(600)]
    tiny_embedder(batch_tokens=256, calls=calls).embed(texts)
    return calls
