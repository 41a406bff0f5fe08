"""One line of a results file: what was played, what was answered, and what that is worth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from psearch_jax.config import ProtocolConfig
from psearch_jax.questions.question import Question
from psearch_jax.retrieval.passages import Hit
from psearch_jax.rewards import answers
from psearch_jax.rewards.decomposition import distinct_queries
from psearch_jax.rollout.episode import Episode, Role
from psearch_jax.rollout.protocol import well_formed as is_well_formed

#: Why an episode was cut off.
CUT_OFF = ("budget", "context")


def episode_facts(
    episode: Episode,
    *,
    decode: Callable[[Sequence[int]], str],
    well_formed: Callable[[Episode], bool],
) -> dict[str, Any]:
    """What was played, without a judgement of the answer.

    Args:
      episode: a finished episode.
      decode: token ids to text, special tokens kept.
      well_formed: the protocol's judgement of the policy turns.

    Returns:
      A JSON object: the `question`, the `answer` (None if there is none), the numbers of `metrics.METRICS` that
      are no score, the `end_reason`, `segments` ([role, text] in order, role "prompt", "policy" or
      "observation"), `tokens` (for each policy segment its tokens as [text, log-probability]) and `results`
      (a search turn each: its `queries` and for each query its `passages`).
    """
    searches = episode.searches
    return {
        "question": episode.question.text,
        "answer": episode.answer,
        "turns": len(episode.turns),
        "calls": len(episode.turns),
        "searches": len(searches),
        "subqueries": episode.subqueries,
        "distinct_queries": distinct_queries(episode),
        "decomposed": bool(searches and len(searches[0].queries) >= 2),
        "policy_tokens": episode.count(Role.POLICY),
        "observation_tokens": episode.count(Role.OBSERVATION),
        "prompt_tokens": episode.count(Role.PROMPT),
        "well_formed": bool(well_formed(episode)),
        "answered": episode.answer is not None,
        "invalid_turns": sum(1 for turn in episode.turns if turn.kind == "invalid"),
        "failed_searches": sum(turn.failed for turn in episode.turns),
        "truncated": episode.end_reason in CUT_OFF,
        "end_reason": episode.end_reason,
        "segments": segments(episode, decode),
        "tokens": policy_tokens(episode, decode),
        "results": [found_record(turn.queries, turn.hits) for turn in searches],
    }


def found_record(queries: Sequence[str], hits: Sequence[Sequence[Hit]]) -> dict[str, Any]:
    """What one search found, as JSON."""
    return {
        "queries": list(queries),
        "passages": [
            [
                {
                    "id": hit.passage.id,
                    "title": hit.passage.title,
                    "text": hit.passage.text,
                    "score": round(float(hit.score), 4),
                }
                for hit in found
            ]
            for found in hits
        ],
    }


def episode_record(
    episode: Episode,
    *,
    decode: Callable[[Sequence[int]], str],
    well_formed: Callable[[Episode], bool],
    sample: int = 0,
) -> dict[str, Any]:
    """One line of a results file: `episode_facts` with what `scored` adds."""
    facts = episode_facts(episode, decode=decode, well_formed=well_formed)
    return scored(episode.question, facts, sample=sample)


def scored(question: Question, facts: Mapping[str, Any], *, sample: int = 0) -> dict[str, Any]:
    """The line of what was played for a question: identification (`id`, `dataset`, `sample` of the question, `kind`,
    `unseen`), the `golden_answers`, the scores of the answer (`em`, `f1`, `substring`, `tolerant`), and where the
    data set names them how many of the gold passages were retrieved (`gold_recall`, `all_gold`; else None)."""
    golden, answer = question.golden_answers, facts["answer"]
    recall = gold_recall(question, facts["results"])
    return {
        "id": question.id,
        "dataset": question.dataset,
        "sample": sample,
        "kind": question.kind,
        "unseen": question.metadata.get("unseen"),
        "golden_answers": list(golden),
        "em": answers.exact_match(answer, golden),
        "f1": answers.f1(answer, golden),
        "substring": answers.substring_match(answer, golden),
        "tolerant": answers.tolerant_match(answer, golden),
        "gold_recall": recall,
        "all_gold": None if recall is None else recall == 1.0,
        **facts,
    }


def gold_recall(question: Question, results: Iterable[Mapping[str, Any]]) -> float | None:
    """The share of a question's gold passages among those that its searches found, or None where it names none.

    Gold passages are known by title (`gold_titles`) or by id (`needs`, a list a hop).
    """
    titles = question.metadata.get("gold_titles")
    needs = question.metadata.get("needs")
    name = "title" if titles else "id"
    gold = {_plain(t) for t in titles or ()} or {_plain(i) for hop in needs or () for i in hop}
    if not gold:
        return None
    found = {
        _plain(passage[name])
        for search in results
        for passages in search["passages"]
        for passage in passages
    }
    return len(gold & found) / len(gold)


def _plain(text: str) -> str:
    """Titles differ in case and blanks between a data set and a corpus."""
    return " ".join(str(text).split()).casefold()


def segments(episode: Episode, decode: Callable[[Sequence[int]], str]) -> list[list[str]]:
    """The episode as [role, text] pairs, one a run of tokens with equal role."""
    parts: list[list[str]] = []
    start = 0
    for stop in range(1, len(episode.ids) + 1):
        if stop == len(episode.ids) or episode.roles[stop] != episode.roles[start]:
            role = Role(episode.roles[start]).name.lower()
            parts.append([role, decode(episode.ids[start:stop])])
            start = stop
    return parts


def spelling(decode: Callable[[Sequence[int]], str]) -> Callable[[Sequence[int]], str]:
    """The same decoding, which remembers single tokens: a page of them is asked for one by one."""
    known: dict[int, str] = {}

    def spelled(ids: Sequence[int]) -> str:
        if len(ids) != 1:
            return decode(ids)
        text = known.get(ids[0])
        if text is None:
            text = known[ids[0]] = decode(ids)
        return text

    return spelled


def policy_tokens(
    episode: Episode,
    decode: Callable[[Sequence[int]], str],
    advantages: Sequence[float] | None = None,
) -> list[list[list[Any]]]:
    """The tokens of each policy segment as [text, log-probability], for a page that shows them.

    A character whose bytes lie in several tokens stands with the last of them, and the log-probabilities of the
    tokens are added up there. With `advantages` (one for every token of the episode) a token has its own behind it.
    """
    parts: list[list[list[Any]]] = []
    logprobs = episode.logprobs or [0.0] * len(episode.ids)
    waiting: list[int] = []
    total = 0.0
    for at, (token, role) in enumerate(zip(episode.ids, episode.roles, strict=True)):
        if role != Role.POLICY:
            continue
        if at == 0 or episode.roles[at - 1] != Role.POLICY:
            parts.append([])
        waiting.append(token)
        total += logprobs[at]
        text = decode(waiting)
        last = at + 1 == len(episode.ids) or episode.roles[at + 1] != Role.POLICY
        if last or not text.endswith("\ufffd") or len(waiting) > 8:
            own = [] if advantages is None else [round(float(advantages[at]), 4)]
            parts[-1].append([text, round(total, 3), *own])
            waiting, total = [], 0.0
    return parts


def training_record(
    step: int,
    episode: Episode,
    reward: float,
    advantages: float | Sequence[float],
    *,
    decode: Callable[[Sequence[int]], str],
    well_formed: Callable[[Episode], bool],
) -> dict[str, Any]:
    """A line of a training run's `episodes.jsonl`: a record with its `step`, `reward` and `advantage`, the mean over
    the policy's tokens where each has its own (then `tokens` holds them)."""
    line = episode_record(episode, decode=decode, well_formed=well_formed, sample=episode.member)
    if isinstance(advantages, Sequence):
        drawn = [a for a, r in zip(advantages, episode.roles, strict=True) if r == Role.POLICY]
        line["tokens"] = policy_tokens(episode, decode, advantages)
        mean = sum(drawn) / max(1, len(drawn))
    else:
        mean = advantages
    return {"step": step, "reward": round(reward, 5), "advantage": round(float(mean), 5), **line}


def training_records(
    protocol: ProtocolConfig,
    step: int,
    episodes: Sequence[Episode],
    rewards: Sequence[float],
    advantages: Sequence[float | Sequence[float]],
    decode: Callable[[Sequence[int]], str],
) -> list[dict[str, Any]]:
    """Lines of the first episodes that a step learned from; `rewards` and `advantages` may go on behind them."""
    return [
        training_record(
            step,
            episode,
            reward,
            advantage,
            decode=decode,
            well_formed=lambda played: is_well_formed(protocol, played),
        )
        for episode, reward, advantage in zip(episodes, rewards, advantages, strict=False)
    ]
