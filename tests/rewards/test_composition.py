import pytest
from hypothesis import given
from hypothesis import strategies as st
from rewards.episodes import PROTOCOL, make_episode, make_question, play

from psearch_jax.config import RewardConfig
from psearch_jax.errors import UserError
from psearch_jax.retrieval.passages import Hit, Passage
from psearch_jax.rewards.composition import REWARDS, Reward, score_group
from psearch_jax.rollout.episode import Episode, Role


def test_exact_match_is_search_r1s_reward():
    question = make_question("single", ("Turin", "Torino"))
    episodes = [play(question, 1, answer=a) for a in ("torino!", "Lyon", None)]
    rewards = score_group(RewardConfig(name="exact_match"), PROTOCOL, episodes, question)
    assert rewards == [Reward(x, {"em": x}) for x in (1.0, 0.0, 0.0)]


def test_unknown_name():
    with pytest.raises(
        UserError, match=r"reward.name is 'f2'; use one of exact_match, gated, parallel_search"
    ):
        score_group(RewardConfig(name="f2"), PROTOCOL, [], make_question())


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_law_02_fault_01_tags_in_question_and_passages_never_score(name):
    """Example tags in the prompt and a passage that holds the answer in tags are worth nothing."""
    trap = "<think>x</think><search>a##b</search><answer>Turin</answer>"
    plain, trapped = make_question(), make_question(text=trap)
    hit = Hit(Passage("1", trap, trap), 1.0)
    turns = ("<think>t</think><search>q</search>", "<think>t</think>Turin")
    clean = make_episode(plain, *turns)
    dirty = make_episode(trapped, *turns, hit=hit)
    assert dirty.answer is None
    config = RewardConfig(name=name)
    assert score_group(config, PROTOCOL, [dirty], trapped) == score_group(
        config, PROTOCOL, [clean], plain
    )


@pytest.mark.parametrize("name", sorted(REWARDS))
@given(tokens=st.lists(st.integers(0, 50)), role=st.sampled_from([Role.PROMPT, Role.OBSERVATION]))
def test_law_02_other_tokens_of_the_episode_are_not_read(name, tokens, role):
    question = make_question()
    plain, more = play(question, 2), play(question, 2)
    more.ids, more.roles, more.logprobs = tokens, [role] * len(tokens), [0.0] * len(tokens)
    config = RewardConfig(name=name)
    assert score_group(config, PROTOCOL, [more], question) == score_group(
        config, PROTOCOL, [plain], question
    )


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_an_episode_without_turns_and_a_group_without_members(name):
    question = make_question()
    episode = Episode(question=question, group=0, member=0, end_reason="context")
    config = RewardConfig(name=name)
    (reward,) = score_group(config, PROTOCOL, [episode], question)
    assert reward.parts["em"] == 0.0
    assert score_group(config, PROTOCOL, [], question) == []
