"""The client: as if the index were here, whatever the servers do; each published server is understood."""

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from retrieval.live_server import answering, serving

from psearch_jax import assembly
from psearch_jax.config import RetrievalConfig
from psearch_jax.errors import UserError
from psearch_jax.retrieval import endpoints
from psearch_jax.retrieval.client import RemoteSearcher
from psearch_jax.retrieval.lexical import LexicalIndex
from psearch_jax.retrieval.passages import Hit, Passage
from psearch_jax.retrieval.rankers import LexicalRanker
from psearch_jax.retrieval.searcher import CachedSearcher, SearchBackend
from psearch_jax.retrieval.server import make_app

PASSAGES = [Passage(f"p{i}", f"T{i}", f"word{i} common text") for i in range(200)]
QUERIES = [f"word{i}" for i in range(150)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "REST", 0.05)


@pytest.fixture(scope="module")
def local() -> CachedSearcher:
    index = LexicalIndex.build(p.contents for p in PASSAGES)
    return CachedSearcher(LexicalRanker(index, "print"), PASSAGES)


@pytest.fixture(scope="module")
def address(local: CachedSearcher) -> Iterator[str]:
    with serving(make_app(local)) as url:
        yield url


class Published:
    """A server after the published contract, of `/retrieve` or `/batch_search`, which can be told to misbehave."""

    def __init__(self, local: SearchBackend, name: str = "") -> None:
        self.local = local
        self.name = name
        self.faults: list[tuple[int, dict[str, str], bytes]] = []
        self.seen: list[dict] = []
        self.headers: list[dict[str, str]] = []
        self.lock = threading.Lock()

    def __call__(self, method: str, path: str, headers: dict, body: bytes) -> tuple:
        if path == "/health":
            content = {"fingerprint": self.name} if self.name else {}
            return (200 if self.name else 404), {}, json.dumps(content).encode()
        with self.lock:
            self.headers.append(headers)
            self.seen.append(json.loads(body))
            if self.faults:
                return self.faults.pop(0)
        asked = self.seen[-1]
        if path == "/retrieve":
            found = self.local.search(asked["queries"], asked["topk"])
            rows = [
                [
                    {
                        "document": {"id": h.passage.id, "contents": h.passage.contents},
                        "score": h.score,
                    }
                    for h in own
                ]
                for own in found
            ]
            return 200, {}, json.dumps({"result": rows}).encode()
        found = self.local.search(asked["query"], asked["top_n"])
        documents = [
            [{"id": h.passage.id, "contents": h.passage.contents} for h in own] for own in found
        ]
        scores = [[h.score for h in own] for own in found]
        return 200, {}, json.dumps([documents, scores]).encode()


def test_the_client_and_the_index_are_interchangeable(
    address: str, local: CachedSearcher, tmp_path: Path
) -> None:
    config = RetrievalConfig(urls=(address,), disk_cache=str(tmp_path / "cache.sqlite"))
    remote = assembly.open_backend(config)
    assert isinstance(remote, SearchBackend)
    assert remote.fingerprint == local.fingerprint
    assert remote.search([*QUERIES, " ", "word3"], 3) == local.search([*QUERIES, " ", "word3"], 3)
    stats = remote.stats
    assert (stats.queries, stats.distinct, stats.empty) == (152, 150, 1)
    remote.search(QUERIES[:5], 3)
    assert remote.stats.cached == 5
    remote.close()


@pytest.mark.parametrize("dialect", ["retrieve", "batch_search"])
def test_published_servers_are_understood(local: CachedSearcher, dialect: str) -> None:
    server = Published(local)
    with answering(server) as url:
        remote = RemoteSearcher([url], dialect=dialect, token="secret")
        assert remote.search(QUERIES, 2) == local.search(QUERIES, 2)
        assert len(server.seen) == 3  # 64, 64, 22 queries
        assert all(h["authorization"] == "Bearer secret" for h in server.headers)
        assert remote.fingerprint != local.fingerprint
        remote.close()


