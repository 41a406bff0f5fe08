"""What a turn says and how search results are written: pure text in, pure text out.

A protocol is data (`ProtocolConfig`); those of the published systems are files in configs/protocols. Only text of
policy tokens is ever given to `parse_turn` and read by `well_formed` (law 2); what the corpus says is rendered by
`render_results` so that it can never look like a tag.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from psearch_jax.config import ProtocolConfig
from psearch_jax.retrieval.passages import Hit, Passage
from psearch_jax.rollout.episode import Episode
from psearch_jax.rollout.prompts import prompt_text as prompt_text

_LINE_BREAKS = re.compile(r"\s*[\r\n\v\f\x1c-\x1e\x85\u2028\u2029]\s*")
_SURROGATES = re.compile(r"[\ud800-\udfff]")
_BOXED = "\\boxed{"


@dataclass(frozen=True, kw_only=True)
class Action:
    """What a turn asks for.

    `kind`: "search" (with `queries`), "answer" (with `answer`, perhaps empty; None where the protocol wants a box
    and there is none), "invalid" (a closing stop tag is there but no pair, or a search without a query), "none"
    (no closing stop tag yet, or none that counts: see `parse_turn`).
    """

    kind: str
    queries: tuple[str, ...] = ()
    answer: str | None = None


def stop_tags(protocol: ProtocolConfig) -> tuple[str, str]:
    """The closing tags that end a turn."""
    return protocol.search[1].strip(), protocol.answer[1].strip()


def control_tags(protocol: ProtocolConfig) -> tuple[str, ...]:
    """Every tag of the protocol, without the blanks that its configuration may put around it."""
    pairs = (protocol.think, protocol.search, protocol.information, protocol.answer)
    return tuple(dict.fromkeys(tag.strip() for pair in pairs for tag in pair if tag.strip()))


def parse_turn(protocol: ProtocolConfig, text: str) -> Action:
    """Read the first complete search or answer pair of one turn's policy text. Never raises, whatever the text.

    "First" is the pair whose closing tag comes first; its content begins after the nearest opening
    tag before that (or the first one: `protocol.opening`). More text can therefore never change what has been read,
    so the engine may act the moment a tag closes. Queries are those of `written_queries`; exact duplicates are
    dropped; those beyond `max_subqueries` are not sent.

    With an empty `protocol.feedback` there is nothing to tell a policy that closes a tag without a pair or searches
    for nothing: that is not an action, and the turn goes on.
    """
    kind = "none"
    for pair, content in _pairs(protocol, text):
        if pair == "answer":
            return Action(kind="answer", answer=_answer(protocol, content))
        queries = tuple(dict.fromkeys(_queries(protocol, content))) if pair == "search" else ()
        if queries:
            return Action(kind="search", queries=queries[: protocol.max_subqueries])
        if protocol.feedback:
            kind = "invalid"
            if pair == "search":
                break
    return Action(kind=kind)


def search_content(protocol: ProtocolConfig, text: str) -> str:
    """What stands between the tags of the search that a turn's policy text makes; empty where it makes none."""
    for pair, content in _pairs(protocol, text):
        if pair == "answer":
            break
        if pair == "search" and _queries(protocol, content):
            return content
    return ""


def written_queries(protocol: ProtocolConfig, text: str) -> tuple[str, ...]:
    """The queries of a turn's search as the policy wrote them: stripped and none empty, but repeated ones and those
    beyond `max_subqueries` included. None at all where the turn does not search."""
    return tuple(_queries(protocol, search_content(protocol, text)))


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
    rendered passage; tags and labels come on top). They are dealt out in rounds: every sub-query gets
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
    between = protocol.passage_separator
    passages = [
        [
            neutralise(_passage(protocol, hit.passage, rank), tags)
            for rank, hit in enumerate(found, start=1)
        ]
        for found in hits
    ]
    kept = _deal(
        [[count_tokens(passage + between) for passage in found] for found in passages],
        protocol.observation_tokens,
    )
    blocks = []
    for number, (query, found, ranks) in enumerate(
        zip(queries, passages, kept, strict=True), start=1
    ):
        label = ""
        if protocol.attributed:
            label = neutralise(
                protocol.label.format(query_number=number, query=_one_line(query)), tags
            )
        shown = between.join(found[rank] for rank in ranks) if ranks else protocol.no_results
        blocks.append(label + shown)
    # Once more as a whole: two harmless passages side by side may make a tag.
    body = neutralise(between.join(blocks), tags) + (protocol.results_end if blocks else "")
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
    """Whether an episode is written as the protocol asks, read from the policy text of its turns alone.

    Every turn but the last searches, the last one answers (in a box where the protocol wants one). Then, by
    `protocol.format`:

    - "strict": every turn is think → search or think → answer. Tags must be balanced, nothing but blanks may
      stand outside them, and no tag may stand inside them.
    - "paired" (as ReSearch checks): think tags are paired and there are some, there is one answer pair, a search turn
      closes one search, the answer turn has no search tag, and the policy writes no results itself. Text may stand
      anywhere.
    """
    wanted = ["search"] * (len(episode.turns) - 1) + ["answer"]
    if not episode.turns or [turn.kind for turn in episode.turns] != wanted:
        return False
    if protocol.answer_form == "boxed" and episode.answer is None:
        return False
    if protocol.format == "paired":
        return _paired(protocol, [turn.text for turn in episode.turns])
    any_tag = _alternatives(control_tags(protocol))
    for turn, kind in zip(episode.turns, wanted, strict=True):
        match = _turn_pattern(protocol, kind).fullmatch(turn.text)
        if match is None or any(any_tag.search(part) for part in match.groups()):
            return False
    return True


