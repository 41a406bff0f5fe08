"""Baselines: small functions from questions to prompts. The engine plays them like any other episode.

None of them searches by itself, so they are played with `without_search(protocol)`: the policy gets one
turn, for its answer. All prompt text has the role PROMPT, therefore nothing in it is judged (law 2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from psearch_jax.config import ProtocolConfig
from psearch_jax.questions.question import Question
from psearch_jax.rollout.engine import Engine
from psearch_jax.rollout.prompts import prompt_text
from psearch_jax.rollout.protocol import render_results

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
