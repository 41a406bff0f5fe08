"""ScaNN and exact search propose the same neighbours; none is made up."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from retrieval.samples import clustered_vectors, exact_index

from psearch_jax.retrieval.build_options import BuildOptions
from psearch_jax.retrieval.neighbours import (
    ExactNeighbours,
    ScannNeighbours,
    scann_parameters,
)


def test_exact_search_over_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psearch_jax.retrieval.neighbours.EXACT_BLOCK", 7)
    monkeypatch.setattr("psearch_jax.retrieval.neighbours.QUERY_BLOCK", 3)
    vectors_NxE, queries_QxE = clustered_vectors(40, 8, 0), clustered_vectors(10, 8, 1)
    found = ExactNeighbours(vectors_NxE).candidates(queries_QxE, 9)
    expected = np.argsort(-(queries_QxE @ vectors_NxE.T), axis=1)[:, :9]
    assert np.array_equal(np.sort(found, 1), np.sort(expected, 1))


@pytest.mark.parametrize("count", [300, 21_000, 101_000])
def test_scann_finds_what_exact_search_finds(
    count: int, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Brute force, hashing and a tree; after saving and loading too; nothing on the terminal."""
    vectors_NxE, queries_QxE = clustered_vectors(count, 64, 0), clustered_vectors(200, 64, 1)
    exact = exact_index(vectors_NxE)
    expected, _ = exact.search_vectors(queries_QxE, 3)
    parameters = scann_parameters(count, 64)
    built = ScannNeighbours.build(vectors_NxE, parameters)
    built.save(tmp_path / "scann")
    os.rename(tmp_path / "scann", tmp_path / "moved")
    for neighbours in (built, ScannNeighbours.load(tmp_path / "moved", parameters)):
        found, _ = replace(exact, neighbours=neighbours).search_vectors(queries_QxE, 3)
        recall = np.mean([len(set(a) & set(b)) / 3 for a, b in zip(found, expected, strict=True)])
        assert recall >= 0.98
    assert capfd.readouterr() == ("", "")


def test_a_tree_of_leaves_may_find_fewer_and_says_so() -> None:
    """One leaf searched of many: some queries have fewer than k neighbours, and none is made up."""
    vectors_NxE = clustered_vectors(600, 16, 0)
    parameters = scann_parameters(2_000_000, 16) | {
        "leaves": 60,
        "leaves_to_search": 1,
        "training_sample": 600,
    }
    index = replace(
        exact_index(vectors_NxE), neighbours=ScannNeighbours.build(vectors_NxE, parameters)
    )
    ids, scores = index.search_vectors(clustered_vectors(50, 16, 1), 150)
    assert (ids == -1).any()
    assert np.array_equal(ids == -1, np.isneginf(scores))
    for row in ids:
        real = row[row >= 0]
        assert len(set(real.tolist())) == len(real)
        assert (row[len(real) :] == -1).all()


def test_parameters_follow_the_size() -> None:
    assert scann_parameters(19_999, 384) == {"scoring": "brute_force"}
    assert "leaves" not in scann_parameters(100_000, 384)
    large = scann_parameters(4_000_000, 384)
    assert (large["leaves"], large["leaves_to_search"], large["spill"]) == (4500, 360, True)
    once = {"spill": False, "leaves": 2000, "leaves_to_search": 800}
    assert (
        BuildOptions(reorder_type="disk").scann_parameters(4_000_000, 384).items() >= once.items()
    )
    asked = BuildOptions(leaves=1000).scann_parameters(4_000_000, 384)
    assert (asked["leaves"], asked["leaves_to_search"], asked["spill"]) == (1000, 80, True)
    assert scann_parameters(50_000, 5)["dimensions_per_block"] == 1


def test_what_a_tree_finds_does_not_depend_on_the_batch() -> None:
    """ScaNN is handed blocks of one size: with others, now and then another leaf is searched (one or two queries
    of real titles in a thousand found something else)."""
    rng = np.random.default_rng(0)
    vectors_NxE = clustered_vectors(6_000, 384, 0)
    queries_QxE = vectors_NxE[:1_000] + 0.003 * rng.standard_normal((1_000, 384)).astype(np.float32)
    parameters = scann_parameters(2_000_000, 384) | {
        "leaves": 78,
        "leaves_to_search": 16,
        "training_sample": 6_000,
    }
    tree = ScannNeighbours.build(vectors_NxE, parameters)
    handed, search = set(), tree._searcher.search_batched

    class Watched:
        def search_batched(self, queries_QxE: np.ndarray, **options: int) -> tuple:
            handed.add(len(queries_QxE))
            return search(queries_QxE, **options)

    tree._searcher = Watched()
    whole = tree.candidates(queries_QxE, 3)
    for first in range(0, 1_000, 37):
        part = slice(first, first + 37)
        np.testing.assert_array_equal(tree.candidates(queries_QxE[part], 3), whole[part])
    assert len(handed) == 1
    assert tree.candidates(queries_QxE[:0], 3).shape == (0, 3)
