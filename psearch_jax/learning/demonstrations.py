"""Scripted episodes for the warm start, in three styles: sequential, parallel, and without search.

They are drawn from shadow worlds (random names and numbers) and from the seen part of the real one. What a search
returns is imitated: the needed passage, mostly first, among passages with neighbouring names. Comparison
drills come first in the curriculum and stay in every batch: numbers that were "found" are given, and only the
answer counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from psearch_jax.config import ProtocolConfig, SupervisedConfig
from psearch_jax.learning.batches import Sequence
from psearch_jax.questions.facts import Facts, write_number
from psearch_jax.questions.shadow import ShadowWorlds
from psearch_jax.questions.templates import Script, SubQuery, Templates, far_apart, passages_of
from psearch_jax.questions.world import MIXTURE, World
from psearch_jax.retrieval.passages import Hit, Passage
from psearch_jax.rollout.episode import Role
from psearch_jax.rollout.protocol import control_tags, prompt_text, render_results

RECALL, FOUND = "recall", "found"


@dataclass(frozen=True)
class Piece:
    """Text of one role. `answer_weight` is the weight of the answer's own tokens, `weight` of the others."""

    role: Role
    text: str
    weight: float = 1.0
    answer_weight: float = 1.0


@dataclass
class Scene:
    """A world to draw scripts from and an imitated search over its passages."""

    facts: Facts
    templates: Templates
    real: bool
    passages: dict[str, Passage] = field(default_factory=dict)
    order: dict[str, list[int]] = field(default_factory=dict)
    place: dict[int, int] = field(default_factory=dict)
    own: dict[int, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, facts: Facts, real: bool, allowed: Callable[[int], bool] = lambda i: True) -> Scene:
        """Prepare a world; only `allowed` entities are ever shown."""
        scene = cls(facts, Templates(facts, allowed), real)
        hidden = {
            e.name for i, e in enumerate(facts.entities) if e.kind == "country" and not allowed(i)
        }
        for i, entity in enumerate(facts.entities):
            if allowed(i):
                shown = {
                    key: tuple(name for name in names if name not in hidden)
                    for key, names in entity.related.items()
                }
                scene.own[i] = tuple(p.id for p in passages_of(i, entity))
                scene.passages.update(
                    (p.id, p) for p in passages_of(i, replace(entity, related=shown))
                )
        for kind in ("city", "country", "element"):
            indices = [i for i, e in enumerate(facts.entities) if e.kind == kind and allowed(i)]
            indices.sort(key=lambda i: facts.entities[i].name)
            scene.order[kind] = indices
            scene.place.update((index, position) for position, index in enumerate(indices))
        return scene

    def search(self, rng: np.random.Generator, query: SubQuery, k: int) -> list[Hit]:
        """k passages with the needed one among them, first nine times in ten."""
        found: dict[str, Passage] = {}
        index, passage = query.needs.split(".", 1)
        entity = self.facts.entities[int(index)]
        order, place = self.order[entity.kind], self.place[int(index)]
        own = [key for key in self.own[int(index)] if key != query.needs]
        for _ in range(8):
            if len(found) >= k - 1:
                break
            if own and entity.kind != "city" and rng.random() < 0.4:
                key = own[int(rng.integers(len(own)))]
            else:
                near = rng.random() < 0.6
                other = place + int(rng.integers(-4, 5)) if near else int(rng.integers(len(order)))
                key = f"{order[other % len(order)]}.{passage}"
            if key != query.needs and key in self.passages:
                found[key] = self.passages[key]
        shown = list(found.values())
        rank = 0 if rng.random() < 0.9 else int(rng.integers(len(shown) + 1))
        shown.insert(rank, self.passages[query.needs])
        return [Hit(p, 1.0 - 0.1 * i) for i, p in enumerate(shown[:k])]


def think(findings: tuple[tuple[str, str], ...]) -> str:
    """The last thought: what was found, value before name, in the order of the question."""
    return ";".join(f" {value} {name}" for value, name in findings) if findings else FOUND


