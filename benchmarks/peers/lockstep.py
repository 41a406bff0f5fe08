"""Rolling out as Search-R1's loop does: the whole batch draws a turn, searches, appends, and is prefilled again.

What draws is given (`generate`), so any sampler can be measured. Prompts, protocol, retrieval and budgets are ours.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from psearch_jax.config import ProtocolConfig
from psearch_jax.rollout.environment import SearchEnvironment
from psearch_jax.rollout.episode import Episode, Request, Role, Turn
from psearch_jax.rollout.protocol import parse_turn, render_results

#: (prompts, most tokens to draw) → (tokens drawn for each, the token that ended it included; seconds that it took).
Generate = Callable[[list[list[int]], int], tuple[list[list[int]], float]]


@dataclass(frozen=True, kw_only=True)
class Played:
    """Episodes (without log-probabilities), and what they took.

    Attributes:
      seconds: of drawing, searching and the loop itself; what `generate` spent beyond the seconds that it told (pipes)
        is left out.
      drawing: seconds that `generate` told.
      forwarded: real tokens given to the model, prompts at every turn anew.
    """

    episodes: list[Episode]
    seconds: float
    drawing: float
    forwarded: int


def play(
    generate: Generate,
    requests: Sequence[Request],
    protocol: ProtocolConfig,
    environment: SearchEnvironment,
    *,
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[Sequence[int]], str],
    context: int,
    end_ids: Collection[int] = (),
) -> Played:
    """Play all episodes in lock-step; the rules are those of rollout/reference.py, a turn at a time."""
    began = time.perf_counter()
    waited = drawing = 0.0
    forwarded = 0
    episodes = [
        Episode(question=r.question, group=r.group, member=r.member, ids=list(r.prompt_ids))
        for r in requests
    ]
    for episode in episodes:
        episode.roles = [int(Role.PROMPT)] * len(episode.ids)
    limits = [
        min(context, len(episode.ids) + protocol.response_tokens)
        if protocol.response_tokens
        else context
        for episode in episodes
    ]
    active = list(range(len(episodes)))
    while active:
        called = time.perf_counter()
        drawn, seconds = generate([episodes[i].ids for i in active], protocol.turn_tokens)
        waited += time.perf_counter() - called
        drawing += seconds
        forwarded += sum(len(episodes[i].ids) for i in active) + sum(map(len, drawn))
        searching = []
        for i, ids in zip(active, drawn, strict=True):
            episode = episodes[i]
            ids = _cut(ids[: limits[i] - len(episode.ids)], decode, protocol)
            _end_turn(episode, ids, decode(ids), protocol, limits[i], end_ids)
            if not episode.end_reason and episode.turns[-1].kind == "search":
                searching.append(i)
        # As in Search-R1, one call for the whole batch.
        turns = [episodes[i].turns[-1] for i in searching]
        found = environment.search([turn.queries for turn in turns], protocol.top_k)
        for turn, results in zip(turns, found, strict=True):
            turn.hits, turn.failed = results.hits, results.failed
        active = [
            i
            for i in active
            if not episodes[i].end_reason and _observe(episodes[i], encode, protocol, limits[i])
        ]
    whole = time.perf_counter() - began
    return Played(
        episodes=episodes,
        seconds=whole - waited + drawing,
        drawing=drawing,
        forwarded=forwarded,
    )


def _cut(
    ids: list[int], decode: Callable[[Sequence[int]], str], protocol: ProtocolConfig
) -> list[int]:
    """A turn up to the token that completes its action. (A sampler that stops at tokens runs past a tag that was
    spelled in several.) More text never changes what has been read, so the place can be bisected."""

    def acts(size: int) -> bool:
        return parse_turn(protocol, decode(ids[:size])).kind != "none"

    if not acts(len(ids) - 1):
        return ids
    return ids[: bisect_left(range(len(ids)), True, key=acts)]


def _end_turn(
    episode: Episode,
    ids: list[int],
    text: str,
    protocol: ProtocolConfig,
    limit: int,
    end_ids: Collection[int],
) -> None:
    """Append a turn and say what comes of it."""
    action = parse_turn(protocol, text)
    start = len(episode.ids)
    episode.ids += ids
    episode.roles += [int(Role.POLICY)] * len(ids)
    turn = Turn(kind="none", start=start, stop=len(episode.ids), text=text)
    full = len(episode.ids) >= limit
    searches_left = len(episode.turns) < protocol.max_search_turns
    ended = bool(ids) and ids[-1] in end_ids
    if action.kind == "answer":
        turn.kind, turn.answer, episode.end_reason = "answer", action.answer, "answer"
    elif action.kind != "none" and not searches_left:
        turn.kind, episode.end_reason = "invalid", "turns"
    elif action.kind == "search" and not full:
        turn.kind, turn.queries = "search", action.queries
    elif action.kind == "invalid" or (protocol.feedback_always and searches_left and not full):
        turn.kind = "invalid"
    elif ended:
        turn.kind, episode.end_reason = "invalid", "end"
    else:
        episode.end_reason = "context" if full else "budget"
    episode.turns.append(turn)


def _observe(
    episode: Episode,
    encode: Callable[[str], Sequence[int]],
    protocol: ProtocolConfig,
    limit: int,
) -> bool:
    """Append what the last turn brought; False where that leaves no room for another."""
    turn = episode.turns[-1]
    text = protocol.feedback
    if turn.kind == "search":
        text = render_results(
            protocol,
            turn.queries,
            turn.hits,
            lambda line: len(encode(line)),
        )
    if len(episode.turns) == protocol.max_search_turns:
        text += protocol.last_turn
    ids = encode(text)
    if len(episode.ids) + len(ids) >= limit:
        episode.end_reason = "context"
        return False
    episode.ids += ids
    episode.roles += [int(Role.OBSERVATION)] * len(ids)
    return True
