"""Search by words: BM25 as the `bm25s` package computes it, over words that we cut ourselves."""

from __future__ import annotations

import functools
import json
import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from psearch_jax.errors import UserError

K1, B_LENGTH = 1.5, 0.75  # bm25s's defaults, as in Robertson's papers
#: How texts are cut; part of the fingerprint of every index that was cut so.
CUT = "casefold, accents folded, runs of word characters, 1"
_WORD = re.compile(r"\w+")
#: Words that stand in most questions and tell nothing of what they ask for.
STOPWORDS = frozenset(
    re.findall(
        r"\w+",
        """a an and are as at be but by did do does for from had has have he her him his how i if in into is it its
        no not of on or s she such that the their then there these they this to was were what when where which who
        whom whose why will with""",
    )
)


def words(text: str) -> list[str]:
    """The words of a text: lower case, without accents and without `STOPWORDS`."""
    return [word for word in _WORD.findall(_folded(text)) if word not in STOPWORDS]


def _folded(text: str) -> str:
    if text.isascii():
        return text.lower()
    parts = unicodedata.normalize("NFKD", text.casefold())
    return "".join(part for part in parts if not unicodedata.combining(part))


def lexical_parameters() -> dict[str, Any]:
    """What decides the scores, for a manifest."""
    return {"k1": K1, "b": B_LENGTH, "cut": CUT}


def bm25s_version() -> str:
    """The installed version, without importing it."""
    try:
        return version("bm25s")
    except PackageNotFoundError:
        raise UserError(
            "bm25s is not installed; run `pip install bm25s`, or set retrieval.kind to scann."
        ) from None


@dataclass
class _Cut:
    """Word numbers of every text, and the number of every word; the form that bm25s takes."""

    ids: list[list[int]]
    vocab: dict[str, int]


class LexicalIndex:
    """BM25 scores of every word in every passage that has it, sparse; kept by column."""

    def __init__(self, scorer: Any, together: Sequence[Any] = ()) -> None:
        """`together`: the scorers of all parts of a collection, whose passages count as one corpus."""
        self._scorer = scorer
        self._together = together or (scorer,)

    def among(self, parts: Sequence[LexicalIndex]) -> LexicalIndex:
        """The same passages as a part of a collection: a word is as rare as it is in all parts together, so that
        scores of different parts can be compared (but for the mean length of a passage, which stays the part's)."""
        return LexicalIndex(self._scorer, [part._scorer for part in parts])

    @classmethod
    def build(cls, texts: Iterable[str]) -> LexicalIndex:
        """Count the words of all texts; takes about 16 bytes a word of the corpus while it runs."""
        bm25s = _bm25s()
        cut = _Cut([], {})
        number = functools.partial(cut.vocab.setdefault)
        for text in texts:
            cut.ids.append([number(word, len(cut.vocab)) for word in words(text)])
        if not cut.vocab:
            number("", 0)
            cut.ids[0].append(0)  # bm25s divides by the mean length
        scorer = bm25s.BM25(method="lucene", k1=K1, b=B_LENGTH, backend="numpy")
        scorer.index(cut, show_progress=False)
        return cls(scorer)

    def save(self, directory: Path) -> None:
        """Write bm25s's files."""
        self._scorer.save(str(directory), show_progress=False)

    @classmethod
    def load(cls, directory: Path) -> LexicalIndex:
        """Read what `save` wrote; the scores stay on disk, mapped.

        Raises:
          UserError: the files cannot be read.
        """
        try:
            return cls(_bm25s().BM25.load(str(directory), mmap=True, show_progress=False))
        except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
            raise UserError(
                f"The words of the index in {directory} cannot be read ({error}); build it again."
            ) from error

    def __len__(self) -> int:
        return int(self._scorer.scores["num_docs"])

    def scores(self, query: str) -> Float32[np.ndarray, "N"] | None:
        """The score of every passage, or None when no word of the query is in any."""
        scores_N = None
        matrix = self._scorer.scores
        for word in words(query):
            number = self._scorer.vocab_dict.get(word)
            if number is None:
                continue
            if scores_N is None:
                scores_N = np.zeros(len(self), np.float32)
            column = slice(*matrix["indptr"][number : number + 2])
            scores_N[matrix["indices"][column]] += matrix["data"][column] * self._weight(word)
        return scores_N

    def _weight(self, word: str) -> np.float32:
        """What makes the score of a word in this part one in all parts."""
        if len(self._together) == 1:
            return np.float32(1)
        counts = [(int(s.scores["num_docs"]), _passages_with(s, word)) for s in self._together]
        own = (len(self), _passages_with(self._scorer, word))
        return np.float32(_rarity(*map(sum, zip(*counts, strict=True))) / _rarity(*own))

    def rank(self, queries: Sequence[str], k: int) -> list[list[tuple[int, float]]]:
        """(row, score) of the k best passages of every query, equal scores in passage order; a passage without a word
        of the query is none."""
        results = []
        for query in queries:
            scores_N = self.scores(query)
            results.append([] if scores_N is None else _best(scores_N, k))
        return results


def _passages_with(scorer: Any, word: str) -> int:
    number = scorer.vocab_dict.get(word)
    if number is None:
        return 0
    first, end = scorer.scores["indptr"][number : number + 2]
    return int(end - first)


def _rarity(passages: int, having: int) -> float:
    """The inverse document frequency as Lucene has it."""
    return math.log(1 + (passages - having + 0.5) / (having + 0.5))


def _best(scores_N: np.ndarray, k: int) -> list[tuple[int, float]]:
    rows = np.flatnonzero(scores_N > 0)
    if len(rows) > k:
        cut = np.partition(scores_N[rows], -k)[-k]
        rows = rows[scores_N[rows] >= cut]  # all that are equal to the last: order decides
    order = np.lexsort((rows, -scores_N[rows]))[:k]
    return [(int(row), float(scores_N[row])) for row in rows[order]]


def _bm25s() -> Any:
    bm25s_version()
    import bm25s

    return bm25s
