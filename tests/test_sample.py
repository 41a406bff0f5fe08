"""Rejection sampling on a toy policy: what is kept, that a killed run ends alike, and that it can be trained on."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from test_trainer import ENGINE, PARAMS, QUESTIONS, TOKENIZER

from psearch_jax.config import RejectionConfig, SamplingConfig
from psearch_jax.errors import UserError
from psearch_jax.learning.batches import from_episode
from psearch_jax.learning.episode_files import EpisodeStream, read_episodes
from psearch_jax.metrics_log import read_lines
from psearch_jax.rewards.answers import exact_match
from psearch_jax.sample import EPISODES, PARTIAL, keep, sample

CONFIG = RejectionConfig(samples=6, keep=2, well_formed=False, questions_at_once=2)
SETTINGS = {"recipe": "a"}


def play(directory, questions=QUESTIONS, config=CONFIG, **other):
    return sample(
        config,
        ENGINE,
        PARAMS,
        questions,
        sampling=SamplingConfig(),
        directory=directory,
        settings=SETTINGS,
        **other,
    )


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    directory = tmp_path_factory.mktemp("played")
    return directory, play(directory)


def test_only_right_episodes_are_kept_and_few_of_a_question(played):
    directory, counts = played
    rows = read_lines(directory / EPISODES)
    assert counts["played"] == 24 and counts["kept"] == len(rows) > 0
    assert all(row["em"] and exact_match(row["answer"], ("1",)) for row in rows)
    of_question = [[r for r in rows if r["id"] == q.id] for q in QUESTIONS]
    assert max(map(len, of_question)) <= 2
    assert all(
        len({json.dumps(r["token_ids"]) for r in group}) == len(group) for group in of_question
    )


def test_the_ids_that_were_sampled_are_the_ids_that_are_trained_on(played):
    """Law 1: played again, the episodes have the ids and roles of the file."""
    rows = read_lines(played[0] / EPISODES)
    sequences = read_episodes(played[0] / EPISODES, TOKENIZER)
    group = next(i for i, q in enumerate(QUESTIONS) if q.id == rows[0]["id"])
    request = replace(ENGINE.requests([QUESTIONS[group]])[0], group=group, member=rows[0]["sample"])
    (episode,) = ENGINE.rollout(PARAMS, [request], key=jax.random.key(0), sampling=SamplingConfig())
    view = from_episode(episode, 0.0)
    assert list(sequences[0].ids) == list(view.ids)
    np.testing.assert_array_equal(sequences[0].weights, view.weights)
    assert keep(CONFIG, [episode, episode], lambda e: False) == [episode]
    assert keep(replace(CONFIG, well_formed=True), [episode], lambda e: False) == []


def test_law_13_a_killed_run_writes_the_same_file(played, tmp_path):
    class Killed(Exception):
        pass

    def kill(done, total):
        raise Killed

    with pytest.raises(Killed):
        play(tmp_path, on_progress=kill)
    assert not (tmp_path / EPISODES).exists()
    with (tmp_path / PARTIAL).open("a") as file:
        file.write('{"question": "q2", "epi')  # the write was cut
    seen = []
    play(tmp_path, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(4, 4)]
    assert (tmp_path / EPISODES).read_bytes() == (played[0] / EPISODES).read_bytes()
    (tmp_path / PARTIAL).write_text('{"settings": {"recipe": "b"}}\n')
    with pytest.raises(UserError, match="episodes of another recipe, policy or set of questions"):
        play(tmp_path)


def test_rows_without_ids_are_encoded_and_foreign_ids_refused(played, tmp_path):
    rows = read_lines(played[0] / EPISODES)

    def read(change):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps({**row, **change(row)}) + "\n" for row in rows))
        return read_episodes(path, TOKENIZER)

    def texts(row):
        return {"token_ids": [[role, TOKENIZER.encode(text)] for role, text in row["segments"]]}

    assert [list(s.ids) for s in read(texts)] == [
        list(s.ids) for s in read_episodes(played[0] / EPISODES, TOKENIZER)
    ]
    with pytest.raises(UserError, match=r'line 1: its "token_ids" are not those of its "segments"'):
        read(lambda row: {"token_ids": [[role, ids[:-1]] for role, ids in row["token_ids"]]})
    with pytest.raises(UserError, match="wrote nothing"):
        read(lambda row: {"token_ids": row["token_ids"][:1], "segments": row["segments"][:1]})
    with pytest.raises(UserError, match="there is no file"):
        read_episodes(tmp_path / "none.jsonl", TOKENIZER)


def test_every_episode_comes_once_an_epoch_whatever_step_is_asked_for_first(played):
    sequences = read_episodes(played[0] / EPISODES, TOKENIZER)
    longest = max(len(s.ids) for s in sequences)
    tokens = sum(len(s.ids) for s in sequences)
    one, two = (EpisodeStream(sequences, 2 * longest, 1, seed=3) for _ in range(2))
    two.batch(9)
    seen = []
    for step in range(10):
        batch = one.batch(step)
        np.testing.assert_array_equal(batch.tokens_RxL, two.batch(step).tokens_RxL)
        seen.append(int(np.count_nonzero(batch.segments_RxL)))
    members = [i for step in one._batches for i in step]
    for start in range(0, len(members) - len(sequences) + 1, len(sequences)):
        assert sorted(members[start : start + len(sequences)]) == list(range(len(sequences)))
    assert sum(seen) == sum(len(sequences[i].ids) for i in members) and tokens > 0
    with pytest.raises(UserError, match=r"supervised\.row_length is 3, but the longest episode"):
        EpisodeStream(sequences, 3, 1, seed=0)
