"""Searching on retrieval servers, ours or the published ones, as if the index were in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from psearch_jax.errors import UserError
from psearch_jax.retrieval import dialects
from psearch_jax.retrieval.answer_cache import AnswerCache
from psearch_jax.retrieval.endpoints import CallFailed, CallRefused, Endpoints
from psearch_jax.retrieval.passages import Hit
from psearch_jax.retrieval.rankers import short_hash
from psearch_jax.retrieval.searcher import CachingSearch

BATCH = 64  # queries of one request
CONCURRENCY = 8  # requests at one time
FINGERPRINT = "X-Index-Fingerprint"

#: Dialect → path, the body for (queries, k), and how the answer is read.
DIALECTS: dict[str, tuple[str, Callable[..., dict[str, Any]], Callable[..., list[list[Hit]]]]] = {
    "retrieve": (
        "/retrieve",
        lambda queries, k: {"queries": queries, "topk": k, "return_scores": True},
        dialects.read_retrieve,
    ),
    "batch_search": (
        "/batch_search",
        lambda queries, k: {"query": queries, "top_n": k, "return_score": True},
        dialects.read_batch,
    ),
}


class RemoteSearcher(CachingSearch):
    """Servers that hold one index. Results are kept in memory, and on disk under the index's fingerprint."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        dialect: str = "retrieve",
        cache_size: int = 65536,
        disk_cache: str = "",
        timeout: float = 15.0,
        patience: float = 60.0,
        token: str = "",
    ) -> None:
        """Look for the servers; they may still be starting.

        Args:
          urls: http://host:port of each; load is shared among them.
          dialect: a key of `DIALECTS`.
          disk_cache: an SQLite file, or "" for none.
          timeout, patience: see `Endpoints`.
          token: sent as bearer token.

        Raises:
          UserError: no address, no server that answers, or servers with different indexes.
        """
        super().__init__(cache_size, one_at_a_time=False)
        headers = {"Authorization": f"Bearer {token}"} if token else None
        self._endpoints = Endpoints(urls, timeout=timeout, patience=patience, headers=headers)
        self._path, self._body, self._read = DIALECTS[dialect]
        self._pool = ThreadPoolExecutor(CONCURRENCY, thread_name_prefix="retrieval")
        self._fingerprint_lock = threading.Lock()
        self._fingerprint = self._ask_fingerprint(urls, timeout, headers)
        self._disk = AnswerCache(disk_cache) if disk_cache else None

    @property
    def fingerprint(self) -> str:
        """What the servers call their index; servers that do not say are named by their addresses."""
        return self._fingerprint

    def warm_up(self) -> None:
        """Servers do that themselves."""

    def close(self) -> None:
        """Close connections and files."""
        self._pool.shutdown(cancel_futures=True)
        self._endpoints.close()
        if self._disk is not None:
            self._disk.close()

    def _ask_fingerprint(
        self, urls: Sequence[str], timeout: float, headers: dict[str, str] | None
    ) -> str:
        """Of the servers that say; those that do not answer now may do so later, if one does."""
        said: dict[str, str] = {}
        problems = []
        for url in urls:
            try:
                response = httpx.get(url.rstrip("/") + "/health", timeout=timeout, headers=headers)
                content = response.json() if response.status_code == 200 else {}
                value = content.get("fingerprint") if isinstance(content, dict) else None
                said[url] = value if isinstance(value, str) else ""
            except httpx.TransportError as error:
                problems.append(f"{url}: {error}")
            except ValueError:
                said[url] = ""  # a server of others, whose health is no JSON
        if not said:
            raise UserError(
                f"No retrieval server answers ({'; '.join(problems)}); start one (psearch serve INDEX), or mend "
                "retrieval.urls."
            )
        if len(set(said.values())) > 1:
            raise UserError(
                f"The servers of retrieval.urls have different indexes ({said}); name servers of one index."
            )
        return next(iter(said.values())) or short_hash([sorted(urls), self._path])

    def _look_up(self, queries: list[str], k: int) -> dict[str, tuple[Hit, ...]]:
        found = self._disk.read(self._fingerprint, queries, k) if self._disk is not None else {}
        missing = [query for query in queries if query not in found]
        parts = [missing[i : i + BATCH] for i in range(0, len(missing), BATCH)]
        if len(parts) == 1:
            answers = [self._request(parts[0], k)]
        else:
            answers = list(self._pool.map(lambda part: self._request(part, k), parts))
        for part, hits in zip(parts, answers, strict=True):
            own = {query: tuple(o) for query, o in zip(part, hits, strict=True)}
            found |= own
            if self._disk is not None:
                self._disk.write(self._fingerprint, own, k)
        return found

    def _request(self, queries: list[str], k: int) -> list[list[Hit]]:
        def make(url: str) -> httpx.Request:
            return self._endpoints.build("POST", url + self._path, json=self._body(queries, k))

        def read(response: httpx.Response) -> list[list[Hit]]:
            hits = self._read(response.json(), len(queries), k)
            self._notice(response.headers.get(FINGERPRINT, self._fingerprint))
            return hits

        try:
            return self._endpoints.call(make, read)
        except CallRefused as error:
            raise RuntimeError(
                f"a retrieval server refused {len(queries)} queries: {error}"
            ) from error
        except CallFailed as error:
            raise TimeoutError(f"no retrieval server answered: {error}") from error

    def _notice(self, fingerprint: str) -> None:
        """A live index has changed: what is in memory is of the old one."""
        with self._fingerprint_lock:
            if fingerprint != self._fingerprint:
                self._fingerprint = fingerprint
                self.forget()
