"""Web engines, against a server with answers of our own making: what each is asked, what becomes of an answer."""

import json
import time
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from retrieval.live_server import answering

from psearch_jax import assembly
from psearch_jax.config import RetrievalConfig, WebConfig
from psearch_jax.errors import UserError
from psearch_jax.retrieval.passages import Hit, Passage
from psearch_jax.retrieval.web_engines import ENGINES, CostCeiling, WebSearcher

KEY = "key-of-ours"
ANSWERS = {
    "serpapi": lambda rows: {
        "organic_results": [{"link": u, "title": t, "snippet": s} for u, t, s in rows]
    },
    "google": lambda rows: {"items": [{"link": u, "title": t, "snippet": s} for u, t, s in rows]},
    "brave": lambda rows: {
        "web": {"results": [{"url": u, "title": t, "description": s} for u, t, s in rows]}
    },
    "tavily": lambda rows: {"results": [{"url": u, "title": t, "content": s} for u, t, s in rows]},
}
ROWS = [("http://a", "A", "first"), ("http://b", "B", " "), ("http://c", "C\nc", "second ")]


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for engine in ENGINES.values():
        for name in engine.variables:
            monkeypatch.setenv(name, KEY)


def config(engine: str, url: str, **changes) -> WebConfig:
    return WebConfig(
        **{"engine": engine, "url": url, "cache": "", "calls_per_second": 1000.0, **changes}
    )


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_each_engine_is_asked_in_its_form(engine: str) -> None:
    seen: list[tuple] = []

    def answer(method: str, path: str, headers: dict, body: bytes) -> tuple:
        seen.append((method, parse_qs(urlsplit(path).query), headers, body))
        return 200, {}, json.dumps(ANSWERS[engine](ROWS)).encode()

    with answering(answer) as url:
        searcher = WebSearcher(config(engine, url))
        [hits, none] = searcher.search(["who  is it", " "], 2)
        searcher.close()
    assert hits == [
        Hit(Passage("http://a", "A", "first"), 1.0),
        Hit(Passage("http://c", "C c", "second"), 0.5),
    ]
    assert none == []
    [(method, query, headers, body)] = seen
    if engine == "tavily":
        assert method == "POST" and headers["authorization"] == f"Bearer {KEY}"
        assert json.loads(body) == {"query": "who is it", "max_results": 2}
        return
    assert method == "GET" and query["q"] == ["who is it"]
    if engine == "brave":
        assert headers["x-subscription-token"] == KEY and query["count"] == ["2"]
    else:
        assert query["num"] == ["2"] and KEY in query[{"serpapi": "api_key"}.get(engine, "key")]
    if engine == "google":
        assert query["cx"] == [KEY]


def test_nothing_found_a_fault_and_a_refusal() -> None:
    replies = [
        (200, {}, b'{"error": "Google hasn\'t returned any results for this query."}'),
        (500, {}, b""),
        (200, {}, b'{"organic_results": []}'),
        (401, {}, b'{"error": "Invalid key: ' + KEY.encode() + b'"}'),
    ]
    with answering(lambda *_: replies.pop(0)) as url:
        searcher = WebSearcher(config("serpapi", url))
        assert searcher.search(["a"], 3) == [[]]
        assert searcher.search(["b"], 3) == [[]]
        with pytest.raises(RuntimeError, match="401") as caught:
            searcher.search(["c"], 3)
        assert KEY not in str(caught.value)
        assert searcher.spent == pytest.approx(4 * 0.005)
        searcher.close()


def test_the_ceiling_the_rate_and_the_cache(tmp_path: Path) -> None:
    seen: list[str] = []

    def answer(method: str, path: str, headers: dict, body: bytes) -> tuple:
        seen.append(path)
        return 200, {}, json.dumps(ANSWERS["tavily"](ROWS[:1])).encode()

    cache = str(tmp_path / "web.sqlite")
    with answering(answer) as url:
        own = config("tavily", url, cost_ceiling=0.015, calls_per_second=20.0, cache=cache)
        searcher = WebSearcher(own)
        begun = time.monotonic()
        searcher.search(["a", "b", "a"], 1)
        searcher.search(["c"], 1)
        assert time.monotonic() - begun >= 2 / 20
        with pytest.raises(CostCeiling, match=r"cost_ceiling=0.015"):
            searcher.search(["d"], 1)
        searcher.close()
        again = assembly.open_backend(RetrievalConfig(web=own))
        assert [hits[0].passage.text for hits in again.search(["a", "b", "c"], 1)] == ["first"] * 3
        assert len(seen) == 3 and again.spent == 0
        again.close()


def test_a_key_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOOGLE_CSE_ID")
    with pytest.raises(UserError, match="GOOGLE_CSE_ID, which is not set"):
        WebSearcher(config("google", "http://127.0.0.1:9"))
