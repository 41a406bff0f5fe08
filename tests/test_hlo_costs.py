"""Reading the compiler's text: hand-made programs with known costs."""

import pytest

from psearch_jax.hlo_costs import hlo_costs, matmul_flops
from psearch_jax.hlo_text import byte_size, first_group, parse, trip_count

CYCLES = 'backend_config={{"window_config":{{"estimated_cycles":"{}"}}}}'
HEADER = "HloModule jit_f, is_scheduled=true, num_partitions=4\n\n"


def cycles(count: int) -> str:
    return CYCLES.format(count)


def loop(limit: str, body: str, *, start: int = 0, step: int = 1) -> str:
    """A program whose entry runs a loop over a counter and one array."""
    return f"""{HEADER}%cond (p: (s32[], f32[8,8])) -> pred[] {{
  %p = (s32[]{{:T(128)}}, f32[8,8]{{1,0:T(8,128)}}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%p), index=0
  %n = s32[]{{:T(128)}} constant({limit})
  ROOT %less = pred[]{{:T(512)}} compare(%i, %n), direction=LT
}}

%body (q: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {{
  %q = (s32[]{{:T(128)}}, f32[8,8]{{1,0:T(8,128)}}) parameter(0)
  %j = s32[]{{:T(128)}} get-tuple-element(%q), index=0
  %x = f32[8,8]{{1,0:T(8,128)}} get-tuple-element(%q), index=1
  %one = s32[]{{:T(128)}} constant({step})
  %next = s32[]{{:T(128)}} add(%j, %one)
{body}
  ROOT %out = (s32[]{{:T(128)}}, f32[8,8]{{1,0:T(8,128)}}) tuple(%next, %y)
}}

ENTRY %main (a: f32[8,8]) -> f32[8,8] {{
  %a = f32[8,8]{{1,0:T(8,128)}} parameter(0)
  %zero = s32[]{{:T(128)}} constant({start})
  %init = (s32[]{{:T(128)}}, f32[8,8]{{1,0:T(8,128)}}) tuple(%zero, %a)
  %w = (s32[], f32[8,8]) while(%init), condition=%cond, body=%body
  ROOT %r = f32[8,8]{{1,0:T(8,128)}} get-tuple-element(%w), index=1
}}
"""


def costs(text: str, **options):
    # A collective takes a second for each byte that is received.
    return hlo_costs(text, clock_hz=100.0, link_time=lambda kind, group, count: count, **options)


PLAIN = f"  %y = f32[8,8]{{1,0:T(8,128)}} add(%x, %x), {cycles(50)}"


@pytest.mark.parametrize(
    ("start", "limit", "step", "runs"),
    [(0, 28, 1, 28), (3, 28, 1, 25), (0, 28, 3, 10), (5, 5, 1, 0)],
)
def test_a_loop_runs_from_start_to_limit(start, limit, step, runs):
    text = loop(str(limit), PLAIN, start=start, step=step)
    computations, entry = parse(text)
    loops = [i for i in computations[entry].instructions.values() if i.opcode == "while"]
    assert trip_count(loops[0], computations[entry], computations) == runs
    assert costs(text).cycles == 50 * runs
    assert costs(text).seconds(100.0) == 0.5 * runs


def test_a_trip_count_that_is_written_down_is_taken():
    text = loop("28", PLAIN).replace(
        "body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"7"}}'
    )
    assert costs(text).cycles == 350


def test_a_loop_that_depends_on_data_runs_as_often_as_said():
    text = loop("28", PLAIN).replace("direction=LT", "direction=NE")
    assert costs(text, while_steps=5).cycles == 250


def test_a_limit_that_is_carried_in():
    text = loop("28", PLAIN)
    text = text.replace(
        "%n = s32[]{:T(128)} constant(28)", "%n = s32[]{:T(128)} get-tuple-element(%p), index=2"
    )
    text = text.replace("tuple(%zero, %a)", "tuple(%zero, %a, %limit)")
    text = text.replace("  %init =", "  %limit = s32[]{:T(128)} constant(12)\n  %init =")
    assert costs(text, while_steps=99).cycles == 50 * 99  # the loop may change it
    text = text.replace("tuple(%next, %y)", "tuple(%next, %y, %same)")
    text = text.replace(
        "  %one =", "  %same = s32[]{:T(128)} get-tuple-element(%q), index=2\n  %one ="
    )
    assert costs(text, while_steps=99).cycles == 50 * 12


