"""Parts of a step's time, FLOPs and rates, against hand-computed values."""

import jax
import pytest

from psearch_jax import throughput
from psearch_jax.models.decoder import DecoderConfig, abstract_params
from psearch_jax.questions.question import Question
from psearch_jax.rollout.episode import Episode

SIZES = {"vocab_size": 10, "hidden_size": 4, "intermediate_size": 6, "num_layers": 2}
SIZES |= {"num_heads": 2, "num_kv_heads": 1, "head_dim": 2, "attention_bias": False}
CONFIG = DecoderConfig(**SIZES)


def episode(length: int) -> Episode:
    question = Question(id="q", text="a", golden_answers=("b",))
    return Episode(question=question, group=0, member=0, ids=[1] * length)


def test_parts_add_up_to_the_total():
    clock = throughput.Clock()
    clock.laps = {"rollout": 10.0, "rewards": 2.0, "update": 6.0}
    clock._last = clock._start + 18.0
    played = [
        {"seconds": {"prefill": 1.0, "append": 1.0, "decode": 5.0, "search": 2.0, "host": 1.0}}
    ]
    seconds = throughput.breakdown(clock, played, logprobs=1.5, checkpoint=0.5)
    assert seconds == {
        "decode": 5.0,
        "append": 2.0,
        "search_wait": 2.0,
        "rewards": 2.0,
        "logprobs": 1.5,
        "update": 4.5,
        "checkpoint": 0.5,
        "idle": pytest.approx(1.0),
        "total": pytest.approx(18.5),
    }
    assert set(seconds) == {*throughput.PARTS, "total"}
    assert sum(seconds[part] for part in throughput.PARTS) == pytest.approx(seconds["total"])


def test_flops_of_a_pass_by_hand():
    _, params = abstract_params(CONFIG)
    weights = throughput.weights_in_products(CONFIG, params)
    # q 4×4, k and v 4×2, o 4×4, three of 4×6, two norms of 4; a last norm, and the tied table of 10×4
    assert weights == 2 * (16 + 8 + 8 + 16 + 72 + 8) + 4 + 40
    untied = DecoderConfig(**SIZES, tie_embeddings=False)
    assert throughput.weights_in_products(untied, abstract_params(untied)[1]) == weights
    # Two layers, two heads of two: 4·2·4 FLOPs for each of 1+2+3 pairs of tokens.
    forward = throughput.model_flops(CONFIG, weights, [episode(3)], backward=False)
    assert forward == 2 * weights * 3 + 32 * 6
    assert throughput.model_flops(CONFIG, weights, [episode(3)], backward=True) == 3 * forward


def test_rates_and_utilisation(monkeypatch):
    seconds = {"total": 4.0, "update": 2.0}
    told = throughput.rates(CONFIG, 100, [episode(6)] * 4, [episode(6)] * 2, seconds, 2)
    assert told["tokens_per_second"] == 6.0
    figures = told["throughput"]
    assert figures["tokens_per_second_device"] == 3.0
    assert figures["episodes_per_second"] == 1.0 and figures["episodes_per_second_device"] == 0.5
    assert figures["mfu"] is None  # nobody states a CPU's peak
    assert figures["host_memory"] > 10_000_000
    monkeypatch.setattr(throughput, "peak_of", lambda kind: 1e6)
    figures = throughput.rates(CONFIG, 100, [episode(6)] * 4, [episode(6)] * 2, seconds, 2)
    one = 2 * 100 * 6 + 32 * 21
    assert figures["throughput"]["mfu_update"] == pytest.approx(2 * 3 * one / (2.0 * 2e6))
    assert figures["throughput"]["mfu"] == pytest.approx((2 * 3 + 4) * one / (4.0 * 2e6))


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("TPU v5 lite", 197e12),
        ("TPU v5p", 459e12),
        ("TPU v5", 459e12),
        ("TPU v6 lite", 918e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("cpu", None),
    ],
)
def test_peaks_by_what_devices_say_they_are(kind, peak):
    found = throughput.peak_of(kind)
    assert found == peak


def test_a_trace_has_three_steps_and_leaves_the_first_out(tmp_path, monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda directory: calls.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    trace = throughput.Trace(tmp_path)
    for step in range(1, 8):
        trace.after_step()
        calls.append(str(step))
    assert calls == ["start", "1", "2", "3", "stop", "4", "5", "6", "7"]
