"""Web search engines as a search backend: SerpAPI, Google's Custom Search, Brave, Tavily.

Formats: the engines' public API references of 2025. A result becomes a passage with its address as id, its title, and
what the engine quotes of it as text. Keys come from the environment and are sent to the engine's address alone.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from psearch_jax.config import WebConfig
from psearch_jax.errors import UserError
from psearch_jax.retrieval.answer_cache import AnswerCache
from psearch_jax.retrieval.endpoints import CallFailed, CallRefused, Endpoints
from psearch_jax.retrieval.passages import Hit, Passage
from psearch_jax.retrieval.rankers import short_hash
from psearch_jax.retrieval.searcher import CachingSearch

CONCURRENCY = 4


class CostCeiling(RuntimeError):
    """Further calls would cost more than was allowed."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """How an engine is asked, and where its answer has the results.

    Attributes:
      url: its address, with the path.
      variables: environment variables that hold what it wants to know of the caller, the key first.
      request: (query, k, values of the variables) → what httpx's `build_request` takes beside method and address.
      results: keys that lead to the list of results in the answer.
      id, title, text: keys of a result.
      most: results that one call can give.
      method: of HTTP.
    """

    url: str
    variables: tuple[str, ...]
    request: Callable[[str, int, list[str]], dict[str, Any]]
    results: tuple[str, ...]
    id: str
    title: str = "title"
    text: str
    most: int
    method: str = "GET"


ENGINES: Mapping[str, Engine] = {
    "serpapi": Engine(
        url="https://serpapi.com/search.json",
        variables=("SERPAPI_API_KEY",),
        request=lambda query, k, keys: {
            "params": {"engine": "google", "q": query, "num": k, "api_key": keys[0]}
        },
        results=("organic_results",),
        id="link",
        text="snippet",
        most=100,
    ),
    "google": Engine(
        url="https://www.googleapis.com/customsearch/v1",
        variables=("GOOGLE_API_KEY", "GOOGLE_CSE_ID"),
        request=lambda query, k, keys: {
            "params": {"q": query, "num": k, "key": keys[0], "cx": keys[1]}
        },
        results=("items",),
        id="link",
        text="snippet",
        most=10,
    ),
    "brave": Engine(
        url="https://api.search.brave.com/res/v1/web/search",
        variables=("BRAVE_API_KEY",),
        request=lambda query, k, keys: {
            "params": {"q": query, "count": k},
            "headers": {"X-Subscription-Token": keys[0], "Accept": "application/json"},
        },
        results=("web", "results"),
        id="url",
        text="description",
        most=20,
    ),
    "tavily": Engine(
        url="https://api.tavily.com/search",
        variables=("TAVILY_API_KEY",),
        request=lambda query, k, keys: {
            "json": {"query": query, "max_results": k},
            "headers": {"Authorization": f"Bearer {keys[0]}"},
        },
        results=("results",),
        id="url",
        text="content",
        most=20,
        method="POST",
    ),
}


class WebSearcher(CachingSearch):
    """An engine. Every distinct query is one call, and one price, unless a cache has it.

    Attributes:
      spent: what the calls of this object have cost.
    """

    def __init__(
        self, config: WebConfig, *, cache_size: int = 65536, patience: float = 60.0
    ) -> None:
        """Look for the keys and open the cache; no call is made.

        Raises:
          UserError: no such engine, a key that is not set, an address or a cache that cannot be used.
        """
        super().__init__(cache_size, one_at_a_time=False)
        engine = ENGINES[config.engine]
        self._keys = [os.environ.get(name, "").strip() for name in engine.variables]
        for name, value in zip(engine.variables, self._keys, strict=True):
            if not value:
                raise UserError(
                    f"retrieval.web.engine={config.engine} wants the environment variable {name}, which is not set; "
                    "set it, or choose another engine."
                )
        self._engine, self._config = engine, config
        self._endpoints = Endpoints(
            [config.url or engine.url],
            timeout=config.call_timeout,
            patience=patience,
            setting="retrieval.web.url",
        )
        self._cache_file = AnswerCache(config.cache) if config.cache else None
        self._pool = ThreadPoolExecutor(CONCURRENCY, thread_name_prefix="web")
        self._turn = threading.Lock()
        self._next_call = 0.0
        self.spent = 0.0
        self.fingerprint = short_hash(["web", config.engine, config.url or engine.url])

    def close(self) -> None:
        """Close connections and files."""
        self._pool.shutdown(cancel_futures=True)
        self._endpoints.close()
        if self._cache_file is not None:
            self._cache_file.close()

    def _look_up(self, queries: list[str], k: int) -> dict[str, tuple[Hit, ...]]:
        cache, source = self._cache_file, self.fingerprint
        found = cache.read(source, queries, k) if cache is not None else {}
        missing = [query for query in queries if query not in found]

        def one(query: str) -> tuple[Hit, ...]:
            hits = self._ask(query, min(k, self._engine.most))
            if cache is not None:  # at once: what was paid for is kept, whatever the others come to
                cache.write(source, {query: hits}, k)
            return hits

        return found | dict(zip(missing, self._pool.map(one, missing), strict=True))

    def _ask(self, query: str, k: int) -> tuple[Hit, ...]:
        def make(url: str) -> httpx.Request:
            self._wait_and_pay()
            return self._endpoints.build(
                self._engine.method, url, **self._engine.request(query, k, self._keys)
            )

        try:
            return self._endpoints.call(make, lambda response: self._hits(response.json(), k))
        except CallRefused as error:
            raise RuntimeError(self._without_keys(str(error))) from None
        except CallFailed as error:
            raise TimeoutError(self._without_keys(str(error))) from None

    def _wait_and_pay(self) -> None:
        """Every call, a repeated one too, waits for its turn and is counted before it is made."""
        with self._turn:
            price, ceiling = self._config.price, self._config.cost_ceiling
            if ceiling and self.spent + price > ceiling * (1 + 1e-9):
                raise CostCeiling(
                    f"the calls to {self._config.engine} have cost {self.spent:g} and the next would pass "
                    f"retrieval.web.cost_ceiling={ceiling:g}"
                )
            self.spent += price
            now = time.monotonic()
            turn = max(now, self._next_call)
            self._next_call = turn + 1 / self._config.calls_per_second
        time.sleep(turn - now)

    def _hits(self, content: Any, k: int) -> tuple[Hit, ...]:
        """The results of an answer by rank: the engines give no scores, so it is 1 / rank."""
        if not isinstance(content, dict):
            raise ValueError("no JSON object")
        if isinstance(content.get("error"), str) and not content.get(self._engine.results[0]):
            # SerpAPI says so when there is nothing.
            if "any results" in content["error"]:
                return ()
            raise ValueError(self._without_keys(content["error"]))
        results: Any = content
        for key in self._engine.results:
            results = results.get(key, {}) if isinstance(results, dict) else {}
        hits: list[Hit] = []
        for result in results or []:
            text = result.get(self._engine.text)
            if isinstance(text, str) and text.strip():
                title = str(result.get(self._engine.title) or "").replace("\n", " ")
                passage = Passage(str(result.get(self._engine.id) or ""), title, text.strip())
                hits.append(Hit(passage, 1 / (len(hits) + 1)))
        return tuple(hits[:k])

    def _without_keys(self, text: str) -> str:
        for key in self._keys:
            text = text.replace(key, "…")
        return text
