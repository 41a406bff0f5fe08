"""The retrieval server: every published dialect over one index, many clients in one search.

What a client may be refused with: 400 a blank query where the dialect wants one, 401 no or a wrong token, 413 too much
in one request, 422 a field that is wrong (the answer names it), 503 with Retry-After a full queue, 504 too late.
"""

import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import prometheus_client as prometheus
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

import psearch_jax
from psearch_jax.retrieval import dialects
from psearch_jax.retrieval.coalescing import Coalescer, DeadlinePassed, QueueFull, SearchFailed
from psearch_jax.retrieval.passages import Hit
from psearch_jax.retrieval.reranking import Reranker
from psearch_jax.retrieval.searcher import SearchBackend

_log = logging.getLogger(__name__)

#: Headers that we add to the published forms.
FINGERPRINT = "X-Index-Fingerprint"
TIMEOUT = "X-Timeout-Seconds"
#: Answered without a token: they tell nothing of the corpus.
OPEN_PATHS = ("/health",)
#: Paths that metrics tell apart; others are counted together, or a stranger could fill the memory with names.
PATHS = ("/retrieve", "/search", "/batch_search", "/rerank", "/health", "/metrics")


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """What one request may be, and what may wait.

    Attributes:
      topk: passages where a request does not say how many; max_topk: at most.
      max_bytes, max_queries, max_characters: of a request, in one, of a query.
      batch, capacity: queries in one search, and waiting.
      deadline: seconds for an answer; a request may ask for less (`TIMEOUT`).
    """

    topk: int = 3
    max_topk: int = 1000
    max_bytes: int = 4 << 20
    max_queries: int = 1024
    max_characters: int = 20_000
    batch: int = 256
    capacity: int = 4096
    linger: float = 0.002
    deadline: float = 30.0


class _Metrics:
    """Counts for Prometheus, in a registry of their own: two servers in one process do not mix."""

    def __init__(self, coalescer: Coalescer, backend: SearchBackend) -> None:
        self.registry = prometheus.CollectorRegistry()
        more: dict[str, Any] = {"registry": self.registry}
        self.requests = prometheus.Counter(
            "psearch_requests", "Requests answered.", ("path", "status"), **more
        )
        self.seconds = prometheus.Histogram(
            "psearch_request_seconds", "Seconds from request to answer.", ("path",), **more
        )
        self.queries = prometheus.Counter("psearch_queries", "Queries asked.", **more)
        for name, text, value in (
            ("psearch_queue_queries", "Queries that wait.", lambda: coalescer.waiting),
            ("psearch_searches", "Searches made.", lambda: coalescer.searches),
            ("psearch_searched_queries", "Queries searched.", lambda: coalescer.searched),
            ("psearch_cached_queries", "Found in the cache.", lambda: backend.stats.cached),
            ("psearch_search_seconds", "Seconds searched.", lambda: backend.stats.seconds),
        ):
            prometheus.Gauge(name, text, **more).set_function(value)


