"""Where the time of a training step goes, and what share of the devices it uses."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import psutil
from flax import nnx

from psearch_jax.models.decoder_config import DecoderConfig
from psearch_jax.rollout.episode import Episode
from psearch_jax.topologies import CHIPS

#: What a device says it is → its peak in bfloat16, dense, in FLOP/s (the vendor's). The first that fits counts.
PEAK_FLOPS = {
    "TPU v4": CHIPS["v4"].peak_flops,
    "TPU v5 lite": CHIPS["v5e"].peak_flops,
    "TPU v5e": CHIPS["v5e"].peak_flops,
    "TPU v5": CHIPS["v5p"].peak_flops,
    "TPU v6": CHIPS["v6e"].peak_flops,
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "L4": 121e12,
}
#: Parts of a step; `idle` is what is left of the total.
PARTS = (
    *("decode", "append", "search_wait", "rewards"),
    *("logprobs", "update", "checkpoint", "idle"),
)


class Clock:
    """Seconds by phase; they add up to the total."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """What went by since the last lap was spent on `name`."""
        now = time.monotonic()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now

    @property
    def total(self) -> float:
        """From the beginning to the last lap."""
        return self._last - self._start


class Trace:
    """A profiler's trace of a few training steps, for TensorBoard or Perfetto, written into `directory`.

    The first step is left out: what it does is mostly compiling.
    """

    def __init__(self, directory: Path, steps: int = 3) -> None:
        self.directory, self.left = directory, steps
        self._running = False

    def after_step(self) -> None:
        """To be called after every step."""
        if self._running:
            self.left -= 1
            if self.left == 0:
                self._running = False
                jax.profiler.stop_trace()
        elif self.left:
            jax.profiler.start_trace(str(self.directory))
            self._running = True


def breakdown(
    clock: Clock, rollouts: Sequence[Mapping[str, Any]], *, logprobs: float, checkpoint: float
) -> dict[str, float]:
    """Seconds of a step by `PARTS`, and their total.

    Args:
      clock: with laps "rollout", "rewards" and "update".
      rollouts: `Engine.stats` of each rollout of the step.
      logprobs: seconds of the update phase that went into forward passes beside the update.
      checkpoint: how long the save before this step held the run up.
    """

    def played(*names: str) -> float:
        return sum(stats["seconds"].get(name, 0.0) for stats in rollouts for name in names)

    seconds = {
        "decode": played("decode"),
        "append": played("append", "prefill"),
        "search_wait": played("search"),
        "rewards": clock.laps.get("rewards", 0.0),
        "logprobs": logprobs,
        "update": clock.laps.get("update", 0.0) - logprobs,
        "checkpoint": checkpoint,
    }
    total = clock.total + checkpoint
    return {**seconds, "idle": max(0.0, total - sum(seconds.values())), "total": total}


def peak_of(kind: str) -> float | None:
    """Peak of a kind of device in FLOP/s, bfloat16; None where it is not known (a CPU)."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in kind), None)


def weights_in_products(config: DecoderConfig, params: nnx.State) -> int:
    """Parameters that every token is multiplied with: all of them, less a token table that is only looked up in."""
    every = sum(leaf.size for leaf in jax.tree.leaves(params))
    return every - (0 if config.tie_embeddings else config.vocab_size * config.hidden_size)


def model_flops(
    config: DecoderConfig, weights: int, episodes: Sequence[Episode], *, backward: bool
) -> float:
    """FLOPs that a forward pass over the episodes needs (backward: and a backward pass), nothing computed twice:
    2 a token and weight, and causal attention over what stands before; three times that with a backward pass."""
    lengths = [len(episode.ids) for episode in episodes]
    attended = sum(length * (length + 1) // 2 for length in lengths)
    width = config.num_heads * config.head_dim
    forward = 2.0 * weights * sum(lengths) + 4.0 * config.num_layers * width * attended
    return forward * (3 if backward else 1)


def rates(
    config: DecoderConfig,
    weights: int,
    played: Sequence[Episode],
    learned: Sequence[Episode],
    seconds: Mapping[str, float],
    devices: int,
) -> dict[str, Any]:
    """Tokens and episodes a second (of all devices, and of each), utilisation, and memory of this process.

    Returns:
      tokens_per_second, and as `throughput` episodes_per_second, tokens_per_second_device, episodes_per_second_device;
      mfu (model FLOPs of rollout and update over the whole step) and mfu_update (of the update over its time), None
      where the device's peak is not known; host_memory (bytes resident), device_memory (most bytes ever in use on one
      device, None where it does not say).
    """
    total, tokens = seconds["total"], sum(len(episode.ids) for episode in played)
    peak = peak_of(jax.devices()[0].device_kind)
    update = model_flops(config, weights, learned, backward=True)
    step = update + model_flops(config, weights, played, backward=False)

    def share(flops: float, time: float) -> float | None:
        return flops / (time * peak * devices) if peak and time > 0 else None

    return {
        "tokens_per_second": tokens / total,
        "throughput": {
            "episodes_per_second": len(played) / total,
            "tokens_per_second_device": tokens / total / devices,
            "episodes_per_second_device": len(played) / total / devices,
            "mfu": share(step, total),
            "mfu_update": share(update, seconds["update"]),
            "host_memory": psutil.Process().memory_info().rss,
            "device_memory": (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        },
    }
