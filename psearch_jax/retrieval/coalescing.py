"""Many clients' queries in one search: what waits while a search runs goes into the next one, up to a limit."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from psearch_jax.retrieval.passages import Hit

#: Queries and k → the hits of every query.
Search = Callable[[Sequence[str], int], list[list[Hit]]]


class QueueFull(Exception):
    """There is no room for more queries; `retry_after` seconds on there may be."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"the queue is full; try again in {retry_after} s")
        self.retry_after = retry_after


class DeadlinePassed(Exception):
    """A search did not begin or end in time."""


class SearchFailed(Exception):
    """The search raised; its error is the cause."""


@dataclass(frozen=True, eq=False)
class _Job:
    queries: list[str]
    k: int
    future: asyncio.Future[list[list[Hit]]]


class Coalescer:
    """Gathers searches. One search runs at a time, in a thread of its own; the event loop stays free.

    Attributes:
      searches, searched: how often it was searched, and for how many queries in all.
    """

    def __init__(
        self, search: Search, *, batch: int = 256, capacity: int = 4096, linger: float = 0.002
    ) -> None:
        """`batch`: queries of one search, about; `capacity`: that may wait; `linger`: seconds that the first one waits
        for company."""
        self._search = search
        self._batch = batch
        self._capacity = capacity
        self._linger = linger
        self._waiting: deque[_Job] = deque()
        self._wake = asyncio.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="search")
        self._worker: asyncio.Task[None] | None = None
        self._closing = False
        self._seconds = 0.01  # of a search, a running mean
        self.waiting = 0  # queries
        self.searches = self.searched = 0

    def start(self) -> None:
        """Begin to search; needs a running event loop."""
        self._worker = asyncio.get_running_loop().create_task(self._work())

    async def close(self) -> None:
        """Take no more, and answer what is waiting."""
        self._closing = True
        self._wake.set()
        if self._worker is not None:
            await self._worker
        self._pool.shutdown()

    async def submit(self, queries: Sequence[str], k: int, seconds: float) -> list[list[Hit]]:
        """Wait for the hits of some queries.

        Raises:
          QueueFull: too many wait already.
          DeadlinePassed: `seconds` have passed.
          SearchFailed: the search raised.
        """
        if self._closing or (self.waiting and self.waiting + len(queries) > self._capacity):
            searches = 1 + self.waiting / self._batch
            raise QueueFull(max(1, math.ceil(searches * self._seconds)))
        job = _Job(list(queries), k, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        self.waiting += len(queries)
        self._wake.set()
        try:
            return await asyncio.wait_for(job.future, seconds)
        except TimeoutError:
            raise DeadlinePassed(f"no answer within {seconds:g} s") from None

    async def call(self, function: Callable[[], object], seconds: float) -> object:
        """Run something else in the thread of the searches, in its turn."""
        running = asyncio.get_running_loop().run_in_executor(self._pool, function)
        try:
            return await asyncio.wait_for(running, seconds)
        except TimeoutError:
            raise DeadlinePassed(f"no answer within {seconds:g} s") from None

    async def _work(self) -> None:
        while True:
            if not self._waiting:
                if self._closing:
                    return
                self._wake.clear()
                await self._wake.wait()
                continue
            if self.waiting < self._batch and self._linger and not self._closing:
                await asyncio.sleep(self._linger)
            jobs = self._take()
            if jobs:
                await self._answer(jobs)

    def _take(self) -> list[_Job]:
        """The next jobs of one k, oldest first; those that nobody waits for any more are dropped."""
        jobs: list[_Job] = []
        kept: deque[_Job] = deque()
        size = 0
        while self._waiting and size < self._batch:
            job = self._waiting.popleft()
            if job.future.done():
                self.waiting -= len(job.queries)
            elif not jobs or (job.k == jobs[0].k and size + len(job.queries) <= self._batch):
                jobs.append(job)
                size += len(job.queries)
            else:
                kept.append(job)
        self._waiting.extendleft(reversed(kept))
        return jobs

    async def _answer(self, jobs: list[_Job]) -> None:
        queries = [query for job in jobs for query in job.queries]
        self.waiting -= len(queries)
        begun = time.monotonic()
        try:
            found = await asyncio.get_running_loop().run_in_executor(
                self._pool, self._search, queries, jobs[0].k
            )
        except Exception as error:  # each of those who wait gets it
            for job in jobs:
                failed = SearchFailed(f"{type(error).__name__}: {error}")
                failed.__cause__ = error
                if not job.future.done():
                    job.future.set_exception(failed)
            return
        self._seconds += 0.2 * (time.monotonic() - begun - self._seconds)
        self.searches += 1
        self.searched += len(queries)
        first = 0
        for job in jobs:
            if not job.future.done():
                job.future.set_result(found[first : first + len(job.queries)])
            first += len(job.queries)