@pytest.mark.parametrize(
    ("operation", "kind", "count"),
    [
        # Of 256 bytes on each of 4 chips, or 256 in all of which each keeps a quarter.
        ("all-gather(%x), replica_groups={{0,1,2,3}}, dimensions={0}", "all-gather", 256 * 3),
        ("all-reduce(%x), replica_groups=[1,4]<=[4], to_apply=%add", "all-reduce", 2 * 192),
        ("reduce-scatter(%x), replica_groups=[1,4]<=[4], dimensions={0}", "reduce-scatter", 192),
        ("all-to-all(%x), replica_groups=[1,4]<=[4]", "all-to-all", 192),
        ("all-to-all(%x), replica_groups=[2,2]<=[4]", "all-to-all", 128),
        ("collective-permute(%x), source_target_pairs={{0,1},{1,0}}", "collective-permute", 256),
    ],
)
def test_bytes_of_collectives(operation, kind, count):
    text = loop("10", f"  %y = f32[8,8]{{1,0}} {operation}, channel_id=1")
    found = costs(text)
    assert found.bytes_moved == {kind: 10 * count}
    assert found.waiting == 10 * count
    assert found.seconds(100.0) == 10 * count


def test_a_collective_of_one_chip_moves_nothing():
    text = loop("10", "  %y = f32[8,8]{1,0} all-reduce(%x), replica_groups={{0},{1},{2},{3}}")
    assert costs(text).bytes_moved == {}


def test_what_starts_early_hides_behind_work():
    body = (
        "  %s = (f32[8,8], f32[8,8]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}\n"
        f"  %work = f32[8,8] add(%x, %x), {cycles(20_000)}\n"
        "  %y = f32[8,8] collective-permute-done(%s)"
    )
    found = costs(loop("10", body))
    assert (found.waiting, found.hidden) == (0, 2560)
    # 200 seconds of work in each turn, 256 of sending.
    assert found.exposed == pytest.approx(560)
    assert found.seconds(100.0) == pytest.approx(2560)


FUSED = """%piece (a: f32[8,8]) -> f32[32,8] {
  %a = f32[8,8]{1,0} parameter(0)
  ROOT %g = f32[32,8]{1,0} all-gather(%a), channel_id=3, replica_groups={{0,1,2,3}}, dimensions={0}, \
backend_config={"async_collective_fusion_config":{"flag_start":"FLAG","flag_end":"8"}}
}

"""


def test_a_collective_in_pieces_counts_once():
    text = loop(
        "10",
        f"  %s = f32[32,8] fusion(%x), calls=%piece1\n{PLAIN}\n  %d = f32[32,8] fusion(%x), calls=%piece2",
    )
    pieces = FUSED.replace("FLAG", "-1").replace("%piece", "%piece1")
    pieces += FUSED.replace("FLAG", "2").replace("%piece", "%piece2")
    found = costs(text.replace(HEADER, HEADER + pieces))
    assert found.bytes_moved == {"all-gather": 10 * 256 * 3}
    assert found.hidden == 10 * 256 * 3
    assert found.waiting == 0


def test_an_all_reduce_of_which_a_part_is_kept_is_a_reduce_scatter():
    scatter = """%all-reduce-scatter.1 (a: f32[8,8]) -> f32[2,8] {
  %a = f32[8,8]{1,0} parameter(0)
  %sum = f32[8,8]{1,0} all-reduce(%a), channel_id=3, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %own = f32[2,8]{1,0} slice(%sum), slice={[0:2], [0:8]}
}

"""
    text = loop(
        "10", f"  %s = f32[2,8] fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1\n{PLAIN}"
    )
    found = costs(text.replace(HEADER, HEADER + scatter))
    assert found.bytes_moved == {"reduce-scatter": 10 * 192}


def test_the_dearer_branch_is_taken():
    def branch(name: str, count: int) -> str:
        return f"""%{name} (a: f32[8,8]) -> f32[8,8] {{
  %a = f32[8,8]{{1,0}} parameter(0)
  ROOT %b = f32[8,8]{{1,0}} add(%a, %a), {cycles(count)}
}}

"""

    body = "  %y = f32[8,8] conditional(%j, %x, %x), branch_computations={%cheap, %dear}"
    text = loop("10", body).replace(HEADER, HEADER + branch("cheap", 3) + branch("dear", 70))
    assert costs(text).cycles == 700


