"""What the rollout engine runs on the device: pure functions over the state of all slots (law 7).

A slot's state is its cache rows and the hidden state of its last token. A decoding step draws the next
token from that hidden state and forwards it at once. So every token of an episode is forwarded exactly
once, whether it was drawn, belongs to a prompt or came back from a search (law 4), and a paused slot
goes on as if it had never stopped.

Shape suffixes: B slots, N rows of one append, T tokens of a bucket, K steps of a block, V vocabulary, D hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from psearch_jax.mesh import NOWHERE, Layout
from psearch_jax.models.decoder import unembed
from psearch_jax.models.kv_cache import KVCache, copy_slots, extend, read_slots, write_slots
from psearch_jax.rollout.sampling import sample


class SlotState(NamedTuple):
    """What stays on the device between calls. Always donated."""

    cache: KVCache
    hidden_BxD: Float[Array, "B D"]  # of each slot's last token: the next token is drawn from it
    prompt_hidden_BxD: Float[
        Array, "B D"
    ]  # of the last token of the prompt whose cache rows the slot holds


class SlotInputs(NamedTuple):
    """What the host decides about every slot before a block. All data: changing it compiles nothing."""

    active_B: Bool[Array, "B"]
    length_B: Int[Array, "B"]  # tokens that the slot's episode has
    room_B: Int[Array, "B"]  # tokens that it may still get in this turn
    group_B: UInt32[Array, "B"]
    member_B: UInt32[Array, "B"]
    temperature_B: Float[Array, "B"]
    top_k_B: Int[Array, "B"]
    top_p_B: Float[Array, "B"]
    stop_at: Int[Array, ""]  # the block ends when no more slots than this are active


class Block(NamedTuple):
    """What a block of decoding drew."""

    tokens_BxK: Int[Array, "B K"]
    logprobs_BxK: Float[Array, "B K"]
    count_B: Int[Array, "B"]  # tokens drawn
    active_B: Bool[Array, "B"]  # still decoding; the others paused at their last token
    nan_B: Bool[Array, "B"]  # the logits were not finite: nothing was drawn
    steps: Int[Array, ""]


def episode_key(key: Key[Array, ""], group: Any, member: Any) -> Key[Array, ""]:
    """The key of one episode; the token at position p is drawn with `fold_in(episode_key, p)` (law 7)."""
    return jax.random.fold_in(jax.random.fold_in(key, group), member)


def decode(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    state: SlotState,
    inputs: SlotInputs,
    key: Key[Array, ""],
    pauses_V: Bool[Array, "V"],
    *,
    steps: int,
    window: int,
    dtype: Any,
    layout: Layout = NOWHERE,
) -> tuple[SlotState, Block]:
    """Decode up to `steps` tokens in every active slot.

    A slot pauses at a token of `pauses_V`, when its room is used up, or when its logits are not finite
    (law 3). The block ends early when at most `stop_at` slots are still active. `window` must cover every
    active length and the tokens that may be drawn.
    """
    slots = inputs.length_B.shape[0]
    keys_B = jax.vmap(episode_key, (None, 0, 0))(key, inputs.group_B, inputs.member_B)
    rows_B = jnp.arange(slots)

    def step(carry: tuple[SlotState, Block, Array]) -> tuple[SlotState, Block, Array]:
        state, block, length_B = carry
        # Each device scores its part of the vocabulary for all rows, and draws from all of it for its own.
        hidden_BxD = layout.constrain(state.hidden_BxD, "vocab_rows", None)
        logits_BxV = layout.constrain(
            unembed(graphdef, params, hidden_BxD, layout), "vocab_rows", "vocab"
        )
        logits_BxV = layout.constrain(logits_BxV, "rows", None)
        ids_B, logprobs_B = sample(
            logits_BxV,
            jax.vmap(jax.random.fold_in)(keys_B, length_B),
            inputs.temperature_B,
            inputs.top_k_B,
            inputs.top_p_B,
        )
        finite_B = jnp.isfinite(logprobs_B)
        drawn_B = block.active_B & finite_B
        hidden_Bx1xD, cache = extend(
            graphdef,
            params,
            state.cache,
            ids_B[:, None],
            length_B,
            drawn_B.astype(jnp.int32),
            window=window,
            dtype=dtype,
            layout=layout,
        )
        hidden_BxD = jnp.where(drawn_B[:, None], hidden_Bx1xD[:, 0], state.hidden_BxD)
        column_B = jnp.where(drawn_B, block.count_B, steps)  # out of range: nothing is written
        count_B = block.count_B + drawn_B
        block = Block(
            tokens_BxK=block.tokens_BxK.at[rows_B, column_B].set(ids_B, mode="drop"),
            logprobs_BxK=block.logprobs_BxK.at[rows_B, column_B].set(logprobs_B, mode="drop"),
            count_B=count_B,
            active_B=drawn_B & ~pauses_V[ids_B] & (count_B < inputs.room_B),
            nan_B=block.nan_B | (block.active_B & ~finite_B),
            steps=block.steps + 1,
        )
        return state._replace(cache=cache, hidden_BxD=hidden_BxD), block, length_B + drawn_B

    def more(carry: tuple[SlotState, Block, Array]) -> Bool[Array, ""]:
        block = carry[1]
        return (block.steps < steps) & (jnp.sum(block.active_B) > inputs.stop_at)

    empty = Block(
        tokens_BxK=jnp.zeros((slots, steps), jnp.int32),
        logprobs_BxK=jnp.zeros((slots, steps), jnp.float32),
        count_B=jnp.zeros(slots, jnp.int32),
        active_B=inputs.active_B,
        nan_B=jnp.zeros(slots, bool),
        steps=jnp.int32(0),
    )
    state, block, _ = jax.lax.while_loop(more, step, (state, empty, inputs.length_B))
    return state, block


def append(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    state: SlotState,
    slot_N: Int[Array, "N"],
    tokens_NxT: Int[Array, "N T"],
    start_N: Int[Array, "N"],
    count_N: Int[Array, "N"],
    *,
    window: int,
    dtype: Any,
    layout: Layout = NOWHERE,
) -> SlotState:
    """Forward known tokens (a prompt, an observation) in a few slots.

    Only these slots' rows are read and computed. A row with `slot` = B is padding: nothing of it is written.
    `window` must be at least start + count of every row. On a mesh the rows come in equal runs, one for each run of
    slots that a device holds, so that no cache travels.
    """
    pieces = layout.size("rows")
    few = read_slots(state.cache, slot_N, window, pieces)
    hidden_NxTxD, few = extend(
        graphdef,
        params,
        few,
        tokens_NxT,
        start_N,
        count_N,
        window=window,
        dtype=dtype,
        layout=layout,
    )
    last_NxD = hidden_NxTxD[jnp.arange(slot_N.shape[0]), count_N - 1]
    cache = write_slots(state.cache, few, slot_N, window, pieces)
    hidden_BxD = state.hidden_BxD.at[slot_N].set(last_NxD, mode="drop")
    return state._replace(cache=cache, hidden_BxD=hidden_BxD)


def seat(
    state: SlotState,
    prefilled_B: Bool[Array, "B"],
    src_N: Int[Array, "N"],
    dst_N: Int[Array, "N"],
    begins_B: Bool[Array, "B"],
    *,
    pieces: int = 1,
) -> SlotState:
    """Let episodes begin behind prompts that the cache holds already.

    `prefilled` slots have just had their prompt appended; each `dst` slot then gets the rows of its `src`
    slot (which may be in the middle of an episode: its prompt's rows are still the first ones); slots that
    `begin` continue from the end of their prompt. Entries with `dst` = B are padding. `pieces`: as in `read_slots`.
    """
    prompt_BxD = jnp.where(prefilled_B[:, None], state.hidden_BxD, state.prompt_hidden_BxD)
    prompt_BxD = prompt_BxD.at[dst_N].set(prompt_BxD.at[src_N].get(mode="clip"), mode="drop")
    hidden_BxD = jnp.where(begins_B[:, None], prompt_BxD, state.hidden_BxD)
    return SlotState(copy_slots(state.cache, src_N, dst_N, pieces), hidden_BxD, prompt_BxD)


def clear(state: SlotState, slots_B: Bool[Array, "B"]) -> SlotState:
    """Zero everything that these slots hold."""

    def zero(x: Array) -> Array:
        # Hidden states are [B, D]; of a cache array the slots are the fourth dimension from the end.
        return jnp.where(slots_B.reshape(-1, *[1] * (min(x.ndim, 4) - 1)), 0, x)

    return jax.tree.map(zero, state)
