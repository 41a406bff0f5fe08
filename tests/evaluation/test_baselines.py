"""Each baseline as its paper has it: what it asks for, in which order, and which answer it reads. No model is needed:
a test plays the model and the searcher."""

from __future__ import annotations

import dataclasses

import pytest

from psearch_jax.config import ProtocolConfig
from psearch_jax.evaluation.baselines import BASELINES, first_line, marked_answer
from psearch_jax.evaluation.scripts import Desk, Search, Write, Written
from psearch_jax.questions.question import Question
from psearch_jax.retrieval.passages import Hit, Passage

QUESTION = Question(id="q", text="Who made {it}?", golden_answers=("Ann",))
PROTOCOL = ProtocolConfig(max_search_turns=3, turn_tokens=100, top_k=2)


def prompt(question, text):
    assert text.count("{question}") == 1
    return text.replace("{question}", question.text)


DESK = Desk(
    protocol=PROTOCOL,
    prompt=prompt,
    passages=lambda hits: "\n".join(hit.passage.text for hit in hits),
)


def hits(query):
    return (Hit(Passage(query, "", f"about {query}"), 1.0),)


def play(name, *texts, protocol=PROTOCOL):
    """(answer, what was asked for) when the model writes these texts one after the other."""
    script = BASELINES[name](dataclasses.replace(DESK, protocol=protocol), QUESTION)
    asked, replies, reply = [], iter(texts), None
    try:
        while True:
            wanted = script.send(reply)
            asked.append(wanted)
            if isinstance(wanted, Search):
                reply = tuple(hits(query) for query in wanted.queries)
            else:
                reply = Written(text=next(replies))
    except StopIteration as finished:
        assert next(replies, None) is None, "more was expected to be asked for"
        return finished.value, asked


def queries(asked):
    return [wanted.queries for wanted in asked if isinstance(wanted, Search)]


def writes(asked):
    return [wanted for wanted in asked if isinstance(wanted, Write)]


def test_direct_and_chain_of_thought_search_nothing():
    answer, asked = play("direct", "\n Ann \nbecause")
    assert (answer, queries(asked), len(asked)) == ("Ann", [], 1)
    assert "Who made {it}?" in asked[0].prompt
    answer, asked = play("cot", "Bob sold it.\nAnswer: Bob\n**Answer: Ann**")
    assert (answer, len(asked)) == ("Ann", 1)
    assert asked[0].tokens == 100
    assert play("cot", "no idea")[0] is None


def test_rag_searches_the_question_once():
    answer, asked = play("rag", "Ann")
    assert (answer, queries(asked)) == ("Ann", [("Who made {it}?",)])
    (written,) = writes(asked)
    assert "about Who made {it}?" in written.prompt
    assert written.shown == "about Who made {it}?"


def test_ircot_searches_with_every_thought_and_then_reads():
    answer, asked = play(
        "ircot", "It is a lamp.", "Ann made lamps. The answer is: Ann", "Answer: Ann"
    )
    assert answer == "Ann"
    assert queries(asked) == [("Who made {it}?",), ("It is a lamp.",)]
    first, second, reader = writes(asked)
    assert "Thoughts so far: none" in first.prompt
    assert "Thoughts so far: It is a lamp." in second.prompt
    # A passage is an observation when it is shown for the first time.
    assert (first.shown, second.shown, reader.shown) == (
        "about Who made {it}?", "about It is a lamp.", "",
    )  # fmt: skip
    assert "about It is a lamp.\nabout Who" in reader.prompt
    # It ends when a thought comes again, and after as many as there are search turns.
    assert len(queries(play("ircot", "Same.", "Same.", "Answer: Ann")[1])) == 2
    assert len(queries(play("ircot", "1.", "2.", "3.", "Answer: Ann")[1])) == 4


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_iter_retgen_searches_with_what_it_generated(turns):
    """Also where few search turns are allowed: with one search it would be RAG."""
    protocol = dataclasses.replace(PROTOCOL, max_search_turns=turns)
    answer, asked = play("iter_retgen", "a lamp\nAnswer: Bob", "Answer: Ann", protocol=protocol)
    assert answer == "Ann"
    assert queries(asked) == [("Who made {it}?",), ("Who made {it}? a lamp Answer: Bob",)]


def test_search_o1_condenses_what_it_finds():
    answer, asked = play(
        "search_o1",
        "First: <search>lamp maker ## more</search>",
        "Lamps are </information> made by Ann.",
        "So. Answer: Ann",
    )
    assert answer == "Ann"
    # It sends one query at a time.
    assert queries(asked) == [("lamp maker",)]
    ask, refine, go_on = writes(asked)
    assert "about lamp maker" in refine.prompt and refine.shown == "about lamp maker"
    assert go_on.prompt.startswith(ask.prompt)
    assert "<information>Lamps are < /information> made by Ann.</information>" in go_on.prompt
    assert "about lamp maker" not in go_on.prompt
    # After the last search turn it can only answer.
    text = "<search>again</search>"
    endless = [t for _ in range(3) for t in (text, "nothing")] + [text]
    assert play("search_o1", *endless)[0] is None


def test_r1_answers_in_its_tags():
    answer, asked = play("r1", "<think>hm</think><answer> Ann </answer>")
    assert (answer, queries(asked)) == ("Ann", [])
    assert "<think>" in asked[0].prompt and "<answer>" in asked[0].prompt
    assert play("r1", "Ann")[0] is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Answer: 12 May", "12 May"),
        ("the answer is Ann", "Ann"),
        ("The answer is: Ann", "Ann"),
        ("answer：安", "安"),
        ("Answer:", None),
        ("", None),
    ],
)
def test_where_an_answer_is_read(text, answer):
    assert marked_answer(text) == answer


def test_the_first_line_with_something_on_it():
    assert first_line(" \n a b \nc") == "a b"
    assert first_line(" \n") is None
