"""The packaged all-MiniLM-L6-v2 from end to end, and the measured reference on 2Wiki-101."""

import json
from pathlib import Path

import numpy as np
import pytest

from psearch_jax.config import RetrievalConfig
from psearch_jax.errors import UserError
from psearch_jax.retrieval.corpus import read_corpus
from psearch_jax.retrieval.embedding import Embedder, load_embedder
from psearch_jax.retrieval.index import open_or_build
from psearch_jax.retrieval.passages import Passage
from psearch_jax.retrieval.searcher import Searcher, recall_at_k

ENCODER = "all-MiniLM-L6-v2"
COUNTRIES = {
    "France": ("Paris", "Europe", "euro", "6.44"),
    "Japan": ("Tokyo", "Asia", "yen", "3.78"),
    "Brazil": ("Brasilia", "South America", "real", "8.51"),
    "Kenya": ("Nairobi", "Africa", "shilling", "5.83"),
    "Canada": ("Ottawa", "North America", "dollar", "9.98"),
    "Norway": ("Oslo", "Europe", "krone", "3.24"),
    "Egypt": ("Cairo", "Africa", "pound", "1.01"),
    "Thailand": ("Bangkok", "Asia", "baht", "5.14"),
    "Poland": ("Warsaw", "Europe", "zloty", "3.12"),
    "Mexico": ("Mexico City", "North America", "peso", "1.97"),
}
FIELDS = ("capital", "continent", "currency", "area 10^6×")


def small_world() -> tuple[list[Passage], list[str], list[list[str]]]:
    """200 passages, 40 queries and the passage that each query needs."""
    passages, queries, needed = [], [], []
    for name, values in COUNTRIES.items():
        for field, value in zip(FIELDS, values, strict=True):
            identifier = f"{name}-{field}"
            passages.append(Passage(identifier, name, f"{field} of {name}: {value}"))
            queries.append(f"{field.split()[0]} of {name}")
            needed.append([identifier])
    cities = [
        f"{a}{b}" for a in ("Al", "Bren", "Cor", "Dun") for b in ("ford", "ville", "stad", "ia")
    ]
    for i in range(160):
        city, country = cities[i % len(cities)], list(COUNTRIES)[i // len(cities)]
        text = f"population 10^5×{1 + i % 9}.{i % 100:02d} {city}, city in {country}"
        passages.append(Passage(f"city-{i}", city, text))
    return passages, queries, needed


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return load_embedder(ENCODER, 2048)


def test_real_passages_are_found(embedder: Embedder, tmp_path: Path) -> None:
    passages, queries, needed = small_world()
    config = RetrievalConfig(directory=str(tmp_path), kind="scann", encoder=ENCODER)
    index = open_or_build(passages, embedder, config)
    assert index.vectors_NxE.shape == (200, 384)
    scann = Searcher(index, embedder, passages)
    exact = Searcher(index.exact(), embedder, passages)
    assert recall_at_k(scann, queries, needed, 3) >= 0.95
    assert [hits[0].passage for hits in scann.search(queries, 3)] == [
        hits[0].passage for hits in exact.search(queries, 3)
    ]


def test_a_text_has_one_vector_whatever_the_batch(embedder: Embedder) -> None:
    texts = ["Lyon", "capital of France: Paris", "capital of France: Paris " * 4]
    vectors = embedder.embed(texts)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(embedder.embed_queries(texts), vectors, atol=2e-5)


def test_a_query_has_one_vector_to_the_bit(embedder: Embedder) -> None:
    """In a hashed index the last digit of a vector decides what is found."""
    queries = [f"inhabitants of city number {n}" for n in range(70)]
    alone = np.concatenate([embedder.embed_queries([query]) for query in queries])
    for count in (7, 70):
        np.testing.assert_array_equal(embedder.embed_queries(queries[-count:]), alone[-count:])


def test_texts_are_cut_at_256_word_pieces(embedder: Embedder) -> None:
    plan = embedder.plan(["city " * 1000, "\ud800 half a surrogate", ""])
    assert [len(ids) for ids in plan.token_ids][::2] == [256, 2]
    assert plan.token_ids[0][-1] == plan.token_ids[2][-1]


def test_an_encoder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        load_embedder("nowhere")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read"):
        load_embedder(str(tmp_path))


@pytest.mark.slow
def test_2wiki_101_gold_titles(embedder: Embedder, shared_data: Path) -> None:
    """Measured with the reference implementation: 0.931 of the questions get all their gold passages when each
    gold title is a query (top-3, exact search), 0.188 when the question is the only query."""
    passages = read_corpus(shared_data / "2wiki101_corpus.jsonl")
    lines = (shared_data / "2wiki101_questions.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    # Kept between runs: embedding takes minutes.
    directory = Path("runs") / "test-2wiki101"
    config = RetrievalConfig(directory=str(directory), kind="exact", embed="contents")
    searcher = Searcher(open_or_build(passages, embedder, config), embedder, passages)
    titles = [row["metadata"]["gold_titles"] for row in rows]

    def all_gold_found(queries: list[list[str]]) -> float:
        """The share of questions whose gold titles are all among the top 3 of their queries."""
        found = [searcher.search(own, 3) for own in queries]
        return np.mean(
            [
                set(gold) <= {hit.passage.title for hits in lists for hit in hits}
                for gold, lists in zip(titles, found, strict=True)
            ]
        )

    assert all_gold_found(titles) == pytest.approx(0.931, abs=0.006)
    assert all_gold_found([[row["question"]] for row in rows]) == pytest.approx(0.188, abs=0.006)
