"""Searches in the background: batched, never sent twice, answered in any order, never waited for in vain."""

import threading
import time
from dataclasses import replace

import pytest
from rollout import toys
from rollout.test_engine import KEY, PROMPTS, SAMPLED, assert_same, engine, expected, policy
from rollout.test_environment import hit

from psearch_jax.rollout.engine import Engine
from psearch_jax.rollout.environment import Found, SearchEnvironment
from psearch_jax.rollout.searches import Searches


class Gate:
    """Holds every call until its first query is let through; answers each query with itself."""

    def __init__(self):
        self.calls, self.open, self.lock = [], {}, threading.Lock()

    def event(self, query):
        with self.lock:
            return self.open.setdefault(query, threading.Event())

    def search(self, queries, k):
        self.calls.append(tuple(queries))
        self.event(queries[0]).wait(5)
        return [[hit(query)] for query in queries]


def searches(backend, **settings):
    environment = SearchEnvironment(backend=backend, **settings)
    return Searches(environment, 1), environment.counts


def found(*queries):
    return Found(hits=tuple((hit(query),) for query in queries))


def test_law_05_a_query_on_its_way_is_not_sent_again():
    gate = Gate()
    waiting, counts = searches(gate)
    waiting.send([(0, ["a", "b"]), (1, ["b"])])
    waiting.send([(2, ["a", "c"])])
    assert waiting.collect() == {}
    gate.event("c").set()
    assert waiting.collect(0.05) == {}  # its other query is still out
    gate.event("a").set()
    answers = {}
    while len(waiting):
        answers |= waiting.collect(5)
    assert answers == {0: found("a", "b"), 1: found("b"), 2: found("a", "c")}
    assert gate.calls == [("a", "b"), ("c",)]
    assert (counts.queries, counts.distinct, counts.batches, counts.failed) == (5, 3, 2, 0)


def test_results_come_in_any_order_and_a_full_house_waits_as_one_batch():
    gate = Gate()
    waiting, _ = searches(gate, concurrency=2)
    for ticket, query in enumerate("abcd"):
        waiting.send([(ticket, [query])])
    gate.event("c").set()  # the batch that waits for a place
    gate.event("b").set()
    assert waiting.collect(5) == {1: found("b")}
    assert waiting.collect(5) == {2: found("c"), 3: found("d")}
    assert gate.calls == [("a",), ("b",), ("c", "d")]
    gate.event("a").set()
    assert waiting.collect(5) == {0: found("a")}


def test_law_14_a_backend_that_hangs_is_given_up_and_the_next_search_is_not():
    gate = Gate()
    waiting, counts = searches(gate, timeout=0.05, concurrency=1)
    waiting.send([(0, ["a", "x"]), (1, ["a"])])
    waiting.send([(2, ["b"])])  # no place is free, so it never goes out
    given_up: dict = {}
    while len(given_up) < 3:  # together, or one after another on a busy machine
        more = waiting.collect(5)
        assert more
        given_up |= more
    assert given_up == {
        0: Found(hits=((), ()), failed=2),
        1: Found(hits=((),), failed=1),
        2: Found(hits=((),), failed=1),
    }
    assert (counts.failed, counts.late) == (4, 4)
    gate.event("c").set()
    waiting.send([(3, ["c"])])
    assert waiting.collect(5) == {3: found("c")}
    gate.event("a").set()  # a late answer is nobody's
    time.sleep(0.02)
    assert waiting.collect(0.05) == {}


def test_an_interrupt_in_the_background_reaches_the_loop():
    class Interrupted:
        def search(self, queries, k):
            raise KeyboardInterrupt

    waiting, _ = searches(Interrupted())
    waiting.send([(0, ["a"])])
    with pytest.raises(KeyboardInterrupt):
        waiting.collect(5)


class Jittery:
    """A toy corpus whose calls take from nothing to a few blocks, another time at each."""

    def __init__(self, seed):
        self.corpus, self.seed, self.count = toys.Corpus(), seed, 0

    def search(self, queries, k):
        self.count += 1
        time.sleep(0.03 * ((self.count * 7 + self.seed * 3) % 5))
        return self.corpus.search(queries, k)


@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("seed", [0, 1])
def test_law_07_neither_the_order_of_answers_nor_the_rows_of_a_block_matter(seed, rows, narrow):
    e = narrow if rows else engine("split")
    e.environment = SearchEnvironment(backend=Jittery(seed))
    requests = toys.make_requests(e.tokenizer, PROMPTS, 3)
    episodes = e.rollout(policy("split"), requests, key=KEY, sampling=SAMPLED)
    assert_same(episodes, expected("split", SAMPLED))
    assert e.stats["decode_rows"] == (rows or 4)
    assert e.stats["forwarded_over_episode_tokens"] <= 1.0


@pytest.fixture(scope="module")
def narrow():
    """An engine that decodes two of its four slots at a time."""
    e = engine("split")
    rollout = replace(e.rollout_config, decode_rows=2)
    return Engine(e.graphdef, e.config, e.tokenizer, e.protocol, toys.Corpus(), rollout)
