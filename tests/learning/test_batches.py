import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psearch_jax.errors import UserError
from psearch_jax.learning.batches import (
    Sequence,
    fill,
    first_fit_decreasing,
    from_episode,
    pack,
    split,
)
from psearch_jax.questions.question import Question
from psearch_jax.rollout.episode import Episode, Role


def test_two_episodes_in_one_row():
    batch = pack(
        [
            Sequence(ids=[5, 6], weights=[1.0, 0.5], advantages=2.0, old_logprobs=[0.0, -1.0]),
            Sequence(ids=[7, 8, 9], weights=[0.0, 1.0, 1.0], advantages=-1.0, old_logprobs=-2.0),
        ],
        row_length=6,
    )
    np.testing.assert_array_equal(batch.tokens_RxL, [[7, 8, 9, 5, 6, 0]])
    np.testing.assert_array_equal(batch.positions_RxL, [[0, 1, 2, 0, 1, 0]])
    np.testing.assert_array_equal(batch.segments_RxL, [[1, 1, 1, 2, 2, 0]])
    # The first token of a segment is predicted from nothing: never counted, whatever its weight says.
    np.testing.assert_array_equal(batch.weights_RxL, [[0, 1, 1, 0, 0.5, 0]])
    np.testing.assert_array_equal(batch.advantages_RxL, [[-1, -1, -1, 2, 2, 0]])
    np.testing.assert_array_equal(batch.old_logprobs_RxL, [[-2, -2, -2, 0, -1, 0]])


lengths = st.lists(st.integers(1, 20), max_size=40)


@given(lengths, st.integers(0, 12))
def test_first_fit_decreasing_places_each_once_and_overfills_nothing(lengths, rows):
    bins, left = first_fit_decreasing(lengths, 20, rows)
    assert sorted(left + [i for members in bins for i in members]) == list(range(len(lengths)))
    assert len(bins) <= rows
    assert all(0 < sum(lengths[i] for i in members) <= 20 for members in bins)
    free = [20 - sum(lengths[i] for i in members) for members in bins]
    assert not left or (len(bins) == rows and min(lengths[i] for i in left) > max(free, default=0))


@given(lengths.filter(bool))
def test_first_fit_decreasing_is_within_its_bound(lengths):
    bins, _ = first_fit_decreasing(lengths, 20, len(lengths))
    # No two bins can be at most half full, so fewer than 2 × total / capacity + 1 are opened.
    assert len(bins) <= 2 * sum(lengths) / 20 + 1


@given(st.lists(st.integers(1, 8), min_size=1, max_size=12))
def test_every_token_comes_back_from_its_segment(lengths):
    rng = np.random.default_rng(0)
    sequences = [Sequence(ids=rng.integers(1, 99, n)) for n in lengths]
    batch = pack(sequences, 8)
    found = []
    for row in range(batch.tokens_RxL.shape[0]):
        for segment in range(1, batch.segments_RxL[row].max() + 1):
            found.append(tuple(batch.tokens_RxL[row][batch.segments_RxL[row] == segment]))
    assert sorted(found) == sorted(tuple(sequence.ids) for sequence in sequences)
    assert batch.segments_RxL.astype(bool).sum() == sum(lengths)


@given(st.lists(st.lists(st.sampled_from(list(Role)), min_size=1, max_size=10), min_size=1))
def test_laws_01_and_02_masks_are_the_roles_however_they_interleave(roles):
    """But for the first token of an episode, which nothing predicts; ids are those that were played."""
    question = Question(id="q", text="?", golden_answers=("x",))
    episodes = [
        Episode(
            question=question,
            group=0,
            member=i,
            ids=[100 * i + t for t in range(len(own))],
            roles=[int(role) for role in own],
            logprobs=[-1.0 if role is Role.POLICY else 0.0 for role in own],
        )
        for i, own in enumerate(roles)
    ]
    batch = pack([from_episode(episode, 1.0) for episode in episodes], 10)
    held = batch.segments_RxL > 0
    found = dict(zip(batch.tokens_RxL[held].tolist(), batch.weights_RxL[held], strict=True))
    assert found == {
        100 * i + t: float(t > 0 and role is Role.POLICY)
        for i, own in enumerate(roles)
        for t, role in enumerate(own)
    }
    assert not batch.weights_RxL[~held].any()
    np.testing.assert_array_equal(
        batch.old_logprobs_RxL < 0,
        np.isin(
            batch.tokens_RxL,
            [
                100 * i + t
                for i, own in enumerate(roles)
                for t, r in enumerate(own)
                if r is Role.POLICY
            ],
        )
        & held,
    )


def test_fixed_rows_and_what_is_left():
    sequences = [Sequence(ids=[1] * n) for n in (3, 4, 2)]
    batch, left = fill(sequences, 5, 1)
    assert batch.tokens_RxL.shape == (1, 5)
    assert left == [0, 2]
    assert pack(sequences, 5, 4).tokens_RxL.shape == (4, 5)
    assert pack(sequences, 5, rows_multiple=4).tokens_RxL.shape == (4, 5)
    with pytest.raises(ValueError, match="2 of 3 sequences do not fit 1 rows of 5"):
        pack(sequences, 5, 1)


def test_an_episode_is_never_cut():
    with pytest.raises(UserError, match=r"6 tokens .* rows of 5; set row_length to at least 6"):
        pack([Sequence(ids=[1] * 6)], 5)


def test_nothing_to_pack_is_a_batch_of_padding():
    batch = pack([], 5, 2)
    assert batch.tokens_RxL.shape == (2, 5)
    assert not batch.segments_RxL.any()


def test_law_01_law_02_weights_are_the_recorded_roles():
    episode = Episode(
        question=Question(id="q", text="?", golden_answers=("a",)),
        group=0,
        member=0,
        ids=[4, 5, 6, 7, 8],
        roles=[Role.PROMPT, Role.POLICY, Role.OBSERVATION, Role.OBSERVATION, Role.POLICY],
        logprobs=[0.0, -0.5, 0.0, 0.0, -0.25],
    )
    sequence = from_episode(episode, 1.5)
    np.testing.assert_array_equal(sequence.weights, [0, 1, 0, 0, 1])
    batch = pack([sequence], 5)
    np.testing.assert_array_equal(batch.tokens_RxL, [[4, 5, 6, 7, 8]])
    np.testing.assert_array_equal(batch.old_logprobs_RxL, np.float32([[0, -0.5, 0, 0, -0.25]]))
    np.testing.assert_array_equal(batch.advantages_RxL, np.full((1, 5), 1.5))


def test_minibatches_share_out_the_filled_rows():
    batch = pack([Sequence(ids=[1] * 4)] * 3, 4, 6)
    first, second = split(batch, 2)
    assert (first.segments_RxL.any(axis=1).sum(), second.segments_RxL.any(axis=1).sum()) == (2, 1)
    assert first.segments_RxL[
        :2
    ].all()  # the filled rows come first, the empty ones are stepped over
    with pytest.raises(ValueError, match="6 rows"):
        split(batch, 4)
