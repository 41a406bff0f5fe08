"""Rankings by words, by vectors on a mesh, fused and reranked: the right rows, in the right order."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from retrieval.samples import clustered_vectors, exact_index
from retrieval.tiny_encoder import tiny_embedder

from psearch_jax.config import MeshConfig
from psearch_jax.errors import UserError
from psearch_jax.mesh import make_mesh
from psearch_jax.retrieval.device_search import DeviceNeighbours
from psearch_jax.retrieval.index import Index
from psearch_jax.retrieval.lexical import LexicalIndex, words
from psearch_jax.retrieval.passages import Passage
from psearch_jax.retrieval.rankers import (
    DenseRanker,
    FusedRanker,
    LexicalRanker,
    RerankedRanker,
    fuse,
)
from psearch_jax.retrieval.reranking import Reranker
from psearch_jax.retrieval.searcher import CachedSearcher

TEXTS = ("Lyon city on the Rhône", "Turin city city", "Paris", "the of")
PASSAGES = [Passage(f"p{i}", "", text) for i, text in enumerate(TEXTS)]


def bm25(count: int, df: int, tf: int, length: int, mean: float) -> float:
    """Lucene's BM25, by hand."""
    idf = math.log(1 + (count - df + 0.5) / (df + 0.5))
    return idf * tf / (tf + 1.5 * (1 - 0.75 + 0.75 * length / mean))


def test_words_are_folded_and_the_common_ones_left_out() -> None:
    assert words("The Rhône—Zürich's 2nd STRASSE") == ["rhone", "zurich", "2nd", "strasse"]


def test_bm25_by_hand(tmp_path) -> None:
    built = LexicalIndex.build(TEXTS)
    built.save(tmp_path / "bm25")
    mean = (3 + 3 + 1 + 0) / 4
    for index in (built, LexicalIndex.load(tmp_path / "bm25")):
        [city, rhone, nothing, common] = index.rank(["CITY", "rhone", "unknown", "the"], 5)
        assert [row for row, _ in city] == [1, 0]
        assert city[0][1] == pytest.approx(bm25(4, 2, 2, 3, mean), rel=1e-5)
        assert city[1][1] == pytest.approx(bm25(4, 2, 1, 3, mean), rel=1e-5)
        assert [row for row, _ in rhone] == [0]
        assert nothing == common == []
        assert len(index) == 4


def test_parts_score_as_one_corpus() -> None:
    """All passages have three words, so the mean length of every part is that of the whole."""
    texts = ["red fox runs", "red dog runs", "red cat sleeps", "blue fox sleeps"]
    [whole] = LexicalIndex.build(texts).rank(["red fox"], 4)
    parts = [LexicalIndex.build(texts[:1]), LexicalIndex.build(texts[1:])]
    scored = {
        first + row: score
        for first, part in zip((0, 1), parts, strict=True)
        for row, score in part.among(parts).rank(["red fox"], 4)[0]
    }
    assert scored == pytest.approx(dict(whole), rel=1e-5)


def test_equal_scores_keep_passage_order_and_a_small_k_is_the_beginning() -> None:
    index = LexicalIndex.build([f"same word{i % 2}" for i in range(50)])
    [whole] = index.rank(["same"], 50)
    assert [row for row, _ in whole] == list(range(50))
    assert index.rank(["same"], 7) == [whole[:7]]


def test_a_corpus_without_words_and_broken_files(tmp_path) -> None:
    assert LexicalIndex.build(["the", "of"]).rank(["the", "x"], 3) == [[], []]
    with pytest.raises(UserError, match="cannot be read"):
        LexicalIndex.load(tmp_path)


def test_reciprocal_ranks_by_hand() -> None:
    fused = fuse([[(7, 0.9), (3, 0.8)], [(3, 12.0), (5, 11.0), (7, 2.0)]])
    assert [row for row, _ in fused] == [3, 7, 5]
    assert [score for _, score in fused] == pytest.approx(
        [1 / 62 + 1 / 61, 1 / 61 + 1 / 63, 1 / 62]
    )


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_the_mesh_finds_what_the_host_finds(precision: str) -> None:
    """1,003 rows over eight devices: the last one is not full. Ties and missing rows are the index's affair."""
    vectors = clustered_vectors(1003, 16, 0)
    queries = clustered_vectors(21, 16, 1)
    exact = exact_index(vectors)
    mesh = make_mesh(MeshConfig(), jax.devices())
    neighbours = DeviceNeighbours(vectors, mesh, precision)
    ids, scores = Index(exact.manifest, vectors, neighbours).search_vectors(queries, 5)
    expected, expected_scores = exact.search_vectors(queries, 5)
    assert np.array_equal(ids, expected)
    assert np.array_equal(scores, expected_scores)
    assert neighbours.bytes_a_device <= (2 if precision == "bfloat16" else 1.5) * 16 * 160
    few = DeviceNeighbours(vectors[:3], mesh, precision).candidates(queries[:1], 8)
    assert sorted(few[0].tolist()) == [-1] * 5 + [0, 1, 2]


def rankers() -> tuple[DenseRanker, LexicalRanker]:
    embedder = tiny_embedder()
    index = exact_index(embedder.embed(TEXTS))
    return DenseRanker(index, embedder), LexicalRanker(LexicalIndex.build(TEXTS), "words")


def length_reranker() -> Reranker:
    """Prefers the shorter passage."""

    def tokenize(pairs):
        return [([1] * len(text), [0] * len(text)) for _, text in pairs]

    return Reranker(
        name="length",
        fingerprint="length",
        score=lambda tokens_BxL, types_BxL, mask_BxL: jnp.asarray(-mask_BxL.sum(1), jnp.float32),
        tokenize=tokenize,
        max_tokens=32,
    )


def test_fused_and_reranked_searchers() -> None:
    dense, lexical = rankers()
    fused = FusedRanker([dense, lexical], depth=4)
    searcher = CachedSearcher(fused, PASSAGES)
    [hits, none] = searcher.search(["Turin city", " "], 2)
    assert [hit.passage.id for hit in hits] == ["p1", "p0"]
    assert hits[0].score == pytest.approx(2 / 61)
    assert none == []
    assert fused.rank(["Turin city"], 2) == [fused.rank(["Turin city"], 4)[0][:2]]
    reranked = RerankedRanker(fused, length_reranker(), PASSAGES, depth=4)
    hits = CachedSearcher(reranked, PASSAGES).search(["Turin city"], 3)[0]
    assert [hit.passage.text for hit in hits] == ["Paris", "the of", "Turin city city"]
    prints = {dense.fingerprint, fused.fingerprint, reranked.fingerprint}
    assert len(prints | {FusedRanker([dense, lexical], depth=5).fingerprint}) == 4
