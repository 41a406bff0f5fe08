"""Plans: topologies by name, figures and their cache, arithmetic, the report, and the TPU compiler where it is."""

import importlib.util
import json
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from psearch_jax import cli, plan_figures, plan_report, planning, topologies
from psearch_jax.config_files import resolve
from psearch_jax.errors import UserError
from psearch_jax.hlo_costs import hlo_costs
from psearch_jax.plan_arithmetic import cheapest_changes, mesh_of_shapes, reckon
from psearch_jax.planned_programs import PlannedProgram, programs
from psearch_jax.planned_recipe import lay_out_abstract, matmul_parameters
from psearch_jax.topologies import GIB, parse_slice

libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed"
)
TINY = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


@pytest.fixture
def tiny(tmp_path):
    """Settings of a small recipe for four devices."""
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return [
        *("policy=nowhere", f"architecture={path}", "retrieval.kind=none", "mesh.fsdp=4"),
        *("rollout.slots=16", "rollout.context=512", "algorithm.row_length=512"),
        *("algorithm.micro_rows=4", "algorithm.kl_coefficient=0.1", "model.remat=full"),
        *("trainer.questions_per_step=4", "trainer.group_size=4", "rollout.append_buckets=[128]"),
        f"compile_cache={tmp_path / 'kept'}",
    ]


def config(settings, *more):
    return planning.for_accelerator(resolve([], [*settings, *more])[0])


# What the user can mend


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "there is nothing to plan for: give --topology v5p:2x2x4"),
        (["--topology", "v5e:9"], "there is no topology 'v5e:9'"),
        (["hardware.devices=8", "hardware.memory_gib=80", "mesh.fsdp=3"], "do not multiply to 8"),
        (
            ["hardware.devices=8", "hardware.memory_gib=80", "policy=nowhere"],
            "policy 'nowhere' is not here and architecture=''",
        ),
        (
            ["hardware.devices=8", "hardware.memory_gib=80", "retrieval.encoder=nowhere"],
            "name its config.json, such as retrieval.encoder_architecture=",
        ),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(capsys, arguments, sentence):
    code = cli.main(["plan", *arguments])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


# Figures


def test_memory_of_a_program():
    found = plan_figures.Figures(
        argument_bytes=100, output_bytes=60, alias_bytes=50, temporary_bytes=30, code_bytes=7
    )
    assert found.hbm_bytes == 147
    assert replace(found, needed_bytes=999).hbm_bytes == 999


def test_seconds_add_up():
    slice_ = parse_slice("v5e-16")
    found = plan_figures.Figures(
        cycles=3e9,
        waiting_seconds=0.5,
        exposed_seconds=0.25,
        kernel_flops=16 * 0.4 * 197e12,
        flops=16 * 0.4 * 197e12 + 1600.0,
        chip_flops=200.0,
        kernel_calls=32,
        kernels=3,
    )
    assert found.seconds(slice_) == pytest.approx(2 + 0.5 + 0.25 + 1)
    slow = replace(
        found, kernel_bytes=16 * 3 * 819e9
    )  # a kernel that waits for three seconds' worth of memory
    assert slow.seconds(slice_) == pytest.approx(2 + 0.5 + 0.25 + 3)
    assert found.repeated(slice_) == pytest.approx(2.0)
    assert found.kernels_repeated(slice_) == pytest.approx(1.5)


def test_what_does_not_fit_is_a_verdict_and_no_crash():
    slice_ = parse_slice("v5e-16")
    message = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
        "(40.25G) exceeds available HBM (15.75G)."
    )
    assert plan_figures.needed_bytes(message, "update", slice_) == int(40.25 * GIB)
    older = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
        "Used 17.30G of 15.75G hbm."
    )
    assert plan_figures.needed_bytes(older, "update", slice_) == int(17.3 * GIB)
    with pytest.raises(UserError, match="refuses the program 'update' for v5e-16"):
        plan_figures.needed_bytes("INTERNAL: something else\nmore", "update", slice_)


class Lowered:
    """A program that counts how often it is compiled."""

    def __init__(self):
        self.compiled = 0

    def as_text(self):
        return "module @jit_f"


