"""The embedded world holds what the README says of it."""

import json
import re
from collections import Counter

import numpy as np
import pytest

from psearch_jax.errors import UserError
from psearch_jax.questions.readers import read_flashrag
from psearch_jax.questions.shadow import ShadowWorlds
from psearch_jax.questions.templates import MIN_RATIO, MIN_YEARS, Templates, far_apart
from psearch_jax.questions.world import SPLITS, World, write_world


def test_there_are_at_least_34000_passages_with_unique_ids(world):
    assert len(world.passages) >= 34_000
    assert len({p.id for p in world.passages}) == len(world.passages)


def test_lyon_and_turin_can_be_asked_about(world):
    texts = {p.title: p.text for p in world.passages if p.title in ("Lyon", "Turin")}
    assert texts["Lyon"].endswith("Lyon, city in France")
    assert texts["Turin"].endswith("Turin, city in Italy")


def test_the_world_is_the_same_twice(world):
    again = World(world.facts)
    assert again.splits == world.splits


def test_splits_have_their_sizes_kinds_and_do_not_overlap(world):
    texts = Counter(q.text for questions in world.splits.values() for q in questions)
    assert max(texts.values()) == 1
    for split, size in SPLITS.items():
        kinds = Counter(q.kind for q in world.splits[split])
        assert sum(kinds.values()) == size
        assert set(kinds) == {"parallelizable", "bridge", "mixed", "single"}


def test_half_of_the_test_questions_are_about_unseen_entities_only(world):
    unseen = [q for q in world.splits["test"] if q.metadata["unseen"]]
    assert len(unseen) == len(world.splits["test"]) // 2
    unseen_entities = [
        e for e, u in zip(world.facts.entities, world.unseen, strict=True) if u and e.label
    ]
    hidden = {e.label for e in unseen_entities}
    hidden |= {e.facts["capital"] for e in unseen_entities if "capital" in e.facts}
    pattern = re.compile("|".join(sorted(map(re.escape, hidden), key=len, reverse=True)))
    for question in unseen:
        assert pattern.search(question.text)


def test_no_training_question_or_answer_names_an_unseen_entity(world):
    entities = world.facts.entities
    hidden = {
        e.name for e, u in zip(entities, world.unseen, strict=True) if u and e.kind == "country"
    }
    shown = {e.name for e, u in zip(entities, world.unseen, strict=True) if not u}
    for question in world.splits["train"]:
        assert not question.metadata["unseen"]
        assert question.golden_answers[0] not in hidden - shown
        for hop in question.metadata["needs"]:
            assert not any(world.unseen[int(need.split(".")[0])] for need in hop)


def test_the_needed_passages_hold_the_answer_or_the_compared_values(world):
    passages = {p.id: p.text for p in world.passages}
    for question in world.splits["test"]:
        last = [passages[need] for need in question.metadata["needs"][-1]]
        answer = question.golden_answers[0]
        if answer in ("yes", "no"):
            assert len(last) == 2
        else:
            assert any(answer.split(", ")[0] in text for text in last), question


def test_comparisons_have_the_right_winner_and_no_near_ties(world):
    passages = {p.id: p.text for p in world.passages}
    checked = 0
    for question in world.splits["test"]:
        match = re.match(
            r"Which (\w+) (has more inhabitants|has a larger population|is larger|is denser)",
            question.text,
        )
        if not match or question.kind != "parallelizable":
            continue
        values = []
        for query, need in zip(
            question.metadata["queries"][0], question.metadata["needs"][0], strict=True
        ):
            magnitude, digits = re.search(r"10\^(-?\d+)\*([\d.]+)", passages[need]).groups()
            values.append((float(digits) * 10 ** int(magnitude), query.split(" of ", 1)[1]))
        values.sort(reverse=True)
        assert values[0][1] == question.golden_answers[0]
        assert values[0][0] >= 0.99 * MIN_RATIO * values[1][0]  # written with three digits
        checked += 1
    assert checked > 300


@pytest.mark.parametrize(
    ("attribute", "values", "largest", "apart"),
    [
        ("area", [100, 126, 20], True, True),
        ("area", [100, 124], True, False),
        ("area", [5, 5], True, False),
        ("discovery year", [1700, 1700 + MIN_YEARS, 1900], False, True),
        ("discovery year", [1700, 1719], False, False),
    ],
)
def test_near_ties(attribute, values, largest, apart):
    assert far_apart(attribute, values, largest) is apart


def test_neither_yes_nor_no_is_a_good_guess(world):
    for split in ("train", "test"):
        answers = Counter(q.golden_answers[0] for q in world.splits[split])
        assert 0.35 < answers["yes"] / (answers["yes"] + answers["no"]) < 0.6


def test_the_files_are_flashrag_and_are_read_by_the_common_reader(world, tmp_path):
    directory = write_world(tmp_path / "world", world)
    row = json.loads((directory / "corpus.jsonl").read_text().split("\n")[0])
    assert set(row) == {"id", "contents"}
    questions = read_flashrag(directory / "test.jsonl")
    assert [q.text for q in questions] == [q.text for q in world.splits["test"]]
    assert [q.kind for q in questions] == [q.kind for q in world.splits["test"]]
    assert "GeoNames" in (directory / "SOURCES.txt").read_text()
    assert not list(tmp_path.glob("*.part*"))


def test_a_directory_with_other_files_is_left_alone(world, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="holds other files"):
        write_world(tmp_path, world)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_shadow_worlds_use_seen_names_only_as_material_and_follow_the_generator(world):
    worlds = ShadowWorlds(world.facts, [not u for u in world.unseen])
    one, two = (worlds.make(np.random.default_rng(3)) for _ in range(2))
    assert one == two
    assert worlds.make(np.random.default_rng(4)) != one
    templates = Templates(one)
    rng = np.random.default_rng(0)
    kinds = Counter()
    for _ in range(300):
        for draw in (
            templates.compare,
            templates.shared,
            templates.single,
            templates.bridge,
            templates.mixed,
        ):
            script = draw(rng)
            kinds[script.kind if script else None] += 1
    assert all(kinds[k] > 50 for k in ("parallelizable", "single", "bridge", "mixed"))
