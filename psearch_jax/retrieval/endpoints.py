"""Calls to several servers of one kind: the least busy healthy one, timeouts, repetitions, circuit breaking."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

import httpx
import tenacity

from psearch_jax.errors import UserError

T = TypeVar("T")
#: HTTP statuses that may pass: timeouts, too many requests, and the server's own errors.
PASSING = frozenset((408, 425, 429, *range(500, 600)))
TRIP_AFTER = 3  # failures in a row after which a server is left alone
REST, LONGEST_REST = 0.5, 30.0  # seconds; doubled with every failure after a rest


def _is_address(url: str) -> bool:
    parts = urlsplit(url)
    try:
        return bool(
            parts.scheme in ("http", "https")
            and parts.hostname
            and parts.username is None
            and parts.port != 0
        )
    except ValueError:  # the port is no number
        return False


class CallFailed(Exception):
    """A call that may succeed when it is repeated. `after`: seconds that the server asks to wait."""

    def __init__(self, what: str, after: float = 0.0) -> None:
        super().__init__(what)
        self.after = after


class CallRefused(Exception):
    """A call that a repetition cannot mend."""


@dataclass(eq=False)
class _Endpoint:
    url: str
    busy: int = 0
    calls: int = 0
    failures: int = 0  # in a row
    rest: float = 0.0
    resting_until: float = 0.0


class Endpoints:
    """Servers that give the same answers. Safe for several threads."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout: float,
        patience: float,
        headers: dict[str, str] | None = None,
        setting: str = "retrieval.urls",
    ) -> None:
        """`timeout`: seconds of one call; `patience`: of all repetitions together.

        Raises:
          UserError: no address, or one that is none.
        """
        # At the level INFO httpx logs whole addresses, and those of web engines hold keys.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        for url in urls:
            if not _is_address(url):
                raise UserError(
                    f"{setting} has {url!r}, which is no address; write http://host:port, without a name or password."
                )
        if not urls:
            raise UserError(f"{setting} is empty; name a server.")
        self._endpoints = [_Endpoint(url.rstrip("/")) for url in urls]
        self._patience = patience
        self._lock = threading.Lock()
        limits = httpx.Limits(max_connections=256, max_keepalive_connections=64)
        self._client = httpx.Client(timeout=timeout, limits=limits, headers=headers)
        self.failed_calls = 0  # calls that were repeated or given up

    def call(self, make: Callable[[str], httpx.Request], read: Callable[[httpx.Response], T]) -> T:
        """Send `make(url)` to a server and `read` its answer, until that succeeds.

        `read` raises ValueError for an answer that is none.

        Raises:
          CallFailed: the patience is over.
          CallRefused: an HTTP status that says that the request is wrong.
        """
        end = time.monotonic() + self._patience
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(CallFailed),
            stop=tenacity.stop_after_delay(self._patience),
            wait=self._pause,
            reraise=True,
        )
        return retrying(self._once, make, read, end)

    def build(self, method: str, url: str, **content: object) -> httpx.Request:
        """A request with the headers of all."""
        return self._client.build_request(method, url, **content)  # type: ignore[arg-type]

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _pause(self, state: tenacity.RetryCallState) -> float:
        """Random, growing, and what the server asked for."""
        outcome = state.outcome
        error = outcome.exception() if outcome is not None else None
        jitter = tenacity.wait_random_exponential(multiplier=0.1, max=5)(state)
        return jitter + (error.after if isinstance(error, CallFailed) else 0.0)

    def _once(
        self,
        make: Callable[[str], httpx.Request],
        read: Callable[[httpx.Response], T],
        end: float,
    ) -> T:
        endpoint = self._pick(end)
        try:
            result = self._read(make(endpoint.url), read)
        except CallFailed:
            self._failed(endpoint)
            raise
        except BaseException:
            with self._lock:
                endpoint.busy -= 1
            raise
        with self._lock:
            endpoint.busy -= 1
            endpoint.failures, endpoint.rest, endpoint.resting_until = 0, 0.0, 0.0
        return result

    def _read(self, request: httpx.Request, read: Callable[[httpx.Response], T]) -> T:
        where = request.url.copy_with(query=None)
        try:
            response = self._client.send(request)
        except httpx.TransportError as error:
            raise CallFailed(f"{where}: {type(error).__name__}: {error}") from error
        if response.status_code in PASSING:
            after = response.headers.get("Retry-After", "")
            seconds = min(float(after), LONGEST_REST) if after.isdigit() else 0.0
            raise CallFailed(f"{where} answered {response.status_code}", seconds)
        if response.status_code >= 300:
            raise CallRefused(f"{where} answered {response.status_code}: {response.text[:300]}")
        try:
            return read(response)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CallFailed(f"{where} answered something else: {error}") from error

    def _pick(self, end: float) -> _Endpoint:
        """The least busy server. One whose rest is over is tried first, by one call; when all rest, it is waited for
        the first."""
        with self._lock:
            now = time.monotonic()
            awake = [e for e in self._endpoints if e.resting_until <= now]
            tried = [e for e in awake if e.failures >= TRIP_AFTER]
            if tried:
                chosen = tried[0]
                chosen.resting_until = now + max(
                    chosen.rest, REST
                )  # the others wait for the result
            elif awake:
                chosen = min(awake, key=lambda e: (e.busy, e.calls))
            else:
                chosen = min(self._endpoints, key=lambda e: e.resting_until)
            wait = min(chosen.resting_until, end) - now if not awake else 0.0
            chosen.busy += 1
            chosen.calls += 1
        time.sleep(max(0.0, wait))
        return chosen

    def _failed(self, endpoint: _Endpoint) -> None:
        with self._lock:
            self.failed_calls += 1
            endpoint.busy -= 1
            endpoint.failures += 1
            if endpoint.failures >= TRIP_AFTER:
                endpoint.rest = min(max(REST, 2 * endpoint.rest), LONGEST_REST)
                endpoint.resting_until = time.monotonic() + endpoint.rest
