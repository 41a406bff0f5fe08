"""The search side of an episode: queries of all waiting episodes in, hits out, whatever the backend does."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from psearch_jax.retrieval.passages import Hit, Passage

QUIET = 10.0  # seconds between two warnings of a kind


class Sparse(logging.Filter):
    """Lets one line of a kind through in `QUIET` seconds, with how many were held back: a backend that is away for a
    minute fails hundreds of times, and each is counted in the metrics."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}
        self._held: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging.Filter."""
        kind, now = record.msg, time.monotonic()
        if now - self._last.get(kind, -math.inf) < QUIET:
            self._held[kind] += 1
            return False
        self._last[kind] = now
        if held := self._held.pop(kind, 0):
            record.msg = f"{kind} (and {held} times more before)"
        return True


_log = logging.getLogger(__name__)
_log.addFilter(Sparse())


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
    distinct: int = 0  # sent to the backend: each once, however many episodes wait for it
    batches: int = 0
    retried: int = 0  # attempts after the first
    failed: int = 0  # queries of episodes answered with "no results" because no attempt gave any
    late: int = 0  # those of `failed` whose time was up


@dataclass(kw_only=True)
class SearchEnvironment:
    """Where the sub-queries of episodes are sent, and what happens when that fails.

    What raises, or returns something other than one list of hits for every query, is asked again up to `retries`
    times; a query whose list alone is malformed is asked again alone. Then its episodes get no hits for it, counted
    as failed (law 14): the protocol renders that as its "no results" line, and the episode goes on.

    timeout: seconds that a search may take, repetitions included. concurrency: batches that are searched at the same
    time. Both matter to `searches.Searches`, which waits in the background; `search` here waits for the backend.
    """

    backend: Backend
    retries: int = 2
    timeout: float = 60.0
    concurrency: int = 4
    counts: SearchCounts = field(default_factory=SearchCounts)

    def search(self, episodes: Sequence[Sequence[str]], k: int) -> list[Found]:
        """Search for the queries of several episodes; one `Found` for each, in order."""
        distinct = list(dict.fromkeys(query for queries in episodes for query in queries))
        reply = ask(self.backend, distinct, k, self.retries)
        self.counts.queries += sum(map(len, episodes))
        self.counts.batches += bool(distinct)
        self.counts.distinct += len(distinct)
        self.counts.retried += reply.retried
        return [self.found(queries, reply.hits) for queries in episodes]

    def found(self, queries: Sequence[str], hits: Mapping[str, tuple[Hit, ...]]) -> Found:
        """What one episode is told: the hits of its queries, those without any entry counted as failed."""
        failed = sum(query not in hits for query in queries)
        self.counts.failed += failed
        return Found(hits=tuple(hits.get(query, ()) for query in queries), failed=failed)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a backend said to one batch: the hits of each query that it answered, and attempts after the first."""

    hits: Mapping[str, tuple[Hit, ...]]
    retried: int = 0


def ask(
    backend: Backend,
    queries: Sequence[str],
    k: int,
    retries: int,
    *,
    until: float = math.inf,
) -> Reply:
    """Ask for distinct queries, and again for those without an answer; whatever a backend raises stays here.

    The last attempt asks one query at a time, so that a query which the backend cannot bear costs no other its
    answer. until: no attempt begins after that time of `time.monotonic`.
    """
    hits: dict[str, tuple[Hit, ...]] = {}
    missing, retried = list(queries), 0
    for attempt in range(retries + 1):
        if not missing or (attempt and time.monotonic() >= until):
            break
        retried = attempt
        singly = 0 < attempt == retries
        for part in [[query] for query in missing] if singly else [missing]:
            if attempt and time.monotonic() >= until:
                break
            try:
                hits |= _checked(backend.search(part, k), part, k)
            except Exception as error:  # whatever a backend raises, the episodes go on
                _log.warning(
                    "search of %d queries failed (attempt %d of %d): %s: %s",
                    len(part),
                    attempt + 1,
                    retries + 1,
                    type(error).__name__,
                    error,
                )
        missing = [query for query in missing if query not in hits]
    return Reply(hits=hits, retried=retried)


def _checked(results: object, queries: Sequence[str], k: int) -> dict[str, tuple[Hit, ...]]:
    """At most k hits for each query whose list is one of hits; ValueError when it is not clear whose they are."""
    if not isinstance(results, (list, tuple)) or len(results) != len(queries):
        size = len(results) if isinstance(results, (list, tuple)) else type(results).__name__
        raise ValueError(f"the backend returned {size} results for {len(queries)} queries")
    good = {
        query: tuple(hits[:k])
        for query, hits in zip(queries, results, strict=True)
        if isinstance(hits, (list, tuple)) and all(map(_is_hit, hits))
    }
    if len(good) < len(queries):
        _log.warning(
            "%d of %d results are not a list of hits", len(queries) - len(good), len(queries)
        )
    return good


def _is_hit(hit: object) -> bool:
    return (
        isinstance(hit, Hit)
        and isinstance(hit.passage, Passage)
        and isinstance(hit.passage.title, str)
        and isinstance(hit.passage.text, str)
    )
