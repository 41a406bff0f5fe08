"""Law 14: a search that fails never costs an episode silently."""

import logging

import pytest

from psearch_jax.retrieval.passages import Hit, Passage
from psearch_jax.rollout import environment as room
from psearch_jax.rollout.environment import Found, SearchEnvironment


def hit(text: str) -> Hit:
    return Hit(Passage(text, "", text), 1.0)


class Backend:
    """Fails or misbehaves as told, one entry a call; then answers every query with itself, three times."""

    def __init__(self, *behaviour):
        self.behaviour = list(behaviour)
        self.calls = []

    def search(self, queries, k):
        self.calls.append(list(queries))
        if self.behaviour:
            answer = self.behaviour.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        return [[hit(query)] * 3 for query in queries]


def test_law_05_every_distinct_query_is_sent_once():
    backend = Backend()
    environment = SearchEnvironment(backend=backend)
    found = environment.search([["a", "b"], ["b"], ["a", "c"]], k=2)
    assert backend.calls == [["a", "b", "c"]]
    assert found[2] == Found(hits=((hit("a"),) * 2, (hit("c"),) * 2))
    assert (environment.counts.queries, environment.counts.distinct) == (5, 3)


WHOLE = [ConnectionError("gone"), None, "ab", [[]], [[], [], []]]  # too few and too many among them
ONE = [
    [[], None],
    [[], ["text"]],
    [[], [{"document": "x"}]],
]  # of two lists the second is none of hits


@pytest.mark.parametrize("bad", [*WHOLE, *ONE], ids=repr)
def test_law_14_a_failure_is_retried(bad):
    backend = Backend(bad)
    environment = SearchEnvironment(backend=backend, retries=2)
    (found,) = environment.search([["a", "b"]], k=1)
    # Who got a list of hits, even an empty one, is not asked about again.
    assert backend.calls[1:] == ([["b"]] if bad in ONE else [["a", "b"]])
    assert found == Found(hits=(() if bad in ONE else (hit("a"),), (hit("b"),)))
    assert environment.counts.retried == 1
    assert environment.counts.failed == 0


@pytest.mark.parametrize("bad", WHOLE, ids=repr)
def test_law_14_a_lasting_failure_is_counted_and_answered_with_nothing(bad):
    backend = Backend(*[bad] * 2, *[TimeoutError()] * 2)  # the last attempt asks one by one
    environment = SearchEnvironment(backend=backend, retries=2)
    assert environment.search([["a", "b"], ["b"]], k=1) == [
        Found(hits=((), ()), failed=2),
        Found(hits=((),), failed=1),
    ]
    assert backend.calls == [["a", "b"], ["a", "b"], ["a"], ["b"]]
    assert environment.counts.failed == 3
    assert environment.search([["a"]], k=1)[0].failed == 0  # the next batch has its own chances


def test_law_14_a_query_that_the_backend_cannot_bear_costs_no_other_its_answer():
    class Picky(Backend):
        def search(self, queries, k):
            if "bad" in queries:
                raise ValueError("cannot encode this")
            return super().search(queries, k)

    environment = SearchEnvironment(backend=Picky(), retries=1)
    assert environment.search([["a", "bad"], ["b"]], k=1) == [
        Found(hits=((hit("a"),), ()), failed=1),
        Found(hits=((hit("b"),),)),
    ]


def test_nothing_to_search_calls_nobody():
    backend = Backend()
    assert SearchEnvironment(backend=backend).search([], k=1) == []
    assert backend.calls == []


def test_an_interrupt_is_not_a_failed_search():
    backend = Backend()
    backend.search = lambda queries, k: (_ for _ in ()).throw(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        SearchEnvironment(backend=backend).search([["a"]], k=1)


def test_a_backend_that_is_away_warns_now_and_then(caplog, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(room.time, "monotonic", lambda: clock[0])
    sparse, log = room.Sparse(), logging.getLogger("psearch_jax.rollout.environment")
    monkeypatch.setattr(log, "filters", [sparse])
    environment = SearchEnvironment(
        backend=Backend(*[ConnectionError("gone")] * 7), retries=1, counts=room.SearchCounts()
    )
    for clock[0] in (100.0, 101.0, 111.0):
        environment.search([["a"]], k=1)
    assert [record.getMessage().partition("gone")[2] for record in caplog.records] == [
        "",
        " (and 3 times more before)",
    ]
    assert environment.counts.failed == 3