class Demonstrations:
    """Draws pieces of episodes; everything follows from the generator that is handed in."""

    def __init__(self, protocol: ProtocolConfig, config: SupervisedConfig, tokenizer: Any) -> None:
        self.protocol, self.config, self.tokenizer = protocol, config, tokenizer
        self.encode = lru_cache(maxsize=200_000)(self._encode)
        # Whether every tag is one token, as in a tokenizer that was trained for the protocol.
        self.whole_tags = all(len(self._encode(tag)) == 1 for tag in control_tags(protocol))
        self.answer_open, self.answer_close = (
            tokenizer.convert_tokens_to_ids(tag) for tag in protocol.answer
        )
        # Ids that are words or parts of words: letters only, a blank before them or not.
        self.words = [
            index
            for text, index in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
            if text.removeprefix("\u0120").isascii() and text.removeprefix("\u0120").isalpha()
        ]

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def script(self, rng: np.random.Generator, templates: Templates) -> Script:
        """A question of the world's mixture."""
        names = list(MIXTURE)
        shares = np.array(list(MIXTURE.values()))
        while True:
            script = getattr(templates, str(rng.choice(names, p=shares / shares.sum())))(rng)
            if script is not None:
                return script

    def bare_drill(self, rng: np.random.Generator) -> Sequence:
        """The shortest comparison, which is learned first: two numbers, each before a name of one to three random
        tokens, and the name with the larger number. Random tokens can only be copied, never guessed."""
        exponents = rng.integers(0, 9, size=2)
        if rng.random() < 0.5:
            exponents[1] = exponents[0]
        values = 10.0 ** (exponents + rng.uniform(0, 1, size=2))
        if not far_apart("", list(values), True):
            values[0] *= 2.0
            values[1] /= 2.0
        names = [[int(i) for i in rng.choice(self.words, rng.integers(1, 4))] for _ in values]
        ids = [*self.encode(self.protocol.think[0])]
        for i, (value, name) in enumerate(zip(values, names, strict=True)):
            ids += [*self.encode(";" if i else ""), *self.encode(f" {write_number(value)}"), *name]
        opening, closing = (self.encode(tag) for tag in self.protocol.answer)
        ids += [*self.encode(self.protocol.think[1]), *opening]
        answer = names[int(np.argmax(values))]
        weights = np.zeros(len(ids) + len(answer) + len(closing), np.float32)
        weights[len(ids) :] = self.config.answer_weight
        return Sequence(ids=[*ids, *answer, *closing], weights=weights)

    def copy_drill(self, rng: np.random.Generator) -> Sequence:
        """Random tokens, then the same ones in a search: nothing but looking back can predict them."""
        words = [int(i) for i in rng.choice(self.words, rng.integers(4, 20))]
        opening, closing = (self.encode(tag) for tag in self.protocol.search)
        ids = [*words, *opening, *words, *closing]
        weights = np.zeros(len(ids), np.float32)
        weights[len(words) + len(opening) :] = 1.0
        return Sequence(ids=ids, weights=weights)

    def drill(self, rng: np.random.Generator, templates: Templates) -> list[Piece]:
        """A comparison of the world's own kind whose findings are given; only the answer is trained."""
        draw = templates.shared if rng.random() < self.config.drill_shared else templates.compare
        while (script := draw(rng)) is None:
            pass
        text = self.answer_turn(script, think(script.findings))
        return [
            Piece(Role.PROMPT, prompt_text(self.protocol, script.text, self.tokenizer)),
            Piece(Role.POLICY, text, 0.0, self.config.answer_weight),
        ]

    def episode(self, rng: np.random.Generator, scene: Scene) -> list[Piece]:
        """A whole episode in a random style."""
        script = self.script(rng, scene.templates)
        sequential, parallel, without, baseline = np.cumsum(self.config.styles)
        draw = rng.random() * baseline
        pieces = [Piece(Role.PROMPT, prompt_text(self.protocol, script.text, self.tokenizer))]
        compared = bool(script.findings)
        answer_weight = self.config.answer_weight if compared else 1.0
        if draw < parallel:
            # What cannot be decomposed has one style of searching.
            together = draw >= sequential
            for hop in script.hops:
                for queries in [hop] if together else [(query,) for query in hop]:
                    pieces += self._search_turn(rng, scene, queries)
            text = self.answer_turn(script, think(script.findings))
            pieces.append(Piece(Role.POLICY, text, 1.0, answer_weight))
        elif draw < without:
            # A guess about a world that does not exist teaches nothing but guessing.
            text = self.answer_turn(script, RECALL)
            pieces.append(Piece(Role.POLICY, text, 1.0, 1.0 if scene.real else 0.0))
        else:
            pieces += self._retrieved_first(rng, scene, script, answer_weight)
        return pieces

    def _search_turn(
        self, rng: np.random.Generator, scene: Scene, queries: tuple[SubQuery, ...]
    ) -> list[Piece]:
        protocol = self.protocol
        attribute = queries[0].attribute
        texts = tuple(query.text for query in queries)
        # Fewer passages than a rollout shows: shorter episodes, so more of them.
        k = int(rng.integers(1, protocol.top_k + 1))
        hits = [scene.search(rng, query, k) for query in queries]
        return [
            Piece(
                Role.POLICY,
                f"{protocol.think[0]}{attribute}{protocol.think[1]}"
                f"{protocol.search[0]}{protocol.separator.join(texts)}{protocol.search[1]}",
            ),
            Piece(Role.OBSERVATION, render_results(protocol, texts, hits, self.count_tokens)),
        ]

    def count_tokens(self, text: str) -> int:
        """Tokens of a text."""
        return len(self.encode(text))

    def answer_turn(self, script: Script, thought: str) -> str:
        protocol = self.protocol
        return (
            f"{protocol.think[0]}{thought}{protocol.think[1]}"
            f"{protocol.answer[0]} {script.answer}{protocol.answer[1]}"
        )

    def _retrieved_first(
        self, rng: np.random.Generator, scene: Scene, script: Script, answer_weight: float
    ) -> list[Piece]:
        """The prompt of the retrieve-once baseline: passages found for the question itself come with it."""
        needed = [query for hop in script.hops for query in hop]
        kept = [query for query in needed if rng.random() < 0.7] or needed[:1]
        passages = [scene.search(rng, query, 1)[0] for query in kept][: self.protocol.top_k]
        while len(passages) < self.protocol.top_k:
            passages.append(scene.search(rng, kept[0], 3)[-1])
        order = rng.permutation(len(passages))
        block = render_results(
            self.protocol, (script.text,), [[passages[i] for i in order]], self.count_tokens
        )
        texts = " ".join(hit.passage.text for hit in passages)
        known = tuple(pair for pair in script.findings if pair[0] in texts and pair[1] in texts)
        thought = think(known) if known else FOUND
        # The answer itself counts only where the passages decide it.
        complete = len(kept) == len(needed) <= self.protocol.top_k
        text = self.answer_turn(script, thought)
        return [
            Piece(Role.PROMPT, block),
            Piece(Role.POLICY, text, 1.0, answer_weight if complete or scene.real else 0.0),
        ]

    def sequence(self, pieces: list[Piece]) -> Sequence:
        """Token ids, each piece encoded by itself as in a rollout, with the weight of every token."""
        ids: list[int] = []
        weights: list[float] = []
        for piece in pieces:
            new = self.encode(piece.text)
            ids += new
            if piece.role is not Role.POLICY:
                reading = piece.role is Role.OBSERVATION
                weights += [self.config.observation_weight if reading else 0.0] * len(new)
                continue
            if not self.whole_tags:
                weights += self._weights_by_place(piece)
                continue
            inside = False
            for token in new:
                inside = inside and token != self.answer_close
                closing = token == self.answer_close
                weights.append(piece.answer_weight if inside else (piece.weight or float(closing)))
                inside = inside or token == self.answer_open
        return Sequence(ids=ids, weights=np.asarray(weights, np.float32))

    def _weights_by_place(self, piece: Piece) -> list[float]:
        """The weight of every token of a policy's piece whose tags are several tokens each, some shared with what
        stands beside them: by where its characters stand."""
        opening, closing = (tag.strip() for tag in self.protocol.answer)
        start = (
            piece.text.find(opening) + len(opening) if opening in piece.text else len(piece.text)
        )
        stop = piece.text.find(closing, start)
        stop = len(piece.text) if stop < 0 else stop
        coded = self.tokenizer(piece.text, add_special_tokens=False, return_offsets_mapping=True)
        return [
            piece.answer_weight
            if start <= first < stop
            else piece.weight or float(first >= stop)  # the answer's end is always learned
            for first, _ in coded["offset_mapping"]
        ]


