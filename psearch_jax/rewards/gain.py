"""Our reward for what sub-queries find: each one earns what it alone brought in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from psearch_jax.config import ProtocolConfig, RewardConfig
from psearch_jax.questions.question import Question
from psearch_jax.retrieval.passages import Hit
from psearch_jax.rewards.answers import exact_match, normalize
from psearch_jax.rewards.decomposition import fold
from psearch_jax.rollout.episode import Episode
from psearch_jax.rollout.protocol import written_queries

_CLOSED = ("", "yes", "no", "noanswer")


def gain_parts(
    config: RewardConfig, protocol: ProtocolConfig, episode: Episode, question: Question
) -> dict[str, float]:
    """Exact match, plus what the sub-queries of an episode brought in, less what was wasted.

    *Gold items* G are the passages that the data set names as evidence (metadata `needs`: ids; `gold_titles` or
    `supporting_facts`: titles). Without evidence there is one item, a gold answer in a passage, and none at all where
    the gold answers are yes or no. Sub-queries are equal if they differ in case and blanks only; a sub-query brings
    in what any of its searches found, whether or not the budget let it be shown.

    - em: 1 for an exact match.
    - gain: `gain_weight`·u / |G|, where u is the number of items that exactly one sub-query of the episode brought
      in. What two different ones bring in earns nothing: either of them was needless. 0 without items.
    - duplicates and empty: together −`gain_waste`·w / (1 + w), w = d + e, shared between them as d to e.
      d counts written sub-queries that were written before in the episode (also in the same search, where only the
      first is sent). e counts *empty fan-out*: in a search of two or more different sub-queries, those that bring
      no item in, those beyond the cap, which are never sent, among them. A search for a single thing that finds
      nothing costs nothing, nor does one that failed, nor any where there are no items.

    The first waste costs half of `gain_waste`, and no further one is free. A right answer is worth at least
    1 − `gain_waste`, a wrong one at most `gain_weight`: while their sum is below 1, no wrong answer beats a right one.
    """
    found = _found(protocol, episode, question)
    bringers = Counter(item for items in found.values() for item in items)
    count = len(_items(question))
    alone = sum(1 for number in bringers.values() if number == 1)
    duplicates, empty = _waste(protocol, episode, found, judged=count > 0)
    share = config.gain_waste / (1 + duplicates + empty)
    return {
        "em": float(exact_match(episode.answer, question.golden_answers)),
        "gain": config.gain_weight * alone / count if count else 0.0,
        "duplicates": -share * duplicates,
        "empty": -share * empty,
    }


def _found(
    protocol: ProtocolConfig, episode: Episode, question: Question
) -> dict[str, frozenset[str]]:
    """Every sub-query that was sent, folded → the gold items that it brought in."""
    items = _items(question)
    found: dict[str, frozenset[str]] = {}
    for turn in episode.searches:
        for query, hits in zip(turn.queries, turn.hits, strict=False):
            new = {name for name, holds in items.items() for hit in hits if holds(hit)}
            found[fold(query)] = found.get(fold(query), frozenset()) | new
    return found


def _waste(
    protocol: ProtocolConfig,
    episode: Episode,
    found: dict[str, frozenset[str]],
    *,
    judged: bool,
) -> tuple[int, int]:
    """(duplicates, empty sub-queries of fan-out); no sub-query counts as both or twice."""
    seen: set[str] = set()
    duplicates = empty = 0
    for turn in episode.searches:
        written = [fold(query) for query in written_queries(protocol, turn.text)]
        fresh = [query for query in dict.fromkeys(written) if query not in seen]
        duplicates += len(written) - len(fresh)
        if len(set(written)) > 1 and not turn.failed and judged:
            empty += sum(1 for query in fresh if not found.get(query))
        seen.update(fresh)
    return duplicates, empty


def _items(question: Question) -> dict[str, Callable[[Hit], bool]]:
    """The gold items of a question by name, each with the test whether a hit holds it."""
    meta = question.metadata
    needs = {str(need) for hop in meta.get("needs") or () for need in hop}
    facts = meta.get("supporting_facts")
    titles = list(meta.get("gold_titles") or ())
    if isinstance(facts, dict):
        titles += facts.get("title") or ()
    items: dict[str, Callable[[Hit], bool]] = {}
    for need in needs:
        items[f"id {need}"] = partial(_is, need)
    for title in {fold(str(title)) for title in titles}:
        items[f"title {title}"] = partial(_is_titled, title)
    golds = {normalize(gold) for gold in question.golden_answers} - set(_CLOSED)
    if golds and not items:
        items["answer"] = partial(_says, golds)
    return items


def _is(id: str, hit: Hit) -> bool:
    return hit.passage.id == id


def _is_titled(title: str, hit: Hit) -> bool:
    return fold(hit.passage.title) == title


def _says(golds: set[str], hit: Hit) -> bool:
    """Whether a passage contains one of the normalised answers as whole words."""
    text = f" {normalize(f'{hit.passage.title} {hit.passage.text}')} "
    return any(f" {gold} " in text for gold in golds)
