"""Passages and search results."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage of the corpus: FlashRAG's `{"id", "contents"}` with the title split off."""

    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """The FlashRAG form: the title in quotes on a line of its own, then the text."""
        return f'"{self.title}"\n{self.text}'

    @classmethod
    def from_contents(cls, id: str, contents: str) -> Passage:
        """Split FlashRAG contents; contents without a title line get an empty title."""
        first, newline, rest = contents.partition("\n")
        if newline and len(first) >= 2 and first.startswith('"') and first.endswith('"'):
            return cls(id, first[1:-1], rest)
        return cls(id, "", contents)


@dataclass(frozen=True, slots=True)
class Hit:
    """One search result: a passage and its inner-product score."""

    passage: Passage
    score: float
