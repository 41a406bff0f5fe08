"""Limits of a protocol that the loop keeps: the engine equals the reference under each of them."""

from dataclasses import replace

import pytest
from rollout import toys
from rollout.test_engine import (
    GREEDY,
    KEY,
    PROMPTS,
    SAMPLED,
    assert_same,
    engine,
    policy,
    text_of,
)

from psearch_jax.rollout.environment import SearchEnvironment
from psearch_jax.rollout.episode import Role
from psearch_jax.rollout.reference import play


def written(kind, follows, **limits):
    """One greedy episode of a policy in which each of these pieces follows another."""
    e = engine(kind)
    params = toys.make_policy(e.tokenizer, follows, strength=50.0, mixing=0.0)[2]
    requests = toys.make_requests(e.tokenizer, ["ab\n"])
    protocol = replace(toys.PROTOCOL, **limits)
    return e.rollout(params, requests, key=KEY, sampling=GREEDY, protocol=protocol)[0]


@pytest.mark.parametrize(
    "limits",
    [
        {"feedback": ""},
        {"feedback_always": True, "turn_tokens": 5},
        {"response_tokens": 20},
        {"last_turn": "!\n", "max_search_turns": 1},
    ],
    ids=str,
)
def test_law_07_equals_the_reference_under_every_limit(limits):
    e = engine("split")
    protocol = replace(toys.PROTOCOL, **limits)
    requests = toys.make_requests(e.tokenizer, PROMPTS, 3)
    ours = e.rollout(policy("split"), requests, key=KEY, sampling=SAMPLED, protocol=protocol)
    theirs = [
        play(
            e.graphdef,
            policy("split"),
            e.tokenizer,
            protocol,
            SearchEnvironment(backend=toys.Corpus()),
            request,
            key=KEY,
            sampling=SAMPLED,
            context=e.rollout_config.context,
            end_ids=e.end_ids,
        )
        for request in requests
    ]
    assert_same(ours, theirs)
    if "response_tokens" in limits:
        lengths = [len(episode.ids) - episode.count(Role.PROMPT) for episode in ours]
        assert max(lengths) <= 20 and any(episode.end_reason == "context" for episode in ours)


def test_a_turn_that_meets_its_limit_is_told_so_and_spent():
    # Whatever the observation ends with, the policy goes on writing "a b c a …".
    pieces = [("\n", "a"), ("b", "c"), ("c", "a"), ("a", "b")]
    limits = {"feedback_always": True, "turn_tokens": 3, "max_search_turns": 2}
    episode = written("whole", pieces, **limits)
    assert [turn.kind for turn in episode.turns] == ["invalid", "invalid", "none"]
    assert text_of("whole", episode, Role.OBSERVATION) == "??\n" * 2
    assert episode.end_reason == "budget"  # the last turn can only answer


def test_the_turn_that_can_only_answer_is_announced_once():
    pieces = [("\n", "<search>"), ("<search>", "a"), ("a", "</search>")]
    episode = written("whole", pieces, last_turn="bc\n", max_search_turns=2)
    assert [turn.kind for turn in episode.turns] == ["search", "search", "invalid"]
    observed = text_of("whole", episode, Role.OBSERVATION)
    assert observed.count("bc\n") == 1 and observed.endswith("bc\n")
