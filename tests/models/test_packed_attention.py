"""Attention by name: every implementation gives what the plain one gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from psearch_jax.config import MeshConfig
from psearch_jax.errors import UserError
from psearch_jax.mesh import NOWHERE, Layout, make_mesh
from psearch_jax.models import packed_attention as room


def arrays(batch, length, heads, kv_heads, width, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    q, k, v = (
        jax.random.normal(key, (batch, length, n, width))
        for key, n in zip(keys, (heads, kv_heads, kv_heads), strict=True)
    )
    rng = np.random.default_rng(seed)
    borders = np.sort(rng.integers(1, length, (batch, 3)), axis=1)
    segments = 1 + (np.arange(length)[None, :, None] >= borders[:, None]).sum(-1)
    segments[:, -length // 8 :] = 0  # padding at the end
    return q, k, v, jnp.asarray(segments, jnp.int32)


def test_dot_product_is_the_plain_one():
    q, k, v, segments = arrays(2, 24, 4, 2, 8)
    want = room.packed_attention("plain", segments)(q, k, v)
    got = room.packed_attention("dot_product", segments)(q, k, v)
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [None, {"data": 2, "tensor": 2, "sequence": 2}],
    ids=["one device", "rows, heads and tokens cut"],
)
def test_splash_is_the_plain_one(axes, monkeypatch):
    """The TPU kernel in Pallas's interpreter, values and gradients, on real (not padding) positions. Two blocks of
    keys, so that there are pieces of the queries' gradient to be summed."""
    monkeypatch.setattr(room, "SPLASH_BLOCK", 128)
    q, k, v, segments = arrays(2, 256, 4, 2, 128)
    layout = NOWHERE if axes is None else Layout(make_mesh(MeshConfig(**axes)))
    real = np.asarray(segments > 0)
    probe = jax.random.normal(jax.random.key(7), (2, 256, 4 * 128)) * real[..., None]

    def plain(q, k, v):
        return jnp.vdot(room.packed_attention("plain", segments)(q, k, v), probe)

    def splash(q, k, v):
        return jnp.vdot(room._splash(segments, layout, q, k, v, interpret=True), probe)

    want, want_grads = jax.jit(jax.value_and_grad(plain, argnums=(0, 1, 2)))(q, k, v)
    got, grads = jax.jit(jax.value_and_grad(splash, argnums=(0, 1, 2)))(q, k, v)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-2)
    for a, b in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)


def test_what_a_name_means_depends_on_platform_and_length():
    assert {room.resolve(name, 128, NOWHERE) for name in ("auto", "plain", "splash")} == {"plain"}

    class OnTpu(Layout):
        platform = "tpu"

    assert room.resolve("auto", 4096, OnTpu()) == "splash"
    assert room.resolve("auto", 100, OnTpu()) == "plain"
    with pytest.raises(UserError, match="multiple of 128 tokens, and they have 100"):
        room.resolve("splash", 100, OnTpu())
    with pytest.raises(UserError, match="'flash'; choose one of auto, plain"):
        room.resolve("flash", 128, NOWHERE)
