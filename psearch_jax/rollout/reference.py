"""One episode, no cache, a Python loop: what the engine must equal token for token.

Shares the protocol, the environment and the sampler with the engine, and nothing else. Forwards the whole sequence
for every token and looks at the text after each one. Slow on purpose; for tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from psearch_jax.config import ProtocolConfig, SamplingConfig
from psearch_jax.models.decoder import hidden_states, unembed
from psearch_jax.rollout.environment import SearchEnvironment
from psearch_jax.rollout.episode import Episode, Request, Role, Turn
from psearch_jax.rollout.protocol import parse_turn, render_results
from psearch_jax.rollout.sampling import sample


@partial(jax.jit, static_argnums=0)
def draw(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    tokens_1xL: Int[Array, "1 L"],
    length: Int[Array, ""],
    key: Key[Array, ""],
    settings: tuple[Float[Array, "1"], Int[Array, "1"], Float[Array, "1"]],
) -> tuple[Int[Array, "1"], Float[Array, "1"]]:
    """The token after the first `length` tokens, and its log-probability."""
    positions_1xL = jnp.arange(tokens_1xL.shape[1])[None]
    segments_1xL = (positions_1xL < length).astype(jnp.int32)
    hidden_1xLxD = hidden_states(graphdef, params, tokens_1xL, positions_1xL, segments_1xL)
    logits_1xV = unembed(graphdef, params, hidden_1xLxD[:, length - 1])
    return sample(logits_1xV, jax.random.fold_in(key, length)[None], *settings)


def play(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    tokenizer: Any,
    protocol: ProtocolConfig,
    environment: SearchEnvironment,
    request: Request,
    *,
    key: Array,
    sampling: SamplingConfig,
    context: int,
    end_ids: Sequence[int] = (),
) -> Episode:
    """Play one episode in float32; `key` is the rollout's."""
    episode = Episode(question=request.question, group=request.group, member=request.member)
    key = jax.random.fold_in(jax.random.fold_in(key, request.group), request.member)
    settings = (
        np.array([sampling.temperature], np.float32),
        np.array([sampling.top_k], np.int32),
        np.array([sampling.top_p], np.float32),
    )

    def add(ids: Sequence[int], role: Role, logprob: float = 0.0) -> None:
        episode.ids += ids
        episode.roles += [int(role)] * len(ids)
        episode.logprobs += [logprob] * len(ids)

    add(request.prompt_ids, Role.PROMPT)
    if protocol.response_tokens:
        context = min(context, len(request.prompt_ids) + protocol.response_tokens)
    while not episode.end_reason:
        start, kind, text = len(episode.ids), "none", ""
        while kind == "none" and not episode.end_reason:
            length = len(episode.ids)
            tokens_1xL = np.zeros((1, context), np.int32)
            tokens_1xL[0, :length] = episode.ids
            token, logprob = draw(graphdef, params, tokens_1xL, np.int32(length), key, settings)
            if not np.isfinite(logprob[0]):
                episode.end_reason = "nan"
                break
            add([int(token[0])], Role.POLICY, float(logprob[0]))
            text = tokenizer.decode(episode.ids[start:], skip_special_tokens=False)
            action = parse_turn(protocol, text)
            kind, full = action.kind, len(episode.ids) >= context
            if kind == "answer":
                episode.end_reason = "answer"
            elif kind != "none" and len(episode.turns) >= protocol.max_search_turns:
                kind, episode.end_reason = "invalid", "turns"
            elif kind == "search" and full:
                kind, episode.end_reason = "none", "context"
            elif (
                kind == "none"
                and protocol.feedback_always
                and not full
                and len(episode.turns) < protocol.max_search_turns
                and (episode.ids[-1] in end_ids or len(episode.ids) - start >= protocol.turn_tokens)
            ):
                kind = "invalid"
            elif kind == "none" and episode.ids[-1] in end_ids:
                kind, episode.end_reason = "invalid", "end"
            elif kind == "none" and full:
                episode.end_reason = "context"
            elif kind == "none" and len(episode.ids) - start >= protocol.turn_tokens:
                episode.end_reason = "budget"
        turn = Turn(kind=kind, start=start, stop=len(episode.ids), text=text)
        episode.turns.append(turn)
        if kind == "answer":
            turn.answer = action.answer
        if episode.end_reason:
            break
        observation = protocol.feedback
        if kind == "search":
            (found,) = environment.search([action.queries], protocol.top_k)
            turn.queries, turn.hits, turn.failed = action.queries, found.hits, found.failed
            observation = render_results(
                protocol,
                turn.queries,
                turn.hits,
                lambda line: len(tokenizer.encode(line, add_special_tokens=False)),
            )
        if len(episode.turns) == protocol.max_search_turns:
            observation += protocol.last_turn
        ids = tokenizer.encode(observation, add_special_tokens=False)
        if len(episode.ids) + len(ids) >= context:
            episode.end_reason = "context"
        else:
            add(ids, Role.OBSERVATION)
    return episode
