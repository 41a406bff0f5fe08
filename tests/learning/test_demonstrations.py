"""Scripted episodes say what a rollout would, name nobody they must not, and follow from (seed, step)."""

import itertools
import re

import numpy as np
import pytest

from psearch_jax.config import ProtocolConfig, SupervisedConfig
from psearch_jax.learning.demonstrations import DemonstrationStream, Scene
from psearch_jax.learning.supervised import step_batch
from psearch_jax.questions.tokenizer import train_tokenizer, world_texts
from psearch_jax.rollout.episode import Role
from psearch_jax.rollout.protocol import parse_turn

PROTOCOL = ProtocolConfig()


@pytest.fixture(scope="module")
def tokenizer(world, tmp_path_factory):
    texts = itertools.islice(world_texts(world), 8000)
    return train_tokenizer(texts, PROTOCOL, 1024, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def stream(world, tokenizer):
    config = SupervisedConfig(rows_per_step=2, drill_steps=2)
    return DemonstrationStream(world, PROTOCOL, config, tokenizer)


def episodes(stream, count, scene=None):
    rng = np.random.default_rng(1)
    return [
        stream.demonstrations.episode(rng, scene or (stream.real if i % 2 else stream.shadow(0)))
        for i in range(count)
    ]


def test_every_policy_piece_is_one_turn_that_the_protocol_reads(stream):
    kinds = set()
    for pieces in episodes(stream, 200):
        policy = [piece.text for piece in pieces if piece.role is Role.POLICY]
        actions = [parse_turn(PROTOCOL, text) for text in policy]
        assert [action.kind for action in actions[:-1]] == ["search"] * (len(actions) - 1)
        assert actions[-1].kind == "answer" and actions[-1].answer
        assert len(actions) - 1 <= PROTOCOL.max_search_turns
        kinds.add((len(actions), max((len(a.queries) for a in actions), default=0)))
    assert {(1, 0), (2, 1), (2, 2), (3, 1)} <= kinds


def test_the_styles_have_their_shares_among_comparisons(stream):
    first = []
    for pieces in episodes(stream, 1200):
        question = pieces[0].text
        if question.startswith(("Which", "Do ")) and pieces[1].role is Role.POLICY:
            action = parse_turn(PROTOCOL, pieces[1].text)
            first.append("none" if action.kind == "answer" else len(action.queries) > 1)
    shares = {style: first.count(style) / len(first) for style in (False, True, "none")}
    assert shares[False] == pytest.approx(0.5, abs=0.06)
    assert shares[True] == pytest.approx(0.3, abs=0.06)
    assert shares["none"] == pytest.approx(0.2, abs=0.06)


def test_no_demonstration_names_an_unseen_country_or_city(stream, world):
    hidden = [
        e.name
        for e, unseen in zip(world.facts.entities, world.unseen, strict=True)
        if unseen and e.label and len(e.name) > 5
    ]
    shown = {
        e.name for e, unseen in zip(world.facts.entities, world.unseen, strict=True) if not unseen
    }
    # As a whole name: "Niger" does not stand in "Nigeria", nor a suburb's name in its city's.
    names = {name for name in hidden if name not in shown}
    found = []
    for pieces in episodes(stream, 300, stream.real):
        for piece in pieces:
            for fragment in re.split(
                r"[\n;:?]|, | of | or |<[^>]*>|##|^Do | and (?=.* share)|capital | in |\d |where | is$| have$",
                piece.text,
            ):
                if fragment.strip() in names:
                    found.append((fragment, piece.text))
    assert not found


def test_weights_fall_on_policy_tokens_and_guesses_about_shadow_worlds_are_not_learned(stream):
    demonstrations = stream.demonstrations
    guesses = 0
    for pieces in episodes(stream, 300, stream.shadow(0)):
        sequence = demonstrations.sequence(pieces)
        weights = np.asarray(sequence.weights)
        assert len(weights) == len(sequence.ids)
        start = 0
        for piece in pieces:
            stop = start + len(demonstrations.encode(piece.text))
            if piece.role is Role.OBSERVATION:
                assert np.all(weights[start:stop] == np.float32(stream.config.observation_weight))
            elif piece.role is Role.PROMPT:
                assert not weights[start:stop].any()
            elif piece.text.startswith("<think>recall</think>"):
                ids = list(sequence.ids[start:stop])
                inside = slice(
                    start + ids.index(demonstrations.answer_open) + 1,
                    start + ids.index(demonstrations.answer_close),
                )
                assert not weights[inside].any()
                assert weights[stop - 1] == 1.0
                guesses += 1
            elif len(pieces) > 2 and pieces[1].role is Role.PROMPT:
                continue  # passages given beforehand: the answer counts where they decide it
            else:
                assert weights[start:stop].all()
            start = stop
    assert guesses > 20


def test_a_bare_drill_asks_for_the_name_behind_the_larger_number(stream, tokenizer):
    rng = np.random.default_rng(5)
    for _ in range(200):
        sequence = stream.demonstrations.bare_drill(rng)
        text = tokenizer.decode(sequence.ids)
        first, second = re.findall(r" 10\^(-?\d+)\*(\d\.\d\d)", text)
        numbers = [float(f"{digits}e{power}") for power, digits in (first, second)]
        thought, answer = re.fullmatch(
            r"<think>(.*)</think><answer>(.*)</answer>", text, re.DOTALL
        ).groups()
        names = [re.sub(r"^ 10\^-?\d+\*\d\.\d\d", "", part) for part in thought.split(";")]
        assert max(numbers) >= 1.2 * min(numbers)
        assert answer == names[int(numbers[1] > numbers[0])]
        assert not np.asarray(sequence.weights)[
            : list(sequence.ids).index(stream.demonstrations.answer_open) + 1
        ].any()


def test_a_copy_drill_asks_for_random_words_a_second_time(stream):
    demonstrations = stream.demonstrations
    opening, closing = demonstrations.tokenizer.convert_tokens_to_ids(list(PROTOCOL.search))
    rng = np.random.default_rng(6)
    lengths, seen = set(), set()
    for _ in range(200):
        sequence = demonstrations.copy_drill(rng)
        ids = list(sequence.ids)
        count = ids.index(opening)
        assert ids == [*ids[:count], opening, *ids[:count], closing]
        np.testing.assert_array_equal(sequence.weights, [0.0] * (count + 1) + [1.0] * (count + 1))
        assert sequence.weights.dtype == np.float32
        lengths.add(count)
        seen |= set(ids[:count])
    assert lengths == set(range(4, 20))
    assert seen <= set(demonstrations.words) and len(seen) > len(demonstrations.words) // 2


def test_pieces_are_encoded_as_a_rollout_would(stream, tokenizer):
    for pieces in episodes(stream, 40):
        ids = list(stream.demonstrations.sequence(pieces).ids)
        assert tokenizer.decode(ids) == "".join(piece.text for piece in pieces)
        assert ids == [i for p in pieces for i in tokenizer.encode(p.text)]


def test_law_13_the_batch_of_a_step_follows_from_seed_and_step(stream, world, tokenizer):
    again = DemonstrationStream(world, PROTOCOL, stream.config, tokenizer)
    for step in (3, 0, 60):  # in another order than the first stream has seen them
        for one, two in zip(step_batch(stream, step), step_batch(again, step), strict=True):
            np.testing.assert_array_equal(one, two)
    assert not np.array_equal(step_batch(stream, 3)[0], step_batch(stream, 4)[0])


def test_batches_are_nearly_full(stream):
    for step in (0, 5):
        assert (step_batch(stream, step).segments_RxL > 0).mean() > 0.85


def test_the_imitated_search_returns_the_needed_passage_first_nine_times_in_ten(stream):
    rng = np.random.default_rng(2)
    scene = stream.shadow(1)
    ranks = []
    for _ in range(600):
        script = stream.demonstrations.script(rng, scene.templates)
        query = script.hops[0][0]
        hits = scene.search(rng, query, 3)
        ids = [hit.passage.id for hit in hits]
        assert query.needs in ids and len(set(ids)) == len(ids) <= 3
        ranks.append(ids.index(query.needs))
    assert ranks.count(0) / len(ranks) == pytest.approx(0.93, abs=0.03)


def test_a_scene_shows_allowed_entities_only(world):
    scene = Scene.of(world.facts, True, lambda index: not world.unseen[index])
    assert not any(world.unseen[int(id.split(".")[0])] for id in scene.passages)


def test_weights_by_place_are_those_by_tags(stream, monkeypatch):
    """What tokenizers without the tags as tokens use, where both ways can be taken."""
    make = stream.demonstrations
    rng = np.random.default_rng(2)
    drills = [make.drill(rng, stream.shadow(0).templates) for _ in range(20)]
    every = [*episodes(stream, 60), *drills]
    want = [make.sequence(pieces) for pieces in every]
    assert len({float(w) for sequence in want for w in sequence.weights}) > 3
    monkeypatch.setattr(make, "whole_tags", False)
    for sequence, pieces in zip(want, every, strict=True):
        got = make.sequence(pieces)
        assert list(got.ids) == list(sequence.ids)
        np.testing.assert_array_equal(got.weights, sequence.weights)
