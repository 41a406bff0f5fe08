"""Shadow worlds: the real world's templates over random names and numbers.

A policy that is only shown real facts memorises them. Here every name is new, so the only way to be right is to
copy it from the question and to read the number that was retrieved.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from psearch_jax.questions.facts import CONTINENTS, MAX_LABEL, Entity, Facts

CITIES, COUNTRIES, ELEMENTS = 400, 40, 30


class ShadowWorlds:
    """Makes worlds whose names are the halves of real names, joined at random.

    Args:
      facts: real facts; only entities whose index `is_seen` lend their names.
      pieces: parts of words. Half of the worlds join random ones into names, which nothing but copying can predict.
    """

    def __init__(self, facts: Facts, is_seen: Sequence[bool], pieces: Sequence[str] = ()) -> None:
        self.pieces = list(pieces)
        self._from_pieces = False
        self.names = {
            kind: [
                e.name
                for e, seen in zip(facts.entities, is_seen, strict=True)
                if seen and e.label and e.kind == kind
            ]
            for kind in ("city", "country", "element")
        }
        countries = [
            e for e, s in zip(facts.entities, is_seen, strict=True) if s and e.kind == "country"
        ]
        self.currencies = sorted({e.facts["currency"] for e in countries if "currency" in e.facts})
        self.languages = sorted({e.facts["language"] for e in countries if "language" in e.facts})

    def _names(self, rng: np.random.Generator, kind: str, count: int) -> list[str]:
        # Country names are too few to give variety, so cities lend theirs too.
        pools = [self.names[kind], self.names["city"]]
        made: dict[str, None] = {}
        while len(made) < count:
            if self._from_pieces:
                parts = rng.integers(len(self.pieces), size=int(rng.integers(1, 4)))
                name = "".join(self.pieces[int(i)] for i in parts).strip()
            else:
                pool = pools[int(rng.random() < 0.5)]
                first, second = (pool[int(rng.integers(len(pool)))] for _ in range(2))
                cut, start = (int(rng.integers(1, max(2, len(name)))) for name in (first, second))
                name = (first[:cut] + second[start:]).strip(" -'")
            if 2 < len(name) <= MAX_LABEL and "  " not in name and name[0].isalpha():
                made[name] = None
        return list(made)

    def _some_words(self, rng: np.random.Generator, real: Sequence[str], count: int) -> list[str]:
        """Half real words, half invented ones, few enough that countries share them."""
        return [
            *(real[int(i)] for i in rng.integers(len(real), size=count - count // 2)),
            *self._names(rng, "country", count // 2),
        ]

    def make(self, rng: np.random.Generator) -> Facts:
        """One world."""
        self._from_pieces = bool(self.pieces) and bool(rng.integers(2))
        names = self._names(rng, "city", CITIES)
        country_names = self._names(rng, "country", COUNTRIES)
        element_names = self._names(rng, "element", ELEMENTS)
        taken: set[str] = set()
        currencies = self._some_words(rng, self.currencies, 12)
        languages = self._some_words(rng, self.languages, 12)
        continents = list(CONTINENTS.values())
        entities: list[Entity] = []
        for i, name in enumerate(country_names):
            taken.add(name)
            population, area = 10 ** rng.uniform(2, 9.2), 10 ** rng.uniform(0, 7)
            entities.append(
                Entity(
                    kind="country",
                    name=name,
                    label=name,
                    numbers={
                        "population": population,
                        "area": area,
                        "population density": 10 ** rng.uniform(-1, 4),
                    },
                    facts={
                        "capital": names[i],
                        "currency": str(rng.choice(currencies)),
                        "continent": str(rng.choice(continents)),
                        "language": str(rng.choice(languages)),
                    },
                    related={"neighbours": tuple(rng.choice(country_names, 3, replace=False))},
                )
            )
        for i, name in enumerate(names):
            if name in taken:
                continue
            taken.add(name)
            # Most real cities lie between 15,000 and 100,000, so half of these do too.
            exponent = rng.uniform(4.17, 5) if rng.random() < 0.5 else rng.uniform(3, 7.4)
            country = country_names[i] if i < COUNTRIES else str(rng.choice(country_names))
            entities.append(
                Entity(
                    kind="city",
                    name=name,
                    label=name,
                    numbers={"inhabitants": 10**exponent},
                    facts={"country": country},
                )
            )
        for name in element_names:
            if name in taken:
                continue
            entities.append(
                Entity(
                    kind="element",
                    name=name,
                    label=name,
                    numbers={
                        "atomic weight": 10 ** rng.uniform(0, 2.5),
                        "density": 10 ** rng.uniform(-4, 1.4),
                        "melting point": 10 ** rng.uniform(1, 3.6),
                        "discovery year": float(rng.integers(1650, 2012)),
                    },
                    facts={"symbol": name[: int(rng.integers(1, 3))].capitalize()},
                )
            )
        return Facts(entities=tuple(entities))
