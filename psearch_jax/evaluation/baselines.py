"""Baselines: small functions of prompts and calls. The engine plays them like any other episode.

Those of `BASELINES` are scripts (`scripts.py`): each is what its paper describes, with prompts of our own, the same
retriever and the same k as the policy's. Chain of thought: Wei et al. 2022. IRCoT: Trivedi et al. 2023. Iter-RetGen:
Shao et al. 2023. Search-o1: Li et al. 2025. R1 without search (as Search-R1 has it): thought and answer in tags.

`closed_book_prompts` and `rag_prompts` are the embedded policy's, which knows no instructions: it gets one turn, for
its answer (`without_search`). All prompt text has the role PROMPT, therefore nothing in it is judged (law 2).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from psearch_jax.config import ProtocolConfig
from psearch_jax.evaluation.scripts import Desk, Script, Search, Write
from psearch_jax.questions.question import Question
from psearch_jax.retrieval.passages import Hit
from psearch_jax.rollout.engine import Engine
from psearch_jax.rollout.prompts import prompt_text
from psearch_jax.rollout.protocol import (
    control_tags,
    neutralise,
    parse_turn,
    render_results,
    written_queries,
)

#: What a closed-book episode starts with: the policy is told to answer from memory.
RECALL = "recall"


def without_search(protocol: ProtocolConfig) -> ProtocolConfig:
    """The same protocol with no search turn, so that the first turn is the forced answer turn."""
    return dataclasses.replace(protocol, max_search_turns=0)


def policy_prompts(
    protocol: ProtocolConfig, questions: Sequence[Question], tokenizer: Any = None
) -> list[str]:
    """The prompt that the policy was trained on; the tokenizer is needed where that is a chat."""
    return [prompt_text(protocol, question, tokenizer) for question in questions]


def closed_book_prompts(
    protocol: ProtocolConfig, questions: Sequence[Question], tokenizer: Any = None
) -> list[str]:
    """Answer from memory: the thinking is given, what follows can only be the answer."""
    opening, closing = protocol.think
    prompts = policy_prompts(protocol, questions, tokenizer)
    return [f"{prompt}{opening}{RECALL}{closing}" for prompt in prompts]


def rag_prompts(engine: Engine, questions: Sequence[Question]) -> list[str]:
    """Single-query retrieval: the question itself is searched once, its results stand in the prompt.

    All questions are searched in one batch, through the engine's environment (a failed search is retried
    and counted), with the `top_k` and the observation budget of the engine's protocol.
    """
    protocol = engine.protocol
    found = engine.environment.search([(question.text,) for question in questions], protocol.top_k)
    return [
        prompt
        + render_results(
            protocol,
            (question.text,),
            results.hits,
            lambda text: len(engine.encode(text)),
            reserved=engine.reserved,
        )
        for prompt, question, results in zip(
            policy_prompts(protocol, questions, engine.tokenizer), questions, found, strict=True
        )
    ]


# -- scripts

SHORT_ANSWER = 48  # tokens of an answer without a thought
_ANSWER = re.compile(r"answer(?:\s+is)?\s*[:：]\s*(.+)|answer\s+is\s+(.+)", re.IGNORECASE)

_ONLY = "Give only the answer itself, as short as possible: a name, a date, a number, yes or no."
_STEPS = 'Think step by step. Then write "Answer:" and after it only the answer itself, as short as possible.'
DIRECT = f"Answer the question. {_ONLY}\n\nQuestion: {{question}}\nAnswer:"
COT = f"Answer the question. {_STEPS}\n\nQuestion: {{question}}\n"
RAG = f"Answer the question with the help of the passages. {_ONLY}\n\n%s\n\nQuestion: {{question}}\nAnswer:"
READER = (
    f"Answer the question with the help of the passages. {_STEPS}\n\n%s\n\nQuestion: {{question}}\n"
)
NEXT_THOUGHT = (
    "Passages and a question are given, and the thoughts so far. Write the next thought: one short sentence with a "
    'fact that leads towards the answer. If the answer is known, write "The answer is:" and the answer.\n\n%s\n\n'
    "Question: {question}\nThoughts so far: %s\nNext thought:"
)
SEARCH_O1 = (
    "Answer the question step by step. Whenever a fact is missing, look it up: write %s what you want to know %s and "
    'stop; what is known about it is then given to you. When you know enough, write "Answer:" and after it only the '
    "answer itself, as short as possible.\n\nQuestion: {question}\n"
)
REFINE = (
    "Somebody works on the question below and has looked something up. State in one or two sentences what the passages "
    "say about it, and nothing else; if they say nothing, write that nothing was found.\n\nQuestion: {question}\n"
    "Looked up: %s\n\n%s\n\nWhat they say:"
)
THINK = (
    "Think about the question between {think[0]} and {think[1]}. Then give only the answer itself, as short as "
    "possible, between {answer[0]} and {answer[1]}.\n"
)


def desk_of(engine: Engine) -> Desk:
    """How prompts and passages are written for this engine's policy."""
    protocol = engine.protocol
    plain = dataclasses.replace(protocol, prompt_file="", prompt_column="")
    tags = (*control_tags(protocol), *engine.reserved)

    def prompt(question: Question, text: str) -> str:
        # Passages and thoughts may hold braces; only the question's place is filled.
        return prompt_text(dataclasses.replace(plain, prompt=text), question, engine.tokenizer)

    def passages(hits: Sequence[Hit]) -> str:
        kept: dict[str, str] = {}
        left = protocol.observation_tokens
        for hit in hits:
            title = f"{hit.passage.title}: " if hit.passage.title else ""
            line = neutralise(" ".join(f"{title}{hit.passage.text}".split()), tags)
            cost = len(engine.encode(line + "\n"))
            if hit.passage.id not in kept and cost <= left:
                kept[hit.passage.id] = line
                left -= cost
        return "\n".join(kept.values()) or protocol.no_results

    return Desk(protocol=protocol, prompt=prompt, passages=passages)


