"""Attention of a decoding step by name: every kernel gives what the plain one gives, in the interpreter."""

import importlib.util
from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from psearch_jax.config import MeshConfig
from psearch_jax.errors import UserError
from psearch_jax.mesh import NOWHERE, Layout, make_mesh
from psearch_jax.models import attention, decoder, kv_cache
from psearch_jax.models import decode_attention as room
from psearch_jax.program_costs import count_flops
from psearch_jax.topologies import open_devices, parse_slice

SLOTS, HEADS, KV_HEADS, WIDTH, CONTEXT, WINDOW = 4, 4, 2, 128, 512, 256
START = jnp.array([0, 127, 255, 300], jnp.int32)  # the last slot waits, longer than the window


def arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    cache = (2, SLOTS, KV_HEADS, CONTEXT, WIDTH)  # of two layers
    q, k, v = (
        jax.random.normal(key, shape)
        for key, shape in zip(keys, ((SLOTS, 1, HEADS, WIDTH), cache, cache), strict=True)
    )
    # Rounded to bfloat16, in which the TPU kernel reads whatever the cache is stored in.
    return q, *(x.astype(jnp.bfloat16).astype(jnp.float32) for x in (k, v))


def ragged_reference(q, pages, lengths, indices, ends, count, **blocks):
    """What the ragged kernel says of itself (one token a sequence): `ends` are where the sequences' tokens end."""
    assert set(blocks) == {"num_kv_pages_per_block", "num_queries_per_block"}

    def on_host(q, pages, lengths, indices, ends, count):
        out = np.zeros_like(q)
        for i in range(count[0]):
            assert ends[i + 1] - ends[i] == 1
            keys, values = (
                pages[indices[i]].reshape(-1, 2, q.shape[-1])[: lengths[i]].swapaxes(0, 1)
            )
            weights = np.exp(q[ends[i]] @ keys.T)
            out[ends[i]] = weights @ values / weights.sum(-1, keepdims=True)
        return out

    return jax.pure_callback(on_host, q, q, pages, lengths, indices, ends, count)


def plain(q, k, v):
    mask = attention.cache_mask(START, 1, WINDOW)
    return attention.attend_by_head(q, k[1, :, :, :WINDOW], v[1, :, :, :WINDOW], mask)


@pytest.mark.parametrize("name", list(room.PLATFORMS))
@pytest.mark.parametrize("axes", [None, {"fsdp": 2, "tensor": 2}], ids=["one device", "mesh"])
def test_a_kernel_is_the_plain_one(name, axes, monkeypatch):
    """Layer 1 of a stacked cache, of which it reads a window; on a mesh slots and heads are cut."""
    layout = NOWHERE
    if axes:
        layout = Layout(make_mesh(MeshConfig(**axes), jax.devices()[:4]), "rollout")

    def run(q, k, v, layer):
        return room.attend_one(
            name, q, k, v, (layer,), START, window=WINDOW, layout=layout, interpret=True
        )

    if name == "ragged_paged_attention":
        # Neither of JAX's interpreters runs it (it reshapes references, and indexes them by loop counters), so what it
        # is handed goes to what it says that it computes.
        monkeypatch.setattr(room, "ragged_paged_attention", ragged_reference)
    with pltpu.force_tpu_interpret_mode() if name == "paged_attention" else nullcontext():
        got = jax.jit(run)(*arrays(), jnp.int32(1))
    np.testing.assert_allclose(got, plain(*arrays()), atol=1e-5 if "decode" in name else 2e-3)


def test_a_decoding_step_takes_the_kernel():
    """Through two scanned layers of a decoder, after a cache that two tokens have filled."""
    config = decoder.DecoderConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=128,
        max_unrolled_layers=0,
    )
    graphdef, params = decoder.init_params(config, jax.random.key(1))
    tokens, zeros = jnp.array([[3, 4], [5, 6]]), jnp.zeros(2, jnp.int32)
    cache = kv_cache.init_cache(config, 2, 128)
    extend = jax.jit(
        partial(kv_cache.extend, graphdef, window=128), static_argnames="attention_name"
    )
    _, cache = extend(params, cache, tokens, zeros, zeros + 2)

    def step(name):
        return extend(params, cache, tokens[:, :1], zeros + 2, zeros + 1, attention_name=name)

    with pltpu.force_tpu_interpret_mode():
        got, written = step("paged_attention")
    want, expected = step("plain")
    np.testing.assert_allclose(got, want, atol=0.02)
    assert not np.array_equal(got, want)  # it was another kernel
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.02), written, expected)