def test_figures_are_kept_by_content(tmp_path, monkeypatch):
    calls = []

    def compiled(lowered, program, mesh, slice_):
        calls.append(program.name)
        return plan_figures.Figures(argument_bytes=5, moved={"all-gather": 2.0})

    monkeypatch.setattr(plan_figures, "_compiled", compiled)
    monkeypatch.setattr(plan_figures.importlib.metadata, "version", lambda name: "1")
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))

    def figures(size, topology="v5e-16", lines=None):
        program = PlannedProgram(
            name="square",
            what="a product",
            function=jax.jit(lambda a: a @ a),
            arguments=(jax.ShapeDtypeStruct((size, size), jnp.float32),),
            options={},
            beside=(),
            tokens=1,
        )
        note = lines.append if lines is not None else (lambda line: None)
        return plan_figures.figures(program, mesh, parse_slice(topology), tmp_path, note)

    first, lines = figures(8), []
    assert figures(8, lines=lines) == first
    assert lines == ["square: a product (kept from an earlier plan)"]
    assert len(calls) == 1
    figures(9)
    figures(8, "v6e-16")
    assert len(calls) == 3
    for path in tmp_path.glob("*.json"):
        path.write_text("{")  # torn
    assert figures(8) == first
    assert len(calls) == 4


# Arithmetic


def test_resident_bytes_are_exact(tiny):
    """Against sums by hand: every matrix is cut over the four devices, what has one dimension is whole."""
    found = reckon(config(tiny), 4).recipe
    layer = 256 * (4 + 2 * 2) * 64 + 256 * 256 + 3 * 256 * 512
    assert matmul_parameters(found) == 8 * layer + 256 * 1024
    matrices = 8 * layer + 2 * 1024 * 256
    vectors = 8 * (2 * 256 + (4 + 2 * 2) * 64) + 256
    assert found.resident.parameters == 4 * (matrices // 4 + vectors)
    # Adam's two moments and a few counters.
    assert 0 <= found.resident.optimizer - 2 * found.resident.parameters < 100
    assert found.resident.reference == found.resident.parameters
    # Two tensors of 8 layers, 2 heads of 64, bfloat16, 16 slots of 512 on four devices; and two states of 256 a slot.
    assert found.resident.cache == 16 // 4 * (2 * 8 * 2 * 64 * 512 * 2 + 2 * 256 * 2)
    assert found.rows == 16
    without = reckon(config(tiny, "algorithm.kl_coefficient=0"), 4).recipe
    assert without.resident.reference == 0


def test_adapters_leave_little_to_train(tiny):
    found = reckon(config(tiny, "model.lora_rank=4", "model.param_dtype=bfloat16"), 4).recipe
    whole = reckon(config(tiny), 4).recipe
    assert found.resident.parameters < whole.resident.parameters / 10
    assert found.resident.frozen == pytest.approx(whole.resident.parameters / 2, rel=0.05)


def test_slots_that_fit(tiny):
    """At the number that fits, cache and temporaries fill what is left beside the reserve."""
    settings = config(tiny, "hardware.devices=4", "hardware.memory_gib=0.5")
    plan = planning.plan(settings)
    assert plan.slice is None
    decode = next(cost for cost in plan.costs if cost.program.name == "decode")
    growing = plan.recipe.resident.cache + decode.figures.temporary_bytes
    fixed = decode.total_bytes - growing
    full = fixed + growing * plan.rollout_slots / 16
    room = 0.9 * plan.usable_bytes
    assert room - growing / 16 * 4 < full <= room
    assert plan.rollout_slots % 4 == 0


def test_changes_are_offered_where_it_does_not_fit(tiny):
    settings = config(tiny, "hardware.devices=4", "hardware.memory_gib=0.02")
    plan = planning.plan(settings)
    assert not plan.fits
    assert plan.fullest.program.name == "update"
    assert 0 < len(plan.changes) <= 3
    before = reckon(settings, 4).update
    for change in plan.changes:
        assert change.saves == before - reckon(change.config, 4).update > 0
    assert "does not fit" in plan_report.verdict(plan)


def test_changes_that_suffice_come_first(tiny):
    settings = config(tiny, "model.remat=none", "algorithm.micro_rows=16")
    changes = cheapest_changes(settings, 4, fullest="update", over=int(2e6))
    assert changes[0].settings == "algorithm.micro_rows=8"
    assert changes[0].enough
    assert [c.enough for c in changes] == sorted([c.enough for c in changes], reverse=True)
    for change in cheapest_changes(settings, 4, fullest="decode", over=1):
        assert "micro_rows" not in change.settings


def test_a_mesh_without_devices():
    mesh = mesh_of_shapes(resolve([], ["mesh.fsdp=4", "mesh.tensor=2"])[0].mesh, 16)
    assert dict(mesh.shape) == {"data": 2, "fsdp": 4, "tensor": 2, "sequence": 1}


def test_every_program_of_a_recipe_is_planned(tiny):
    recipe = lay_out_abstract(config(tiny, "retrieval.kind=exact"), mesh_of(4))
    assert [program.name for program in programs(recipe)] == [
        *("update", "logprobs", "decode", "prefill", "append", "embed")
    ]


def mesh_of(count):
    from psearch_jax.config import MeshConfig
    from psearch_jax.mesh import make_mesh

    return make_mesh(MeshConfig(fsdp=count), jax.devices()[:count])


def test_the_report_of_arithmetic(tiny, capsys):
    settings = [*tiny, "hardware.devices=4", "hardware.memory_gib=1"]
    code = cli.main(["plan", "--json", *settings])
    told = json.loads(capsys.readouterr().out)
    assert code == 0
    assert told["fits"] is True
    assert told["method"] == "arithmetic"
    assert told["programs"]["update"]["seconds_estimate"] is None
    assert 1.0 < told["programs"]["update"]["flops_over_6nd"] < 2.0
    # The reference policy's pass is a forward pass: 2ND and its attention.
    assert told["programs"]["update"]["reference_flops"] > 0
    assert cli.main(["plan", *settings]) == 0
    out = capsys.readouterr().out
    assert "rollout slots: 16 asked for" in out
    assert "No compiler was asked" in out


# With the compiler


def product(size, slice_, devices):
    """A matmul on every chip by itself: (compiled, its costs)."""
    mesh = Mesh(np.array(devices), ("x",))
    rows = NamedSharding(mesh, PartitionSpec("x"))
    a = jax.ShapeDtypeStruct((size * slice_.chips, size), jnp.bfloat16, sharding=rows)
    b = jax.ShapeDtypeStruct(
        (size, size), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec())
    )
    compiled = jax.jit(jnp.matmul).lower(a, b).compile()
    costs = hlo_costs(compiled.as_text(), clock_hz=slice_.chip.clock_hz, link_time=lambda *_: 0.0)
    return compiled, costs


@libtpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ["v4-8", "v5e-4", "v5p-8", "v6e-4"])
def test_the_clock_makes_seconds_of_cycles(name):
    """Cycles of products that keep a chip busy: within the peak, at most a third below it, and within a third of the
    compiler's own `optimal_seconds`, which it tells for programs without loops and collectives."""
    slice_ = parse_slice(name)
    compiled, costs = product(4096, slice_, topologies.open_devices(slice_))
    assert costs.flops == 2 * 4096**3
    seconds = costs.seconds(slice_.chip.clock_hz)
    assert 0.66 < costs.flops / seconds / slice_.chip.peak_flops <= 1.0
    assert seconds / compiled.cost_analysis()["optimal_seconds"] == pytest.approx(1, abs=0.34)


@libtpu
@pytest.mark.slow
def test_usable_memory_is_what_the_compiler_says():
    for name in ("v4-8", "v5e-4", "v5p-8", "v6e-4"):
        slice_ = parse_slice(name)
        mesh = Mesh(np.array(topologies.open_devices(slice_)), ("x",))
        huge = jax.ShapeDtypeStruct(
            (200 * GIB // 4,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec())
        )
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            jax.jit(lambda x: x * 2).lower(huge).compile()
        assert f"({slice_.chip.hbm_bytes / GIB:.2f}G)" in str(caught.value)
        assert plan_figures.needed_bytes(str(caught.value), "f", slice_) == 400 * GIB


@libtpu
@pytest.mark.slow
def test_a_loop_costs_what_its_turns_cost():
    """Eight scanned layers against the line through one and two of them, written out, by the compiler's own
    `optimal_seconds`. (By ours the scan is dearer than the line: it copies the weights of each turn.)"""
    slice_ = parse_slice("v5e-4")
    mesh = Mesh(np.array(topologies.open_devices(slice_)), ("x",))
    whole = NamedSharding(mesh, PartitionSpec())
    rows = jax.ShapeDtypeStruct(
        (4 * 4096, 2048), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("x"))
    )

    def compiled(function, layers):
        ws = jax.ShapeDtypeStruct((layers, 2048, 2048), jnp.bfloat16, sharding=whole)
        done = jax.jit(function).lower(rows, ws).compile()
        costs = hlo_costs(done.as_text(), clock_hz=slice_.chip.clock_hz, link_time=lambda *_: 0.0)
        return done.cost_analysis()["optimal_seconds"], costs.seconds(slice_.chip.clock_hz), costs

    def layer(x, w):
        return jnp.tanh(x @ w)

    def written_out(x, ws):
        for w in ws:
            x = layer(x, w)
        return x

    def scanned(x, ws):
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0]

    (their_one, our_one, _), (their_two, our_two, _) = (
        compiled(written_out, 1),
        compiled(written_out, 2),
    )
    _, ours, costs = compiled(scanned, 8)
    assert costs.flops == 8 * 2 * 4096 * 2048**2
    assert our_one + 7 * (our_two - our_one) < ours < 2 * (our_one + 7 * (our_two - our_one))
    assert ours == pytest.approx(their_one + 7 * (their_two - their_one), rel=0.25)


