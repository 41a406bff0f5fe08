"""The server: the published forms to the letter, many clients in one search, and every refusal with its status."""

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import jax.numpy as jnp
import pytest
from retrieval.live_server import serving

from psearch_jax.retrieval.coalescing import Coalescer, DeadlinePassed, QueueFull
from psearch_jax.retrieval.lexical import LexicalIndex
from psearch_jax.retrieval.passages import Hit, Passage
from psearch_jax.retrieval.rankers import LexicalRanker
from psearch_jax.retrieval.reranking import Reranker
from psearch_jax.retrieval.searcher import CachedSearcher
from psearch_jax.retrieval.server import FINGERPRINT, TIMEOUT, ServerLimits, make_app

PASSAGES = [
    Passage("a", "Lyon", "a city on the Rhône"),
    Passage("b", "Turin", "a city on the Po"),
    Passage("c", "Po", "a river in Italy"),
]
LYON = {
    "id": "a",
    "contents": '"Lyon"\na city on the Rhône',
    "title": "Lyon",
    "text": "a city on the Rhône",
}


class Slowly(CachedSearcher):
    """Counts searches, and waits where a test says so."""

    def __init__(self) -> None:
        index = LexicalIndex.build(p.contents for p in PASSAGES)
        super().__init__(LexicalRanker(index, "print"), PASSAGES, cache_size=0)
        self.began, self.go = threading.Event(), threading.Event()
        self.go.set()
        self.sizes: list[int] = []

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        self.began.set()
        self.go.wait(10)
        self.sizes.append(len(queries))
        if "fail" in queries:
            raise RuntimeError("the index is gone")
        return super().search(queries, k)


def by_length() -> Reranker:
    return Reranker(
        name="length",
        fingerprint="length",
        score=lambda tokens, types, mask: jnp.asarray(-mask.sum(1), jnp.float32),
        tokenize=lambda pairs: [([1] * len(p), [0] * len(p)) for _, p in pairs],
        max_tokens=64,
    )


@pytest.fixture(scope="module")
def backend() -> Slowly:
    return Slowly()


LIMITS = ServerLimits(
    topk=2, max_topk=50, max_bytes=3000, max_queries=8, max_characters=500, capacity=6, batch=4
)


@pytest.fixture(scope="module")
def address(backend: Slowly) -> Iterator[str]:
    with serving(make_app(backend, limits=LIMITS, reranker=by_length())) as url:
        yield url


@pytest.fixture
def client(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, timeout=20) as own:
        yield own


def test_retrieve_as_search_r1_sends_it(client: httpx.Client) -> None:
    body = {"queries": ["lyon", "river po"], "topk": 1, "return_scores": True}
    answer = client.post("/retrieve", json=body)
    assert answer.status_code == 200 and answer.headers[FINGERPRINT] == "print"
    [[first], [second]] = answer.json()["result"]
    assert first["document"] == LYON and first["score"] > 0
    assert second["document"]["id"] == "c"
    plain = client.post("/retrieve", json={**body, "return_scores": False}).json()
    assert plain == {"result": [[LYON], [second["document"]]]}


@pytest.mark.parametrize(
    ("body", "ids"),
    [
        ({"query": "lyon", "topk": None}, [["a"]]),
        ({"queries": "city", "topk": 0}, [["a", "b"]]),
        ({"queries": [], "topk": 3, "return_scores": True}, []),
        ({"queries": ["", "zzz"]}, [[], []]),
        ({"queries": ["italy"], "topk": 50, "extra": 1}, [["c"]]),
    ],
)
def test_retrieve_as_clients_in_the_wild_send_it(client: httpx.Client, body, ids) -> None:
    answer = client.post("/retrieve", json=body)
    assert answer.status_code == 200
    found = [
        [entry.get("document", entry)["id"] for entry in own] for own in answer.json()["result"]
    ]
    assert found == ids


def test_search_and_batch_search_as_research_sends_them(client: httpx.Client) -> None:
    assert client.post("/search", json={"query": "lyon", "top_n": 1}).json() == [LYON]
    pair = client.post("/search", json={"query": "lyon", "top_n": 1, "return_score": True}).json()
    assert pair[0] == [LYON] and pair[1][0] > 0
    body = {"query": ["lyon", "po river"], "top_n": 1, "return_score": True}
    documents, scores = client.post("/batch_search", json=body).json()
    assert [[d["id"] for d in own] for own in documents] == [["a"], ["c"]]
    assert [len(own) for own in scores] == [1, 1]
    body["return_score"] = False
    assert client.post("/batch_search", json=body).json() == documents
    for path, query in (("/search", " "), ("/batch_search", []), ("/batch_search", [""])):
        assert client.post(path, json={"query": query}).status_code == 400


