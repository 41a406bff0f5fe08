"""Batches cover every text once, waste little, and come in few shapes."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models.tiny_bert import VOCABULARY, write_bert
from retrieval.tiny_encoder import TABLE_VxE, encode, tiny_embedder, tokenize

from psearch_jax.config import MeshConfig, RetrievalConfig
from psearch_jax.errors import UserError
from psearch_jax.mesh import make_mesh
from psearch_jax.models.encoder_families import EncoderUse
from psearch_jax.retrieval.embedding import (
    MAX_LENGTHS,
    QUERY_LENGTHS,
    Embedder,
    buckets_to,
    choose_lengths,
    distinct_texts,
    embed_texts,
    encoder_fingerprint,
    load_embedder,
    plan_batches,
    query_batches,
)
from psearch_jax.retrieval.index import open_or_build
from psearch_jax.retrieval.manifest import read_manifest
from psearch_jax.retrieval.passages import Passage
from psearch_jax.retrieval.searcher import Searcher

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=80)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=30),
    limit=st.integers(1, 3),
    compile_tokens=st.sampled_from([0, 7, 1000]),
)
def test_chosen_lengths_are_the_cheapest(
    lengths: list[int], limit: int, compile_tokens: int
) -> None:
    """Against every combination of lengths."""

    def cost(chosen: Sequence[int]) -> int:
        padded = sum(min(length for length in chosen if length >= n) for n in lengths)
        return padded + compile_tokens * len(chosen)

    grid = range(1, 13)
    best = min(
        cost(combination)
        for size in range(1, limit + 1)
        for combination in itertools.combinations(grid, size)
        if combination[-1] >= max(lengths)
    )
    chosen = choose_lengths(lengths, limit, compile_tokens)
    assert len(chosen) <= limit
    assert chosen == sorted(chosen)
    assert cost(chosen) == best


@settings(deadline=None)
@given(lengths=LENGTHS, batch_tokens=st.sampled_from([16, 128, 1024]))
def test_plan_covers_each_text_once_and_fits(lengths: list[int], batch_tokens: int) -> None:
    batches = plan_batches(lengths, batch_tokens)
    assert sorted(i for batch in batches for i in batch.texts) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch.texts) <= batch.rows
        assert max(lengths[i] for i in batch.texts) <= batch.length
        assert batch.rows * batch.length <= max(batch_tokens, batch.length)
    assert all(len(batch.texts) == batch.rows for batch in batches[:-1])
    assert len({(batch.rows, batch.length) for batch in batches}) <= MAX_LENGTHS + 1


@settings(deadline=None)
@given(
    lengths=LENGTHS,
    batch_tokens=st.sampled_from([16, 128, 4096]),
    multiple=st.sampled_from([3, 8, 32]),
)
def test_rows_are_a_multiple_for_a_mesh(
    lengths: list[int], batch_tokens: int, multiple: int
) -> None:
    batches = plan_batches(lengths, batch_tokens, multiple)
    assert sorted(i for batch in batches for i in batch.texts) == list(range(len(lengths)))
    for batch in batches:
        assert batch.rows % multiple == 0
        assert batch.rows * batch.length <= max(batch_tokens, multiple * batch.length)
    assert len({(batch.rows, batch.length) for batch in batches}) <= MAX_LENGTHS + 1


def test_padding_of_a_corpus_is_at_most_ten_percent() -> None:
    """From a few hundred thousand tokens on; below, compiling another shape would cost more than padding."""
    rng = np.random.default_rng(0)
    words = rng.gamma(9.0, 2.0, 20_000).astype(int) + 3
    plan = tiny_embedder(batch_tokens=4096).plan(["w " * n for n in words])
    assert plan.padding <= 0.10
    assert len(plan.shapes) <= MAX_LENGTHS + 1


@settings(deadline=None)
@given(lengths=LENGTHS)
def test_query_shapes_are_fixed_and_depend_on_the_query_alone(lengths: list[int]) -> None:
    batches = query_batches(lengths, 8)
    assert sorted(i for batch in batches for i in batch.texts) == list(range(len(lengths)))
    for batch in batches:
        assert batch.rows == 8
        assert batch.length in QUERY_LENGTHS
        assert 0 < len(batch.texts) <= batch.rows
        for i in batch.texts:
            assert batch.length == min(n for n in QUERY_LENGTHS if n >= lengths[i])


def test_queries_beyond_the_longest_bucket_are_rounded_up() -> None:
    assert {batch.length for batch in query_batches([300, 512], 8)} == {512}


@settings(deadline=None)
@given(texts=st.lists(st.text("ab ", max_size=12), max_size=40))
def test_vectors_do_not_depend_on_batching(texts: list[str]) -> None:
    expected = np.array([TABLE_VxE[ids].mean(0) for ids in tokenize(texts)]).reshape(-1, 16)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    embedder = tiny_embedder(batch_tokens=64)
    np.testing.assert_allclose(embedder.embed(texts), expected, atol=1e-6)
    np.testing.assert_allclose(embedder.embed_queries(texts), expected, atol=1e-6)


def test_equal_texts_are_computed_once_and_equal() -> None:
    calls: list[tuple[int, int]] = []
    seen: list[tuple[int, int]] = []
    vectors = tiny_embedder(calls=calls).embed(
        ["a b", "c", "a b", "c", "a b"], lambda done, total: seen.append((done, total))
    )
    assert sum(rows for rows, _ in calls) <= 16
    assert seen == [(2, 2)]
    assert np.array_equal(vectors[0], vectors[2])
    assert np.array_equal(vectors[1], vectors[3])
    assert distinct_texts(["x", "y", "x"])[0] == ["x", "y"]


def test_progress_rises_to_the_total() -> None:
    seen: list[tuple[int, int]] = []
    tiny_embedder(batch_tokens=64).embed(
        [f"word{i} " * (1 + i % 5) for i in range(300)],
        lambda done, total: seen.append((done, total)),
    )
    done = [d for d, _ in seen]
    assert len(seen) > 5
    assert done == sorted(set(done))
    assert seen[-1] == (300, 300)


def test_law_06_nothing_new_is_compiled_after_warm_up() -> None:
    calls: list[tuple[int, int]] = []
    embedder = tiny_embedder(calls=calls)
    embedder.warm_up()
    warmed = set(calls)
    rng = np.random.default_rng(0)
    for count in (1, 2, 5, 13, 45, 100, 300):
        lengths = rng.integers(1, QUERY_LENGTHS[2], count)
        embedder.embed_queries([" ".join("q" * n) for n in lengths])
    assert set(calls) == warmed == embedder.shapes_seen


def test_a_vector_without_direction_is_refused() -> None:
    embedder = tiny_embedder()
    embedder._encode = lambda tokens_BxL, mask_BxL: jnp.full((len(tokens_BxL), 16), jnp.nan)
    with pytest.raises(FloatingPointError, match="not finite"):
        embedder.embed_queries(["x"])


def test_no_texts_no_vectors() -> None:
    assert tiny_embedder().embed([]).shape == (0, 16)
    assert tiny_embedder().embed_queries([]).shape == (0, 16)


def test_buckets_end_at_the_limit() -> None:
    assert buckets_to(256, QUERY_LENGTHS) == QUERY_LENGTHS
    assert buckets_to(64, QUERY_LENGTHS) == (8, 12, 16, 24, 32, 64)
    assert buckets_to(512, QUERY_LENGTHS) == (*QUERY_LENGTHS, 512)
    assert buckets_to(5, QUERY_LENGTHS) == (5,)


E5 = EncoderUse(family="e5", query_prefix="query: ", passage_prefix="passage: ")


def prefixed(use: EncoderUse, seen: list[str] | None = None) -> Embedder:
    """A tiny embedder of that use that notes the texts it is given."""

    def noting(texts: Sequence[str]) -> list[list[int]]:
        if seen is not None:
            seen.extend(texts)
        return tokenize(texts)

    return Embedder(
        name="tiny",
        fingerprint="tiny",
        dims=16,
        encode=encode,
        tokenize=noting,
        batch_tokens=64,
        use=use,
    )


def test_queries_and_passages_get_their_own_prefix_on_every_way() -> None:
    seen: list[str] = []
    embedder = prefixed(E5, seen)
    texts = ["Lyon", "a city", ""]
    plain = tiny_embedder()
    queries, passages = ([p + t for t in texts] for p in ("query: ", "passage: "))
    np.testing.assert_array_equal(embedder.embed_queries(texts), plain.embed_queries(queries))
    assert seen == queries
    np.testing.assert_array_equal(embedder.embed(texts), plain.embed(passages))
    assert seen == queries + passages
    plan = embedder.plan(texts)
    assert plan.token_ids == tokenize(passages)
    assert np.abs(embedder.embed(texts) - plain.embed(texts)).max() > 0.1


def test_law_06_warm_up_counts_the_query_prefix() -> None:
    use = EncoderUse(query_prefix="one two three four five six seven eight nine ten: ")
    embedder = prefixed(use)
    embedder.warm_up()
    warmed = set(embedder.shapes_seen)
    assert {length for _, length in warmed} == {12, 16, 24}
    rng = np.random.default_rng(0)
    for count in (1, 5, 100):
        embedder.embed_queries([" ".join("q" * n) for n in rng.integers(0, 14, count)])
    assert embedder.shapes_seen == warmed


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small random encoders: `e5-tiny` and `bge-small-en-tiny`, of the same weights, and `unnamed`."""
    root = tmp_path_factory.mktemp("encoders")
    for name in ("e5-tiny", "bge-small-en-tiny", "unnamed"):
        write_bert(root / name, num_hidden_layers=1)  # every shape is compiled: small is quick
    return root


