"""Searching: each distinct query once, a cache, no wrong passage, the same answers every time."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from retrieval.tiny_encoder import tiny_embedder

from psearch_jax.config import RetrievalConfig
from psearch_jax.errors import UserError
from psearch_jax.retrieval import searcher as searcher_module
from psearch_jax.retrieval.embedding import Embedder
from psearch_jax.retrieval.index import Index, open_or_build
from psearch_jax.retrieval.passages import Passage
from psearch_jax.retrieval.searcher import NoSearcher, Searcher, open_searcher, recall_at_k

TEXTS = ("population of Lyon", "area of Turin", "capital of France", "capital of Italy")
PASSAGES = [Passage(f"p{i}", text.split()[-1], text) for i, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    directory = str(tmp_path_factory.mktemp("index"))
    return open_or_build(PASSAGES, tiny_embedder(), RetrievalConfig(directory=directory))


class CountingEmbedder(Embedder):
    """Remembers the queries of every call."""

    asked: list[list[str]]

    def embed_queries(self, queries: list[str]) -> np.ndarray:
        self.asked.append(list(queries))
        return super().embed_queries(queries)


def counting() -> CountingEmbedder:
    embedder = tiny_embedder()
    embedder.__class__ = CountingEmbedder
    embedder.asked = []
    return embedder


def test_the_passage_itself_is_found_first(index: Index) -> None:
    searcher = Searcher(index, tiny_embedder(), PASSAGES)
    for passage, hits in zip(PASSAGES, searcher.search(TEXTS, 2), strict=True):
        assert len(hits) == 2
        assert hits[0].passage is passage
        assert hits[0].score == pytest.approx(1, abs=1e-6)
        assert hits[0].score >= hits[1].score
    assert searcher.fingerprint == index.fingerprint


def test_each_distinct_query_is_sent_once_and_then_cached(index: Index) -> None:
    embedder = counting()
    searcher = Searcher(index, embedder, PASSAGES)
    first = searcher.search(["b a", "a", "b  a ", "a"], 1)
    assert embedder.asked == [["b a", "a"]]
    assert first[0] == first[2]
    assert first[1] == first[3]
    assert searcher.search(["a", "c"], 1)[0] == first[1]
    assert embedder.asked[1:] == [["c"]]
    searcher.search(["a"], 2)
    assert embedder.asked[2:] == [["a"]]
    stats = searcher.stats
    assert (stats.calls, stats.queries, stats.distinct, stats.cached) == (3, 7, 5, 1)
    assert stats.seconds > 0


def test_the_least_recently_used_result_goes_first(index: Index) -> None:
    embedder = counting()
    searcher = Searcher(index, embedder, PASSAGES, cache_size=2)
    for query in ("a", "b", "a", "c", "a", "b"):
        searcher.search([query], 1)
    assert embedder.asked == [["a"], ["b"], ["c"], ["b"]]


def test_a_call_larger_than_the_cache_is_answered_whole(index: Index) -> None:
    searcher = Searcher(index, tiny_embedder(), PASSAGES, cache_size=0)
    assert [hits[0].passage for hits in searcher.search(TEXTS, 1)] == PASSAGES
    searcher.search(TEXTS, 1)
    assert searcher.stats.cached == 0


def test_blank_queries_find_nothing_and_are_never_encoded(index: Index) -> None:
    embedder = counting()
    searcher = Searcher(index, embedder, PASSAGES)
    assert searcher.search(["", " \n\t"], 3) == [[], []]
    assert embedder.asked == []
    assert searcher.search([" ", TEXTS[0], ""], 1)[1][0].passage == PASSAGES[0]
    assert searcher.stats.empty == 4
    assert searcher.search([], 3) == []


def test_fewer_passages_than_k(index: Index) -> None:
    hits = Searcher(index, tiny_embedder(), PASSAGES).search(["area of Lyon"], 50)[0]
    assert sorted(hit.passage.id for hit in hits) == ["p0", "p1", "p2", "p3"]


def test_a_very_long_query_is_answered(index: Index) -> None:
    searcher = Searcher(index, tiny_embedder(), PASSAGES)
    assert len(searcher.search(["capital " * 12_500], 3)[0]) == 3


@settings(max_examples=30, deadline=None)
@given(queries=st.lists(st.sampled_from(["", "Lyon", "of", "capital of", "area"]), max_size=12))
def test_results_do_not_depend_on_the_other_queries(index: Index, queries: list[str]) -> None:
    searcher = Searcher(index, tiny_embedder(), PASSAGES)
    together = searcher.search(queries, 2)
    for query, hits in zip(queries, together, strict=True):
        alone = Searcher(index, tiny_embedder(), PASSAGES).search([query], 2)[0]
        assert [hit.passage for hit in hits] == [hit.passage for hit in alone]


def test_results_can_be_changed_by_the_caller_without_harm(index: Index) -> None:
    searcher = Searcher(index, tiny_embedder(), PASSAGES)
    searcher.search(["Lyon"], 2)[0].clear()
    assert len(searcher.search(["Lyon"], 2)[0]) == 2


def test_k_below_one(index: Index) -> None:
    for backend in (Searcher(index, tiny_embedder(), PASSAGES), NoSearcher()):
        with pytest.raises(UserError, match=r"protocol\.top_k"):
            backend.search(["x"], 0)


def test_a_searcher_refuses_what_does_not_belong_together(index: Index) -> None:
    with pytest.raises(UserError, match="not these 4"):
        Searcher(index, tiny_embedder(), PASSAGES[::-1])
    with pytest.raises(UserError, match="not these 3"):
        Searcher(index, tiny_embedder(), PASSAGES[:3])
    with pytest.raises(UserError, match=r"retrieval\.encoder"):
        Searcher(index, tiny_embedder(fingerprint="tiny-2"), PASSAGES)
    with pytest.raises(UserError, match=r"retrieval\.cache_size is -1"):
        Searcher(index, tiny_embedder(), PASSAGES, cache_size=-1)


def test_the_index_switched_off(tmp_path: Path) -> None:
    config = RetrievalConfig(kind="none", directory=str(tmp_path / "unused"))
    backend = open_searcher(config, PASSAGES)
    assert backend.search(["x", "y"], 3) == [[], []]
    assert backend.stats.queries == 2
    assert backend.fingerprint == "none"
    assert list(tmp_path.iterdir()) == []


def test_open_searcher_follows_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int, dict[str, str]]] = []

    def load(name: str, batch_tokens: int, **wanted: str) -> Embedder:
        asked.append((name, batch_tokens, wanted))
        return tiny_embedder(batch_tokens=batch_tokens)

    monkeypatch.setattr("psearch_jax.retrieval.searcher.load_embedder", load)
    config = RetrievalConfig(
        directory=str(tmp_path),
        encoder="some",
        embed_batch_tokens=96,
        kind="exact",
        cache_size=0,
        pooling="cls",
        query_prefix="q: ",
        passage_prefix="",
        encoder_dtype="bfloat16",
    )
    seen: list[tuple[int, int]] = []
    backend = open_searcher(config, PASSAGES, lambda done, total: seen.append((done, total)))
    wanted = {
        "pooling": "cls",
        "query_prefix": "q: ",
        "passage_prefix": "",
        "dtype": "bfloat16",
    }
    assert asked == [("some", 96, wanted)]
    assert seen[-1] == (4, 4)
    assert backend.search([TEXTS[2]], 1)[0][0].passage == PASSAGES[2]
    other = open_searcher(replace(config, embed="contents"), PASSAGES)
    assert other.fingerprint != backend.fingerprint


def test_recall_counts_queries_with_all_needed_passages(index: Index) -> None:
    searcher = Searcher(index, tiny_embedder(), PASSAGES)
    needed = [["p0"], ["p1", "p2"], {"p2"}, ["p3"]]
    assert recall_at_k(searcher, TEXTS, needed, 1) == 0.75
    assert recall_at_k(searcher, TEXTS, needed, 4) == 1.0
    with pytest.raises(ValueError, match="needs at least one"):
        recall_at_k(searcher, ["x"], [[]], 1)
    with pytest.raises(ValueError, match="needs at least one"):
        recall_at_k(searcher, [], [], 1)


@pytest.mark.parametrize("kind", ["bm25", "hybrid", "exact"])
def test_a_recipe_opens_every_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(searcher_module, "load_embedder", lambda *args, **more: tiny_embedder())
    matrix = "int8" if kind == "exact" else "none"
    config = RetrievalConfig(directory=str(tmp_path), kind=kind, device_matrix=matrix)
    found = open_searcher(config, PASSAGES)
    for passage, hits in zip(PASSAGES, found.search(TEXTS, 2), strict=True):
        assert hits[0].passage is passage
    assert isinstance(found, Searcher) == (kind == "exact")  # the demo counts the index's passages
    other = open_searcher(config, PASSAGES[:3])
    assert found.fingerprint != other.fingerprint
