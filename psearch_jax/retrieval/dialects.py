"""The request and answer forms of the published retrieval servers; what the client speaks and the server answers.

Search-R1 and ParallelSearch: `POST /retrieve`. ReSearch and FlashRAG: `POST /search`, `POST /batch_search`. Search-R1's
reranker: `POST /rerank`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, Field

from psearch_jax.retrieval.passages import Hit, Passage


class Retrieve(BaseModel):
    """`{"queries": […], "topk", "return_scores"}`; also with `query`, one or several."""

    queries: list[str] | str | None = None
    query: list[str] | str | None = None
    topk: int | None = Field(None, ge=0, description="0 or null: the server's default.")
    return_scores: bool = False

    def asked(self) -> list[str]:
        """The queries, from whichever field has them."""
        given = self.queries if self.queries is not None else self.query
        return [given] if isinstance(given, str) else list(given or [])


class Search(BaseModel):
    """`{"query", "top_n", "return_score"}`."""

    query: str
    top_n: int | None = Field(None, ge=0)
    return_score: bool = False


class BatchSearch(BaseModel):
    """`{"query": […], "top_n", "return_score"}`."""

    query: list[str]
    top_n: int | None = Field(None, ge=0)
    return_score: bool = False


class Rerank(BaseModel):
    """`{"queries", "documents": [[…]], "rerank_topk", "return_scores"}`; a document as in any answer, or a string."""

    queries: list[str]
    documents: list[list[dict[str, Any] | str]]
    rerank_topk: int | None = Field(None, ge=0)
    return_scores: bool = False


def document(passage: Passage) -> dict[str, str]:
    """A passage as all dialects have it, and its parts."""
    return {
        "id": passage.id,
        "contents": passage.contents,
        "title": passage.title,
        "text": passage.text,
    }


def retrieve_answer(found: Sequence[Sequence[Hit]], scores: bool) -> dict[str, Any]:
    """What `/retrieve` answers."""
    if not scores:
        return {"result": [[document(hit.passage) for hit in hits] for hits in found]}
    return {
        "result": [
            [{"document": document(hit.passage), "score": hit.score} for hit in hits]
            for hits in found
        ]
    }


def search_answer(hits: Sequence[Hit], scores: bool) -> list[Any]:
    """What `/search` answers."""
    documents = [document(hit.passage) for hit in hits]
    return [documents, [hit.score for hit in hits]] if scores else documents


def batch_answer(found: Sequence[Sequence[Hit]], scores: bool) -> list[Any]:
    """What `/batch_search` answers."""
    documents = [[document(hit.passage) for hit in hits] for hits in found]
    return [documents, [[hit.score for hit in hits] for hits in found]] if scores else documents


def read_document(value: Any) -> Passage:
    """A passage from whatever a server or a client sends for one.

    Raises:
      ValueError: it holds no text.
    """
    if isinstance(value, dict) and isinstance(value.get("document"), dict):
        value = value["document"]
    if isinstance(value, str):
        return Passage.from_contents("", value)
    if isinstance(value, dict):
        identifier = str(value.get("id", ""))
        title, text = value.get("title"), value.get("text")
        if isinstance(text, str):
            return Passage(identifier, title if isinstance(title, str) else "", text)
        if isinstance(value.get("contents"), str):
            return Passage.from_contents(identifier, value["contents"])
    raise ValueError("a document without contents or text")


def read_retrieve(content: Any, count: int, k: int) -> list[list[Hit]]:
    """The hits in an answer of `/retrieve`; without scores they are 0.

    Raises:
      ValueError: it is no such answer, or not one for so many queries.
    """
    result = content.get("result") if isinstance(content, dict) else None
    return _hits(result, None, count, k)


def read_batch(content: Any, count: int, k: int) -> list[list[Hit]]:
    """The hits in an answer of `/batch_search` that was asked for scores.

    Raises:
      ValueError: see `read_retrieve`.
    """
    if not isinstance(content, list) or len(content) != 2:
        raise ValueError("not a pair of documents and scores")
    return _hits(content[0], content[1], count, k)


def _hits(result: Any, scores: Any, count: int, k: int) -> list[list[Hit]]:
    if not isinstance(result, list) or len(result) != count:
        size = len(result) if isinstance(result, list) else type(result).__name__
        raise ValueError(f"{size} results for {count} queries")
    found: list[list[Hit]] = []
    for number, own in enumerate(result):
        if not isinstance(own, list):
            raise ValueError(f"result {number} is no list")
        given = scores[number] if scores is not None else [_score(value) for value in own]
        if not isinstance(given, list) or len(given) != len(own):
            raise ValueError(f"result {number} has not a score for every document")
        hits = [
            Hit(read_document(value), float(score)) for value, score in zip(own, given, strict=True)
        ]
        found.append(hits[:k])
    return found


def _score(value: Any) -> float:
    score = value.get("score", 0.0) if isinstance(value, dict) else 0.0
    return float(score) if isinstance(score, (int, float)) else 0.0
