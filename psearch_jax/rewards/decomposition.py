"""Rewards for asking side by side: ParallelSearch as released and by its formula, and our gated variant."""

from __future__ import annotations

from collections.abc import Sequence

from psearch_jax.config import ProtocolConfig, RewardConfig
from psearch_jax.questions.question import Question
from psearch_jax.rewards.answers import exact_match
from psearch_jax.rewards.format import format_bonus
from psearch_jax.rollout.episode import Episode, Turn
from psearch_jax.rollout.protocol import search_content, written_queries


def decomposed(protocol: ProtocolConfig, episode: Episode) -> bool:
    """Whether the first search contains the separator, whatever stands on its two sides (of a tool call: whether it
    lists two or more queries).

    That is what the released ParallelSearch looks for. Read from the policy text of the turn.
    """
    return any(_split(protocol, turn) for turn in episode.searches[:1])


def _split(protocol: ProtocolConfig, turn: Turn) -> bool:
    """Whether a search turn asks for several things at once."""
    if protocol.query_form == "tool_call":
        return len(written_queries(protocol, turn.text)) > 1
    return bool(protocol.separator) and protocol.separator in search_content(protocol, turn.text)


def parallel_search_parts(
    config: RewardConfig, protocol: ProtocolConfig, episode: Episode, question: Question
) -> dict[str, float]:
    """ParallelSearch's released reward by part (reference: its paper's r_o + r_d + r_s + r_f, and its code).

    With n search turns, λ and α of the configuration:

    - em: 1 for an exact match.
    - decomposition: parallelizable: α·λ_d if decomposed; every other kind: λ_d if not.
    - search: −λ_s·|n − 1| for parallelizable and single questions, −λ_s·|min(n, 2) − 2| for bridge
      questions, plus the constant λ_s that the released code adds to the paper's formula.
    - format: −λ_f if right but badly formatted, +λ_f if wrong but well formatted.

    A *mixed* question (parallel, then sequential) is treated as a bridge question, because the reward knows
    three kinds only; one of unknown kind as a single-hop question, as a row without a type is.
    """
    split = decomposed(protocol, episode)
    return _formula(config, protocol, episode, question, split=split, constant=1)


def parallel_search_paper_parts(
    config: RewardConfig, protocol: ProtocolConfig, episode: Episode, question: Question
) -> dict[str, float]:
    """The formula of ParallelSearch's paper: as `parallel_search_parts`, without the added constant, and an episode
    is decomposed if any of its searches is. The paper states no values of α and λ_f; ours are the code's."""
    split = any(_split(protocol, turn) for turn in episode.searches)
    return _formula(config, protocol, episode, question, split=split, constant=0)


def _formula(
    config: RewardConfig,
    protocol: ProtocolConfig,
    episode: Episode,
    question: Question,
    *,
    split: bool,
    constant: int,
) -> dict[str, float]:
    """r_o, r_d, r_s + `constant`·λ_s and r_f for an episode that is decomposed (`split`) or not."""
    right = exact_match(episode.answer, question.golden_answers)
    n = len(episode.searches)
    if question.kind == "parallelizable":
        decomposition = config.alpha_decomposition * config.lambda_decomposition if split else 0.0
    else:
        decomposition = 0.0 if split else config.lambda_decomposition
    if question.kind in ("bridge", "mixed"):
        distance = abs(min(n, 2) - 2)
    else:
        distance = abs(n - 1)
    return {
        "em": float(right),
        "decomposition": decomposition,
        "search": config.lambda_search * (constant - distance),
        "format": format_bonus(protocol, episode, right=right, weight=config.lambda_format),
    }


def gated_parts(
    config: RewardConfig, episodes: Sequence[Episode], question: Question
) -> list[dict[str, float]]:
    """Our reward: efficiency counts only when the answer is right, and only against the group.

    A wrong answer gets exactly 0. A right one gets 1, plus `gated_turns` scaled by its rank in generation
    turns among the right members of the group (fewest 1, most 0, evenly in between, equals equal), plus
    `gated_subqueries` scaled likewise by its rank in distinct sub-queries beyond those of the best member
    (the one with the fewest turns, then the fewest sub-queries). So a right answer is worth between 1 and
    1 + both weights, no wrong one ever beats it, and neither needless turns nor endless fan-out are free.
    Nothing depends on the kind of the question: a question that needs two steps is compared with others that
    took two.
    """
    right = [exact_match(episode.answer, question.golden_answers) for episode in episodes]
    turns = [len(episode.turns) for episode in episodes]
    queries = [distinct_queries(episode) for episode in episodes]
    winners = [i for i, is_right in enumerate(right) if is_right]
    best = min(((turns[i], queries[i]) for i in winners), default=(0, 0))[1]
    turn_rank = _rank({i: turns[i] for i in winners})
    query_rank = _rank({i: max(0, queries[i] - best) for i in winners})
    return [
        {
            "em": float(right[i]),
            "turns": config.gated_turns * turn_rank.get(i, 0.0),
            "subqueries": config.gated_subqueries * query_rank.get(i, 0.0),
        }
        for i in range(len(episodes))
    ]


def distinct_queries(episode: Episode) -> int:
    """Sub-queries of an episode that differ in more than case and blanks."""
    return len({fold(query) for turn in episode.searches for query in turn.queries})


def fold(query: str) -> str:
    """A form that is equal for queries that differ in case and blanks only."""
    return " ".join(query.casefold().split())


def _rank(values: dict[int, int]) -> dict[int, float]:
    """The smallest value gets 1, the largest 0, those between by place; where all are equal all get 1."""
    places = {value: place for place, value in enumerate(sorted(set(values.values())))}
    last = max(1, len(places) - 1)
    return {member: 1.0 - places[value] / last for member, value in values.items()}
