"""From judged episodes to minibatches."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psearch_jax.config import AlgorithmConfig
from psearch_jax.learning.batches import Sequence, micro_batch_rows, pack, padding_share, unpack
from psearch_jax.learning.experience import (
    give_advantages,
    keep_bad_batch,
    merge_metrics,
    minibatches,
    shaped_rewards,
    to_sequence,
)
from psearch_jax.questions.question import Question
from psearch_jax.rollout.episode import Episode, Role

CONFIG = AlgorithmConfig(row_length=8, micro_rows=1, minibatches=2)
QUESTION = Question(id="q", text="?", golden_answers=("1",))


def episode(length, end_reason="answer"):
    roles = [Role.PROMPT, *[Role.POLICY] * (length - 1)]
    return Episode(
        question=QUESTION,
        group=0,
        member=0,
        ids=list(range(length)),
        roles=[int(role) for role in roles],
        logprobs=[0.0, *[-1.0] * (length - 1)],
        end_reason=end_reason,
    )


def with_advantages(*advantages):
    return [replace(to_sequence(CONFIG, episode(4)), advantages=a) for a in advantages]


def held(batches):
    return sum((batch.segments_RxL > 0).sum() for batch in batches)


def test_what_has_no_advantage_is_left_out_of_the_computation_only():
    sequences = with_advantages(0.0, 0.0, 0.5, -0.5)
    batches, denominator = minibatches(CONFIG, sequences, 4, 2)
    assert [batch.tokens_RxL.shape for batch in batches] == [(2, 8), (2, 8)]
    assert held(batches) == 8
    assert denominator == 12 / 2  # policy tokens of all four
    _, denominator = minibatches(replace(CONFIG, aggregation="sequence_mean"), sequences, 4, 2)
    assert denominator == 4 / 2
    fixed = replace(CONFIG, aggregation="fixed_length", fixed_length=10)
    assert minibatches(fixed, sequences, 4, 2)[1] == 40 / 2
    for terms in ({"entropy_coefficient": 0.1}, {"kl_coefficient": 0.1}):
        assert held(minibatches(replace(CONFIG, **terms), sequences, 4, 2)[0]) == 16
    in_reward = replace(CONFIG, kl_coefficient=0.1, kl_place="reward")
    assert held(minibatches(in_reward, sequences, 4, 2)[0]) == 8  # the advantage has it already


def test_where_nothing_has_an_advantage_a_group_is_scored_all_the_same():
    assert held(minibatches(CONFIG, with_advantages(0.0, 0.0, 0.0, 0.0), 4, 2)[0]) == 8


def test_episodes_that_were_cut_off_are_filtered_if_asked():
    cut = episode(4, "context")
    assert to_sequence(CONFIG, cut).weights.sum() == 3
    filtered = to_sequence(replace(CONFIG, overlong_filter=True), cut)
    assert filtered.weights.sum() == 0
    sequences = [*with_advantages(0.5, -0.5), replace(filtered, advantages=0.5)]
    batches, denominator = minibatches(CONFIG, sequences, 4, 2)
    assert denominator == 6 / 2
    assert held(batches) == 8


def test_near_the_end_of_the_context_rewards_fall():
    groups = [[episode(4), episode(7)], [episode(8), episode(2)]]
    rewards = np.ones((2, 2))
    assert shaped_rewards(CONFIG, rewards, groups, 8) is rewards
    shaped = replace(CONFIG, overlong_buffer=4, overlong_penalty=0.8)
    np.testing.assert_allclose(shaped_rewards(shaped, rewards, groups, 8), [[1.0, 0.4], [0.2, 1.0]])


def test_a_divergence_in_the_reward_by_hand():
    """Two members with reward 1 whose policy tokens diverged by 3 · 0.2 and by 0: 1 − 0.5 · 0.6 against 1."""
    sequences = with_advantages(0.0, 0.0)
    divergences = [np.array([9.0, 0.2, 0.2, 0.2]), np.zeros(4)]  # a prompt does not pay
    config = replace(CONFIG, normalize_std=False, kl_coefficient=0.5, kl_place="reward")
    got, returns = give_advantages(
        config, np.ones((1, 2)), sequences, divergences=divergences, kl_coefficient=0.5
    )
    assert [s.advantages for s in got] == [pytest.approx(-0.15), pytest.approx(0.15)]
    assert returns == []


def test_gae_pays_token_by_token():
    """γ = λ = 1: what comes after a token, less the value; the reward stands at the last policy token."""
    sequence = Sequence(ids=[1, 2, 3, 4], weights=np.array([0.0, 1.0, 0.0, 1.0]), old_logprobs=-1.0)
    config = replace(CONFIG, advantage="gae", normalize_std=False)
    got, returns = give_advantages(
        config,
        np.array([[2.0]]),
        [sequence],
        divergences=[np.array([9.0, 0.2, 9.0, 0.4])],
        kl_coefficient=0.5,
        values=[np.array([7.0, 1.0, 7.0, 0.5])],
    )
    np.testing.assert_allclose(returns[0], [0.0, 1.7, 0.0, 1.8], atol=1e-6)
    np.testing.assert_allclose(got[0].advantages, [0.0, 0.7, 0.0, 1.3], atol=1e-6)
    whitened, _ = give_advantages(
        replace(config, normalize_std=True),
        np.array([[2.0]]),
        [sequence],
        values=[np.array([7.0, 1.0, 7.0, 0.5])],
    )
    np.testing.assert_allclose(whitened[0].advantages[[1, 3]], [-(0.5**0.5), 0.5**0.5], atol=1e-4)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=12))
def test_unpacking_gives_back_what_was_packed(lengths):
    sequences = [Sequence(ids=np.arange(n) + 100 * i) for i, n in enumerate(lengths)]
    batch = pack(sequences, 8)
    for sequence, ids in zip(sequences, unpack(batch.tokens_RxL, sequences, 8), strict=True):
        np.testing.assert_array_equal(ids, sequence.ids)


def test_padding_is_counted_in_what_is_computed():
    batch = pack([Sequence(ids=[1] * 8), Sequence(ids=[1] * 4)], 8, 6)
    assert padding_share([batch], 2) == pytest.approx(
        4 / 16
    )  # two rows; the others are stepped over
    assert padding_share([batch], 4) == pytest.approx(20 / 32)
    assert padding_share([batch], 1, shards=4) == pytest.approx(20 / 32)
    assert padding_share([pack([], 8, 6)], 2) == 0.0
    assert [micro_batch_rows(6, m, 4) for m in (1, 5, 64)] == [4, 8, 8]


def test_bad_batches_are_kept_up_to_a_limit(tmp_path):
    batch = pack([Sequence(ids=[5, 6, 7])], 4)
    for step in range(1, 8):
        keep_bad_batch(tmp_path, step, batch)
    names = sorted(path.name for path in (tmp_path / "bad_batches").iterdir())
    assert names == [f"step-{i}-{i - 1}.npz" for i in range(1, 5)]
    with np.load(tmp_path / "bad_batches" / names[0]) as arrays:
        np.testing.assert_array_equal(arrays["tokens_RxL"], [[5, 6, 7, 0]])


def test_means_over_tokens_do_not_depend_on_how_full_the_minibatches_are():
    full = {"loss": 1.0, "entropy": 2.0, "gap": 0.1, "gap_max": 0.2, "weight": 30.0, "tokens": 40.0}
    short = {
        "loss": 3.0,
        "entropy": 4.0,
        "gap": 0.5,
        "gap_max": 0.9,
        "weight": 10.0,
        "tokens": 12.0,
    }
    empty = dict.fromkeys(full, 0.0)
    assert merge_metrics([full, short, empty]) == {
        "loss": pytest.approx(4 / 3), "entropy": 2.5, "gap": 0.1, "gap_max": 0.2,
        "weight": 40.0, "tokens": 52.0,
    }  # fmt: skip