def test_rerank_takes_documents_of_every_form(client: httpx.Client) -> None:
    documents = [[LYON, {"document": {"contents": "short"}}, "a bare string that is long"]]
    body = {"queries": ["q"], "documents": documents, "rerank_topk": 2, "return_scores": True}
    [own] = client.post("/rerank", json=body).json()["result"]
    assert [entry["document"] for entry in own] == [documents[0][1], LYON]
    assert own[0]["score"] > own[1]["score"]
    body["return_scores"] = False
    assert client.post("/rerank", json=body).json()["result"] == [[documents[0][1], LYON]]
    for wrong in ({"documents": []}, {"documents": [[{"id": "x"}]]}):
        answer = client.post("/rerank", json={**body, **wrong})
        assert answer.status_code == 422 and "documents" in answer.json()["detail"][0]["loc"]


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/retrieve", {}, 422, "queries"),
        ("/retrieve", {"queries": [1]}, 422, "queries"),
        ("/retrieve", {"queries": ["x"], "topk": -1}, 422, "topk"),
        ("/retrieve", {"queries": ["x"], "topk": "many"}, 422, "topk"),
        ("/retrieve", {"queries": ["x"], "topk": 51}, 422, "topk"),
        ("/retrieve", {"queries": ["x", "y" * 501]}, 422, "501 characters"),
        ("/search", {"query": None}, 422, "query"),
        ("/search", {"query": "x", "top_n": 51}, 422, "top_n"),
        ("/retrieve", {"queries": ["x"] * 9}, 413, "at most 8"),
        ("/retrieve", {"queries": ["x" * 3000]}, 413, "larger than 3000 bytes"),
        ("/retrieve", b"{", 422, "json"),
        ("/retrieve", b'{"queries": ["\xff"]}', 400, "body"),
        ("/nothing", {}, 404, "Not Found"),
    ],
)
def test_what_is_wrong_is_named(client: httpx.Client, path, body, status, says) -> None:
    more = {"content": body} if isinstance(body, bytes) else {"json": body}
    answer = client.post(path, headers={"Content-Type": "application/json"}, **more)
    assert answer.status_code == status
    assert says in answer.text and len(answer.text) < 600


def test_a_body_without_a_length_is_cut_off_too(client: httpx.Client) -> None:
    answer = client.post("/retrieve", content=(b"x" * 1000 for _ in range(5)))
    assert answer.status_code == 413


def test_a_full_queue_a_deadline_and_coalescing(client: httpx.Client, backend: Slowly) -> None:
    """While one search hangs, six more queries find room; the next are told when to come again."""
    backend.go.clear()
    backend.began.clear()
    backend.sizes.clear()

    def ask(count: int, **headers: str) -> httpx.Response:
        return client.post("/retrieve", json={"queries": ["lyon"] * count}, headers=headers)

    with ThreadPoolExecutor(8) as pool:
        try:
            first = pool.submit(ask, 1)
            assert backend.began.wait(10)
            late = ask(1, **{TIMEOUT: "0.05"})
            assert late.status_code == 504
            waiting = [pool.submit(ask, 1) for _ in range(5)]
            while client.get("/health").json()["waiting"] < 6:  # with the late one, still in line
                time.sleep(0.01)
            full = ask(1)
            assert full.status_code == 503 and int(full.headers["Retry-After"]) >= 1
        finally:
            backend.go.set()
        assert [r.result().status_code for r in (first, *waiting)] == [200] * 6
    assert backend.sizes == [1, 4, 1]
    assert ask(1, **{TIMEOUT: "soon"}).status_code == 422
    assert client.post("/retrieve", json={"queries": ["fail"]}).status_code == 500
    assert ask(1).status_code == 200


def test_health_metrics_and_openapi(client: httpx.Client) -> None:
    client.post("/retrieve", json={"queries": ["lyon"]})
    assert client.get("/health").json()["fingerprint"] == "print"
    text = client.get("/metrics").text
    assert 'psearch_requests_total{path="/retrieve",status="200"}' in text
    assert "psearch_request_seconds_bucket" in text and "psearch_queue_queries" in text
    paths = client.get("/openapi.json").json()["paths"]
    assert {"/retrieve", "/search", "/batch_search", "/rerank", "/health"} <= set(paths)


def test_a_token_is_asked_for(backend: Slowly) -> None:
    with serving(make_app(backend, token="secret")) as url:
        body = {"json": {"queries": ["lyon"]}}
        for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            assert httpx.post(url + "/retrieve", headers=given, **body).status_code == 401
        right = {"Authorization": "Bearer secret"}
        assert httpx.post(url + "/retrieve", headers=right, **body).status_code == 200
        assert httpx.get(url + "/health").status_code == 200
        assert httpx.get(url + "/metrics").status_code == 401
        assert (
            httpx.post(
                url + "/rerank", headers=right, json={"queries": [], "documents": []}
            ).status_code
            == 501
        )


def test_stopping_answers_what_waits_and_takes_no_more() -> None:
    async def play() -> None:
        go = threading.Event()

        def search(queries: Sequence[str], k: int) -> list[list[Hit]]:
            go.wait(10)
            return [[] for _ in queries]

        coalescer = Coalescer(search, linger=0)
        coalescer.start()
        running = [asyncio.create_task(coalescer.submit(["q"], k, 5)) for k in (1, 2, 1)]
        await asyncio.sleep(0.05)
        closing = asyncio.create_task(coalescer.close())
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await coalescer.submit(["q"], 1, 5)
        go.set()
        await closing
        assert await asyncio.gather(*running) == [[[]]] * 3
        assert coalescer.waiting == 0 and coalescer.searched == 3

    asyncio.run(play())


def test_what_nobody_waits_for_is_not_searched() -> None:
    async def play() -> None:
        sizes: list[int] = []
        go = threading.Event()

        def search(queries: Sequence[str], k: int) -> list[list[Hit]]:
            go.wait(10)
            sizes.append(len(queries))
            return [[] for _ in queries]

        coalescer = Coalescer(search, linger=0)
        coalescer.start()
        first = asyncio.create_task(coalescer.submit(["q"], 1, 5))
        await asyncio.sleep(0.05)
        with pytest.raises(DeadlinePassed):
            await coalescer.submit(["q", "r"], 1, 0.02)
        last = asyncio.create_task(coalescer.submit(["s"], 1, 5))
        go.set()
        await asyncio.gather(first, last)
        assert sizes == [1, 1]
        await coalescer.close()

    asyncio.run(play())
