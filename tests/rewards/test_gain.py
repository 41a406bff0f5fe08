"""The gain reward by hand: who brought what in, and what was wasted."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rewards.episodes import PROTOCOL

from psearch_jax.config import ProtocolConfig, RewardConfig
from psearch_jax.questions.question import Question
from psearch_jax.retrieval.passages import Hit, Passage
from psearch_jax.rewards.composition import score_group
from psearch_jax.rollout.episode import Episode, Turn
from psearch_jax.rollout.protocol import parse_turn

CONFIG = RewardConfig(name="gain")  # gain_weight 0.4, gain_waste 0.2
TWO = {"needs": [["A"], ["B"]]}


def ask(golden=("Turin",), **metadata) -> Question:
    return Question(id="q", text="?", golden_answers=golden, metadata=metadata)


def play(question, *searches, answer="Turin", finds=None, protocol=PROTOCOL, failed=()) -> Episode:
    """Each query finds the passages whose ids it names, or what `finds` says (query → ids)."""
    episode = Episode(question=question, group=0, member=0, end_reason="answer")
    for number, content in enumerate((*searches, None)):
        text = f"<search>{content}</search>" if content else f"<answer>{answer}</answer>"
        action = parse_turn(protocol, text)
        hits = tuple(
            ()
            if number in failed
            else tuple(
                Hit(Passage(name, f"Title {name}", f"Text about {name}."), 1.0)
                for name in (query.upper().split() if finds is None else finds.get(query, ()))
            )
            for query in action.queries
        )
        turn = Turn(kind=action.kind, start=0, stop=0, text=text, queries=action.queries)
        turn.hits, turn.answer, turn.failed = hits, action.answer, len(hits) * (number in failed)
        episode.turns.append(turn)
    return episode


def parts(question, *searches, **how):
    protocol = how.get("protocol", PROTOCOL)
    (reward,) = score_group(CONFIG, protocol, [play(question, *searches, **how)], question)
    assert reward.total == pytest.approx(sum(reward.parts.values()))
    return tuple(round(reward.parts[name], 9) for name in ("gain", "duplicates", "empty"))


@pytest.mark.parametrize(
    ("searches", "expected"),
    [
        (["a##b"], (0.4, 0, 0)),  # each brought in one of two: 0.4 · 2/2
        (["a", "b"], (0.4, 0, 0)),  # one after the other is worth the same
        (["a"], (0.2, 0, 0)),
        (["a b"], (0.4, 0, 0)),  # one query, both
        (["c"], (0, 0, 0)),  # a single search that finds nothing costs nothing
        ([], (0, 0, 0)),
        (["a b##a"], (0.2, 0, 0)),  # B alone; A came in twice and earns nothing
        (["a b##a b"], (0.4, -0.1, 0)),  # the same query twice is one query, and a duplicate
        (["a b##a##b"], (0, 0, 0)),
        (["a##b##c"], (0.4, 0, -0.1)),  # w = 1: 0.2 · 1/2
        (["a##b##c##d"], (0.4, 0, -0.133333333)),  # w = 2: 0.2 · 2/3
        (["c##d"], (0, 0, -0.133333333)),
        (["a##a"], (0.2, -0.1, 0)),  # the second was never sent, but written
        (["a##A"], (0.2, -0.1, 0)),  # case and blanks do not make a query new
        (["a", "b", "a"], (0.4, -0.1, 0)),
        (["a##b", "a##b"], (0.4, -0.133333333, 0)),
        (["c", "c"], (0, -0.1, 0)),
        (["a##c", "c##b"], (0.4, -0.066666667, -0.066666667)),  # c: empty once, then a duplicate
        (["a##b##c##d##e##f"], (0.4, 0, -0.16)),  # e, f are beyond the cap of 4: w = 4, 0.2 · 4/5
    ],
)
def test_by_hand_with_evidence(searches, expected):
    assert parts(ask(**TWO), *searches) == pytest.approx(expected)


@pytest.mark.parametrize(
    "metadata",
    [
        {"gold_titles": ["title a", "Title  B"]},
        {"supporting_facts": {"title": ["Title A", "Title A", "Title B"], "sent_id": [0, 1, 0]}},
        {"supporting_facts": {"title": ["Title A"]}, "gold_titles": ("Title B",)},
    ],
)
def test_evidence_by_title(metadata):
    assert parts(ask(**metadata), "a##b##c") == pytest.approx((0.4, 0, -0.1))
    assert parts(ask(**metadata), "a") == pytest.approx((0.2, 0, 0))


def test_without_evidence_the_answer_is_what_counts():
    question = ask(("the Title B!", "none"))
    assert parts(question, "a##b") == pytest.approx((0.4, 0, -0.1))
    assert parts(question, "b##x", finds={"b": ["B"], "x": ["B"]}) == pytest.approx((0, 0, 0))
    # Whole words only: "Bo" does not stand in "Title Bobo".
    assert parts(ask(("Bo",)), "a", finds={"a": ["Bobo"]}) == pytest.approx((0, 0, 0))


@pytest.mark.parametrize("golds", [("yes",), ("No.",), ("the",)])
def test_nothing_is_judged_where_nothing_can_be_found(golds):
    assert parts(ask(golds), "a##b") == (0, 0, 0)
    assert parts(ask(golds), "a##a") == pytest.approx((0, -0.1, 0))  # but repeating still costs


def test_a_search_that_failed_is_not_the_policys_fault():
    assert parts(ask(**TWO), "a##c", "b", failed=(0,)) == pytest.approx((0.2, 0, 0))


def test_tool_calls_are_read_alike():
    protocol = ProtocolConfig(query_form="tool_call")
    call = '{"name": "search", "arguments": {"query_list": ["a", "b", "b", "c"]}}'
    assert parts(ask(**TWO), call, protocol=protocol) == pytest.approx(
        (0.4, -0.066666667, -0.066666667)
    )


def test_exact_match_comes_first():
    question = ask(**TWO)
    right = play(question, "c##d##c", answer="Turin")
    wrong = play(question, "a##b", answer="Lyon")
    rewards = score_group(CONFIG, PROTOCOL, [right, wrong], question)
    assert [reward.parts["em"] for reward in rewards] == [1.0, 0.0]
    assert rewards[0].total == pytest.approx(1 - 0.15)
    assert rewards[1].total == pytest.approx(0.4)


SEARCHES = st.lists(
    st.lists(st.text("abcd ", min_size=1, max_size=3), min_size=1, max_size=6).map("##".join),
    max_size=4,
)


@settings(deadline=None)
@given(SEARCHES, SEARCHES)
def test_no_wrong_answer_beats_a_right_one_and_waste_is_never_free(first, second):
    question = ask(**TWO)
    right = play(question, *first)
    wrong = play(question, *second, answer="Lyon")
    best, worst = score_group(CONFIG, PROTOCOL, [right, wrong], question)
    assert 0.8 < best.total <= 1.4 + 1e-9
    assert -0.2 < worst.total <= 0.4 + 1e-9
    if first and written(first):
        again = play(question, *first, written(first))
        (more,) = score_group(CONFIG, PROTOCOL, [again], question)
        assert more.total < best.total


def written(searches) -> str:
    """A query that was searched for already, to be asked once more."""
    return next((q.strip() for s in searches for q in s.split("##") if q.strip()), "")