def test_a_kernel_with_a_line_break_in_its_attributes():
    kernel = (
        '  %y = f32[8,8]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", '
        'frontend_attributes={kernel_metadata={\n"block": 1\n}}, metadata={op_name="k"}'
    )
    found = costs(loop("10", kernel))
    assert found.kernels == 10


@pytest.mark.parametrize(
    ("attributes", "group"),
    [
        ("replica_groups={{0,2},{1,3}}", (0, 2)),
        ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3)),
        ("replica_groups=[4,4]<=[4,4]T(1,0)", (0, 4, 8, 12)),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=4] {'axis_1'}", (0, 1, 2, 3)),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=4] {'axis_0'}", (0, 4, 8, 12)),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", (0, 1, 2, 3)),
        ("source_target_pairs={{0,5},{5,0}}", (0, 5)),
        ("", (0, 1, 2)),
    ],
)
def test_device_groups(attributes, group):
    assert first_group(attributes, 3) == group


def test_bytes_of_types():
    assert byte_size("bf16[2,3]{1,0:T(8,128)(2,1)S(1)}") == 12
    assert byte_size("(f32[4], (s32[], u32[2]{:S(2)}))") == 16 + 4 + 8
    assert byte_size("pred[]") == 1


@pytest.mark.parametrize(
    ("types", "line", "flops"),
    [
        (
            ("f32[3,5]", "f32[5,7]"),
            "f32[3,7] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
            210,
        ),
        (("bf16[3,5]", "bf16[5,7]"), "bf16[3,7] convolution(%a, %b), dim_labels=bf_io->bf", 210),
        # A batch dimension of 4, as the compiler writes it: a window that meets one element at a time.
        (
            ("bf16[4,3,5]", "bf16[4,5,7]"),
            "bf16[4,3,7] convolution(%a, %b), window={size=4 stride=3 pad=0_0 lhs_dilate=4}, dim_labels=0bf_0io->0bf",
            4 * 210,
        ),
        # Two halves of a sum in one window: nothing of it is padding.
        (
            ("bf16[3,2,5]", "bf16[2,5,7]"),
            "bf16[3,7,1] convolution(%a, %b), window={size=2}, dim_labels=b0f_0io->bf0",
            420,
        ),
        # Two results of one sum: the window of two slides over one place, half of it always outside.
        (
            ("bf16[3,5,1]", "bf16[7,2,5]"),
            "bf16[3,2,7] convolution(%a, %b), window={size=2 pad=1_1 rhs_reversal=1}, dim_labels=bf0_o0i->b0f",
            420,
        ),
    ],
)
def test_flops_of_products(types, line, flops):
    text = (
        f"{HEADER}ENTRY %main (a: f32[1], b: f32[1]) -> f32[1] {{\n  %a = {types[0]}{{1,0}} parameter(0)\n"
        f"  %b = {types[1]}{{1,0}} parameter(1)\n  ROOT %c = {line}\n}}\n"
    )
    computations, entry = parse(text)
    computation = computations[entry]
    assert matmul_flops(computation.instructions["c"], computation) == flops


def test_an_array_that_is_copied_is_told_from_one_that_is_updated_in_place():
    """A loop of 28 turns over f32[8,8], 256 bytes: written anew in each, or by a fusion that ends in an update."""
    assert costs(loop("28", PLAIN), watch=256).copies == 28
    assert costs(loop("28", PLAIN), watch=257).copies == 0
    assert costs(loop("28", PLAIN)).copies == 0
    copied = PLAIN.replace("add(%x, %x)", "copy(%x)")
    assert costs(loop("28", copied), watch=256).copies == 28
    fused = PLAIN.replace("add(%x, %x)", "fusion(%x), kind=kLoop, calls=%inside")
    inside = """%inside (r: f32[8,8]) -> f32[8,8] {{
  %r = f32[8,8]{{1,0:T(8,128)}} parameter(0)
  ROOT %end = f32[8,8]{{1,0:T(8,128)}} {}(%r, %r), update_window_dims={{2}}
}}

"""
    for opcode, copies in (("scatter", 0), ("dynamic-update-slice", 0), ("add", 28)):
        text = loop("28", fused).replace("%cond (", inside.format(opcode) + "%cond (", 1)
        assert costs(text, watch=256).copies == copies