@libtpu
@pytest.mark.slow
def test_a_plan_end_to_end(tiny, capsys):
    """Every program of a small recipe for four chips: FLOPs counted twice, memory that adds up, kept figures."""
    # 512 slots: a cache that fits into the chip's 128 MiB of fast memory is moved there and back, which are copies too.
    settings = [*tiny, "rollout.slots=512", "--topology", "v5e-4"]
    assert cli.main(["plan", "--json", *settings]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert set(told["programs"]) == {"update", "logprobs", "decode", "prefill", "append"}
    assert told["fits"]
    assert 0.9 < told["headroom"] < 1
    assert err.count("compiled in") == 5
    for program in told["programs"].values():
        # No chip repeats the work of another: the jaxpr's count is the compiled program's, over all chips.
        assert program["matmuls_repeated"] == pytest.approx(1.0, abs=0.02)
        assert program["kernels_repeated"] == 1.0
        assert program["seconds_estimate"] > 0
        assert 0 < program["utilisation_estimate"] < 1
        assert program["total_bytes"] >= program["hbm_bytes"] > program["argument_bytes"]
    update = told["programs"]["update"]
    held = told["resident_bytes"]
    arguments = held["parameters"] + held["optimizer"] + held["reference"]
    assert update["argument_bytes"] == pytest.approx(arguments, rel=0.05)
    decode = told["programs"]["decode"]
    assert decode["argument_bytes"] == pytest.approx(
        held["rollout_parameters"] + held["cache"], rel=0.05
    )
    assert decode["cache_copies"] == 0
    assert update["collective_bytes"]
    again = cli.main(["plan", "--json", *settings])
    out, err = capsys.readouterr()
    assert again == 0
    assert err.count("kept from an earlier plan") == 5
    assert json.loads(out) == told


@libtpu
@pytest.mark.slow
def test_a_recipe_that_does_not_fit(tiny, capsys):
    settings = [*tiny, "rollout.slots=2000000", "--topology", "v5e-4", "--json"]
    assert cli.main(["plan", *settings]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] is False
    assert told["headroom"] < 0
    assert told["fullest"] in ("decode", "prefill", "append")
    assert told["changes"][0]["settings"].startswith("rollout.slots=")
    assert 0 < told["rollout_slots"] < 2_000_000
    assert math.isfinite(told["rollout_slots"])
