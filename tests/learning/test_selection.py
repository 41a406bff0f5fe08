"""Dynamic sampling, and episodes that were cut off."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psearch_jax.learning.selection import (
    choose_groups,
    cut_off,
    overlong_penalties,
    questions_to_refill,
)
from psearch_jax.questions.question import Question
from psearch_jax.rollout.episode import Episode

flags = st.lists(st.booleans(), max_size=12).map(lambda values: np.array(values, bool))


def test_groups_without_spread_are_replaced_by_hand():
    flat = np.array([False, True, True, False])
    assert questions_to_refill(flat, 4, 2) == 2
    assert questions_to_refill(flat, 4, 0) == 0  # bounded
    assert questions_to_refill(flat, 2, 2) == 0  # enough
    more = np.array([False, True, True, False, True, False])
    assert questions_to_refill(more, 4, 1) == 1
    assert choose_groups(more, 3) == [0, 3, 5]
    assert choose_groups(more, 4) == [0, 1, 3, 5]  # the first flat one fills up


@given(flags, st.integers(1, 8), st.integers(0, 3))
def test_a_refill_is_what_is_missing_and_a_choice_prefers_spread(flat, wanted, rounds):
    more = questions_to_refill(flat, wanted, rounds)
    assert 0 <= more <= wanted
    assert bool(more) == (rounds > 0 and (~flat).sum() < wanted)
    chosen = choose_groups(flat, wanted)
    assert len(chosen) == min(wanted, len(flat))
    assert chosen == sorted(set(chosen))
    assert (~flat[chosen]).sum() == min(wanted, (~flat).sum())


def test_refilling_ends_when_no_group_ever_has_spread():
    flat, rounds, played = np.ones(3, bool), 4, 3
    while more := questions_to_refill(flat, 3, rounds):
        played, rounds = played + more, rounds - 1
        flat = np.ones(played, bool)
    assert played == 15


@pytest.mark.parametrize(
    ("reason", "cut"),
    [("answer", False), ("end", False), ("turns", False), ("budget", True), ("context", True)],
)
def test_what_a_limit_on_tokens_ended_is_cut_off(reason, cut):
    question = Question(id="q", text="?", golden_answers=("1",))
    assert cut_off(Episode(question=question, group=0, member=0, end_reason=reason)) is cut


def test_overlong_penalties_by_hand():
    got = overlong_penalties([0, 80, 85, 90, 100, 120], limit=100, buffer=20, penalty=2.0)
    np.testing.assert_allclose(got, [0.0, 0.0, 0.5, 1.0, 2.0, 2.0])
