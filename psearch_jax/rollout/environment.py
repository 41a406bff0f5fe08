"""The search side of an episode: queries of all waiting episodes in, hits out, whatever the backend does."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from psearch_jax.retrieval.passages import Hit, Passage

_log = logging.getLogger(__name__)


@runtime_checkable
class Backend(Protocol):
    """What a search backend must do (`retrieval.searcher.Searcher` does)."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """At most k hits for every query, best first."""
        ...


@dataclass(frozen=True, kw_only=True)
class Found:
    """The results of one episode's search: one tuple of hits for every query, and how many queries failed."""

    hits: tuple[tuple[Hit, ...], ...]
    failed: int = 0


@dataclass(kw_only=True)
class SearchCounts:
    """What was asked of the environment since it was made."""

    queries: int = 0  # asked by episodes
    distinct: int = 0  # sent to the backend, each once a batch
    batches: int = 0
    retried: int = 0  # calls that were repeated
    failed: int = 0  # queries of episodes answered with "no results" because every call failed


@dataclass(kw_only=True)
class SearchEnvironment:
    """Sends the sub-queries of waiting episodes to a backend, each distinct one once (law 5).

    A call that raises or returns something other than one list of hits for every query is repeated up to `retries`
    times. Then every query of it is answered with no hits and counted as failed (law 14): the protocol renders
    that as its "no results" line, and the episode goes on.
    """

    backend: Backend
    retries: int = 2
    counts: SearchCounts = field(default_factory=SearchCounts)

    def search(self, episodes: Sequence[Sequence[str]], k: int) -> list[Found]:
        """Search for the queries of several episodes; one `Found` for each, in order."""
        distinct = list(dict.fromkeys(query for queries in episodes for query in queries))
        found = self._call(distinct, k) if distinct else []
        self.counts.queries += sum(map(len, episodes))
        if found is None:
            self.counts.failed += sum(map(len, episodes))
            return [Found(hits=((),) * len(queries), failed=len(queries)) for queries in episodes]
        by_query = dict(zip(distinct, found, strict=True))
        return [Found(hits=tuple(by_query[query] for query in queries)) for queries in episodes]

    def _call(self, queries: list[str], k: int) -> list[tuple[Hit, ...]] | None:
        """The hits of each query, or None when every call failed."""
        self.counts.batches += 1
        self.counts.distinct += len(queries)
        for attempt in range(self.retries + 1):
            self.counts.retried += attempt > 0
            try:
                return _checked(self.backend.search(queries, k), len(queries), k)
            except Exception as error:  # whatever a backend raises, the episodes go on
                _log.warning(
                    "search of %d queries failed (attempt %d of %d): %s: %s",
                    len(queries),
                    attempt + 1,
                    self.retries + 1,
                    type(error).__name__,
                    error,
                )
        return None


def _checked(results: object, count: int, k: int) -> list[tuple[Hit, ...]]:
    """The results as tuples of at most k hits; ValueError when they are malformed."""
    if not isinstance(results, (list, tuple)) or len(results) != count:
        size = len(results) if isinstance(results, (list, tuple)) else type(results).__name__
        raise ValueError(f"the backend returned {size} results for {count} queries")
    for hits in results:
        if not isinstance(hits, (list, tuple)) or not all(_is_hit(hit) for hit in hits):
            raise ValueError("the backend returned something that is not a list of hits")
    return [tuple(hits[:k]) for hits in results]


def _is_hit(hit: object) -> bool:
    return (
        isinstance(hit, Hit)
        and isinstance(hit.passage, Passage)
        and isinstance(hit.passage.title, str)
        and isinstance(hit.passage.text, str)
    )
