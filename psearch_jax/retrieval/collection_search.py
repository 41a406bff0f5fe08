"""Searching a collection: all its parts as one, without what was deleted, and following its changes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from psearch_jax.errors import UserError
from psearch_jax.retrieval.collection import (
    PARTS,
    STATE,
    OpenCollection,
    open_collection,
    read_state,
)
from psearch_jax.retrieval.device_search import DeviceNeighbours
from psearch_jax.retrieval.embedding import Embedder, load_embedder
from psearch_jax.retrieval.index import Index
from psearch_jax.retrieval.manifest import Manifest, read_manifest
from psearch_jax.retrieval.passages import Hit
from psearch_jax.retrieval.rankers import (
    DenseRanker,
    FusedRanker,
    LexicalRanker,
    Ranker,
    Ranking,
    RerankedRanker,
    short_hash,
)
from psearch_jax.retrieval.reranking import Reranker
from psearch_jax.retrieval.searcher import CachedSearcher


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """How a collection is searched.

    Attributes:
      cache_size: results that are kept; see `CachedSearcher`.
      device_matrix: "none", or the precision of a copy of all vectors on the devices that is searched exactly.
      mesh: those devices.
      reranker, rerank_depth: a cross-encoder that puts the best so many in order; none: the ranking stands.
      verify: compare all checksums when opening.
    """

    cache_size: int = 65536
    device_matrix: str = "none"
    mesh: Mesh | None = None
    reranker: Reranker | None = None
    rerank_depth: int = 50
    verify: bool = True


class PartsRanker:
    """Rankers over consecutive ranges of rows, as one, without the deleted rows."""

    def __init__(
        self,
        rankers: Sequence[Ranker],
        counts: Sequence[int],
        deleted: np.ndarray,
        fingerprint: str,
    ) -> None:
        self._rankers = rankers
        self._firsts = [0, *accumulate(counts[:-1])]
        self._counts = counts
        self._deleted = set(deleted.tolist())
        self.fingerprint = fingerprint

    def rank(self, queries: Sequence[str], k: int) -> list[Ranking]:
        """See `Ranker`."""
        merged: list[Ranking] = [[] for _ in queries]
        for ranker, first, count in zip(self._rankers, self._firsts, self._counts, strict=True):
            for own, found in zip(
                merged, self._live(ranker, first, count, queries, k), strict=True
            ):
                own += found
        return [sorted(own, key=lambda item: (-item[1], item[0]))[:k] for own in merged]

    def _live(
        self, ranker: Ranker, first: int, count: int, queries: Sequence[str], k: int
    ) -> list[Ranking]:
        """The k best of one part that are not deleted; where too many of the best are, more are asked for."""
        results: list[Ranking] = [[] for _ in queries]
        open_queries, wanted = list(range(len(queries))), k
        while open_queries:
            rankings = ranker.rank([queries[i] for i in open_queries], wanted)
            short = []
            for i, ranking in zip(open_queries, rankings, strict=True):
                live = [(first + row, score) for row, score in ranking]
                results[i] = [item for item in live if item[0] not in self._deleted][:k]
                if len(results[i]) < k and len(ranking) >= wanted and wanted < count:
                    short.append(i)
            open_queries, wanted = short, min(4 * wanted, count)
        return results

    def warm_up(self) -> None:
        """Of the first: the encoder is the same."""
        self._rankers[0].warm_up()


class _OnceEmbedded:
    """The encoder of several parts: queries that were just embedded for one are not embedded for the next."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._last: tuple[tuple[str, ...], np.ndarray] = ((), np.empty((0, embedder.dims)))
        self.warm_up = embedder.warm_up

    def embed_queries(self, queries: Sequence[str]) -> np.ndarray:
        """See `Embedder`."""
        if self._last[0] != tuple(queries):
            self._last = (tuple(queries), self._embedder.embed_queries(queries))
        return self._last[1]


def encoder_of(manifest: Manifest, mesh: Mesh | None = None, encoder: str = "") -> Embedder:
    """The encoder that an index was built with, from where it was then or from the directory `encoder`.

    Raises:
      UserError: it cannot be loaded, or is another one.
    """
    use: dict[str, Any] = {
        name: value for name, value in manifest.encoder_use.items() if name != "family"
    }
    embedder = load_embedder(encoder or manifest.encoder, mesh=mesh, **use)
    if embedder.fingerprint != manifest.encoder_hash:
        raise UserError(
            f"The encoder {embedder.name} is not the one of the index: {manifest.encoder} {manifest.encoder_use}; give "
            "the files that the index was built with (--encoder), or build it again."
        )
    return embedder


