import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from psearch_jax.learning.advantages import group_advantages, zero_spread


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