class OnTpu(Layout):
    platform = "tpu"


class OnGpu(Layout):
    platform = "gpu"


def resolve(name, layout, head_dim=128, windows=(512, 4096)):
    return room.resolve(name, layout, head_dim=head_dim, windows=windows)


def test_what_a_name_means_depends_on_platform_and_shapes():
    assert {resolve(name, NOWHERE) for name in room.NAMES} == {"plain"}
    assert resolve("auto", OnTpu()) == resolve("paged_attention", OnTpu()) == "paged_attention"
    assert resolve("ragged_paged_attention", OnTpu()) == "ragged_paged_attention"
    assert resolve("decode_attention", OnTpu()) == "plain"
    assert resolve("auto", OnGpu()) == resolve("paged_attention", OnGpu()) == "plain"
    assert resolve("decode_attention", OnGpu()) == "decode_attention"
    # Shapes that the kernel cannot take, and one of which it would read as much as the plain one.
    assert resolve("auto", OnTpu(), head_dim=64) == "plain"
    assert resolve("auto", OnTpu(), windows=(100, 4096)) == "plain"
    assert resolve("auto", OnTpu(), windows=(128,)) == "plain"
    with pytest.raises(UserError, match="heads that are a multiple of 128 wide, and they are 64"):
        resolve("paged_attention", OnTpu(), head_dim=64)
    with pytest.raises(UserError, match="multiples of 64, and 100 is not"):
        resolve("decode_attention", OnGpu(), windows=(100, 4096))
    with pytest.raises(UserError, match="rollout.attention is 'flash'; choose one of auto, plain"):
        resolve("flash", OnTpu())


def test_by_pages_a_step_reads_half_of_what_it_might():
    """Lengths spread evenly: half of 4,096 positions, and half a page of 512."""
    assert room.read_share("paged_attention", (512, 4096)) == (4096 / 2 + 512 / 2) / 4096
    assert room.read_share("plain", (512, 4096)) == 1
    assert room.read_share("ragged_paged_attention", (512, 4096)) > 1  # so it is never chosen


@pytest.mark.parametrize("name", ["paged_attention", "ragged_paged_attention"])
def test_the_plan_counts_what_the_kernel_computes_and_reads(name):
    def run(q, k, v):
        return room.attend_one(name, q, k, v, (jnp.int32(1),), START, window=WINDOW, layout=NOWHERE)

    counted = count_flops(run, *(x.astype(jnp.bfloat16) for x in arrays()), while_steps=32)
    assert counted.kernel == 2 * 2 * SLOTS * HEADS * WINDOW * WIDTH  # scores and sums
    assert counted.kernel_calls == 1
    assert counted.kernel_bytes == 2 * SLOTS * KV_HEADS * WINDOW * WIDTH * 2
    assert counted.matmul == 0


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed"
)
@pytest.mark.parametrize("topology", ["v5e-4", "v5p-8"])
@pytest.mark.parametrize("name", ["paged_attention", "ragged_paged_attention"])
def test_the_tpu_compiler_takes_the_kernel(name, topology):
    """A layer of a stacked cache as 7B has it on two chips: 14 heads over 2."""
    devices = open_devices(parse_slice(topology))[:2]
    layout = Layout(make_mesh(MeshConfig(tensor=2), devices), "rollout")

    def abstract(*shape, axes=(), dtype=jnp.bfloat16):
        where = jax.sharding.NamedSharding(layout.mesh, layout.spec(*axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    cache = abstract(2, 8, 4, 1024, 128, axes=(None, *kv_cache.cache_axes(4)))

    def run(q, k, v, start, layer):
        return room.attend_one(name, q, k, v, (layer,), start, window=512, layout=layout)

    q = abstract(8, 1, 28, 128, axes=("rows", None, "heads", None))
    start, layer = abstract(8, axes=("rows",), dtype=jnp.int32), abstract(dtype=jnp.int32)
    compiled = jax.jit(run).lower(q, cache, cache, start, layer).compile()
    assert "tpu_custom_call" in compiled.as_text()