def make_ranker(
    collection: OpenCollection, embedder: Embedder | None, options: SearchOptions
) -> Ranker:
    """The ranker that a collection's kind asks for."""
    parts, state = collection.parts, collection.state
    counts = [len(part.passages) for part in parts]
    rankers: list[Ranker] = []
    if collection.manifest.kind != "bm25":
        assert embedder is not None
        once = _OnceEmbedded(embedder)
        dense = []
        for part in parts:
            assert part.dense is not None
            index = part.dense
            if options.device_matrix != "none":
                assert options.mesh is not None
                vectors = index.vectors_NxE
                neighbours = DeviceNeighbours(vectors, options.mesh, options.device_matrix)
                index = Index(index.manifest, vectors, neighbours)
            dense.append(DenseRanker(index, once))
        on = options.device_matrix
        fingerprint = short_hash([state.fingerprint, "dense"] + [on] * (on != "none"))
        rankers.append(PartsRanker(dense, counts, collection.deleted, fingerprint))
    if collection.manifest.kind in ("bm25", "hybrid"):
        fingerprint = short_hash([state.fingerprint, "words"])
        counted = [part.words for part in parts if part.words is not None]
        words = [LexicalRanker(own.among(counted), fingerprint) for own in counted]
        rankers.append(PartsRanker(words, counts, collection.deleted, fingerprint))
    ranker: Ranker = rankers[0] if len(rankers) == 1 else FusedRanker(rankers)
    if options.reranker is not None:
        ranker = RerankedRanker(ranker, options.reranker, collection.passages, options.rerank_depth)
    return ranker


class CollectionSearcher(CachedSearcher):
    """A collection that is searched. With `follow` it looks, before every search, whether the collection changed."""

    def __init__(
        self,
        directory: str | Path,
        embedder: Embedder | None,
        options: SearchOptions,
        *,
        follow: bool = False,
    ) -> None:
        """Open it.

        Args:
          embedder: the one it was built with; None for a collection of words.

        Raises:
          UserError: see `open_collection`; another encoder.
        """
        self._directory = Path(directory)
        self._embedder = embedder
        self._options = options
        self._follow = follow
        self._stamp = self._stamp_now()
        self.collection = open_collection(self._directory, verify=options.verify)
        self._check(self.collection)
        ranker = make_ranker(self.collection, embedder, options)
        super().__init__(ranker, self.collection.passages, options.cache_size)

    def __len__(self) -> int:
        return len(self.collection)

    def _check(self, collection: OpenCollection) -> None:
        """UserError where this encoder or this way of searching is not of a collection."""
        manifest = collection.manifest
        if manifest.kind == "bm25" and self._options.device_matrix != "none":
            raise UserError(
                f"{self._directory} is an index of words and has no vectors to put on devices; leave the device matrix "
                "out."
            )
        own = self._embedder.fingerprint if self._embedder is not None else ""
        if own != manifest.encoder_hash:
            raise UserError(
                f"{self._directory} was built with the encoder {manifest.encoder} {manifest.encoder_use}; "
                "search it with the same one."
            )

    def refresh(self) -> bool:
        """Take up what changed on disk since; returns whether anything did. Searches wait meanwhile."""
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return False
        changed = open_collection(
            self._directory, verify=self._options.verify, known=self.collection.parts
        )
        self._check(changed)  # somebody may have put another index there
        ranker = make_ranker(changed, self._embedder, self._options)
        with self._looking_up:
            self.collection, self._stamp = changed, stamp
            self._ranker, self._passages = ranker, changed.passages
            self.forget()
        return True

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """See `SearchBackend`."""
        if self._follow:
            self.refresh()
        return super().search(queries, k)

    def _stamp_now(self) -> tuple[int, int]:
        try:
            status = os.stat(self._directory / STATE)
        except OSError:
            return (0, 0)  # opening says what is wrong
        return status.st_mtime_ns, status.st_ino


def open_index(
    directory: str | Path,
    options: SearchOptions,
    *,
    encoder: str = "",
    follow: bool = False,
    load: Callable[..., Embedder] = encoder_of,
) -> CollectionSearcher:
    """A collection with its encoder loaded; `encoder`: where its files are now, if not where they were."""
    manifest = open_manifest(directory)
    embedder = None if manifest.kind == "bm25" else load(manifest, None, encoder)
    return CollectionSearcher(directory, embedder, options, follow=follow)


def open_manifest(directory: str | Path) -> Manifest:
    """Of a collection's first part."""
    return read_manifest(Path(directory) / PARTS / read_state(directory).parts[0])
