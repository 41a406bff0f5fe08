import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psearch_jax.errors import UserError
from psearch_jax.learning.advantages import (
    batch_advantages,
    generalized_advantages,
    group_advantages,
    leave_one_out_advantages,
    outcome_advantages,
    whiten,
    zero_spread,
)


def test_hand_computed_group():
    # Mean 1, deviations −1, 0, 1; sample variance 2 / 2 = 1.
    got = group_advantages(np.array([[0.0, 1.0, 2.0]]))
    np.testing.assert_allclose(got, [[-1.0, 0.0, 1.0]], atol=2e-6)
    # Mean 0.25; sample variance (3·0.0625 + 0.5625) / 3 = 0.25, std 0.5.
    got = group_advantages(np.array([[0.0, 0.0, 0.0, 1.0]]))
    np.testing.assert_allclose(got, [[-0.5, -0.5, -0.5, 1.5]], atol=1e-5)


def test_without_the_standard_deviation():
    got = group_advantages(
        np.array([[0.0, 0.0, 0.0, 1.0], [3.0, 1.0, 1.0, 3.0]]), normalize_std=False
    )
    np.testing.assert_allclose(got, [[-0.25, -0.25, -0.25, 0.75], [1.0, -1.0, -1.0, 1.0]])


@given(st.floats(-10, 10), st.integers(1, 9), st.booleans())
def test_equal_rewards_give_exactly_zero(reward, members, normalize):
    rewards = np.full((1, members), reward)
    assert np.all(group_advantages(rewards, normalize_std=normalize) == 0.0)
    assert zero_spread(rewards).all()


def test_equal_rewards_give_zero_where_the_mean_rounds():
    rewards = np.full((1, 3), 0.1)
    assert (rewards - rewards.mean(axis=1, keepdims=True)).any()  # the trap is real
    assert np.all(group_advantages(rewards) == 0.0)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=8), st.floats(-3, 3))
def test_a_group_is_centred_and_unmoved_by_a_constant(rewards, constant):
    rewards_GxM = np.array([rewards])
    got = group_advantages(rewards_GxM)
    assert abs(got.mean()) < 1e-4
    assert np.ptp(rewards) < 1e-3 or np.allclose(
        got, group_advantages(rewards_GxM + constant), atol=1e-3
    )


def test_groups_do_not_touch_each_other():
    first, second = np.array([[0.0, 1.0]]), np.array([[5.0, 9.0]])
    both = group_advantages(np.concatenate([first, second]))
    np.testing.assert_array_equal(both[:1], group_advantages(first))
    np.testing.assert_array_equal(both[1:], group_advantages(second))


def test_leave_one_out_by_hand():
    # Against the mean of the others: 0 − 1.5, 1 − 1, 2 − 0.5; a group of equals gets nothing.
    got = leave_one_out_advantages(np.array([[0.0, 1.0, 2.0], [0.1, 0.1, 0.1]]))
    np.testing.assert_allclose(got, [[-1.5, 0.0, 1.5], [0.0, 0.0, 0.0]], atol=1e-6)
    assert np.all(got[1] == 0.0)
    assert leave_one_out_advantages(np.array([[3.0]])) == 0.0


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=6))
def test_leave_one_out_is_what_its_name_says(rewards):
    got = leave_one_out_advantages(np.array([rewards]))[0]
    if np.ptp(rewards) > 1e-6:
        for i, reward in enumerate(rewards):
            others = rewards[:i] + rewards[i + 1 :]
            assert abs(got[i] - (reward - np.mean(others))) < 1e-5


def test_reinforce_with_the_batch_for_a_baseline_by_hand():
    # Mean 1 over the batch; squares 1, 1, 1, 1 over 3: std √(4/3).
    rewards = np.array([[0.0, 2.0], [2.0, 0.0]])
    np.testing.assert_allclose(
        batch_advantages(rewards, normalize_std=False), [[-1.0, 1.0], [1.0, -1.0]]
    )
    root = np.sqrt(3 / 4)
    np.testing.assert_allclose(batch_advantages(rewards), [[-root, root], [root, -root]], atol=1e-5)
    # Equal within a group, but not in the batch: unlike GRPO it learns from that.
    np.testing.assert_allclose(
        batch_advantages(np.array([[0.0, 0.0], [1.0, 1.0]]), normalize_std=False),
        [[-0.5, -0.5], [0.5, 0.5]],
    )
    assert np.all(batch_advantages(np.full((2, 2), 0.1)) == 0.0)


def test_advantages_by_name():
    rewards = np.array([[0.0, 1.0, 2.0]])
    for name, want in (
        ("grpo", group_advantages(rewards, normalize_std=False)),
        ("rloo", leave_one_out_advantages(rewards)),
        ("reinforce", batch_advantages(rewards, normalize_std=False)),
    ):
        np.testing.assert_array_equal(outcome_advantages(name, rewards, normalize_std=False), want)
    with pytest.raises(UserError, match="algorithm.advantage is 'ppo'; use one of grpo"):
        outcome_advantages("ppo", rewards)


def test_gae_by_hand():
    # γ = 0.5, λ = 0.5, rewards 0 and 1, values 0.4 and 0.6:
    # the last surprise is 1 − 0.6 = 0.4; the first 0 + 0.5·0.6 − 0.4 = −0.1, plus 0.25·0.4.
    got = generalized_advantages(
        np.array([0.0, 1.0]), np.array([0.4, 0.6]), np.ones(2, bool), gamma=0.5, gae_lambda=0.5
    )
    np.testing.assert_allclose(got[0], [0.0, 0.4], atol=1e-6)
    np.testing.assert_allclose(got[1], [0.4, 1.0], atol=1e-6)
    # γ = λ = 1: return minus value.
    got = generalized_advantages(
        np.array([0.1, 0.0, 1.0]),
        np.array([0.5, 0.2, 0.7]),
        np.ones(3, bool),
        gamma=1.0,
        gae_lambda=1.0,
    )
    np.testing.assert_allclose(got[0], [0.6, 0.8, 0.3], atol=1e-6)
    np.testing.assert_allclose(got[1], [1.1, 1.0, 1.0], atol=1e-6)


@given(
    st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.booleans()), max_size=12),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_gae_steps_over_what_the_environment_wrote(tokens, gamma, gae_lambda):
    """As if observations were not there, whatever the critic or a reward says about them."""
    rewards, values, policy = (np.array([token[i] for token in tokens]) for i in range(3))
    policy = policy.astype(bool)
    both = {"gamma": gamma, "gae_lambda": gae_lambda}
    got = generalized_advantages(rewards.astype(float), values.astype(float), policy, **both)
    want = generalized_advantages(
        rewards[policy].astype(float),
        values[policy].astype(float),
        np.ones(policy.sum(), bool),
        **both,
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a[policy], b)
        assert np.all(a[~policy] == 0.0)


def test_whitening_counts_policy_tokens_only():
    advantages = [np.array([9.0, 0.0, 2.0], np.float32), np.array([4.0], np.float32)]
    policy = [np.array([False, True, True]), np.array([True])]
    # 0, 2 and 4: mean 2, sample std 2.
    got = whiten(advantages, policy)
    np.testing.assert_allclose(got[0], [0.0, -1.0, 0.0], atol=1e-5)
    np.testing.assert_allclose(got[1], [1.0], atol=1e-5)
    same = whiten([np.full(3, 0.1, np.float32)], [np.ones(3, bool)])
    np.testing.assert_array_equal(same[0], 0.0)
    assert whiten([np.ones(1, np.float32)], [np.ones(1, bool)])[0] == 0.0
    assert whiten([], []) == []
