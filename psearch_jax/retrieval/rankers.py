"""Ways to rank the rows of a corpus for queries, and to put several of them together.

Each is a `Ranker`: queries in, (row, score) out, best first. `searcher.CachedSearcher` makes hits of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32

from psearch_jax.retrieval.index import Index
from psearch_jax.retrieval.lexical import LexicalIndex
from psearch_jax.retrieval.passages import Hit, Passage
from psearch_jax.retrieval.reranking import Reranker

#: (row, score), best first, no row twice.
Ranking = list[tuple[int, float]]

FUSION_DEPTH = 100  # of each ranking, how many take part in a fusion
FUSION_CONSTANT = 60  # of reciprocal rank fusion (Cormack, Clarke and Büttcher, 2009)


@runtime_checkable
class Ranker(Protocol):
    """Something that ranks rows."""

    @property
    def fingerprint(self) -> str:
        """Equal for rankers that give equal rankings."""
        ...

    def rank(self, queries: Sequence[str], k: int) -> list[Ranking]:
        """At most k rows for every query, which is never blank."""
        ...

    def warm_up(self) -> None:
        """Compile ahead what searching compiles."""
        ...


@runtime_checkable
class QueryEncoder(Protocol):
    """What of `embedding.Embedder` a search needs."""

    def embed_queries(self, queries: Sequence[str]) -> Float32[np.ndarray, "Q E"]:
        """Unit vectors of queries."""
        ...

    def warm_up(self) -> None:
        """Compile ahead."""
        ...


class DenseRanker:
    """Inner products of the query's vector with those of an index."""

    def __init__(self, index: Index, embedder: QueryEncoder) -> None:
        self.index = index
        self.fingerprint = index.fingerprint
        self._embedder = embedder

    def rank(self, queries: Sequence[str], k: int) -> list[Ranking]:
        """See `Ranker`."""
        vectors_QxE = self._embedder.embed_queries(queries)
        ids_QxK, scores_QxK = self.index.search_vectors(vectors_QxE, k)
        return [
            [(int(i), float(s)) for i, s in zip(ids_K, scores_K, strict=True) if i >= 0]
            for ids_K, scores_K in zip(ids_QxK, scores_QxK, strict=True)
        ]

    def warm_up(self) -> None:
        """Compile the encoder for the usual query shapes."""
        self._embedder.warm_up()


class LexicalRanker:
    """BM25."""

    def __init__(self, index: LexicalIndex, fingerprint: str) -> None:
        self._index = index
        self.fingerprint = fingerprint

    def rank(self, queries: Sequence[str], k: int) -> list[Ranking]:
        """See `Ranker`."""
        return self._index.rank(queries, k)

    def warm_up(self) -> None:
        """Nothing is compiled."""


class FusedRanker:
    """Several rankers over the same rows, put together by reciprocal rank."""

    def __init__(self, rankers: Sequence[Ranker], depth: int = FUSION_DEPTH) -> None:
        """`depth`: rows that each of them gives, whatever k is, so that a smaller k gives the beginning of a larger
        one's result."""
        self._rankers = rankers
        self._depth = depth
        self.fingerprint = short_hash(["fused", depth, *(r.fingerprint for r in rankers)])

    def rank(self, queries: Sequence[str], k: int) -> list[Ranking]:
        """See `Ranker`; a score is the sum of 1 / (60 + rank)."""
        depth = max(k, self._depth)
        rankings = [ranker.rank(queries, depth) for ranker in self._rankers]
        return [fuse(own)[:k] for own in zip(*rankings, strict=True)]

    def warm_up(self) -> None:
        """Of each."""
        for ranker in self._rankers:
            ranker.warm_up()


def fuse(rankings: Sequence[Ranking], constant: int = FUSION_CONSTANT) -> Ranking:
    """Reciprocal rank fusion of one query's rankings; equal scores by row."""
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, (row, _) in enumerate(ranking, start=1):
            scores[row] = scores.get(row, 0.0) + 1.0 / (constant + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))


class RerankedRanker:
    """The best `depth` of a ranker, put in order by a cross-encoder."""

    def __init__(
        self, ranker: Ranker, reranker: Reranker, passages: Sequence[Passage], depth: int
    ) -> None:
        self._ranker = ranker
        self._reranker = reranker
        self._passages = passages
        self._depth = depth
        self.fingerprint = short_hash(["reranked", depth, ranker.fingerprint, reranker.fingerprint])

    def rank(self, queries: Sequence[str], k: int) -> list[Ranking]:
        """See `Ranker`; a score is the cross-encoder's logit."""
        rankings = self._ranker.rank(queries, max(k, self._depth))
        candidates = [[Hit(self._passages[row], score) for row, score in own] for own in rankings]
        rows = [
            {id(hit.passage): row for hit, (row, _) in zip(hits, own, strict=True)}
            for hits, own in zip(candidates, rankings, strict=True)
        ]
        reranked = self._reranker.rerank(queries, candidates, k)
        return [
            [(own[id(hit.passage)], hit.score) for hit in hits]
            for own, hits in zip(rows, reranked, strict=True)
        ]

    def warm_up(self) -> None:
        """Of both."""
        self._ranker.warm_up()
        self._reranker.warm_up()


def short_hash(value: object) -> str:
    """16 hex digits of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
