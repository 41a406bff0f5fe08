"""FLOPs of a program against values computed by hand, and the same counted by XLA where it can."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from psearch_jax.program_costs import Flops, count_flops, visible_blocks

A = jax.ShapeDtypeStruct((3, 5), jnp.float32)
B = jax.ShapeDtypeStruct((5, 7), jnp.float32)
#: 2 × 3 × 5 × 7.
ONE = 210


def flops(function, *args, **options) -> float:
    return count_flops(function, *args, **options).total


def test_a_product_is_two_operations_a_multiply_add():
    assert count_flops(jnp.matmul, A, B) == Flops(matmul=ONE)
    x = jax.ShapeDtypeStruct((2, 3, 4, 5), jnp.float32)
    y = jax.ShapeDtypeStruct((2, 6, 4, 5), jnp.float32)
    # Batch 2 × 4, 3 × 6 results, 5 products each.
    assert flops(lambda x, y: jnp.einsum("bqkh,bskh->bkqs", x, y), x, y) == 2 * 2 * 4 * 3 * 6 * 5


def test_element_wise_work_is_not_counted():
    assert flops(lambda a: jnp.tanh(a) * 2 + a.sum(), A) == 0


def test_a_convolution():
    image = jax.ShapeDtypeStruct((2, 8, 8, 3), jnp.float32)
    kernel = jax.ShapeDtypeStruct((3, 3, 3, 4), jnp.float32)

    def run(x, k):
        return jax.lax.conv_general_dilated(
            x, k, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    # 2 images of 6 × 6 places and 4 features, each from 3 × 3 × 3 numbers.
    assert flops(run, image, kernel) == 2 * (2 * 6 * 6 * 4) * 27


def test_a_gradient_is_twice_the_forward_pass():
    def loss(a, b):
        return jnp.sum((a @ b) ** 2)

    assert flops(jax.grad(loss), A, B) == 2 * ONE
    assert flops(jax.grad(loss, argnums=(0, 1)), A, B) == 3 * ONE


def test_loops_count_as_often_as_they_run():
    square = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    stack = jax.ShapeDtypeStruct((6, 4, 4), jnp.float32)

    def scanned(x, ws):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, ws)[0]

    assert flops(scanned, square, stack) == 6 * 2 * 4**3

    def nested(x, ws):
        return jax.lax.fori_loop(0, 3, lambda _, x: scanned(x, ws), x)

    assert flops(jax.jit(nested), square, stack) == 3 * 6 * 2 * 4**3

    def until(x):
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 5, lambda x: x @ x, x)

    assert flops(until, square) == 2 * 4**3
    assert flops(until, square, while_steps=16) == 16 * 2 * 4**3


def test_the_dearer_branch_counts():
    def either(flag, a, b):
        return jax.lax.cond(flag, lambda: a @ b, lambda: jnp.zeros((3, 7)))

    assert flops(either, jax.ShapeDtypeStruct((), jnp.bool_), A, B) == ONE


def test_what_is_recomputed_counts_again():
    stack = jax.ShapeDtypeStruct((6, 4, 4), jnp.float32)
    x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    unit = 6 * 2 * 4**3

    def loss(x, ws, body):
        return jnp.sum(jax.lax.scan(body, x, ws)[0])

    def layer(x, w):
        # Two products, the second of which is not needed again for the gradient of the layer.
        return jnp.tanh(x @ w) @ w, None

    kept = flops(jax.grad(lambda x, ws: loss(x, ws, layer), argnums=1), x, stack)
    again = flops(jax.grad(lambda x, ws: loss(x, ws, jax.checkpoint(layer)), argnums=1), x, stack)
    assert kept == 6 * unit
    assert again == 7 * unit


def test_a_custom_derivative_counts_once():
    @jax.custom_vjp
    def product(a, b):
        return a @ b

    product.defvjp(lambda a, b: (a @ b, (a, b)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))
    assert flops(product, A, B) == ONE
    assert flops(jax.value_and_grad(lambda a, b: jnp.sum(product(a, b)), (0, 1)), A, B) == 3 * ONE


def test_shards_add_up_to_the_whole():
    auto = (AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("rows",), devices=jax.devices()[:4], axis_types=auto)
    x = jax.ShapeDtypeStruct((8, 5), jnp.float32)
    spec = PartitionSpec("rows")

    def run(x, b):
        return jax.shard_map(
            lambda x, b: x @ b, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec
        )(x, b)

    assert flops(run, x, B) == 2 * 8 * 5 * 7


def test_a_pallas_kernel_counts_its_grid():
    from jax.experimental import pallas as pl

    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] @ y_ref[...]

    call = pl.pallas_call(
        kernel,
        grid=(4, 2),
        in_specs=[
            pl.BlockSpec((8, 16), lambda i, j: (i, 0)),
            pl.BlockSpec((16, 8), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((8, 8), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((32, 16), jnp.float32),
    )
    x = jax.ShapeDtypeStruct((32, 16), jnp.float32)
    y = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    assert count_flops(call, x, y) == Flops(kernel=2 * 32 * 16 * 16, kernel_calls=1)
    # What no output needs is no part of any compiled program.
    assert count_flops(lambda x, y: (jax.jit(call)(x, y), x + 1)[1], x, y) == Flops()


@pytest.mark.parametrize(
    ("kernel", "grid", "share"),
    [
        ("splash_mha_fwd_segmented_residuals", (28, 8, 8), 36 / 64),
        ("splash_mha_dq_segmented_no_residuals", (28, 4, 8), (2 + 4 + 6 + 8) / 32),
        ("splash_mha_dkv_segmented_no_residuals", (8, 28, 4), (2 + 4 + 6 + 8) / 32),
        ("splash_mha_fwd", (28, 4, 2), (1 + 1 + 2 + 2) / 8),
        ("splash_mha_fwd", (3, 28, 8, 8), 36 / 64),  # three rows on a device
        ("splash_mha_dkv_segmented_no_residuals", (3, 8, 28, 4), (2 + 4 + 6 + 8) / 32),
        ("another", (28, 8, 8), 1.0),
    ],
)
def test_blocks_above_the_diagonal_are_not_computed(kernel, grid, share):
    assert visible_blocks(kernel, grid) == pytest.approx(share)


def test_a_decoder_counts_as_6nd():
    """A decoder without attention to speak of: 2ND forward, 6ND with gradients, and what remat adds."""
    from flax import nnx

    from psearch_jax.config import MeshConfig
    from psearch_jax.mesh import NOWHERE, Layout, make_mesh
    from psearch_jax.models.decoder import abstract_params, hidden_states
    from psearch_jax.models.decoder_config import DecoderConfig

    config = DecoderConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_layers=8,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
    )
    graphdef, params = abstract_params(config)
    rows, length = 2, 4
    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    layer = 32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 64
    attention = 2 * 2 * rows * length * length * 32  # scores and sums, all heads, no block skipped
    forward = 8 * (2 * layer * rows * length + attention)

    def run(params, tokens, remat, layout=NOWHERE):
        hidden = hidden_states(graphdef, params, tokens, tokens, tokens, remat=remat, layout=layout)
        return jnp.sum(hidden)

    assert isinstance(params, nnx.State)
    assert flops(lambda p, t: run(p, t, "none"), params, tokens) == forward
    # Weights and activations have one product each for every one of the forward pass.
    assert flops(jax.grad(lambda p, t: run(p, t, "none")), params, tokens) == 3 * forward
    down = 8 * 2 * 32 * 64 * rows * length
    full = flops(jax.grad(lambda p, t: run(p, t, "full")), params, tokens)
    # The layer again, but for its last product, which no gradient needs.
    assert full == 4 * forward - down
    # On a mesh, where projections are apart, those of keys and values are not needed again with "attention". (The plain
    # one's scores are: what splash saves, the test below counts.)
    layout = Layout(make_mesh(MeshConfig(fsdp=2), jax.devices()[:2]))
    some = flops(jax.grad(lambda p, t: run(p, t, "attention", layout)), params, tokens)
    assert some == full - 8 * 2 * 32 * (2 * 16) * rows * length


@pytest.mark.parametrize(
    ("remat", "products", "kernels"), [("full", 2 + 2 + 5, 3), ("attention", 2 + 5, 2)]
)
def test_splash_attention_is_computed_once_more_only_where_nothing_of_it_is_kept(
    remat, products, kernels, monkeypatch
):
    """Two products forward, five in the fused backward kernel; two more where the forward kernel runs again."""
    from psearch_jax.mesh import NOWHERE
    from psearch_jax.models import packed_attention as room
    from psearch_jax.models.decoder import REMAT_POLICIES

    monkeypatch.setattr(room, "SPLASH_BLOCK", 128)
    length, heads, width = 512, 4, 128
    segments = jax.ShapeDtypeStruct((1, length), jnp.int32)
    x = jax.ShapeDtypeStruct((1, length, heads, width), jnp.bfloat16)

    def loss(x, segments):
        attended = room._splash(segments, NOWHERE, jnp.sin(x), x, x)
        return jnp.sum(jnp.sin(attended)).astype(jnp.float32)  # the value is needed, too

    kept = jax.checkpoint(loss, policy=REMAT_POLICIES[remat])
    counted = count_flops(jax.value_and_grad(kept), x, segments)
    visible = (4 + 3 + 2 + 1) / 16
    assert counted.kernel == products * 2 * heads * length * length * width * visible
    assert counted.kernel_calls == kernels
    # What attention gave times its gradient, for each query.
    assert counted.matmul == 2 * heads * length * width
