"""Batches cover every text once, waste little, and come in few shapes."""

import itertools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from retrieval.tiny_encoder import TABLE_VxE, tiny_embedder, tokenize

from psearch_jax.retrieval.embedding import (
    MAX_LENGTHS,
    QUERY_LENGTHS,
    QUERY_ROWS,
    choose_lengths,
    distinct_texts,
    plan_batches,
    query_batches,
)

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
    batches = query_batches(lengths)
    assert sorted(i for batch in batches for i in batch.texts) == list(range(len(lengths)))
    for batch in batches:
        assert batch.rows in QUERY_ROWS
        assert batch.length in QUERY_LENGTHS
        assert 0 < len(batch.texts) <= batch.rows
        for i in batch.texts:
            assert batch.length == min(n for n in QUERY_LENGTHS if n >= lengths[i])


def test_queries_beyond_the_longest_bucket_are_rounded_up() -> None:
    assert {batch.length for batch in query_batches([300, 512])} == {512}


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
