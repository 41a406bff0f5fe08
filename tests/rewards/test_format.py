import pytest
from rewards.episodes import PROTOCOL, make_episode, make_question, play

from psearch_jax.config import ProtocolConfig, RewardConfig
from psearch_jax.rewards.composition import score_group
from psearch_jax.rewards.format import format_bonus


@pytest.mark.parametrize(
    ("right", "valid", "bonus"),
    [(True, True, 0.0), (True, False, -0.1), (False, True, 0.1), (False, False, 0.0)],
)
def test_the_four_cases(right, valid, bonus):
    episode = play(make_question(), 1, valid=valid)
    assert format_bonus(PROTOCOL, episode, right=right, weight=0.1) == bonus


@pytest.mark.parametrize(
    ("answer", "valid", "score"),
    [
        ("Turin", True, 1.0),
        ("Turin", False, 0.8),
        ("Lyon", True, 0.2),
        ("Lyon", False, 0.1),
        (None, True, 0.0),
    ],
)
def test_search_r1_with_format(answer, valid, score):
    question = make_question("single")
    episode = play(question, 1, answer=answer, valid=valid)
    config = RewardConfig(name="search_r1_format")
    (reward,) = score_group(config, PROTOCOL, [episode], question)
    assert reward.total == pytest.approx(score, abs=1e-12)
    assert reward.parts["em"] == float(answer == "Turin")


RESEARCH = ProtocolConfig(separator="", max_subqueries=1, answer_form="boxed", format="paired")
SEARCH, GOOD = "<think>t</think><search>q</search>", "<think>t</think><answer>{}</answer>"


@pytest.mark.parametrize(
    ("texts", "end", "code", "paper"),
    [
        ((SEARCH, GOOD.format(r"It is \boxed{Turin}.")), "answer", 1.0, 1.0),
        ((SEARCH, GOOD.format(r"\boxed{Turin Italy}")), "answer", 2 / 3, 2 / 3),
        ((SEARCH, GOOD.format(r"\boxed{Lyon}")), "answer", 0.1, 0.1),
        ((SEARCH, GOOD.format(r"\boxed{}")), "answer", 0.1, 0.1),
        ((SEARCH, GOOD.format("Turin")), "answer", 0.0, 0.0),  # no box, so no answer
        # Badly formatted: the code gives nothing, the paper's formula F1.
        (("<search>q</search>", r"<answer>\boxed{Turin Italy}</answer>"), "answer", 0.0, 2 / 3),
        (("<search>q</search>", r"<answer>\boxed{Lyon}</answer>"), "answer", 0.0, 0.0),
        ((SEARCH,), "context", 0.0, 0.0),  # did not end by itself
        ((SEARCH, r"<think>t</think>Turin"), "end", 0.0, 0.0),
        ((), "context", 0.0, 0.0),
    ],
)
def test_research_by_code_and_by_paper(texts, end, code, paper):
    question = make_question("bridge")
    episode = make_episode(question, *texts, protocol=RESEARCH)
    episode.end_reason = end
    for name, score in (("research", code), ("research_paper", paper)):
        (reward,) = score_group(RewardConfig(name=name), RESEARCH, [episode], question)
        assert reward.total == pytest.approx(score), name
        assert set(reward.parts) == {"f1", "format"}
