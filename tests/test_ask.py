"""One episode in front of somebody, and for programs."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys

import pytest
from rollout.toys import PROTOCOL, ROLLOUT, Corpus, chain, make_policy, make_tokenizer

from psearch_jax import ask
from psearch_jax.errors import UserError
from psearch_jax.rollout.engine import Engine


@pytest.fixture(scope="module")
def policy():
    """Searches for `a` and `b` at the same time until it must answer; writes nothing else."""
    tokenizer = make_tokenizer("whole")
    follows = [
        *chain("\n", "<search>", "a", "##", "b", "</search>"),
        ("</information>", "<search>"),
    ]
    config, graphdef, params = make_policy(tokenizer, follows, strength=60.0, mixing=0.0)
    return config, graphdef, params, tokenizer


def make_engine(policy, backend):
    config, graphdef, _, tokenizer = policy
    return Engine(graphdef, config, tokenizer, PROTOCOL, backend, ROLLOUT)


def test_without_a_terminal_it_is_plain_text(policy):
    out = io.StringIO()
    facts = ask.play(make_engine(policy, Corpus()), policy[2], " a  or b? ", stream=out)
    lines = out.getvalue().splitlines()
    assert lines[0] == "a or b?"
    assert lines[1:8] == [
        "<search>a##b</search>",
        "  search: a",
        "    a a",
        "    a b",
        "  search: b",
        "    b a",
        "    b b",
    ]
    assert lines[-1] == ask.verdict_line(facts)
    assert "\x1b" not in out.getvalue()
    assert (facts["searches"], facts["subqueries"], facts["answer"]) == (2, 4, None)


def test_json_is_one_object_and_nothing_else(policy):
    out = io.StringIO()
    facts = ask.play(make_engine(policy, Corpus()), policy[2], "a or b?", as_json=True, stream=out)
    assert json.loads(out.getvalue()) == facts
    assert out.getvalue().count("\n") == 1
    assert facts["results"][0]["queries"] == ["a", "b"]
    assert facts["seconds"] > 0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_subqueries_stand_side_by_side(policy, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    out = Terminal()
    ask.play(make_engine(policy, Corpus()), policy[2], "a or b?", stream=out)
    assert "\x1b[" in out.getvalue()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert any("a a" in line and "b a" in line for line in plain.splitlines())


def test_a_passage_cannot_steer_the_terminal(policy):
    out = io.StringIO()
    evil = Corpus(suffix=" \x1b]0;owned\x07\x1b[2J[red]x[/red]")
    ask.play(make_engine(policy, evil), policy[2], "a or b?", stream=out)
    assert "\x1b" not in out.getvalue()
    assert "\x07" not in out.getvalue()
    assert "[red]x[/red]" in out.getvalue()


def test_an_empty_question_is_one_sentence(policy):
    with pytest.raises(UserError, match="question is empty"):
        ask.play(make_engine(policy, Corpus()), policy[2], "  \n")


def test_the_last_line_counts():
    facts = {"answer": "Turin", "turns": 2, "searches": 1, "subqueries": 2, "seconds": 1.25}
    assert ask.verdict_line(facts) == "Turin  ·  2 turns, 1 search, 2 sub-queries, 1.2 s"
    facts = {"answer": None, "turns": 1, "searches": 0, "subqueries": 1, "seconds": 0.5}
    line = ask.verdict_line(facts | {"end_reason": "budget"})
    assert line == "no answer (budget)  ·  1 turn, 0 searches, 1 sub-query, 0.5 s"


def test_importing_ask_is_cheap():
    """Start-up counts: the module brings in neither JAX nor drawing libraries before it plays."""
    code = "import sys, psearch_jax.ask; print(*(m for m in ('jax', 'rich', 'matplotlib') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
