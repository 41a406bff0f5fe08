"""Searching for many queries at once.

`open_searcher` is the way in. All backends look alike (`SearchBackend`): a rollout does not know
what it searches.
"""

from __future__ import annotations

import abc
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, runtime_checkable

import jax
from jax.sharding import Mesh

from psearch_jax.config import MeshConfig, RetrievalConfig
from psearch_jax.errors import UserError
from psearch_jax.mesh import make_mesh
from psearch_jax.retrieval.corpus import corpus_fingerprint
from psearch_jax.retrieval.device_search import DeviceNeighbours
from psearch_jax.retrieval.embedding import Embedder, Progress, load_embedder
from psearch_jax.retrieval.index import Index, open_or_build
from psearch_jax.retrieval.lexical import LexicalIndex, bm25s_version, lexical_parameters
from psearch_jax.retrieval.manifest import Manifest
from psearch_jax.retrieval.passages import Hit, Passage
from psearch_jax.retrieval.rankers import (
    DenseRanker,
    FusedRanker,
    LexicalRanker,
    Ranker,
    RerankedRanker,
    short_hash,
)
from psearch_jax.retrieval.reranking import Reranker, load_reranker


@dataclass
class SearchStats:
    """Counts since the start. `queries` were asked, `empty` of them were blank; of the `distinct` ones of each
    call, `cached` came from the cache and the others were searched. `seconds` is wall time inside `search`."""

    calls: int = 0
    queries: int = 0
    empty: int = 0
    distinct: int = 0
    cached: int = 0
    seconds: float = 0.0


@runtime_checkable
class SearchBackend(Protocol):
    """What a rollout needs of a search."""

    @property
    def fingerprint(self) -> str:
        """Names what is searched: equal fingerprints give equal results."""
        ...

    @property
    def stats(self) -> SearchStats:
        """Counts so far."""
        ...

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """At most k hits for every query, in the order of the queries, best first. Fewer where there are
        fewer; none for a blank query."""
        ...


class NoSearcher:
    """The index switched off: every query finds nothing. Shows what a policy answers from memory."""

    fingerprint = "none"

    def __init__(self) -> None:
        self.stats = SearchStats()

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """No hits, for every query."""
        _require_k(k)
        self.stats.calls += 1
        self.stats.queries += len(queries)
        return [[] for _ in queries]


class CachingSearch(abc.ABC):
    """A search with a cache before it, in which every distinct query is looked up once a call. Safe to call from
    several threads. What looks up is `_look_up`, of a subclass."""

    def __init__(self, cache_size: int, *, one_at_a_time: bool) -> None:
        """`cache_size` results are kept, the least recently used go first; 0 keeps none. `one_at_a_time`: looking up
        is left to one thread, others wait.

        Raises:
          UserError: a cache size below zero.
        """
        if cache_size < 0:
            raise UserError(f"retrieval.cache_size is {cache_size}; use 0 (no cache) or more.")
        self.stats = SearchStats()
        self._cache_size = cache_size
        self._cache: OrderedDict[tuple[str, int], tuple[Hit, ...]] = OrderedDict()
        self._lock = threading.Lock()  # of the cache and the counts
        self._looking_up: AbstractContextManager[Any] = (
            threading.Lock() if one_at_a_time else nullcontext()
        )

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """See `SearchBackend`. Queries that differ in blanks only are one. Each distinct one that
        is not in the cache is looked up, in one batch with the others."""
        _require_k(k)
        start = time.perf_counter()
        normal = [" ".join(query.split()) for query in queries]
        results: dict[str, tuple[Hit, ...]] = {"": ()}
        missing: dict[str, None] = {}
        with self._lock:
            for query in dict.fromkeys(normal):
                if not query:
                    continue
                self.stats.distinct += 1
                cached = self._cache.get((query, k))
                if cached is None:
                    missing[query] = None
                else:
                    self.stats.cached += 1
                    self._cache.move_to_end((query, k))
                    results[query] = cached
        if missing:
            with self._looking_up:
                found = self._look_up(list(missing), k)
            results |= found
        with self._lock:
            if missing:
                for query, hits in found.items():
                    self._cache[(query, k)] = hits
                while len(self._cache) > self._cache_size:
                    self._cache.popitem(last=False)
            self.stats.calls += 1
            self.stats.queries += len(queries)
            self.stats.empty += normal.count("")
            self.stats.seconds += time.perf_counter() - start
        return [list(results[query]) for query in normal]

    def forget(self) -> None:
        """Empty the cache."""
        with self._lock:
            self._cache.clear()

    @abc.abstractmethod
    def _look_up(self, queries: list[str], k: int) -> dict[str, tuple[Hit, ...]]:
        """The hits of distinct queries, none of them blank."""


