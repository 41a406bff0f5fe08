"""The episodes that a report embeds: which ones, and in as few bytes as they can be shown from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from psearch_jax.evaluation import tables

SHOWN_EPISODES = 2000  # embedded in the page at most
MOST_BYTES = 15_000_000  # of them; a page with its figures stays under 20 MB
TRAINING = " (training)"
_KEPT = (
    *(
        "id",
        "kind",
        "unseen",
        "question",
        "golden_answers",
        "answer",
        "em",
        "f1",
        "turns",
        "searches",
    ),
    *("subqueries", "policy_tokens", "observation_tokens", "well_formed", "end_reason"),
    *("step", "reward", "advantage", "all_gold"),
)


def viewer_data(
    greedy: Mapping[str, Sequence[Mapping[str, Any]]],
    training: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    limit: int = SHOWN_EPISODES,
) -> dict[str, Any] | None:
    """The episodes that the page embeds: the same questions for every row, evenly by kind, and those of training.

    Args:
      greedy: lines by row.
      training: lines of training episodes by run (`metrics_log.EPISODES_FILE`), evenly over the steps.
      limit: episodes at most; fewer where they would take more than `MOST_BYTES`.

    Returns:
      {"rows": [[row, label]], "initial" (the row shown first), "bases" (the rows that flipped answers can be
      counted against), "kinds", "episodes", "passages": {id: [title, text]} (each stored once), "shown" and "total"
      questions, "trained" (episodes of training that are shown)}; None without episodes.
    """
    names = [name for name in tables.ordered(list(greedy)) if greedy[name]]
    trained = {name: lines for name, lines in (training or {}).items() if lines}
    if not names and not trained:
        return None
    by_kind: dict[str, list[str]] = {}
    if names:
        for record in greedy[max(names, key=lambda name: len(greedy[name]))]:
            by_kind.setdefault(record["kind"], []).append(record["id"])
    page = _Page()
    # Training episodes take at most a quarter of the room, so that results stay comparable.
    share = limit if not names else limit // 4
    for name, lines in trained.items():
        every = max(1, -(-len(lines) * len(trained) // max(1, share)))
        room = (MOST_BYTES if not names else MOST_BYTES // 4) / len(trained)
        page.add(name + TRAINING, _within(lines[::every], room), training=True)
    count = len(page.episodes)
    chosen: set[str] = set()
    if names:
        wanted = max(1, (limit - count) // len(names))
        chosen = _even_sample(by_kind, min(wanted, _affordable(greedy, names, page.bytes)))
        for name in names:
            page.add(name, [record for record in greedy[name] if record["id"] in chosen])
    found = {str(record["kind"]) for record in page.episodes}
    kinds = [kind for kind in tables.KIND_ORDER if kind in found]
    rows = names + [name + TRAINING for name in trained]
    initial = (
        "parallel_search" if "parallel_search" in names else rows[len(names) - 1 if names else 0]
    )
    return {
        "rows": [[name, _label(name)] for name in rows],
        "initial": initial,
        "bases": names if len(names) > 1 else [],
        "kinds": kinds + sorted(found - set(kinds)),
        "episodes": page.episodes,
        "passages": page.passages,
        "shown": len(chosen),
        "total": sum(len(ids) for ids in by_kind.values()),
        "trained": count,
    }


def _label(row: str) -> str:
    plain = row.removesuffix(TRAINING)
    return tables.label_of(plain) + (", training" if plain != row else "")


class _Page:
    """Episodes and the passages they show, each passage once."""

    def __init__(self) -> None:
        self.episodes: list[dict[str, Any]] = []
        self.passages: dict[str, list[str]] = {}
        self.bytes = 0

    def add(
        self, row: str, records: Sequence[Mapping[str, Any]], *, training: bool = False
    ) -> None:
        for record in records:
            results = []
            for turn in record["results"]:
                found = []
                for hits in turn["passages"]:
                    for hit in hits:
                        self.passages[hit["id"]] = [hit["title"], hit["text"]]
                    found.append([[hit["id"], hit["score"]] for hit in hits])
                results.append({"queries": turn["queries"], "passages": found})
            episode = {key: record[key] for key in _KEPT if record.get(key) is not None}
            episode |= {"row": row, "results": results, "segments": shown_segments(record)}
            episode.setdefault("answer", None)
            if training:
                episode["training"] = True
            self.episodes.append(episode)
            self.bytes += _size(record)


def shown_segments(record: Mapping[str, Any]) -> list[list[Any]]:
    """[role, text] of each segment; of the policy's, where its tokens are known, [role, null, tokens] instead, a token
    as [text, log-probability] or [text, log-probability, advantage]."""
    tokens = iter(record.get("tokens") or [])
    segments: list[list[Any]] = []
    for role, text in record["segments"]:
        own = next(tokens, None) if role == "policy" else None
        segments.append([role, None, own] if own else [role, text])
    return segments


def _size(record: Mapping[str, Any]) -> int:
    """About how many bytes a record takes in the page."""
    text = sum(
        len(t) for role, t in record["segments"] if role != "policy" or not record.get("tokens")
    )
    tokens = sum(len(part) for part in record.get("tokens") or [])
    hits = sum(len(found) for turn in record["results"] for found in turn["passages"])
    return 500 + int(1.15 * text) + 20 * tokens + 40 * hits


def _within(records: Sequence[Mapping[str, Any]], most: float) -> Sequence[Mapping[str, Any]]:
    """Every so many of the records that they take at most `most` bytes."""
    whole = sum(map(_size, records))
    return records[:: max(1, -(-whole // max(1, int(most))))]


def _affordable(
    greedy: Mapping[str, Sequence[Mapping[str, Any]]], names: Sequence[str], spent: int
) -> int:
    """How many questions of every row fit into what is left of `MOST_BYTES`."""
    question = 0.0
    texts = 0
    for name in names:
        some = greedy[name][:: max(1, len(greedy[name]) // 200)]
        question += sum(map(_size, some)) / len(some)
        # Passages are stored once, however often they are shown; at worst each of them is new.
        hits = [
            h for r in some for turn in r["results"] for found in turn["passages"] for h in found
        ]
        distinct = {h["id"]: len(h["text"]) + len(h["title"]) for h in hits}
        texts = max(texts, sum(distinct.values()) // len(some))
    return max(1, int((MOST_BYTES - spent) / (question + texts)))


def _even_sample(by_kind: Mapping[str, Sequence[str]], count: int) -> set[str]:
    """`count` ids, as evenly over the kinds as they allow, drawn with a fixed seed."""
    rng = np.random.default_rng(0)
    queues = [list(rng.permutation(sorted(ids))) for _, ids in sorted(by_kind.items())]
    chosen: list[str] = []
    while len(chosen) < count and any(queues):
        for queue in queues:
            if queue and len(chosen) < count:
                chosen.append(str(queue.pop()))
    return set(chosen)
