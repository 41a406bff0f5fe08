import pytest
from rewards.episodes import PROTOCOL, make_question, play

from psearch_jax.rewards.format import format_bonus


@pytest.mark.parametrize(
    ("right", "valid", "bonus"),
    [(True, True, 0.0), (True, False, -0.1), (False, True, 0.1), (False, False, 0.0)],
)
def test_the_four_cases(right, valid, bonus):
    episode = play(make_question(), 1, valid=valid)
    assert format_bonus(PROTOCOL, episode, right=right, weight=0.1) == bonus
