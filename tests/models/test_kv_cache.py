"""The KV cache: pieces equal the whole, rows do not disturb each other, updates happen in place."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psearch_jax.models import decoder, kv_cache

CONFIG = decoder.DecoderConfig(
    vocab_size=61,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
SCANNED = decoder.DecoderConfig(
    **{field: getattr(CONFIG, field) for field in CONFIG.__dataclass_fields__}
    | {"max_unrolled_layers": 0}
)
MODELS = {config: decoder.init_params(config, jax.random.key(0)) for config in (CONFIG, SCANNED)}
EXTEND = jax.jit(kv_cache.extend, static_argnums=0, static_argnames=("window", "dtype"))
WHOLE = jax.jit(decoder.hidden_states, static_argnums=0)
BUCKET, LENGTH, BATCH = 8, 32, 3


def whole(config, tokens_BxL):
    graphdef, params = MODELS[config]
    positions = np.broadcast_to(np.arange(tokens_BxL.shape[1]), tokens_BxL.shape)
    return WHOLE(graphdef, params, tokens_BxL, positions, np.ones_like(tokens_BxL))


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.lists(st.integers(0, BUCKET), min_size=BATCH, max_size=BATCH), min_size=1, max_size=4
    ),
    st.booleans(),
)
def test_law_10_pieces_of_any_size_equal_the_whole_sequence(pieces, scanned):
    """Each row gets its own number of tokens a call (0 to 8, the rest of the bucket is rubbish)."""
    config = SCANNED if scanned else CONFIG
    graphdef, params = MODELS[config]
    tokens = np.random.default_rng(0).integers(2, 61, (BATCH, LENGTH)).astype(np.int32)
    expected = whole(config, tokens)
    cache = kv_cache.init_cache(config, BATCH, LENGTH)
    start = np.zeros(BATCH, np.int32)
    for counts in pieces:
        count = np.array(counts, np.int32)
        block = np.full((BATCH, BUCKET), 59, np.int32)
        for b in range(BATCH):
            block[b, : count[b]] = tokens[b, start[b] : start[b] + count[b]]
        hidden, cache = EXTEND(graphdef, params, cache, block, start, count, window=LENGTH)
        assert np.isfinite(hidden).all()
        for b in range(BATCH):
            np.testing.assert_allclose(
                hidden[b, : count[b]], expected[b, start[b] : start[b] + count[b]], atol=1e-5
            )
        start += count
    for leaf in jax.tree.leaves(cache):
        for b in range(BATCH):
            assert not np.any(leaf[..., b, :, start[b] :, :])  # padding was never written


def test_a_row_with_count_zero_is_untouched():
    graphdef, params = MODELS[CONFIG]
    cache = jax.tree.map(lambda x: x + 3.0, kv_cache.init_cache(CONFIG, 2, 8))
    _, after = EXTEND(
        graphdef,
        params,
        cache,
        np.ones((2, 4), np.int32),
        np.array([0, 2]),
        np.array([4, 0]),
        window=8,
    )
    for old, new in zip(jax.tree.leaves(cache), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(new[1], old[1])
        assert not np.allclose(new[0, :, :4], old[0, :, :4])
        np.testing.assert_array_equal(new[0, :, 4:], old[0, :, 4:])


def test_law_10_the_window_bucket_does_not_change_values():
    graphdef, params = MODELS[CONFIG]
    tokens = np.random.default_rng(1).integers(2, 61, (BATCH, BUCKET)).astype(np.int32)
    start, count = np.zeros(BATCH, np.int32), np.full(BATCH, BUCKET, np.int32)
    results = [
        EXTEND(
            graphdef,
            params,
            kv_cache.init_cache(CONFIG, BATCH, LENGTH),
            tokens,
            start,
            count,
            window=window,
        )[0]
        for window in (BUCKET, 16, LENGTH)
    ]
    np.testing.assert_allclose(results[1], results[0], atol=1e-6)
    np.testing.assert_allclose(results[2], results[0], atol=1e-6)


def test_copy_slots_copies_whole_rows_and_drops_what_is_out_of_range():
    config = CONFIG
    cache = jax.tree.map(
        lambda x: x + jnp.arange(4.0)[:, None, None, None], kv_cache.init_cache(config, 4, 2)
    )
    copied = jax.jit(kv_cache.copy_slots)(cache, jnp.array([3, 0, 1]), jnp.array([0, 2, 4]))
    for leaf in jax.tree.leaves(copied):
        # Row 2 gets what row 0 held before the call (0), although row 0 is overwritten in it.
        np.testing.assert_array_equal(leaf[:, 0, 0, 0], [3, 1, 0, 3])
        assert leaf.shape == (4, config.num_kv_heads, 2, config.head_dim)


@pytest.mark.parametrize("config", [CONFIG, SCANNED])
def test_law_04_the_cache_is_updated_in_place_in_a_decode_loop(config):
    """The compiled loop aliases the donated cache and holds no second one, not even as scratch."""
    graphdef, params = MODELS[config]
    batch, length = 8, 512

    @partial(jax.jit, donate_argnums=0)
    def loop(cache, tokens, start):
        def step(state):
            i, cache, tokens, start = state
            hidden, cache = kv_cache.extend(
                graphdef, params, cache, tokens, start, jnp.ones(batch, jnp.int32), window=8
            )
            tokens = jnp.argmax(decoder.unembed(graphdef, params, hidden), -1).astype(jnp.int32)
            return i + 1, cache, tokens, start + 1

        return jax.lax.while_loop(lambda state: state[0] < 4, step, (0, cache, tokens, start))[1:]

    cache = kv_cache.init_cache(config, batch, length)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    tokens, start = jnp.ones((batch, 1), jnp.int32), jnp.zeros(batch, jnp.int32)
    memory = loop.lower(cache, tokens, start).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 8  # one layer's k or v alone is a quarter of it
