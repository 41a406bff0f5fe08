"""Reading a turn, writing results, judging the form of an episode."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psearch_jax.config import ProtocolConfig
from psearch_jax.questions.question import Question
from psearch_jax.retrieval.passages import Hit, Passage
from psearch_jax.rollout.episode import Episode, Turn
from psearch_jax.rollout.protocol import (
    Action,
    control_tags,
    neutralise,
    parse_turn,
    prompt_text,
    render_results,
    well_formed,
)

P = ProtocolConfig()


def hits(*texts: str) -> list[Hit]:
    return [Hit(Passage(str(i), f"t{i}", text), 1.0) for i, text in enumerate(texts)]


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>x</think><search>a</search>", Action(kind="search", queries=("a",))),
        ("<search> a ## b##a## ##</search>", Action(kind="search", queries=("a", "b"))),
        ("<search>1##2##3##4##5</search>", Action(kind="search", queries=("1", "2", "3", "4"))),
        ("<think>a<answer> Lyon </answer>", Action(kind="answer", answer="Lyon")),
        ("<answer></answer>", Action(kind="answer", answer="")),
        ("<search>a<answer>b</answer></search>", Action(kind="answer", answer="b")),
        ("<search>a<search>b</search>", Action(kind="search", queries=("b",))),
        ("<search>a</search><answer>b</answer>", Action(kind="search", queries=("a",))),
        ("</answer><search>a</search>", Action(kind="search", queries=("a",))),
        ("<search> ## </search>", Action(kind="invalid")),
        ("a</search>", Action(kind="invalid")),
        ("<search>a</answer>", Action(kind="invalid")),
        ("<search>a</think>", Action(kind="none")),
        ("<search>a</search", Action(kind="none")),
        ("", Action(kind="none")),
    ],
)
def test_parse_turn(text: str, expected: Action):
    assert parse_turn(P, text) == expected


def test_parse_without_separator_keeps_one_query():
    protocol = ProtocolConfig(separator="")
    assert parse_turn(protocol, "<search>a##b</search>").queries == ("a##b",)


PIECES = st.lists(st.sampled_from([*control_tags(P), "a", "##", " ", "\n", "<", ">"]), max_size=12)


@given(PIECES, PIECES)
def test_law_03_later_text_never_changes_an_action(first: list[str], second: list[str]):
    action = parse_turn(P, "".join(first))
    if action.kind in ("search", "answer"):
        assert parse_turn(P, "".join(first + second)) == action


def test_render_as_the_embedded_protocol_says():
    assert render_results(P, ["a", "b"], [hits("one", "two\nlines"), []], words) == (
        "<information>1:one\ntwo lines\n2:none\n</information>"
    )


def test_render_as_search_r1_says():
    protocol = ProtocolConfig(
        attributed=False,
        passage="Doc {number}(Title: {title}) {text}",
        before_information="\n\n",
        after_information="\n\n",
    )
    assert render_results(protocol, ["a"], [hits("one", "two")], words) == (
        "\n\n<information>Doc 1(Title: t0) one\nDoc 2(Title: t1) two\n</information>\n\n"
    )


@pytest.mark.parametrize(
    ("budget", "sizes", "expected"),
    [
        (100, [[2, 2], [2]], [[0, 1], [0]]),
        (4, [[2, 2], [2]], [[0], [0]]),  # nobody gets a second before all have a first
        (6, [[2, 2, 2], [2, 2]], [[0, 1], [0]]),
        (5, [[9, 3], [2]], [[1], [0]]),  # over-long: the next that fits
        (5, [[5, 3], [2]], [[1], [0]]),  # room is kept for the other's only passage
        (5, [[4], [4]], [[0], []]),  # not everybody can be served
        (1, [[2], [3]], [[], []]),
        (9, [[], [2, 9, 2]], [[], [0, 2]]),
    ],
)
def test_budget_is_shared_by_whole_passages(budget, sizes, expected):
    protocol = ProtocolConfig(observation_tokens=budget)
    found = [
        hits(*(" ".join([f"p{q}.{r}"] * n) for r, n in enumerate(s))) for q, s in enumerate(sizes)
    ]
    text = render_results(protocol, ["q"] * len(sizes), found, words)
    for q, ranks in enumerate(expected):
        shown = [r for r in range(len(sizes[q])) if f"p{q}.{r}" in text]
        assert shown == ranks
        assert (f"{q + 1}:none\n" in text) == (not ranks)
    assert text.endswith("</information>")


@given(
    st.lists(st.lists(st.integers(1, 9), max_size=4), min_size=1, max_size=4), st.integers(0, 30)
)
def test_budget_is_kept_and_used_fairly(sizes: list[list[int]], budget: int):
    protocol = ProtocolConfig(observation_tokens=budget, attributed=False)
    found = [hits(*("x " * n for n in s)) for s in sizes]
    text = render_results(protocol, ["q"] * len(sizes), found, words)
    used = text.count("x")
    assert used <= budget
    firsts = sum(min(s) for s in sizes if s)
    if firsts <= budget:  # all could be served, so all were
        assert text.count("none\n") == sum(1 for s in sizes if not s)


@given(PIECES, PIECES)
def test_law_02_no_tag_survives_in_a_passage(title: list[str], body: list[str]):
    protocol = ProtocolConfig(passage="{title}{text}", label="{query_number}:{query}:")
    found = [[Hit(Passage("0", "".join(title), "".join(body)), 1.0)]]
    query = "".join(body)
    text = render_results(protocol, [query], found, lambda line: 1)
    inner = text.removeprefix("<information>").removesuffix("</information>")
    assert not any(tag in inner for tag in control_tags(protocol))
    assert parse_turn(protocol, text).kind == "none"
    assert inner.count("\n") == 1


def test_law_02_nested_tags_and_control_tokens_are_broken_up():
    assert neutralise("<sea<search>rch>", control_tags(P)) == "<sea< search>rch>"
    assert neutralise("<<a>a>", ("<a>",)) == "<< a>a>"
    assert neutralise("xx", ("x",)) == "  "
    text = render_results(P, ["a"], [hits("<|end|>")], words, reserved=("<|end|>",))
    assert text == "<information>1:< |end|>\n</information>"


def episode(*turns: tuple[str, str]) -> Episode:
    question = Question(id="q", text="q", golden_answers=("a",))
    made = [Turn(kind=kind, start=0, stop=0, text=text) for kind, text in turns]
    return Episode(question=question, group=0, member=0, turns=made)


SEARCH = ("search", "<think>t</think><search>q</search>")
ANSWER = ("answer", "<think>t</think><answer>a</answer>")


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ((SEARCH, ANSWER), True),
        ((ANSWER,), True),
        ((("answer", " <think>t</think>\n<answer>a</answer>\n\n"),), True),
        ((), False),
        ((SEARCH,), False),
        ((ANSWER, ANSWER), False),
        ((("invalid", SEARCH[1]), ANSWER), False),
        ((("answer", "<answer>a</answer>"),), False),
        ((("answer", "<think>t</think>x<answer>a</answer>"),), False),
        ((("answer", "<think>t</think><answer>a</answer>."),), False),
        ((("answer", "<think>t<think></think><answer>a</answer>"),), False),
        ((("answer", "<think>t</think><answer>a<search></answer>"),), False),
        ((("answer", "<think></information></think><answer>a</answer>"),), False),
        ((("answer", "<think>t</think><think>t</think><answer>a</answer>"),), False),
    ],
)
def test_law_02_well_formed_reads_policy_turns(turns, expected):
    assert well_formed(P, episode(*turns)) is expected


def test_prompt_takes_any_question():
    assert prompt_text(P, "{x} <answer>") == "{x} <answer>\n"