class CachedSearcher(CachingSearch):
    """A ranker and the passages that its rows stand for, in this process."""

    def __init__(
        self, ranker: Ranker, passages: Sequence[Passage], cache_size: int = 65536
    ) -> None:
        """`cache_size`: see `CachingSearch`."""
        super().__init__(cache_size, one_at_a_time=True)
        self._ranker = ranker
        self._passages = passages

    @property
    def fingerprint(self) -> str:
        """Of what is searched."""
        return self._ranker.fingerprint

    def warm_up(self) -> None:
        """Compile what the usual queries need."""
        self._ranker.warm_up()

    def _look_up(self, queries: list[str], k: int) -> dict[str, tuple[Hit, ...]]:
        return {
            query: tuple(Hit(self._passages[row], score) for row, score in ranking)
            for query, ranking in zip(queries, self._ranker.rank(queries, k), strict=True)
        }


class Searcher(CachedSearcher):
    """An index, its passages and its encoder in this process."""

    def __init__(
        self, index: Index, embedder: Embedder, passages: Sequence[Passage], cache_size: int = 65536
    ) -> None:
        """`cache_size`: see `CachedSearcher`.

        Raises:
          UserError: the index was built over other passages or by another encoder.
        """
        check_fits(index.manifest, embedder, len(passages), corpus_fingerprint(passages))
        super().__init__(DenseRanker(index, embedder), passages, cache_size)
        self.index = index


def check_fits(manifest: Manifest, embedder: Embedder, count: int, corpus: str) -> None:
    """UserError unless an index is of `count` passages with this fingerprint, and of this encoder."""
    if (count, corpus) != (manifest.count, manifest.corpus):
        raise UserError(
            f"The index {manifest.fingerprint} was built over {manifest.count} passages that are not these "
            f"{count}; build one for this corpus."
        )
    if embedder.fingerprint != manifest.encoder_hash:
        raise UserError(
            f"The index {manifest.fingerprint} was built with the encoder {manifest.encoder} "
            f"{manifest.encoder_use} and the queries would be encoded by another, {embedder.name} "
            f"{asdict(embedder.use)}; set retrieval.encoder, its pooling and its prefixes to the first "
            "or build another index."
        )


def open_searcher(
    config: RetrievalConfig, passages: Sequence[Passage], progress: Progress | None = None
) -> SearchBackend:
    """The search that a configuration asks for over these passages. Its index is loaded, or built the first time
    (`progress` is called with texts embedded and in all); words are counted anew."""
    if config.kind == "none":
        return NoSearcher()
    reranker = open_reranker(config)
    rankers: list[Ranker] = []
    if config.kind != "bm25":
        embedder = load_embedder(
            config.encoder,
            config.embed_batch_tokens,
            pooling=config.pooling,
            query_prefix=config.query_prefix,
            passage_prefix=config.passage_prefix,
            dtype=config.encoder_dtype,
        )
        dense = "scann" if config.kind == "hybrid" else config.kind
        index = open_or_build(passages, embedder, replace(config, kind=dense), progress)
        if config.device_matrix != "none":
            mesh = local_mesh()
            neighbours = DeviceNeighbours(index.vectors_NxE, mesh, config.device_matrix)
            index = replace(index, neighbours=neighbours)
        if config.kind != "hybrid" and reranker is None:
            return Searcher(index, embedder, passages, config.cache_size)
        rankers.append(DenseRanker(index, embedder))
    if config.kind in ("bm25", "hybrid"):
        words = LexicalIndex.build(getattr(passage, config.embed) for passage in passages)
        parts = [corpus_fingerprint(passages), config.embed, lexical_parameters(), bm25s_version()]
        rankers.append(LexicalRanker(words, short_hash(parts)))
    ranker: Ranker = rankers[0] if len(rankers) == 1 else FusedRanker(rankers)
    if reranker is not None:
        ranker = RerankedRanker(ranker, reranker, passages, config.rerank_depth)
    return CachedSearcher(ranker, passages, config.cache_size)


def open_reranker(config: RetrievalConfig) -> Reranker | None:
    """The cross-encoder that a configuration names; it reads of a passage what is embedded of it."""
    if not config.reranker:
        return None
    return load_reranker(config.reranker, part=config.embed, dtype=config.encoder_dtype)


def local_mesh() -> Mesh:
    """All devices of this process, for a search that the process makes by itself."""
    return make_mesh(MeshConfig(), jax.local_devices())


def recall_at_k(
    searcher: SearchBackend, queries: Sequence[str], needed_ids: Sequence[Collection[str]], k: int
) -> float:
    """The share of queries that have ALL their needed passages among their first k hits.

    Raises:
      ValueError: no queries, as many lists of ids as queries are not given, or a query needs nothing.
    """
    if not queries or len(queries) != len(needed_ids) or not all(needed_ids):
        raise ValueError("every query needs at least one passage id, and there must be a query")
    found = searcher.search(queries, k)
    complete = sum(
        set(needed) <= {hit.passage.id for hit in hits}
        for hits, needed in zip(found, needed_ids, strict=True)
    )
    return complete / len(queries)


def _require_k(k: int) -> None:
    if k < 1:
        raise UserError(f"{k} passages a query were asked for; set protocol.top_k to at least 1.")
