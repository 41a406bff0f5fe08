"""From a row of a data set to a `Question`, whatever its columns are called.

Known shapes: FlashRAG's and Search-R1's rows, and those under which NQ, TriviaQA, PopQA, HotpotQA, 2WikiMultihopQA,
MuSiQue, Bamboogle and MultiHop-RAG were published.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from psearch_jax.questions.question import KINDS, Question

#: HotpotQA's, 2Wiki's and MultiHop-RAG's types → question kind.
TYPES = {
    "comparison": "parallelizable",
    "bridge": "bridge",
    "inference": "bridge",
    "compositional": "bridge",
    "bridge_comparison": "mixed",
    "comparison_query": "parallelizable",
    "temporal_query": "parallelizable",
    "inference_query": "bridge",
    "null_query": "unknown",
}
#: MuSiQue's ids begin with the shape of the graph of its sub-questions.
MUSIQUE = {
    "2hop": "bridge",
    "3hop1": "bridge",
    "3hop2": "mixed",
    "4hop1": "bridge",
    "4hop2": "mixed",
    "4hop3": "mixed",
}
_TEXT = ("question", "query", "Question", "problem")
_ANSWERS = ("golden_answers", "answers", "answer", "possible_answers", "Answer", "target")
#: Columns that describe a question and are kept with it; others (whole documents) would fill the memory.
_KEPT = ("type", "question_type", "level", "data_source", "prompt", "ability", "extra_info")


def kind_of(metadata: Mapping[str, Any], default: str = "single") -> str:
    """`metadata.kind` if it is one of ours, else by the data set's `type`; `default` where there is neither."""
    if metadata.get("kind") in KINDS:
        return str(metadata["kind"])
    for name in ("type", "question_type"):
        if metadata.get(name) is not None:
            return TYPES.get(str(metadata[name]), "unknown")
    return default


def question_of(
    row: Mapping[str, Any],
    *,
    dataset: str,
    number: int,
    kind: str = "single",
    notes: list[str] | None = None,
) -> Question:
    """The question of a row; its id is the data set's name, a colon and the row's id (or its number).

    Args:
      row: columns and values; NumPy arrays and bytes are read as lists and UTF-8 text.
      dataset: Search-R1's column `data_source` goes before it, since its row ids restart for each source.
      number: of the row, for one without an id.
      kind: of a question whose row does not say.
      notes: gets a sentence for everything that was mended.

    Raises:
      ValueError: there is no question or no answer; says what is wrong.
    """
    row = {str(name): plain(value) for name, value in row.items()}
    text = next((row[name] for name in _TEXT if row.get(name) is not None), None)
    if isinstance(text, dict):  # Natural Questions: with its tokens
        text = text.get("text")
    if not isinstance(text, str) or not text.strip():
        raise ValueError('"question" is missing or empty')
    metadata = row.get("metadata") or {}
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except ValueError:
            metadata = None
    if not isinstance(metadata, dict):
        raise ValueError('"metadata" is not an object')
    metadata = {name: row[name] for name in _KEPT if row.get(name) is not None} | metadata
    answers = _answers(row, notes if notes is not None else [])
    titles = gold_titles(row) or gold_titles(metadata)
    for heavy in ("context", "supporting_facts", "evidences", "paragraphs", "evidence_list"):
        metadata.pop(heavy, None)
    if titles:
        metadata["gold_titles"] = titles
    source = str(row.get("data_source") or dataset)
    identity = row.get("id", row.get("_id", row.get("question_id")))
    if identity is None and isinstance(row.get("extra_info"), dict):
        info = row["extra_info"]
        if info.get("index") is not None:
            identity = f"{info.get('split', 'row')}_{info['index']}"
    identity = number if identity is None or identity == "" else identity
    shape = str(identity).split("__")[0]
    return Question(
        id=f"{source}:{identity}",
        text=text,
        golden_answers=tuple(answers),
        kind=kind_of(metadata, MUSIQUE.get(shape, kind)),
        metadata=metadata,
        dataset=source,
    )


