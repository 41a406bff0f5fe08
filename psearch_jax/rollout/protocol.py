"""What a turn says and how search results are written: pure text in, pure text out.

Only text of policy tokens is ever given to `parse_turn` and read by `well_formed` (law 2); what the
corpus says is rendered by `render_results` so that it can never look like a tag.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from psearch_jax.config import ProtocolConfig
from psearch_jax.retrieval.passages import Hit
from psearch_jax.rollout.episode import Episode

_LINE_BREAKS = re.compile(r"\s*[\r\n\v\f\x1c-\x1e\x85\u2028\u2029]\s*")


@dataclass(frozen=True, kw_only=True)
class Action:
    """What a turn asks for.

    `kind`: "search" (with `queries`), "answer" (with `answer`, perhaps empty), "invalid" (a closing
    stop tag is there but no pair, or a search without a query), "none" (no closing stop tag yet).
    """

    kind: str
    queries: tuple[str, ...] = ()
    answer: str | None = None


def prompt_text(protocol: ProtocolConfig, question: str) -> str:
    """The prompt of a question."""
    return protocol.prompt.format(question=question)


def stop_tags(protocol: ProtocolConfig) -> tuple[str, str]:
    """The closing tags that end a turn."""
    return protocol.search[1].strip(), protocol.answer[1].strip()


def control_tags(protocol: ProtocolConfig) -> tuple[str, ...]:
    """Every tag of the protocol, without the blanks that its configuration may put around it."""
    pairs = (protocol.think, protocol.search, protocol.information, protocol.answer)
    return tuple(dict.fromkeys(tag.strip() for pair in pairs for tag in pair if tag.strip()))


def parse_turn(protocol: ProtocolConfig, text: str) -> Action:
    """Read the first complete search or answer pair of one turn's policy text.

    "First" is the pair whose closing tag comes first; its content begins after the nearest opening
    tag before that. More text can therefore never change what has been read, so the engine may act
    the moment a tag closes. Queries are split on the separator and stripped; empty ones and exact
    duplicates are dropped; those beyond `max_subqueries` are not sent.
    """
    search_close, answer_close = stop_tags(protocol)
    closings = list(_alternatives((search_close, answer_close)).finditer(text))
    for closing in closings:
        is_search = closing[0] == search_close
        opening = (protocol.search if is_search else protocol.answer)[0].strip()
        start = text.rfind(opening, 0, closing.start())
        if start < 0:
            continue
        content = text[start + len(opening) : closing.start()].strip()
        if not is_search:
            return Action(kind="answer", answer=content)
        parts = content.split(protocol.separator) if protocol.separator else [content]
        queries = tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))
        if not queries:
            return Action(kind="invalid")
        return Action(kind="search", queries=queries[: protocol.max_subqueries])
    return Action(kind="invalid" if closings else "none")


def render_results(
    protocol: ProtocolConfig,
    queries: Sequence[str],
    hits: Sequence[Sequence[Hit]],
    count_tokens: Callable[[str], int],
    *,
    reserved: tuple[str, ...] = (),
) -> str:
    """Write the observation that answers `queries`.

    Whole passages only, at most `observation_tokens` tokens of them in all (`count_tokens` of each
    rendered line; tags and labels come on top). They are dealt out in rounds: every sub-query gets
    its best passage that fits before any gets another, and in the first round room is kept for the
    shortest passage of each sub-query still to come. A sub-query without a passage says so. Tags of
    the protocol and the `reserved` strings (the tokenizer's control tokens) inside passages and
    queries are broken up, line breaks inside a field become blanks, and the block always closes.

    Args:
      hits: one list for every query, best first; `{number}` of the passage template is the rank.
      count_tokens: tokens of a text.
      reserved: further strings that no passage may contain whole.
    """
    tags = tuple(dict.fromkeys((*control_tags(protocol), *reserved)))
    lines = [
        [
            neutralise(
                protocol.passage.format(
                    title=_one_line(hit.passage.title),
                    text=_one_line(hit.passage.text),
                    number=rank,
                ),
                tags,
            )
            + "\n"
            for rank, hit in enumerate(found, start=1)
        ]
        for found in hits
    ]
    kept = _deal(
        [[count_tokens(line) for line in found] for found in lines], protocol.observation_tokens
    )
    body = ""
    for number, (query, found, ranks) in enumerate(zip(queries, lines, kept, strict=True), start=1):
        if protocol.attributed:
            body += protocol.label.format(
                query_number=number, query=neutralise(_one_line(query), tags)
            )
        body += "".join(found[rank] for rank in ranks) or protocol.no_results + "\n"
    opening, closing = protocol.information
    return protocol.before_information + opening + body + closing + protocol.after_information


def neutralise(text: str, tags: Sequence[str]) -> str:
    """Break up every tag with a blank after its first character: `<search>` becomes `< search>`.

    Repeated until none is left, so that breaking one up cannot uncover another. This ends, because
    every pass widens a run of blanks inside the match and tags neither begin nor end with one.
    """
    pattern = _alternatives(tuple(tags))
    while pattern.search(text):
        text = pattern.sub(
            lambda match: match[0][0] + " " + match[0][1:] if len(match[0]) > 1 else " ", text
        )
    return text


def well_formed(protocol: ProtocolConfig, episode: Episode) -> bool:
    """Whether every turn is think → search or think → answer, the last one (and only it) answers.

    Read from the policy text of the turns alone. Tags must be balanced, nothing but blanks may
    stand outside them, and no tag may stand inside them.
    """
    if not episode.turns:
        return False
    any_tag = _alternatives(control_tags(protocol))
    wanted = ["search"] * (len(episode.turns) - 1) + ["answer"]
    for turn, kind in zip(episode.turns, wanted, strict=True):
        match = _turn_pattern(protocol, kind).fullmatch(turn.text)
        if (
            turn.kind != kind
            or match is None
            or any(any_tag.search(part) for part in match.groups())
        ):
            return False
    return True


def _deal(sizes: list[list[int]], budget: int) -> list[list[int]]:
    """Ranks of the passages that every sub-query shows, given the sizes of its candidates."""
    kept: list[list[int]] = [[] for _ in sizes]
    waiting = [0] * len(sizes)  # the next rank to look at
    for round_number in range(max(map(len, sizes), default=0)):
        for i, candidates in enumerate(sizes):
            room = budget
            if round_number == 0:
                room -= sum(min(later) for later in sizes[i + 1 :] if later)
                if (
                    candidates and min(candidates) > room
                ):  # not everybody can be served: the earlier query is
                    room = budget
            for rank in range(waiting[i], len(candidates)):
                if candidates[rank] <= room:
                    kept[i].append(rank)
                    waiting[i] = rank + 1
                    budget -= candidates[rank]
                    break
    return kept


def _one_line(text: str) -> str:
    return _LINE_BREAKS.sub(" ", text).strip()


@lru_cache(maxsize=64)
def _alternatives(tags: tuple[str, ...]) -> re.Pattern[str]:
    """Any of these strings, the longest first where one is a prefix of another."""
    return re.compile(
        "|".join(re.escape(tag) for tag in sorted(tags, key=len, reverse=True) if tag) or r"(?!)"
    )


@lru_cache(maxsize=16)
def _turn_pattern(protocol: ProtocolConfig, kind: str) -> re.Pattern[str]:
    think, act = protocol.think, protocol.search if kind == "search" else protocol.answer
    tags = [re.escape(tag.strip()) for tag in (*think, *act)]
    return re.compile(r"\s*{}(.*?){}\s*{}(.*){}\s*".format(*tags), re.DOTALL)