# -- reading


def _pairs(protocol: ProtocolConfig, text: str) -> Iterator[tuple[str, str]]:
    """("search" or "answer", what stands before it and after its opening tag) for each closing stop tag in order;
    ("", "") for one without an opening tag."""
    search_close, answer_close = stop_tags(protocol)
    find = text.find if protocol.opening == "first" else text.rfind
    begin = 0  # behind the last pair
    for closing in _alternatives((search_close, answer_close)).finditer(text):
        kind = "search" if closing[0] == search_close else "answer"
        opening = (protocol.search if kind == "search" else protocol.answer)[0].strip()
        start = find(opening, begin, closing.start())
        if start < 0:
            yield "", ""
        else:
            yield kind, text[start + len(opening) : closing.start()].strip()
            begin = closing.end()


def _queries(protocol: ProtocolConfig, content: str) -> list[str]:
    """The queries of a search, stripped, without empty ones."""
    if protocol.query_form == "tool_call":
        parts = _tool_queries(protocol, content)
    else:
        parts = content.split(protocol.separator) if protocol.separator else [content]
    return [part.strip() for part in parts if part.strip()]


def _tool_queries(protocol: ProtocolConfig, content: str) -> list[str]:
    """The queries of `{"name": …, "arguments": {…: [query, …]}}`; none where it is anything else."""
    try:
        call = json.loads(content)
    except (ValueError, RecursionError):
        return []
    if not isinstance(call, dict) or call.get("name") != protocol.tool_name:
        return []
    arguments = call.get("arguments")
    queries = arguments.get(protocol.tool_argument) if isinstance(arguments, dict) else None
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        return []
    # JSON can spell half a character (\ud800), which nothing can encode afterwards.
    return [_SURROGATES.sub("\ufffd", query) for query in queries]


def _answer(protocol: ProtocolConfig, content: str) -> str | None:
    r"""The answer in the content of an answer pair: all of it, or what its last \boxed{…} holds."""
    if protocol.answer_form == "whole":
        return content
    start = content.rfind(_BOXED)
    depth = 0
    for place in range(start + len(_BOXED) - 1, len(content) if start >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(content[place], 0)
        if depth == 0:
            return content[start + len(_BOXED) : place].strip()
    return None


def _paired(protocol: ProtocolConfig, texts: Sequence[str]) -> bool:
    """The "paired" form of `well_formed`, for turns of the right kinds."""
    think, search, information, answer = (
        [tag.strip() for tag in pair]
        for pair in (protocol.think, protocol.search, protocol.information, protocol.answer)
    )
    whole = "\n".join(texts)
    opened, closed = (whole.count(tag) for tag in think)
    return (
        opened == closed > 0
        and all(whole.count(tag) == 1 for tag in answer)
        and not any(tag in whole for tag in information)
        and all(text.count(search[0]) >= text.count(search[1]) == 1 for text in texts[:-1])
        and not any(tag in texts[-1] for tag in search)
    )


# -- writing


def _passage(protocol: ProtocolConfig, passage: Passage, number: int) -> str:
    title, text = _one_line(passage.title), _one_line(passage.text)
    contents = f'"{title}"\n{text}' if title else text
    return protocol.passage.format(title=title, text=text, contents=contents, number=number)


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