def plain(value: Any) -> Any:
    """NumPy arrays, scalars and bytes as Python's own; longer texts inside are left as they are."""
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return value


def _answers(row: Mapping[str, Any], notes: list[str]) -> list[str]:
    """The accepted answers as texts, in order, each once."""
    found = next((row[name] for name in _ANSWERS if row.get(name) is not None), None)
    if found is None:
        found = ground_truth(row.get("reward_model"))
    if found is None and isinstance(row.get("annotations"), Mapping):  # Natural Questions
        found = row["annotations"].get("short_answers")
    if found is None and not any(
        name in row for name in (*_ANSWERS, "reward_model", "annotations")
    ):
        raise ValueError(
            f"there is no column of answers ({', '.join(_ANSWERS[:3])} or reward_model)"
        )
    raw = _flat(found)
    aliases = _flat(row.get("answer_aliases"))
    texts = [text for value in (*raw, *aliases) if (text := _answer_text(value)) is not None]
    if not texts:
        raise ValueError('"golden_answers" is not a list with at least one answer')
    missing = sum(1 for value in raw if _answer_text(value) is None)
    if missing:
        notes.append(f"{missing} of {len(raw)} answers is null or empty and was left out")
    return list(dict.fromkeys(texts))


def ground_truth(reward_model: Any) -> Any:
    """What Search-R1's `reward_model` holds as target: `ground_truth` is an object with `target`, a list, one text, or
    any of these written as JSON."""
    if isinstance(reward_model, str):
        reward_model = _json(reward_model)
    truth = reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None
    if isinstance(truth, str):
        truth = _json(truth)
    if isinstance(truth, Mapping):
        truth = truth.get("target", truth.get("answer"))
    return truth


def _json(text: str) -> Any:
    """A text that is a JSON list or object as that, any other as it is."""
    if text.strip()[:1] in ("[", "{"):
        try:
            return json.loads(text)
        except ValueError:
            pass
    return text


def _flat(value: Any) -> list[Any]:
    """Answers as a list: one value, a list of them (perhaps nested or as JSON), or TriviaQA's object."""
    if value is None:
        return []
    if isinstance(value, str):
        read = _json(value)
        return [value] if isinstance(read, str) else _flat(read)
    if isinstance(value, Mapping):
        names = ("value", "target", "text", "answer", "aliases", "normalized_aliases")
        return [inner for name in names for inner in _flat(value.get(name))]
    if isinstance(value, Iterable):
        # A list keeps its nulls, so that they can be counted.
        return [inner for part in value for inner in ([None] if part is None else _list_item(part))]
    return [value]


def _list_item(value: Any) -> list[Any]:
    """A text inside a list is an answer, even one that looks like JSON."""
    return [value] if isinstance(value, str) else _flat(value)


def _answer_text(value: Any) -> str | None:
    """Numbers as people write them; None for what is no answer."""
    if value is None or (isinstance(value, float) and value != value):
        return None
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    text = str(value)
    return text if text.strip() else None


def gold_titles(row: Mapping[str, Any]) -> list[str]:
    """Titles of the passages that hold the facts, each once, in order; empty where the row does not say."""
    given = row.get("gold_titles")
    if isinstance(given, list):
        return list(dict.fromkeys(str(title) for title in given))
    facts = row.get("supporting_facts")
    found: list[Any] = []
    if isinstance(facts, Mapping):
        found = list(facts.get("title") or [])
    elif isinstance(facts, list):
        found = [
            fact.get("title") if isinstance(fact, Mapping) else fact[0]
            for fact in facts
            if isinstance(fact, Mapping) or (isinstance(fact, list) and fact)
        ]
    for name in ("paragraphs", "evidence_list"):
        parts = row.get(name)
        if not found and isinstance(parts, list):
            found = [
                part.get("title")
                for part in parts
                if isinstance(part, Mapping) and part.get("is_supporting", True)
            ]
    return list(dict.fromkeys(str(title) for title in found if title))