class DemonstrationStream:
    """Sequences for a training step, a function of (seed, step) alone, so a resumed run draws the same."""

    def __init__(
        self, world: World, protocol: ProtocolConfig, config: SupervisedConfig, tokenizer: Any
    ) -> None:
        self.demonstrations = Demonstrations(protocol, config, tokenizer)
        self.config = config
        self.real = Scene.of(world.facts, True, lambda index: not world.unseen[index])
        words = self.demonstrations.words
        self.worlds = ShadowWorlds(
            world.facts,
            [not unseen for unseen in world.unseen],
            [tokenizer.decode([index]) for index in words],
        )
        self.shadow = lru_cache(maxsize=2)(self._make_shadow)

    def _make_shadow(self, number: int) -> Scene:
        rng = np.random.default_rng([self.config.seed, 1, number])
        return Scene.of(self.worlds.make(rng), False)

    def sequences(self, step: int) -> Iterator[Sequence]:
        """Endless sequences for a step; take as many as fit."""
        config, demonstrations = self.config, self.demonstrations
        rng = np.random.default_rng([config.seed, 0, step])
        shadow = self.shadow(step // config.steps_per_world)
        early = step < config.drill_steps
        drills = 1.0 if early else config.drill_share
        while True:
            scene = self.real if rng.random() < config.real_share else shadow
            if rng.random() >= drills:
                yield demonstrations.sequence(demonstrations.episode(rng, scene))
                continue
            kind = rng.random()
            if kind < (0.5 if early else 0.1):
                yield demonstrations.copy_drill(rng)
            elif early or kind < 0.4:
                yield demonstrations.bare_drill(rng)
            else:
                yield demonstrations.sequence(demonstrations.drill(rng, shadow.templates))