TEXTS = ["lyon is a city", "a river in lyon", "query", "a. b. c. d. e", "x " * 40, "y " * 70]
QUERIES = ["lyon is a city", "a river in lyon", "city"]


def test_an_encoder_on_disk_is_used_as_its_family_is(encoders: Path) -> None:
    """The prefixes are real word pieces of the texts, and the pooling is the family's."""
    root = str(encoders)
    plain = {
        pooling: load_embedder(f"{root}/unnamed", pooling=pooling) for pooling in ("mean", "cls")
    }
    e5, bge = load_embedder(f"{root}/e5-tiny"), load_embedder(f"{root}/bge-small-en-tiny")
    instruction = "Represent this sentence for searching relevant passages: "
    for ours, expected in (
        (e5.embed(TEXTS), plain["mean"].embed([f"passage: {t}" for t in TEXTS])),
        (e5.embed_queries(QUERIES), plain["mean"].embed_queries([f"query: {q}" for q in QUERIES])),
        (bge.embed(TEXTS), plain["cls"].embed(TEXTS)),
        (bge.embed_queries(QUERIES), plain["cls"].embed([instruction + q for q in QUERIES])),
    ):
        np.testing.assert_allclose(ours, expected, atol=1e-6)
    assert np.abs(e5.embed(TEXTS) - plain["mean"].embed(TEXTS)).max() > 0.01
    assert np.abs(bge.embed(TEXTS) - plain["mean"].embed(TEXTS)).max() > 0.01
    bare = load_embedder(f"{root}/e5-tiny", query_prefix="", passage_prefix="")
    assert bare.use == EncoderUse(family="e5")
    assert bare.plan(TEXTS).token_ids == plain["mean"].plan(TEXTS).token_ids
    assert len(e5.plan(["y " * 200]).token_ids[0]) == 64  # cut with the prefix in it


