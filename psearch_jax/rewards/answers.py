"""Comparing an answer with the gold answers. The normalisation is SQuAD's (Rajpurkar et al. 2016)."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_CLOSED = ("yes", "no", "noanswer")


def normalize(text: str) -> str:
    """Lower case, without ASCII punctuation and the words a, an, the; single blanks."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str | None, golden_answers: Iterable[str]) -> bool:
    """Whether the normalised answer equals any normalised gold answer; no answer matches nothing."""
    return answer is not None and normalize(answer) in {normalize(gold) for gold in golden_answers}


def f1(answer: str | None, golden_answers: Iterable[str]) -> float:
    """Token F1 with the best gold answer. Yes and no count only when they match exactly (HotpotQA)."""
    if answer is None:
        return 0.0
    return max((_f1(normalize(answer), normalize(gold)) for gold in golden_answers), default=0.0)


def _f1(answer: str, gold: str) -> float:
    if answer == gold:
        return 1.0
    if answer in _CLOSED or gold in _CLOSED:
        return 0.0
    answer_tokens, gold_tokens = answer.split(), gold.split()
    shared = sum((Counter(answer_tokens) & Counter(gold_tokens)).values())
    # 2PR / (P + R) with P = shared / |answer| and R = shared / |gold|.
    return 2 * shared / (len(answer_tokens) + len(gold_tokens))


def substring_match(answer: str | None, golden_answers: Iterable[str]) -> bool:
    """Whether any normalised gold answer occurs in the normalised answer (which may say more)."""
    if answer is None:
        return False
    text = normalize(answer)
    golds = [normalize(gold) for gold in golden_answers]
    return any(gold in text if gold else gold == text for gold in golds)


def tolerant_match(answer: str | None, golden_answers: Iterable[str]) -> bool:
    """Exact match that also forgives spelling: accents, hyphens, full stops, blanks, commas in numbers.

    "state-of-the-art" equals "state of the art", "U.S." equals "US", "1,000" equals "1000" and "São Paulo"
    "Sao Paulo". Reported beside `exact_match`, never instead of it.
    """
    if answer is None:
        return False
    golds = list(golden_answers)
    form = _loose(answer)
    return exact_match(answer, golds) or (bool(form) and form in {_loose(gold) for gold in golds})


def _loose(text: str) -> str:
    """Letters and digits only, without accents and articles."""
    decomposed = unicodedata.normalize("NFKD", _THOUSANDS.sub("", text)).casefold()
    plain = "".join(c for c in decomposed if not unicodedata.combining(c))
    words = "".join(c if c.isalnum() else " " for c in plain)
    return "".join(_ARTICLES.sub(" ", words).split())