def first_line(text: str) -> str | None:
    """The first line with something on it, which is what a short answer is."""
    return next((line.strip() for line in text.splitlines() if line.strip()), None)


def marked_answer(text: str) -> str | None:
    """What stands behind the last "Answer:" or "answer is", to the end of its line; None if it is nowhere."""
    found = [a or b for a, b in _ANSWER.findall(text)]
    return (found[-1].strip().strip("*") or None) if found else None


def direct(desk: Desk, question: Question) -> Script:
    """The answer at once, from memory."""
    written = yield Write(prompt=desk.prompt(question, DIRECT), tokens=SHORT_ANSWER)
    return first_line(written.text)


def cot(desk: Desk, question: Question) -> Script:
    """A thought, then the answer, from memory."""
    written = yield Write(prompt=desk.prompt(question, COT), tokens=desk.protocol.turn_tokens)
    return marked_answer(written.text)


def rag(desk: Desk, question: Question) -> Script:
    """The question is searched once; the answer at once."""
    (hits,) = yield Search(queries=(question.text,))
    shown = desk.passages(hits)
    written = yield Write(
        prompt=desk.prompt(question, RAG % _safe(shown)), tokens=SHORT_ANSWER, shown=shown
    )
    return first_line(written.text)


def ircot(desk: Desk, question: Question) -> Script:
    """Thought and search take turns: every thought is the next query; a reader answers from all that was found."""
    (hits,) = yield Search(queries=(question.text,))
    found, thoughts, seen = list(hits), list[str](), ""
    for _ in range(desk.protocol.max_search_turns):
        shown = desk.passages(found)
        prompt = NEXT_THOUGHT % (_safe(shown), _safe(" ".join(thoughts) or "none"))
        written = yield Write(
            prompt=desk.prompt(question, prompt), tokens=SHORT_ANSWER, shown=_new(shown, seen)
        )
        seen = shown
        thought = first_line(written.text)
        if thought is None or thought in thoughts:
            break
        thoughts.append(thought)
        if marked_answer(thought):
            break
        (hits,) = yield Search(queries=(thought,))
        found = [*hits, *found]  # the newest first: older ones fall out of a full budget
    return (yield from _read(desk, question, found, seen))


def iter_retgen(desk: Desk, question: Question) -> Script:
    """Retrieve and generate in turns: the next search is the question with the whole text of the last answer. At least
    twice: once would be RAG."""
    query, answer, seen = question.text, None, ""
    for _ in range(max(2, desk.protocol.max_search_turns - 1)):
        (hits,) = yield Search(queries=(query,))
        shown = desk.passages(hits)
        written = yield Write(
            prompt=desk.prompt(question, READER % _safe(shown)),
            tokens=desk.protocol.turn_tokens,
            shown=_new(shown, seen),
        )
        seen, answer = shown, marked_answer(written.text)
        query = f"{question.text} {' '.join(written.text.split())}"
    return answer


def search_o1(desk: Desk, question: Question) -> Script:
    """The model searches while it reasons; what is found is condensed by a call of its own before it goes on."""
    opening, closing = (tag.strip() for tag in desk.protocol.search)
    prompt = desk.prompt(question, SEARCH_O1 % (opening, closing))
    for turn in range(desk.protocol.max_search_turns + 1):
        written = yield Write(prompt=prompt, tokens=desk.protocol.turn_tokens)
        queries = written_queries(desk.protocol, written.text)[:1]
        if not queries or turn == desk.protocol.max_search_turns:
            action = parse_turn(desk.protocol, written.text)
            return action.answer or marked_answer(written.text)
        (hits,) = yield Search(queries=queries)
        shown = desk.passages(hits)
        refined = yield Write(
            prompt=desk.prompt(question, REFINE % (_safe(queries[0]), _safe(shown))),
            tokens=desk.protocol.turn_tokens,
            shown=shown,
        )
        before, after = desk.protocol.information
        said = neutralise(" ".join(refined.text.split()), control_tags(desk.protocol))
        prompt += f"{written.text}\n{before}{said or desk.protocol.no_results}{after}\n"
    return None


def r1(desk: Desk, question: Question) -> Script:
    """The policy thinks and answers in its tags, without a search."""
    text = THINK.format(think=desk.protocol.think, answer=desk.protocol.answer)
    written = yield Write(
        prompt=desk.prompt(question, text + "Question: {question}\n"),
        tokens=desk.protocol.turn_tokens,
    )
    return parse_turn(desk.protocol, written.text).answer


def _read(desk: Desk, question: Question, found: Sequence[Hit], seen: str) -> Script:
    """The last call of IRCoT: the answer from the passages that were collected."""
    shown = desk.passages(found)
    written = yield Write(
        prompt=desk.prompt(question, READER % _safe(shown)),
        tokens=desk.protocol.turn_tokens,
        shown=_new(shown, seen),
    )
    return marked_answer(written.text)


def _new(shown: str, seen: str) -> str:
    """The passages that were not shown in the call before."""
    before = set(seen.split("\n"))
    return "\n".join(line for line in shown.split("\n") if line not in before)


def _safe(text: str) -> str:
    """A text that has no place for the question."""
    return text.replace("{question}", "{ question}")


BASELINES: dict[str, Callable[[Desk, Question], Script]] = {
    function.__name__: function
    for function in (direct, cot, rag, ircot, iter_retgen, search_o1, r1)
}
