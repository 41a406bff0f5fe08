"""How many slots fit: bytes of a slot against the memory that is free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import psutil

from psearch_jax.config import RolloutConfig
from psearch_jax.errors import UserError
from psearch_jax.mesh import Layout, resolve_dtype
from psearch_jax.models.decoder_config import DecoderConfig
from psearch_jax.models.kv_cache import init_cache

#: The share of the free memory that slots may take. The rest is for what is not reckoned with.
SHARE = 0.9


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """What was decided, in figures. `free`: bytes of a device (the host's on CPU) that slots may take `SHARE` of;
    `slot`: bytes of a slot there; `fitting`: slots of all devices that fit."""

    slots: int
    fitting: int
    slot: int
    free: int

    def __str__(self) -> str:
        return (
            f"{self.slots} rollout slots of {self.slot / 2**20:.2f} MiB; {self.fitting} fit into "
            f"{SHARE:.0%} of the {self.free / 2**30:.2f} GiB that are free"
        )


def choose_slots(
    rollout: RolloutConfig,
    decoder: DecoderConfig,
    layout: Layout,
    *,
    episodes: int,
    reserved: int = 0,
) -> tuple[RolloutConfig, Sizing]:
    """The rollout settings with a number of slots, and how it was found.

    `rollout.slots` 0 takes as many as fit, but no more than `episodes`, which is what one rollout plays. reserved:
    bytes of a device that something else will take later.

    Raises:
      UserError: more slots than fit, or none fits.
    """
    pieces = layout.size("rows")
    devices = jax.local_devices() if layout.mesh is None else list(layout.mesh.local_devices)
    # Devices of a CPU share the memory of their host.
    sharing = len(devices) if layout.mesh is not None and layout.platform == "cpu" else 1
    free = max(0, free_bytes(devices[0]) // sharing - reserved)
    slot = slot_bytes(decoder, rollout.context, layout, resolve_dtype(rollout.dtype, layout))
    fitting = int(SHARE * free / slot) * pieces
    wanted = rollout.slots or min(fitting, -(-episodes // pieces) * pieces)
    sizing = Sizing(slots=wanted, fitting=fitting, slot=slot, free=free)
    if wanted > fitting or not wanted:
        remedy = (
            f"set rollout.slots to {fitting} or less (0 chooses)"
            if fitting
            else "lower rollout.context, or free memory"
        )
        raise UserError(
            f"rollout.slots={rollout.slots} with rollout.context={rollout.context} does not fit: a slot takes "
            f"{slot / 2**20:.2f} MiB and {free / 2**30:.2f} GiB are free, which is room for {fitting}; {remedy}."
        )
    rows = min(rollout.decode_rows, wanted)
    return replace(rollout, slots=wanted, decode_rows=rows), sizing


def slot_bytes(decoder: DecoderConfig, context: int, layout: Layout, dtype: Any) -> int:
    """Bytes that one slot takes on a device, with what a decoding step needs for it.

    Its keys and values; a layer's part of them again, which is read as a copy; hidden states; and the logits of a
    token three times over (as they come, with noise, and sorted for top-p), float32, whole.
    """
    cache = jax.eval_shape(lambda: init_cache(decoder, 1, context, dtype))
    heads = layout.size("kv_heads")
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)) // heads
    layer = kept // decoder.num_layers
    hidden = 2 * decoder.hidden_size * jnp.dtype(dtype).itemsize
    return kept + layer + hidden + 3 * 4 * decoder.vocab_size


def free_bytes(device: Any) -> int:
    """Memory of a device that nothing has taken; of a CPU, what the host has available."""
    stats = None
    if device.platform != "cpu":
        stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    return int(psutil.virtual_memory().available)