def make_app(
    backend: SearchBackend,
    *,
    limits: ServerLimits | None = None,
    reranker: Reranker | None = None,
    token: str = "",
) -> FastAPI:
    """The application. token: what `Authorization: Bearer …` must bring; empty: nobody is asked."""
    limits = limits or ServerLimits()
    coalescer = Coalescer(
        backend.search, batch=limits.batch, capacity=limits.capacity, linger=limits.linger
    )
    metrics = _Metrics(coalescer, backend)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        coalescer.start()
        yield
        await coalescer.close()

    app = FastAPI(title="psearch", version=psearch_jax.__version__, lifespan=lifespan)
    app.add_middleware(_Gate, metrics=metrics, max_bytes=limits.max_bytes, token=token)
    _add_errors(app)

    async def found(
        request: Request, fields: tuple[str, str], queries: Sequence[str], topk: int | None
    ) -> list[list[Hit]]:
        """`fields`: what the dialect calls the queries and k."""
        _check_size(limits, fields, queries, topk)
        metrics.queries.inc(len(queries))
        if not queries:
            return []
        seconds = _seconds(request, limits)
        return await coalescer.submit(queries, topk or limits.topk, seconds)

    @app.post("/retrieve")
    async def retrieve(request: Request, body: dialects.Retrieve) -> Response:
        """Search-R1's and ParallelSearch's form."""
        if body.queries is None and body.query is None:
            raise _wrong_field(("body", "queries"), "Field required")
        field = "queries" if body.queries is not None else "query"
        hits = await found(request, (field, "topk"), body.asked(), body.topk)
        return _answer(backend, dialects.retrieve_answer(hits, body.return_scores))

    @app.post("/search")
    async def search(request: Request, body: dialects.Search) -> Response:
        """ReSearch's and FlashRAG's form of one query."""
        if not body.query.strip():
            raise HTTPException(400, "query is empty; send one")
        [hits] = await found(request, ("query", "top_n"), [body.query], body.top_n)
        return _answer(backend, dialects.search_answer(hits, body.return_score))

    @app.post("/batch_search")
    async def batch_search(request: Request, body: dialects.BatchSearch) -> Response:
        """ReSearch's and FlashRAG's form of several queries."""
        if not any(query.strip() for query in body.query):
            raise HTTPException(400, "query is empty; send at least one")
        hits = await found(request, ("query", "top_n"), body.query, body.top_n)
        return _answer(backend, dialects.batch_answer(hits, body.return_score))

    @app.post("/rerank")
    async def rerank(request: Request, body: dialects.Rerank) -> Response:
        """Put documents in the order of a cross-encoder."""
        if reranker is None:
            raise HTTPException(501, "this server has no reranker; start it with --reranker")
        if len(body.queries) != len(body.documents):
            raise _wrong_field(("body", "documents"), "As many lists as queries are wanted")
        _check_size(limits, ("queries", "rerank_topk"), body.queries, body.rerank_topk)
        if sum(map(len, body.documents)) > limits.max_queries * 100:
            raise HTTPException(413, f"documents: at most {limits.max_queries * 100}")
        return await _reranked(request, body, reranker)

    async def _reranked(request: Request, body: dialects.Rerank, with_: Reranker) -> Response:
        candidates: list[list[Hit]] = []
        given: dict[int, Any] = {}
        for number, own in enumerate(body.documents):
            try:
                hits = [Hit(dialects.read_document(value), 0.0) for value in own]
            except ValueError as error:
                raise _wrong_field(("body", "documents", number), str(error)) from error
            given |= {id(hit.passage): value for hit, value in zip(hits, own, strict=True)}
            candidates.append(hits)
        k = body.rerank_topk or limits.topk
        ranked: Any = await coalescer.call(
            lambda: with_.rerank(body.queries, candidates, k), _seconds(request, limits)
        )
        scored = [
            [{"document": given[id(hit.passage)], "score": hit.score} for hit in hits]
            for hits in ranked
        ]
        if not body.return_scores:
            scored = [[entry["document"] for entry in own] for own in scored]
        return _answer(backend, {"result": scored})

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Whether it answers, and of which index."""
        return {
            "status": "ok",
            "fingerprint": backend.fingerprint,
            "waiting": coalescer.waiting,
            "reranker": reranker.name if reranker is not None else None,
            "version": psearch_jax.__version__,
        }

    @app.get("/metrics")
    async def metrics_text() -> Response:
        """Prometheus."""
        content = prometheus.generate_latest(metrics.registry)
        return Response(content, media_type=prometheus.CONTENT_TYPE_LATEST)

    return app


def _seconds(request: Request, limits: ServerLimits) -> float:
    """How long a request may take."""
    asked = request.headers.get(TIMEOUT)
    if asked is None:
        return limits.deadline
    try:
        seconds = float(asked)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise _wrong_field(("header", TIMEOUT), "A number of seconds above 0 is wanted")
    return min(seconds, limits.deadline)


def _check_size(
    limits: ServerLimits, fields: tuple[str, str], queries: Sequence[str], topk: int | None
) -> None:
    if len(queries) > limits.max_queries:
        raise HTTPException(
            413, f"{fields[0]}: {len(queries)} queries, at most {limits.max_queries}"
        )
    if (topk or 0) > limits.max_topk:
        raise _wrong_field(("body", fields[1]), f"At most {limits.max_topk} passages a query")
    for number, query in enumerate(queries):
        if len(query) > limits.max_characters:
            raise _wrong_field(
                ("body", fields[0], number),
                f"A query of {len(query)} characters; at most {limits.max_characters}",
            )


def _wrong_field(where: tuple[str | int, ...], what: str) -> RequestValidationError:
    return RequestValidationError([{"loc": where, "msg": what, "type": "value_error"}])


def _answer(backend: SearchBackend, content: Any) -> Response:
    return Response(
        json.dumps(content),
        media_type="application/json",
        headers={FINGERPRINT: backend.fingerprint},
    )


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def wrong(request: Request, error: RequestValidationError) -> Response:
        """Name the fields; not their contents, which may be long."""
        fields = [{name: e[name] for name in ("loc", "msg", "type")} for e in error.errors()]
        return JSONResponse({"detail": fields}, 422)

    @app.exception_handler(QueueFull)
    async def full(request: Request, error: QueueFull) -> Response:
        return JSONResponse({"detail": str(error)}, 503, {"Retry-After": str(error.retry_after)})

    @app.exception_handler(DeadlinePassed)
    async def late(request: Request, error: DeadlinePassed) -> Response:
        return JSONResponse({"detail": str(error)}, 504)

    @app.exception_handler(SearchFailed)
    async def failed(request: Request, error: SearchFailed) -> Response:
        _log.error("a search failed", exc_info=error)
        return JSONResponse({"detail": "the search failed; the server's log says why"}, 500)


class _Gate:
    """Before any path: the token, the size of the body; after it: the counts. Plain ASGI."""

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        metrics: _Metrics,
        max_bytes: int,
        token: str,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._max_bytes = max_bytes
        self._token = f"Bearer {token}".encode() if token else b""

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.perf_counter()
        status = 500
        path = scope["path"] if scope["path"] in PATHS else "other"

        async def counted(message: dict[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._handle(scope, receive, counted)
        finally:
            self._metrics.requests.labels(path, str(status)).inc()
            self._metrics.seconds.labels(path).observe(time.perf_counter() - begun)

    async def _handle(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        if self._token and scope["path"] not in OPEN_PATHS:
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, self._token):
                refusal = JSONResponse(
                    {"detail": "a valid bearer token is wanted"},
                    401,
                    {"WWW-Authenticate": "Bearer"},
                )
                await refusal(scope, receive, send)
                return
        length = headers.get(b"content-length", b"0")
        body, more = b"", not length.isdigit() or int(length) <= self._max_bytes
        too_large = not more
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._max_bytes:
                too_large, more = True, False
        if too_large:
            refusal = JSONResponse(
                {"detail": f"the body is larger than {self._max_bytes} bytes"},
                413,
                {"Connection": "close"},
            )
            await refusal(scope, receive, send)
            return
        sent = False

        async def replay() -> dict[str, Any]:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)