def test_an_encoder_of_no_family_needs_its_pooling(encoders: Path) -> None:
    with pytest.raises(UserError, match="retrieval.pooling"):
        load_embedder(str(encoders / "unnamed"))


def test_law_06_queries_of_a_real_encoder_compile_once(encoders: Path) -> None:
    embedder = load_embedder(str(encoders / "e5-tiny"))
    embedder.warm_up()
    compiled = embedder._encode.func._cache_size()
    assert compiled == 3 == len(embedder.shapes_seen)
    for count in (1, 3, 20, 90):
        embedder.embed_queries([QUERIES[i % 3] + "." * (i % 4) for i in range(count)])
    assert embedder._encode.func._cache_size() == compiled


@pytest.mark.parametrize("sizes", [MeshConfig(), MeshConfig(data=2, fsdp=2, tensor=2)], ids=str)
def test_all_devices_of_a_mesh_embed(encoders: Path, sizes: MeshConfig) -> None:
    """As one device does, to 1e-5."""
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abc "), n)) for n in rng.integers(1, 12, 150)]
    name, mesh = str(encoders / "e5-tiny"), make_mesh(sizes)
    alone, spread = load_embedder(name, 256), load_embedder(name, 256, mesh=mesh)
    expected = alone.embed(texts)
    np.testing.assert_allclose(spread.embed(texts), expected, atol=1e-5)
    queries = spread.embed_queries(QUERIES)
    np.testing.assert_allclose(queries, alone.embed_queries(QUERIES), atol=1e-5)
    pieces = 8 if sizes.tensor == 1 else 4
    assert all(rows % pieces == 0 for rows, _ in spread.shapes_seen)
    # batch_tokens are those of one device.
    assert max(rows * length for rows, length in spread.shapes_seen) > 256


