"""Baselines as scripts: a generator asks for searches and for text, and gets them; it has no loop over a model.

All questions of a chunk go through their scripts side by side: what they ask to be searched goes out as one batch,
what they ask to be written is one rollout of the engine that plays every other episode, with the same retriever.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import jax
from jaxtyping import Array

from psearch_jax.config import ProtocolConfig, SamplingConfig
from psearch_jax.evaluation.records import CUT_OFF, found_record, policy_tokens, spelling
from psearch_jax.questions.question import Question
from psearch_jax.retrieval.passages import Hit
from psearch_jax.rollout.engine import Engine
from psearch_jax.rollout.episode import Request


@dataclass(frozen=True, kw_only=True)
class Search:
    """Asks for the best passages of every query, the protocol's `top_k` each."""

    queries: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Write:
    """Asks the model to go on after a prompt.

    It writes until its end token, a closing tag of the protocol, or the token limit. `shown` are retrieved passages
    that stand in the prompt for the first time: their tokens are counted as observation.
    """

    prompt: str
    tokens: int
    shown: str = ""


@dataclass(frozen=True, kw_only=True)
class Written:
    """What the model wrote, without its end token, and why it stopped."""

    text: str
    end_reason: str = ""


Found: TypeAlias = tuple[tuple[Hit, ...], ...]
#: Yields what it asks for, is sent what it gets, returns the answer (None: there is none).
Script: TypeAlias = Generator[Search | Write, Any, str | None]


@dataclass(frozen=True, kw_only=True)
class Desk:
    """What a baseline may know besides the question: how prompts and passages are written here."""

    protocol: ProtocolConfig
    prompt: Callable[
        [Question, str], str
    ]  # (question, text with {question}) → a prompt, as a chat where asked
    passages: Callable[[Sequence[Hit]], str]  # whole passages within the observation budget


@dataclass(kw_only=True)
class _Play:
    """A script that is played, and what has come of it."""

    script: Script
    question: Question
    wants: Search | Write | None = None
    answer: str | None = None
    end_reason: str = "answer"
    calls: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    policy_tokens: int = 0
    observation_tokens: int = 0
    segments: list[list[str]] = field(default_factory=list)
    tokens: list[list[list[Any]]] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)

    def go_on(self, value: Any = None) -> None:
        """Send what was asked for; the script asks for something else, or ends."""
        try:
            self.wants = self.script.send(value)
        except StopIteration as finished:
            self.wants, self.answer = None, finished.value
            if self.answer is None and self.end_reason == "answer":
                self.end_reason = "end"

    def facts(self) -> dict[str, Any]:
        """The same facts as of an episode (`records.episode_facts`); a call is a turn."""
        queries = [query for result in self.results for query in result["queries"]]
        return {
            "question": self.question.text,
            "answer": self.answer,
            "turns": self.calls,
            "calls": self.calls,
            "searches": len(self.results),
            "subqueries": len(queries),
            "distinct_queries": len({" ".join(query.lower().split()) for query in queries}),
            "decomposed": bool(self.results and len(self.results[0]["queries"]) >= 2),
            "policy_tokens": self.policy_tokens,
            "observation_tokens": self.observation_tokens,
            "prompt_tokens": self.prompt_tokens,
            "well_formed": self.answer is not None,
            "answered": self.answer is not None,
            "invalid_turns": 0,
            "failed_searches": self.failed,
            "truncated": self.end_reason in CUT_OFF,
            "end_reason": self.end_reason,
            "segments": self.segments,
            "tokens": self.tokens,
            "results": self.results,
        }


def play_scripts(
    engine: Engine,
    params: Any,
    scripts: Sequence[tuple[Question, Script, int, int]],
    *,
    key: Array,
    sampling: SamplingConfig,
    on_rollout: Callable[[dict[str, Any]], None] | None = None,
    on_end: Callable[[int, dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Plays every script to its end.

    Args:
      scripts: (question, script, group, member) each. The n-th text of a script is drawn with
        `fold_in(key, n)`, its group and its member, whatever is played beside it.
      on_rollout: gets the engine's figures of every rollout.
      on_end: gets the facts of each script when it has ended, with its place.

    Returns:
      `facts` of each, in order.
    """
    plays = [_Play(script=script, question=question) for question, script, _, _ in scripts]
    for play in plays:
        play.go_on()
    round_, ended = 0, set[int]()
    while any(play.wants is not None for play in plays):
        while searching := [play for play in plays if isinstance(play.wants, Search)]:
            _search(engine, searching)
        writing = [
            (play, group, member)
            for play, (_, _, group, member) in zip(plays, scripts, strict=True)
            if isinstance(play.wants, Write)
        ]
        _write(engine, params, writing, jax.random.fold_in(key, round_), sampling, on_rollout)
        round_ += 1
        for at, play in enumerate(plays):
            if on_end is not None and play.wants is None and at not in ended:
                ended.add(at)
                on_end(at, play.facts())
    return [play.facts() for play in plays]


def _search(engine: Engine, plays: Sequence[_Play]) -> None:
    """Everything that is to be searched now, as one batch."""
    asked = [play.wants.queries for play in plays if isinstance(play.wants, Search)]
    found = engine.environment.search(asked, engine.protocol.top_k)
    for play, queries, results in zip(plays, asked, found, strict=True):
        play.failed += results.failed
        play.results.append(found_record(queries, results.hits))
        play.go_on(results.hits)


def _write(
    engine: Engine,
    params: Any,
    writing: Sequence[tuple[_Play, int, int]],
    key: Array,
    sampling: SamplingConfig,
    on_rollout: Callable[[dict[str, Any]], None] | None,
) -> None:
    """Everything that is to be written now: one rollout for each token limit."""
    context, decode = engine.rollout_config.context, spelling(engine.decode_text)
    batches: dict[int, list[tuple[_Play, Write, Request]]] = {}
    for play, group, member in writing:
        wanted = play.wants
        assert isinstance(wanted, Write)
        ids = engine.encode(wanted.prompt)
        if len(ids) >= context:  # the prompt is never cut (the question could be what is lost)
            play.script.close()
            play.wants, play.end_reason = None, "context"
            continue
        request = Request(question=play.question, prompt_ids=ids, group=group, member=member)
        batches.setdefault(wanted.tokens, []).append((play, wanted, request))
    for tokens, batch in batches.items():
        # No search turn: the first closing tag, the end token or the limit ends it.
        protocol = replace(engine.protocol, max_search_turns=0, turn_tokens=tokens)
        episodes = engine.rollout(
            params,
            [request for _, _, request in batch],
            key=key,
            sampling=sampling,
            protocol=replace(protocol, response_tokens=0),
        )
        if on_rollout is not None:
            on_rollout(engine.stats)
        for (play, wanted, request), episode in zip(batch, episodes, strict=True):
            shown = len(engine.encode(wanted.shown)) if wanted.shown else 0
            drawn = episode.ids[len(request.prompt_ids) :]
            text = engine.decode_text([i for i in drawn if i not in engine.end_ids])
            play.calls += 1
            play.observation_tokens += shown
            play.prompt_tokens += len(request.prompt_ids) - shown
            play.policy_tokens += len(drawn)
            play.segments += [["prompt", wanted.prompt], ["policy", engine.decode_text(drawn)]]
            play.tokens += policy_tokens(episode, decode) or [[]]
            reason = episode.end_reason if episode.end_reason in CUT_OFF else ""
            play.end_reason = reason or "answer"
            play.go_on(Written(text=text, end_reason=episode.end_reason))
