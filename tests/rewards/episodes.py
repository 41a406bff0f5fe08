"""Episodes as the engine would hand them over, built from the text of their turns."""

from psearch_jax.config import ProtocolConfig
from psearch_jax.questions.question import Question
from psearch_jax.retrieval.passages import Hit, Passage
from psearch_jax.rollout.episode import Episode, Turn
from psearch_jax.rollout.protocol import parse_turn

PROTOCOL = ProtocolConfig()
HIT = Hit(Passage("1", "Paris", "capital of France: Paris"), 0.9)


def make_question(
    kind: str = "parallelizable", golden: tuple[str, ...] = ("Turin",), text: str = "?"
) -> Question:
    return Question(id="q", text=text, golden_answers=golden, kind=kind)


def make_episode(
    question: Question, *texts: str, hit: Hit = HIT, protocol: ProtocolConfig = PROTOCOL
) -> Episode:
    """One policy turn a text; what a turn is follows from parsing it. Token ids play no role here."""
    episode = Episode(question=question, group=0, member=0, end_reason="answer")
    for text in texts:
        action = parse_turn(protocol, text)
        episode.turns.append(
            Turn(
                kind=action.kind,
                start=0,
                stop=0,
                text=text,
                queries=action.queries,
                hits=tuple((hit,) for _ in action.queries),
                answer=action.answer,
            )
        )
    return episode


def play(
    question: Question,
    searches: int,
    split: bool = False,
    answer: str | None = "Turin",
    valid: bool = True,
) -> Episode:
    """Searches (the first one decomposed if `split`), then an answer."""
    texts = [
        f"<think>t</think><search>{'a##b' if split and i == 0 else f'q{i}'}</search>"
        for i in range(searches)
    ]
    if answer is not None:
        texts.append(f"{'<think>t</think>' if valid else ''}<answer>{answer}</answer>")
    return make_episode(question, *texts)
