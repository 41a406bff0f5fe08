"""Passages, questions and the searches that answer them, made from facts.

The same templates serve the real world and the shadow worlds of the warm start (random names and numbers), so
what is learned on the one carries to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from psearch_jax.questions.facts import Entity, Facts, write_value
from psearch_jax.retrieval.passages import Passage

#: The larger of two compared numbers is at least this many times the smaller; years differ by MIN_YEARS.
MIN_RATIO = 1.25
MIN_YEARS = 20

#: (entity kind, attribute, largest wins, question)
COMPARISONS: tuple[tuple[str, str, bool, str], ...] = (
    ("city", "inhabitants", True, "Which city has more inhabitants, {names}?"),
    ("country", "population", True, "Which country has a larger population, {names}?"),
    ("country", "area", True, "Which country is larger, {names}?"),
    ("country", "population density", True, "Which country is denser, {names}?"),
    ("element", "atomic weight", True, "Which element is heavier, {names}?"),
    ("element", "density", True, "Which element is denser, {names}?"),
    ("element", "melting point", True, "Which element melts at a higher temperature, {names}?"),
    ("element", "discovery year", False, "Which element is older, {names}?"),
)
#: (entity kind, attribute, question)
SHARED: tuple[tuple[str, str, str], ...] = (
    ("country", "currency", "Do {a} and {b} share a currency?"),
    ("country", "continent", "Do {a} and {b} share a continent?"),
    ("country", "language", "Do {a} and {b} share a language?"),
    ("city", "country", "Do {a} and {b} share a country?"),
)
#: (entity kind, attribute, question)
SINGLES: tuple[tuple[str, str, str], ...] = (
    ("city", "country", "In which country is {a}?"),
    ("city", "inhabitants", "How many inhabitants does {a} have?"),
    ("country", "capital", "What is the capital of {a}?"),
    ("country", "currency", "What is the currency of {a}?"),
    ("country", "continent", "On which continent is {a}?"),
    ("country", "language", "What is the language of {a}?"),
    ("country", "population", "What is the population of {a}?"),
    ("element", "symbol", "What is the symbol of {a}?"),
    ("element", "discovery year", "When was {a} discovered?"),
)
COUNTRY_FACTS = ("capital", "currency", "continent", "language")


@dataclass(frozen=True, kw_only=True)
class SubQuery:
    """A scripted sub-query: its text, the attribute it asks for and the id of the passage that answers it."""

    text: str
    attribute: str
    needs: str


@dataclass(frozen=True, kw_only=True)
class Script:
    """A question with the searches that answer it.

    `hops`: sub-queries that can be searched at the same time, hop after hop. `findings`: (value, name) pairs that
    are compared in the last thought; empty where the last passage says the answer. `entities`: indices of every
    entity that the question or its answer path names.
    """

    text: str
    kind: str
    answer: str
    hops: tuple[tuple[SubQuery, ...], ...]
    findings: tuple[tuple[str, str], ...] = ()
    entities: tuple[int, ...] = ()


def passages_of(index: int, entity: Entity) -> list[Passage]:
    """The passages about one entity: one fact each, for a city its population and its country together."""
    made = []
    if entity.kind == "city":
        place = f"{entity.name}, city in {entity.facts['country']}" if entity.facts else entity.name
        number = entity.numbers.get("inhabitants")
        written = f"inhabitants {write_value('inhabitants', number)} " if number else ""
        return [Passage(f"{index}.inhabitants", entity.name, written + place)]
    for attribute, number in entity.numbers.items():
        text = f"{attribute} {write_value(attribute, number)} {entity.name}, {entity.kind}"
        made.append(Passage(f"{index}.{attribute}", entity.name, text))
    for attribute, fact in entity.facts.items():
        text = f"{attribute} of {entity.name}: {fact}"
        made.append(Passage(f"{index}.{attribute}", entity.name, text))
    for attribute, several in entity.related.items():
        for first in range(0, len(several), 3):
            text = f"{attribute} of {entity.name}: {', '.join(several[first : first + 3])}"
            made.append(Passage(f"{index}.{attribute}.{first}", entity.name, text))
    return made


def subquery(index: int, entity: Entity, attribute: str) -> SubQuery:
    """The sub-query for an attribute of an entity."""
    passage = "inhabitants" if entity.kind == "city" else attribute
    return SubQuery(
        text=f"{attribute} of {entity.label}", attribute=attribute, needs=f"{index}.{passage}"
    )


def far_apart(attribute: str, values: Sequence[float], largest: bool) -> bool:
    """Whether the winner leads clearly: no ties and no near-ties."""
    ordered = sorted(values, reverse=largest)
    if attribute == "discovery year":
        return bool(ordered[1] - ordered[0] >= MIN_YEARS)
    high, low = max(ordered[:2]), min(ordered[:2])
    return bool(high >= MIN_RATIO * low)


def join_names(names: Sequence[str]) -> str:
    """`A or B`; `A, B or C`."""
    return f"{', '.join(names[:-1])} or {names[-1]}"


class Templates:
    """Draws scripts from facts. `allowed` says which entities may occur anywhere in a script."""

    def __init__(self, facts: Facts, allowed: Callable[[int], bool] = lambda index: True) -> None:
        self.entities = facts.entities
        usable = [i for i, e in enumerate(self.entities) if e.label and allowed(i)]
        self.by_kind = {
            kind: [i for i in usable if self.entities[i].kind == kind]
            for kind in ("city", "country", "element")
        }
        self.country_index = {self.entities[i].name: i for i in self.by_kind["country"]}
        self.city_index = {
            self.entities[i].name: i
            for i in self.by_kind["city"]
            if self.entities[i].label == self.entities[i].name
        }
        # Cities whose country can be named too, and countries whose capital's name belongs to one country only.
        self.placed = [
            i
            for i in self.by_kind["city"]
            if self.entities[i].facts["country"] in self.country_index
        ]
        capitals = [e.facts.get("capital", "") for e in self.entities if e.kind == "country"]
        self.capital_once = [
            i
            for i in self.by_kind["country"]
            if "capital" in self.entities[i].facts
            and capitals.count(self.entities[i].facts["capital"]) == 1
        ]
        self.capital_city = [
            i
            for i in self.capital_once
            if self.entities[i].facts["capital"] in self.city_index
            and "inhabitants" in self._city(self.entities[i].facts["capital"]).numbers
        ]
        self._having: dict[tuple[str, str], list[int]] = {}

    def _city(self, name: str) -> Entity:
        return self.entities[self.city_index[name]]

    def _with(self, kind: str, attribute: str) -> list[int]:
        key = (kind, attribute)
        if key not in self._having:
            self._having[key] = [
                i
                for i in self.by_kind[kind]
                if attribute in self.entities[i].numbers or attribute in self.entities[i].facts
            ]
        return self._having[key]

    def compare(self, rng: np.random.Generator, template: int | None = None) -> Script | None:
        """Which of 2–4 things has the largest number? None if the draw was a near-tie."""
        weights = np.array([4, 2, 2, 2, 1, 1, 1, 1], float)
        choice = rng.choice(len(COMPARISONS), p=weights / weights.sum())
        kind, attribute, largest, text = COMPARISONS[int(choice if template is None else template)]
        pool = self._with(kind, attribute)
        count = min(int(rng.choice([2, 2, 2, 3, 3, 4])), len(pool))
        if count < 2:
            return None
        chosen = [pool[i] for i in rng.choice(len(pool), count, replace=False)]
        values = [self.entities[i].numbers[attribute] for i in chosen]
        if not far_apart(attribute, values, largest):
            return None
        return self._comparison("parallelizable", text, attribute, chosen, values, largest, ())

    def _comparison(
        self,
        kind: str,
        text: str,
        attribute: str,
        chosen: Sequence[int],
        values: Sequence[float],
        largest: bool,
        before: tuple[tuple[SubQuery, ...], ...],
        names: Sequence[str] = (),
        others: Sequence[int] = (),
    ) -> Script:
        labels = [self.entities[i].label for i in chosen]
        best = int(np.argmax(values) if largest else np.argmin(values))
        return Script(
            text=text.format(names=join_names(names or labels)),
            kind=kind,
            answer=labels[best],
            hops=(*before, tuple(subquery(i, self.entities[i], attribute) for i in chosen)),
            findings=tuple(
                (write_value(attribute, value), label)
                for value, label in zip(values, labels, strict=True)
            ),
            entities=(*chosen, *others),
        )

    def shared(self, rng: np.random.Generator) -> Script | None:
        """Do A and B share an attribute? Yes and no in equal parts, as far as the facts allow."""
        kind, attribute, text = SHARED[int(rng.integers(len(SHARED)))]
        pool = self._with(kind, attribute) if kind == "country" else self.placed
        if len(pool) < 2:
            return None
        first = pool[int(rng.integers(len(pool)))]
        value = self.entities[first].facts[attribute]
        want = bool(rng.integers(2))
        for _ in range(60):
            second = pool[int(rng.integers(len(pool)))]
            if second != first and (self.entities[second].facts[attribute] == value) == want:
                break
        else:
            return None
        pair = (first, second)
        labels = [self.entities[i].label for i in pair]
        owners = [
            self.country_index[self.entities[i].facts["country"]] for i in pair if kind == "city"
        ]
        return Script(
            text=text.format(a=labels[0], b=labels[1]),
            kind="parallelizable",
            answer="yes" if want else "no",
            hops=(tuple(subquery(i, self.entities[i], attribute) for i in pair),),
            findings=tuple(
                (self.entities[i].facts[attribute], label)
                for i, label in zip(pair, labels, strict=True)
            ),
            entities=(*pair, *owners),
        )

    def single(self, rng: np.random.Generator) -> Script | None:
        """One fact of one thing."""
        kind, attribute, text = SINGLES[int(rng.integers(len(SINGLES)))]
        pool = (
            self.placed if (kind, attribute) == ("city", "country") else self._with(kind, attribute)
        )
        if not pool:
            return None
        index = pool[int(rng.integers(len(pool)))]
        entity = self.entities[index]
        others: tuple[int, ...] = ()
        if attribute in entity.numbers:
            answer = write_value(attribute, entity.numbers[attribute])
        else:
            answer = entity.facts[attribute]
            if attribute == "country":
                others = (self.country_index[answer],)
        return Script(
            text=text.format(a=entity.label),
            kind="single",
            answer=answer,
            hops=((subquery(index, entity, attribute),),),
            entities=(index, *others),
        )

    def bridge(self, rng: np.random.Generator) -> Script | None:
        """The second query needs the first answer."""
        route = int(rng.integers(3))
        if route == 0 and self.capital_once:
            index = self.capital_once[int(rng.integers(len(self.capital_once)))]
            country = self.entities[index]
            attribute = ("currency", "continent", "language")[int(rng.integers(3))]
            if attribute not in country.facts:
                return None
            capital = country.facts["capital"]
            first = SubQuery(
                text=f"country with capital {capital}",
                attribute="capital",
                needs=f"{index}.capital",
            )
            return Script(
                text=f"What is the {attribute} of the country whose capital is {capital}?",
                kind="bridge",
                answer=country.facts[attribute],
                hops=((first,), (subquery(index, country, attribute),)),
                entities=(index,),
            )
        if route == 1 and self.placed:
            index = self.placed[int(rng.integers(len(self.placed)))]
            city = self.entities[index]
            owner = self.country_index[city.facts["country"]]
            attribute = COUNTRY_FACTS[int(rng.integers(4))]
            if attribute not in self.entities[owner].facts:
                return None
            return Script(
                text=f"What is the {attribute} of the country where {city.label} is?",
                kind="bridge",
                answer=self.entities[owner].facts[attribute],
                hops=(
                    (subquery(index, city, "country"),),
                    (subquery(owner, self.entities[owner], attribute),),
                ),
                entities=(index, owner),
            )
        if not self.capital_city:
            return None
        owner = self.capital_city[int(rng.integers(len(self.capital_city)))]
        index = self.city_index[self.entities[owner].facts["capital"]]
        city = self.entities[index]
        return Script(
            text=f"How many inhabitants does the capital of {self.entities[owner].label} have?",
            kind="bridge",
            answer=write_value("inhabitants", city.numbers["inhabitants"]),
            hops=(
                (subquery(owner, self.entities[owner], "capital"),),
                (subquery(index, city, "inhabitants"),),
            ),
            entities=(owner, index),
        )

    def mixed(self, rng: np.random.Generator) -> Script | None:
        """Compare two things that each need a hop."""
        if rng.integers(2) and len(self.capital_city) > 1:
            owners = [self.capital_city[i] for i in _two(rng, len(self.capital_city))]
            chosen = [self.city_index[self.entities[i].facts["capital"]] for i in owners]
            attribute, text = "inhabitants", "Which capital has more inhabitants, that of {names}?"
            asked, hop_attribute, others = owners, "capital", owners
        elif len(self.placed) > 1:
            asked = [self.placed[i] for i in _two(rng, len(self.placed))]
            chosen = [self.country_index[self.entities[i].facts["country"]] for i in asked]
            attribute = ("population", "area", "population density")[int(rng.integers(3))]
            word = {"population": "has a larger population", "area": "is larger"}.get(
                attribute, "is denser"
            )
            text, hop_attribute, others = (
                f"Which country {word}, that of {{names}}?",
                "country",
                asked,
            )
        else:
            return None
        values = [self.entities[i].numbers.get(attribute, 0.0) for i in chosen]
        if chosen[0] == chosen[1] or min(values) <= 0 or not far_apart(attribute, values, True):
            return None
        names = [self.entities[asked[0]].label, f"that of {self.entities[asked[1]].label}"]
        before = (tuple(subquery(i, self.entities[i], hop_attribute) for i in asked),)
        return self._comparison(
            "mixed", text, attribute, chosen, values, True, before, names, others
        )


def _two(rng: np.random.Generator, size: int) -> list[int]:
    return [int(i) for i in rng.choice(size, 2, replace=False)]
