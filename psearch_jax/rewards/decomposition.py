"""Rewards for asking side by side: ParallelSearch as it was released, and our gated variant."""

from __future__ import annotations

from collections.abc import Sequence

from psearch_jax.config import ProtocolConfig, RewardConfig
from psearch_jax.questions.question import Question
from psearch_jax.rewards.answers import exact_match
from psearch_jax.rewards.format import format_bonus
from psearch_jax.rollout.episode import Episode


def decomposed(protocol: ProtocolConfig, episode: Episode) -> bool:
    """Whether the first search contains the separator, whatever stands on its two sides.

    That is what the released ParallelSearch looks for. Read from the policy text of the turn.
    """
    searches = episode.searches
    if not searches or not protocol.separator:
        return False
    opening, closing = (tag.strip() for tag in protocol.search)
    text = searches[0].text
    before = text[: text.find(closing)] if closing in text else text
    return protocol.separator in before[before.rfind(opening) + len(opening) :]


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
    right = exact_match(episode.answer, question.golden_answers)
    split = decomposed(protocol, episode)
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
        "search": config.lambda_search * (1 - distance),
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
    return len({" ".join(q.casefold().split()) for turn in episode.searches for q in turn.queries})


def _rank(values: dict[int, int]) -> dict[int, float]:
    """The smallest value gets 1, the largest 0, those between by place; where all are equal all get 1."""
    places = {value: place for place, value in enumerate(sorted(set(values.values())))}
    last = max(1, len(places) - 1)
    return {member: 1.0 - places[value] / last for member, value in values.items()}