@pytest.mark.parametrize(
    "fault",
    [
        (500, {}, b"no"),
        (503, {"Retry-After": "0"}, b"full"),
        (200, {}, b"not JSON"),
        (200, {}, b'{"result": [[]]}'),
        (200, {}, b'{"result": [[{"score": 1}], []]}'),
        (200, {}, b'{"result": [null, []]}'),
    ],
)
def test_a_faulty_answer_is_asked_for_again(local: CachedSearcher, fault) -> None:
    server = Published(local)
    server.faults = [fault, fault]
    with answering(server) as url:
        remote = RemoteSearcher([url])
        assert remote.search(["word1", "word2"], 1) == local.search(["word1", "word2"], 1)
        assert len(server.seen) == 3
        remote.close()


def test_a_refusal_is_not_repeated_and_patience_ends(local: CachedSearcher) -> None:
    server = Published(local)
    with answering(server) as url:
        remote = RemoteSearcher([url], patience=0.4)
        server.faults = [(422, {}, b"queries: wrong")]
        with pytest.raises(RuntimeError, match="refused 1 queries: .*422: queries: wrong"):
            remote.search(["a"], 1)
        assert len(server.seen) == 1
        server.faults = [(500, {}, b"")] * 1000
        with pytest.raises(TimeoutError, match="answered 500"):
            remote.search(["a"], 1)
        server.faults = []
        assert remote.search(["word1"], 1) == local.search(["word1"], 1)
        remote.close()


def test_a_dead_server_is_left_alone_and_the_load_is_shared(local: CachedSearcher) -> None:
    servers = [Published(local, "same") for _ in range(3)]
    servers[0].faults = [(500, {}, b"")] * 1000
    with ExitStack() as stack:
        urls = [stack.enter_context(answering(server)) for server in servers]
        remote = RemoteSearcher(urls, cache_size=0)
        for _ in range(4):
            assert remote.search(QUERIES * 2, 1) == local.search(QUERIES * 2, 1)
        seen = [len(server.seen) for server in servers]
        assert seen[0] <= 8 and min(seen[1:]) >= 3 and sum(seen[1:]) == 12
        remote.close()


def test_no_server_two_indexes_and_addresses_that_are_none(local: CachedSearcher) -> None:
    with pytest.raises(UserError, match="No retrieval server answers"):
        RemoteSearcher(["http://127.0.0.1:9"], timeout=1)
    for url in ("localhost:8000", "http://me:secret@host", "http://host:many", "http://"):
        with pytest.raises(UserError, match="no address"):
            RemoteSearcher([url])
    with (
        answering(Published(local, "a")) as one,
        answering(Published(local, "b")) as two,
        pytest.raises(UserError, match="different indexes"),
    ):
        RemoteSearcher([one, two])
    config = RetrievalConfig(urls=("http://127.0.0.1:9",), token_variable="NOT_SET_ANYWHERE")
    with pytest.raises(UserError, match="NOT_SET_ANYWHERE, which is not set"):
        assembly.open_backend(config)


def test_results_on_disk_belong_to_an_index(local: CachedSearcher, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache.sqlite")
    counts = []
    for name in ("one", "one", "two"):
        server = Published(local, name)
        with answering(server) as url:
            remote = RemoteSearcher([url], disk_cache=cache)
            assert remote.search(QUERIES[:9], 2) == local.search(QUERIES[:9], 2)
            remote.close()
        counts.append(len(server.seen))
    assert counts == [1, 0, 1]
    (tmp_path / "foreign").write_text("no database, but a longer text" * 99)
    with answering(Published(local)) as url, pytest.raises(UserError, match="cannot be used"):
        RemoteSearcher([url], disk_cache=str(tmp_path / "foreign"))


def test_an_index_that_changes_empties_the_cache(local: CachedSearcher) -> None:
    fingerprint = "one"

    def answer(method: str, path: str, headers: dict, body: bytes) -> tuple:
        if path == "/health":
            return 200, {}, json.dumps({"fingerprint": fingerprint}).encode()
        rows = [[{"document": {"id": fingerprint, "contents": "x"}, "score": 1}]]
        rows *= len(json.loads(body)["queries"])
        return 200, {"X-Index-Fingerprint": fingerprint}, json.dumps({"result": rows}).encode()

    with answering(answer) as url:
        remote = RemoteSearcher([url])
        assert remote.search(["a"], 1) == [[Hit(Passage("one", "", "x"), 1.0)]]
        fingerprint = "two"
        assert remote.search(["a", "b"], 1)[1][0].passage.id == "two"
        assert remote.fingerprint == "two"
        assert remote.search(["a"], 1)[0][0].passage.id == "two"
        remote.close()
