"""Searches in the background: what paused episodes ask goes to the backend while the others decode (law 5).

The loop hands over queries (`send`) and picks up answers (`collect`) in whatever order they come. Everything here is
the loop's alone but the threads, which ask the backend and put its reply into a queue.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from psearch_jax.retrieval.passages import Hit
from psearch_jax.rollout.environment import Found, Reply, SearchEnvironment, ask

#: Threads that never came back from the backend, after which no more are started: then every search waits out its
#: time, and the rollout still ends.
MOST_STUCK = 32


@dataclass(kw_only=True, eq=False)
class _Batch:
    """Distinct queries that one thread asks for."""

    queries: tuple[str, ...]
    began: float
    expires: float  # as `began`, of time.monotonic


@dataclass(kw_only=True, eq=False)
class _Waiting:
    """One episode's search. `hits` has what came so far, `missing` what has not been decided."""

    ticket: int
    queries: tuple[str, ...]
    missing: set[str]
    hits: dict[str, tuple[Hit, ...]] = field(default_factory=dict)


class Searches:
    """The searches of one rollout.

    A query that is on its way already is not sent again. At most `environment.concurrency` batches are asked for at
    the same time; what is sent meanwhile waits and then goes as one batch. When a batch has taken `environment.timeout`
    seconds, the episodes that wait for it are told that nothing was found, and its thread is written off.
    """

    def __init__(self, environment: SearchEnvironment, k: int) -> None:
        self._environment, self._k = environment, k
        self._waiting: dict[int, _Waiting] = {}
        self._unsent: dict[str, float] = {}  # query → when it must be answered
        self._batches: list[_Batch] = []
        self._stuck = 0
        self._replies: queue.SimpleQueue[tuple[_Batch, Reply | BaseException]] = queue.SimpleQueue()
        #: Seconds that batches have taken of late; None before the first.
        self.usual: float | None = None

    def __len__(self) -> int:
        """Episodes that wait for results."""
        return len(self._waiting)

    def send(self, searches: Sequence[tuple[int, Sequence[str]]]) -> None:
        """Search for the queries of some episodes, each with the ticket under which `collect` will answer."""
        now = time.monotonic()
        on_its_way = {query for batch in self._batches for query in batch.queries}
        for ticket, queries in searches:
            self._waiting[ticket] = _Waiting(
                ticket=ticket, queries=tuple(queries), missing=set(queries)
            )
            self._environment.counts.queries += len(queries)
            for query in queries:
                if query not in on_its_way:
                    self._unsent.setdefault(query, now + self._environment.timeout)
        self._start()

    def collect(self, patience: float = 0.0) -> dict[int, Found]:
        """What has been answered, by ticket; waits up to `patience` seconds for something if nothing has.

        Raises what the backend raised if that was no `Exception` (an interrupt).
        """
        until = time.monotonic() + patience
        while True:
            self._read()
            self._expire()
            self._start()
            done = [w for w in self._waiting.values() if not w.missing]
            rest = until - time.monotonic()
            if done or rest <= 0 or not self._waiting:
                break
            self._read(wait=max(0.0, min(rest, self._next_deadline() - time.monotonic())))
        for waiting in done:
            del self._waiting[waiting.ticket]
        return {w.ticket: self._environment.found(w.queries, w.hits) for w in done}

    # -- batches

    def _start(self) -> None:
        """Send what is unsent as one batch, if another may be on its way."""
        room = len(self._batches) < self._environment.concurrency and self._stuck < MOST_STUCK
        if not self._unsent or not room:
            return
        now = time.monotonic()
        batch = _Batch(
            queries=tuple(self._unsent), began=now, expires=now + self._environment.timeout
        )
        self._unsent.clear()
        self._batches.append(batch)
        self._environment.counts.batches += 1
        self._environment.counts.distinct += len(batch.queries)
        # A daemon: a backend that hangs must not keep the program from ending.
        threading.Thread(
            target=self._ask, args=(batch,), name="psearch-search", daemon=True
        ).start()

    def _ask(self, batch: _Batch) -> None:
        """In a thread of its own."""
        environment = self._environment
        try:
            reply: Reply | BaseException = ask(
                environment.backend,
                batch.queries,
                self._k,
                environment.retries,
                until=batch.expires,
            )
        except BaseException as error:  # an interrupt is for the loop
            reply = error
        self._replies.put((batch, reply))

    def _read(self, wait: float = 0.0) -> None:
        """Take up replies that have come; waits for the first one up to `wait` seconds."""
        while True:
            try:
                batch, reply = (
                    self._replies.get(timeout=wait) if wait > 0 else self._replies.get_nowait()
                )
            except queue.Empty:
                return
            wait = 0.0
            if batch not in self._batches:  # written off
                self._stuck -= 1
                continue
            self._batches.remove(batch)
            if isinstance(reply, BaseException):
                raise reply
            seconds = time.monotonic() - batch.began
            self.usual = seconds if self.usual is None else 0.5 * (self.usual + seconds)
            self._environment.counts.retried += reply.retried
            self._settle(batch.queries, reply)

    def _settle(self, queries: Sequence[str], reply: Reply) -> None:
        """These queries are decided: they have hits in the reply, or none will come."""
        for waiting in self._waiting.values():
            for query in waiting.missing.intersection(queries):
                waiting.missing.remove(query)
                if query in reply.hits:
                    waiting.hits[query] = reply.hits[query]

    def _expire(self) -> None:
        """Give up what has taken too long."""
        now = time.monotonic()
        overdue = [batch for batch in self._batches if batch.expires <= now]
        late = {query for batch in overdue for query in batch.queries}
        for batch in overdue:
            self._batches.remove(batch)
            self._stuck += 1
        for query in [query for query, until in self._unsent.items() if until <= now]:
            del self._unsent[query]
            late.add(query)
        if late:
            self._environment.counts.late += sum(
                query in late
                for waiting in self._waiting.values()
                for query in waiting.queries
                if query in waiting.missing
            )
            self._settle(list(late), Reply(hits={}))

    def _next_deadline(self) -> float:
        times = [batch.expires for batch in self._batches] + list(self._unsent.values())
        return min(times)
