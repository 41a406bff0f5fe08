import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rewards.episodes import PROTOCOL, make_episode, make_question, play

from psearch_jax.config import RewardConfig, RewardParts
from psearch_jax.config_files import resolve
from psearch_jax.config_values import CHOICES
from psearch_jax.errors import UserError
from psearch_jax.retrieval.passages import Hit, Passage
from psearch_jax.rewards.composition import REWARDS, Reward, score_group, score_groups
from psearch_jax.rewards.judge import Verdict
from psearch_jax.rollout.episode import Episode, Role

ALL = RewardParts(**{name: 1.0 for name in REWARDS if name != "composed"})


class Yes:
    """A judge that calls whatever begins with "yes" right and fails on what begins with "fail"."""

    def __init__(self):
        self.batches = []

    def judge(self, cases):
        self.batches.append([case.answer for case in cases])
        return [
            Verdict(value=0.25, failed=True)
            if case.answer.startswith("fail")
            else Verdict(value=float(case.answer.startswith("yes")))
            for case in cases
        ]


def score(name, episodes, question, judge=None, **settings):
    """Every reward by its name, a composed one with all the others in it."""
    if name == "composed":
        settings.setdefault("parts", ALL)
    config = RewardConfig(name=name, **settings)
    return score_group(config, PROTOCOL, episodes, question, judge=judge or Yes())


def test_exact_match_is_search_r1s_reward():
    question = make_question("single", ("Turin", "Torino"))
    episodes = [play(question, 1, answer=a) for a in ("torino!", "Lyon", None)]
    rewards = score_group(RewardConfig(name="exact_match"), PROTOCOL, episodes, question)
    assert rewards == [Reward(x, {"em": x}) for x in (1.0, 0.0, 0.0)]


