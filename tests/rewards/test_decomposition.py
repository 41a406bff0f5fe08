"""ParallelSearch as released, cell by cell, and the gated reward's promises."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rewards.episodes import PROTOCOL, make_episode, make_question, play

from psearch_jax.config import ProtocolConfig, RewardConfig
from psearch_jax.rewards.composition import score_group
from psearch_jax.rewards.decomposition import decomposed, distinct_queries

RELEASED = RewardConfig(name="parallel_search")
GATED = RewardConfig(name="gated")
COLUMNS = ("0", "1,D", "1", "2,D", "2", "3,D", "3", "4,D", "4")
#: Obtained by running the released function (valid format): reference/systems.md §2.
TABLE = {
    ("parallelizable", "right"): (1.00, 1.80, 1.35, 1.45, 1.00, 1.10, 0.65, 0.75, 0.30),
    ("parallelizable", "wrong"): (0.10, 0.90, 0.45, 0.55, 0.10, 0.20, -0.25, -0.15, -0.60),
    ("bridge", "right"): (0.80, 1.00, 1.15, 1.35, 1.50, 1.35, 1.50, 1.35, 1.50),
    ("bridge", "wrong"): (-0.10, 0.10, 0.25, 0.45, 0.60, 0.45, 0.60, 0.45, 0.60),
    ("single", "right"): (1.15, 1.35, 1.50, 1.00, 1.15, 0.65, 0.80, 0.30, 0.45),
    ("single", "wrong"): (0.25, 0.45, 0.60, 0.10, 0.25, -0.25, -0.10, -0.60, -0.45),
}
CELLS = [
    (kind, answer, column, value)
    for (kind, answer), values in TABLE.items()
    for column, value in zip(COLUMNS, values, strict=True)
]


def released(question, episode):
    return score_group(RELEASED, PROTOCOL, [episode], question)[0]


@pytest.mark.parametrize(("kind", "answer", "column", "value"), CELLS)
def test_the_released_table(kind, answer, column, value):
    question = make_question(kind)
    episode = play(
        question, int(column[0]), "D" in column, "Turin" if answer == "right" else "Lyon"
    )
    reward = released(question, episode)
    assert reward.total == pytest.approx(value, abs=1e-9)
    assert sum(reward.parts.values()) == pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize(("kind", "answer", "column", "value"), CELLS)
def test_the_released_table_badly_formatted(kind, answer, column, value):
    """λ_f goes off a right answer and is not added to a wrong one: 0.1 less in every cell."""
    question = make_question(kind)
    episode = play(
        question,
        int(column[0]),
        "D" in column,
        "Turin" if answer == "right" else "Lyon",
        valid=False,
    )
    assert released(question, episode).total == pytest.approx(value - 0.1, abs=1e-9)


def test_mixed_is_treated_as_bridge_and_unknown_as_single():
    for searches, split in itertools.product(range(4), (False, True)):
        for kind, like in (("mixed", "bridge"), ("unknown", "single")):
            one, other = make_question(kind), make_question(like)
            assert released(one, play(one, searches, split)) == released(
                other, play(other, searches, split)
            )


def test_decomposed_looks_for_the_separator_in_the_first_search_only():
    question = make_question()
    assert decomposed(PROTOCOL, play(question, 2, split=True))
    assert not decomposed(
        PROTOCOL, make_episode(question, "<search>a</search>", "<search>b##c</search>")
    )
    # As released, it does not ask what stands on the two sides…
    assert decomposed(PROTOCOL, make_episode(question, "<search>a##a</search>"))
    # … but only what stands in the search.
    assert not decomposed(PROTOCOL, make_episode(question, "<think>a##b</think><search>a</search>"))
    assert not decomposed(PROTOCOL, make_episode(question, "<search>a</search>x##y"))
    assert not decomposed(PROTOCOL, make_episode(question, "<answer>a##b</answer>"))


def test_the_decomposition_of_a_tool_call_is_a_list_of_two():
    protocol = ProtocolConfig(query_form="tool_call")
    question = make_question()

    def play_call(queries):
        call = f'{{"name": "search", "arguments": {{"query_list": {queries}}}}}'
        return make_episode(question, f"<search>{call}</search>", protocol=protocol)

    assert decomposed(protocol, play_call('["a", "b"]'))
    assert decomposed(protocol, play_call('["a", "a"]'))  # it does not ask what they are either
    assert not decomposed(protocol, play_call('["a##b"]'))


PAPER = RewardConfig(name="parallel_search_paper")


@pytest.mark.parametrize(("kind", "answer", "column", "value"), CELLS)
def test_the_formula_of_the_paper_is_the_table_less_a_constant(kind, answer, column, value):
    question = make_question(kind)
    episode = play(
        question, int(column[0]), "D" in column, "Turin" if answer == "right" else "Lyon"
    )
    (reward,) = score_group(PAPER, PROTOCOL, [episode], question)
    assert reward.total == pytest.approx(value - 0.35, abs=1e-9)


def test_the_formula_of_the_paper_looks_at_every_search():
    question = make_question()
    late = make_episode(
        question, "<search>a</search>", "<search>b##c</search>", "<answer>Turin</answer>"
    )
    (paper,) = score_group(PAPER, PROTOCOL, [late], question)
    assert paper.parts["decomposition"] == pytest.approx(0.45)
    assert released(question, late).parts["decomposition"] == 0.0


def gated(*episodes, question=None):
    rewards = score_group(GATED, PROTOCOL, list(episodes), question or make_question())
    return [reward.total for reward in rewards]


def test_gated_by_hand():
    question = make_question()
    parallel = play(question, 1, split=True)  # 2 turns, 2 sub-queries
    sequential = play(question, 2)  # 3 turns, 2 sub-queries
    slow = play(question, 3)  # 4 turns, 3 sub-queries, one more than the best
    wrong = play(question, 1, split=True, answer="Lyon")
    got = gated(parallel, sequential, slow, wrong)
    assert got == pytest.approx([1 + 0.3 + 0.1, 1 + 0.15 + 0.1, 1.0, 0.0])


def test_gated_charges_fan_out_beyond_what_the_best_uses():
    question = make_question()
    best = make_episode(question, "<search>a##b</search>", "<answer>Turin</answer>")
    wide = make_episode(question, "<search>a##b##c##d</search>", "<answer>Turin</answer>")
    lean = make_episode(question, "<search>a</search>", "<think></think>", "<answer>Turin</answer>")
    assert gated(best, wide) == pytest.approx([1.4, 1.3])
    # Fewer than the best uses is no merit: it took more turns.
    assert gated(best, wide, lean) == pytest.approx([1.4, 1.3, 1.1])


def test_gated_without_a_right_answer_is_zero_for_all():
    question = make_question()
    assert gated(*(play(question, n, answer="Lyon") for n in range(4))) == [0.0] * 4
    assert gated(play(question, 1, answer=None)) == [0.0]


member = st.tuples(
    st.sampled_from([True, False]),
    st.lists(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4), max_size=4),
)
weights = st.floats(0.0, 2.0)


@given(st.lists(member, min_size=1, max_size=6), weights, weights)
def test_gated_never_puts_a_wrong_answer_before_a_right_one(members, turns, subqueries):
    question = make_question()
    episodes = [
        make_episode(
            question,
            *(f"<search>{'##'.join(queries)}</search>" for queries in searches),
            f"<answer>{'Turin' if right else 'Lyon'}</answer>",
        )
        for right, searches in members
    ]
    config = RewardConfig(name="gated", gated_turns=turns, gated_subqueries=subqueries)
    totals = [reward.total for reward in score_group(config, PROTOCOL, episodes, question)]
    for (right, _), total in zip(members, totals, strict=True):
        assert 1.0 <= total <= 1.0 + turns + subqueries + 1e-9 if right else total == 0.0
    winners = [
        (len(e.turns), distinct_queries(e), total)
        for e, total, (right, _) in zip(episodes, totals, members, strict=True)
        if right
    ]
    for mine, other in itertools.product(winners, repeat=2):
        # Dominated in both counts: never worth more.
        assert mine[2] <= other[2] + 1e-9 or not (other[0] <= mine[0] and other[1] <= mine[1])


def test_weak_points_of_the_released_reward_are_cured():
    """reference/systems.md §2: what the published reward gets wrong, the gated one does not."""
    question = make_question()
    wrong_at_once = play(question, 1, split=True, answer="Lyon")
    right_slowly = play(question, 3)
    assert released(question, wrong_at_once).total > released(question, right_slowly).total
    first, second = gated(wrong_at_once, right_slowly)
    assert first < second