def test_texts_are_embedded_in_one_call(encoders: Path) -> None:
    name = str(encoders / "unnamed")
    vectors = embed_texts(name, TEXTS, mesh=make_mesh(MeshConfig()), pooling="cls")
    np.testing.assert_allclose(vectors, load_embedder(name, pooling="cls").embed(TEXTS), atol=1e-5)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    write_bert(tmp_path, vocab_size=len(VOCABULARY) - 1)
    with pytest.raises(UserError, match=r"token ids up to 65, but the model has 65 rows"):
        load_embedder(str(tmp_path), pooling="mean")


def test_the_fingerprint_covers_all_that_decides_a_vector(encoders: Path) -> None:
    directory = encoders / "unnamed"
    plain = encoder_fingerprint(directory, EncoderUse())
    # The family alone decides nothing, and an index of the plainest use is named as before there were others.
    assert encoder_fingerprint(directory, EncoderUse(family="minilm")) == plain
    uses = [
        EncoderUse(pooling="cls"),
        EncoderUse(passage_prefix="p: "),
        EncoderUse(dtype="bfloat16"),
        EncoderUse(query_prefix="p: "),
        EncoderUse(query_prefix="q: "),
        E5,
    ]
    prints = [plain, *(encoder_fingerprint(directory, use) for use in uses)]
    assert len(set(prints)) == len(prints)
    # Queries of another prefix leave the vectors of passages as they are.
    assert prints[4].partition("+")[0] == prints[5].partition("+")[0] == plain
    assert prints[6].partition("+")[0] == encoder_fingerprint(
        directory, replace(E5, query_prefix="")
    )


def test_an_index_of_other_prefixes_is_never_served(encoders: Path, tmp_path: Path) -> None:
    name = str(encoders / "e5-tiny")
    corpus = [Passage(str(i), "", text) for i, text in enumerate(TEXTS)]
    config = RetrievalConfig(directory=str(tmp_path), kind="exact", encoder=name)
    e5 = load_embedder(name)
    index = open_or_build(corpus, e5, config)
    np.testing.assert_allclose(index.vectors_NxE, e5.embed(TEXTS), atol=1e-6)
    for other in (load_embedder(name, query_prefix=""), load_embedder(name, passage_prefix="")):
        with pytest.raises(UserError, match="build another index"):
            Searcher(index, other, corpus)
        assert open_or_build(corpus, other, config).fingerprint != index.fingerprint
    # Only the query prefix differs: the vectors are taken over, not computed.
    queried_otherwise = load_embedder(name, query_prefix="find: ")
    again = open_or_build(corpus, queried_otherwise, config)
    assert not queried_otherwise.shapes_seen
    assert again.fingerprint != index.fingerprint
    assert np.array_equal(again.vectors_NxE, index.vectors_NxE)
    assert read_manifest(tmp_path / again.fingerprint).fingerprint == again.fingerprint
    hits = Searcher(index, e5, corpus).search(["a river"], 1)
    by_hand = (e5.embed(TEXTS) @ e5.embed_queries(["a river"])[0]).argmax()
    assert hits[0][0].passage == corpus[by_hand]