def test_unknown_name():
    with pytest.raises(
        UserError, match=r"reward.name is 'f2'; use one of composed, exact_match, f1, format"
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
    assert score(name, [dirty], trapped) == score(name, [clean], plain)


@pytest.mark.parametrize("name", sorted(REWARDS))
@settings(deadline=None, max_examples=30)
@given(tokens=st.lists(st.integers(0, 50)), role=st.sampled_from([Role.PROMPT, Role.OBSERVATION]))
def test_law_02_other_tokens_of_the_episode_are_not_read(name, tokens, role):
    question = make_question()
    plain, more = play(question, 2), play(question, 2)
    more.ids, more.roles, more.logprobs = tokens, [role] * len(tokens), [0.0] * len(tokens)
    assert score(name, [more], question) == score(name, [plain], question)


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_an_episode_without_turns_and_a_group_without_members(name):
    question = make_question()
    episode = Episode(question=question, group=0, member=0, end_reason="context")
    (reward,) = score(name, [episode], question)
    assert reward.total <= 0.0 or "search" in name or name == "composed"  # ParallelSearch's λ_d
    assert score(name, [], question) == []


def test_the_names_are_those_of_the_configuration():
    assert set(CHOICES["reward.name"]) == set(REWARDS)


def test_simple_rewards():
    question = make_question("single", ("Turin",))
    episodes = [play(question, 1, answer=a) for a in ("Turin", "Turin Italy", "Lyon", None)]
    assert [r.total for r in score("f1", episodes, question)] == [1.0, pytest.approx(2 / 3), 0, 0]
    assert [r.total for r in score("substring", episodes, question)] == [1.0, 1.0, 0.0, 0.0]
    assert [r.total for r in score("format", episodes, question)] == [1.0, 1.0, 1.0, 0.0]
    assert score("f1", episodes, question)[2].parts == {"f1": 0.0}


def test_parts_add_up_under_their_own_names():
    question = make_question("single", ("Turin",))
    episodes = [play(question, 1, answer=a, valid=v) for a, v in (("Turin", True), ("Lyon", False))]
    parts = RewardParts(exact_match=1.0, format=0.1, research=0.5)
    right, wrong = score("composed", episodes, question, parts=parts)
    assert right.parts == {
        "exact_match": 1.0,
        "format": pytest.approx(0.1),
        "research_f1": 0.5,
        "research_format": 0.0,
    }
    assert right.total == pytest.approx(1.6)
    assert wrong.total == 0.0 and set(wrong.parts) == set(right.parts)


@settings(deadline=None, max_examples=25)
@given(
    weights=st.fixed_dictionaries(
        {name: st.sampled_from([0.0, 0.5, 2.0]) for name in REWARDS if name != "composed"}
    )
)
def test_a_composed_reward_is_the_weighted_sum_of_its_parts(weights):
    question = make_question()
    episodes = [play(question, n, n == 1, a) for n, a in ((1, "Turin"), (3, "fail"), (2, "yes"))]
    wanted = [0.0] * len(episodes)
    for name, weight in weights.items():
        for i, reward in enumerate(score(name, episodes, question)):
            wanted[i] += weight * reward.total
    rewards = score("composed", episodes, question, parts=RewardParts(**weights))
    assert [reward.total for reward in rewards] == pytest.approx(wanted)
    for reward in rewards:
        summands = [value for name, value in reward.parts.items() if name != "judge_failed"]
        assert sum(summands) == pytest.approx(reward.total)


def test_a_judge_is_asked_once_for_all_groups_and_only_where_it_must():
    first, second = make_question(text="one?"), make_question(text="two?")
    groups = [
        [play(first, 1, answer=a) for a in ("Turin", "yes", "no", None)],
        [play(second, 1, answer=a) for a in ("fail", "")],
    ]
    judge = Yes()
    rewards = score_groups(
        RewardConfig(name="judge"), PROTOCOL, groups, [first, second], judge=judge
    )
    assert judge.batches == [["yes", "no", "fail"]]  # right ones and silent ones need no judge
    assert [reward.total for reward in rewards[0]] == [1.0, 1.0, 0.0, 0.0]
    assert rewards[1] == [
        Reward(0.25, {"judge": 0.25, "judge_failed": 1.0}),
        Reward(0.0, {"judge": 0.0, "judge_failed": 0.0}),
    ]


def test_no_judge_is_opened_where_none_is_needed():
    question = make_question()
    config = RewardConfig(name="composed", parts=RewardParts(exact_match=1.0))
    assert score_group(config, PROTOCOL, [play(question, 1)], question)[0].total == 1.0


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["reward.name=composed"], "each of them has weight 0"),
        (["reward.parts.f1=0.5"], "reward.name=exact_match does not read the parts"),
        (["reward.gated_turns=0.5"], "reward.gated_turns is set, but only gated read"),
        (
            ["reward.name=composed", "reward.parts.f1=1", "reward.gain_waste=0.1"],
            "reward.gain_waste is set, but only gain read",
        ),
        (["reward.name=judge"], "name both"),
        (
            ["reward.name=judge", "reward.judge.model=m", "reward.judge.endpoint=ftp://x"],
            "address like http://",
        ),
        (["reward.judge.endpoint=http://me:secret@host/v1"], "without a name or password"),
        (["reward.judge.fallback=2"], "at most 1"),
        (["reward.judge.timeout=0"], "above 0"),
        (["reward.search_r1_scores=[1, 2]"], "reward.search_r1_scores"),
        (["reward.parts.exactmatch=1"], "did you mean reward.parts.exact_match"),
    ],
)
def test_law_11_impossible_rewards(overrides, sentence):
    with pytest.raises(UserError, match=sentence):
        resolve([], overrides)


def test_law_11_a_setting_is_accepted_where_a_reward_reads_it():
    for overrides in (
        ["reward.name=gated", "reward.gated_turns=0.5"],
        ["reward.name=parallel_search_paper", "reward.lambda_search=0.5"],
        ["reward.name=composed", "reward.parts.gain=1", "reward.gain_waste=0.1"],
        ["reward.name=search_r1_format", "reward.search_r1_scores=[1, 0.9, 0.1, 0, -1]"],
        ["reward.name=judge", "reward.judge.endpoint=http://h:1/v1", "reward.judge.model=m"],
    ):
        resolve([], overrides)
