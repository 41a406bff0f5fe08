"""What the rollout engine runs on the device: pure functions over the state of all slots (law 7).

A slot's state is its cache rows and the hidden state of its last token. A decoding step draws the next
token from that hidden state and forwards it at once. So every token of an episode is forwarded exactly
once, whether it was drawn, belongs to a prompt or came back from a search (law 4), and a paused slot
goes on as if it had never stopped.

Shape suffixes: B slots, R rows of a decoding block (all slots, or a few of them), N rows of one append, T tokens of
a bucket, K steps of a block, V vocabulary, D hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
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


class RowInputs(NamedTuple):
    """What the host decides about every row before a block. All data: changing it compiles nothing."""

    slot_R: Int[
        Array, "R"
    ]  # of each row; the number of slots: nobody's. Unread where row r is slot r
    active_R: Bool[Array, "R"]
    length_R: Int[Array, "R"]  # tokens that the slot's episode has
    room_R: Int[Array, "R"]  # tokens that it may still get in this turn
    group_R: UInt32[Array, "R"]
    member_R: UInt32[Array, "R"]
    temperature_R: Float[Array, "R"]
    top_k_R: Int[Array, "R"]
    top_p_R: Float[Array, "R"]
    stop_at: Int[Array, ""]  # the block ends when no more rows than this are active


def empty_rows(rows: int, slots: int, *, stop_at: int = 0) -> RowInputs:
    """Rows of nobody, as arrays of the host to be filled in."""
    return RowInputs(
        slot_R=np.full(rows, slots, np.int32),
        active_R=np.zeros(rows, bool),
        length_R=np.zeros(rows, np.int32),
        room_R=np.zeros(rows, np.int32),
        group_R=np.zeros(rows, np.uint32),
        member_R=np.zeros(rows, np.uint32),
        temperature_R=np.zeros(rows, np.float32),
        top_k_R=np.zeros(rows, np.int32),
        top_p_R=np.ones(rows, np.float32),
        stop_at=np.int32(stop_at),
    )


class Block(NamedTuple):
    """What a block of decoding drew."""

    tokens_RxK: Int[Array, "R K"]
    logprobs_RxK: Float[Array, "R K"]
    count_R: Int[Array, "R"]  # tokens drawn
    active_R: Bool[Array, "R"]  # still decoding; the others paused at their last token
    nan_R: Bool[Array, "R"]  # the logits were not finite: nothing was drawn
    steps: Int[Array, ""]


def episode_key(key: Key[Array, ""], group: Any, member: Any) -> Key[Array, ""]:
    """The key of one episode; the token at position p is drawn with `fold_in(episode_key, p)` (law 7)."""
    return jax.random.fold_in(jax.random.fold_in(key, group), member)


def decode(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    state: SlotState,
    inputs: RowInputs,
    key: Key[Array, ""],
    pauses_V: Bool[Array, "V"],
    *,
    steps: int,
    window: int,
    dtype: Any,
    some: bool = False,
    layout: Layout = NOWHERE,
    attention: str = "plain",
) -> tuple[SlotState, Block]:
    """Decode up to `steps` tokens in every active row.

    A row pauses at a token of `pauses_V`, when its room is used up, or when its logits are not finite
    (law 3). The block ends early when at most `stop_at` rows are still active. `window` must cover every
    active length and the tokens that may be drawn.

    some: static. False: row r is slot r, and the cache is updated where it lies. True: rows are `slot_R`; their part
    of the cache below `window` is copied together once a block and put back after it, so that a step computes and
    reads nothing for the slots that wait. On a mesh as in `append`. attention: see models/decode_attention.py.
    """
    pieces = layout.size("rows")
    whole = state
    if some:
        state = SlotState(
            read_slots(state.cache, inputs.slot_R, window, pieces),
            state.hidden_BxD.at[inputs.slot_R].get(mode="clip"),
            state.prompt_hidden_BxD,
        )
    state, block = _decode_rows(
        graphdef,
        params,
        state,
        inputs,
        key,
        pauses_V,
        steps=steps,
        window=window,
        dtype=dtype,
        layout=layout,
        attention=attention,
    )
    if not some:
        return state, block
    cache = write_slots(whole.cache, state.cache, inputs.slot_R, window, pieces)
    hidden_BxD = whole.hidden_BxD.at[inputs.slot_R].set(state.hidden_BxD, mode="drop")
    return whole._replace(cache=cache, hidden_BxD=hidden_BxD), block


def _decode_rows(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    state: SlotState,
    inputs: RowInputs,
    key: Key[Array, ""],
    pauses_V: Bool[Array, "V"],
    *,
    steps: int,
    window: int,
    dtype: Any,
    layout: Layout,
    attention: str,
) -> tuple[SlotState, Block]:
    """`decode` in a state that has the rows' slots and no others."""
    rows = inputs.length_R.shape[0]
    keys_R = jax.vmap(episode_key, (None, 0, 0))(key, inputs.group_R, inputs.member_R)
    each_R = jnp.arange(rows)

    def step(carry: tuple[SlotState, Block, Array]) -> tuple[SlotState, Block, Array]:
        state, block, length_R = carry
        # Each device scores its part of the vocabulary for all rows, and draws from all of it for its own.
        hidden_RxD = layout.constrain(state.hidden_BxD, "vocab_rows", None)
        logits_RxV = layout.constrain(
            unembed(graphdef, params, hidden_RxD, layout), "vocab_rows", "vocab"
        )
        logits_RxV = layout.constrain(logits_RxV, "rows", None)
        ids_R, logprobs_R = sample(
            logits_RxV,
            jax.vmap(jax.random.fold_in)(keys_R, length_R),
            inputs.temperature_R,
            inputs.top_k_R,
            inputs.top_p_R,
        )
        finite_R = jnp.isfinite(logprobs_R)
        drawn_R = block.active_R & finite_R
        hidden_Rx1xD, cache = extend(
            graphdef,
            params,
            state.cache,
            ids_R[:, None],
            length_R,
            drawn_R.astype(jnp.int32),
            window=window,
            dtype=dtype,
            layout=layout,
            attention_name=attention,
        )
        hidden_RxD = jnp.where(drawn_R[:, None], hidden_Rx1xD[:, 0], state.hidden_BxD)
        column_R = jnp.where(drawn_R, block.count_R, steps)  # out of range: nothing is written
        count_R = block.count_R + drawn_R
        block = Block(
            tokens_RxK=block.tokens_RxK.at[each_R, column_R].set(ids_R, mode="drop"),
            logprobs_RxK=block.logprobs_RxK.at[each_R, column_R].set(logprobs_R, mode="drop"),
            count_R=count_R,
            active_R=drawn_R & ~pauses_V[ids_R] & (count_R < inputs.room_R),
            nan_R=block.nan_R | (block.active_R & ~finite_R),
            steps=block.steps + 1,
        )
        return state._replace(cache=cache, hidden_BxD=hidden_RxD), block, length_R + drawn_R

    def more(carry: tuple[SlotState, Block, Array]) -> Bool[Array, ""]:
        block = carry[1]
        return (block.steps < steps) & (jnp.sum(block.active_R) > inputs.stop_at)

    empty = Block(
        tokens_RxK=jnp.zeros((rows, steps), jnp.int32),
        logprobs_RxK=jnp.zeros((rows, steps), jnp.float32),
        count_R=jnp.zeros(rows, jnp.int32),
        active_R=inputs.active_R,
        nan_R=jnp.zeros(rows, bool),
        steps=jnp.int32(0),
    )
    state, block, _ = jax.lax.while_loop(more, step, (state, empty, inputs.length_R))
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
    window: int,
    pieces: int = 1,
) -> SlotState:
    """Let episodes begin behind prompts that the cache holds already.

    `prefilled` slots have just had their prompt appended; each `dst` slot then gets the rows of its `src`
    slot (which may be in the middle of an episode: its prompt's rows are still the first ones); slots that
    `begin` continue from the end of their prompt. Entries with `dst` = B are padding. `window`, static, covers the
    prompts that are copied; `pieces`: as in `read_slots`.
    """
    prompt_BxD = jnp.where(prefilled_B[:, None], state.hidden_BxD, state.prompt_hidden_BxD)
    prompt_BxD = prompt_BxD.at[dst_N].set(prompt_BxD.at[src_N].get(mode="clip"), mode="drop")
    hidden_BxD = jnp.where(begins_B[:, None], prompt_BxD, state.hidden_BxD)
    cache = copy_slots(state.cache, src_N, dst_N, pieces, window)
    return SlotState(cache, hidden_BxD, prompt_BxD)


def clear(state: SlotState, slots_B: Bool[Array, "B"]) -> SlotState:
    """Zero everything that these slots hold."""

    def zero(x: Array) -> Array:
        # Hidden states are [B, D]; of a cache array the slots are the fourth dimension from the end.
        return jnp.where(slots_B.reshape(-1, *[1] * (min(x.ndim, 4) - 1)), 0, x)

    return jax.tree.map(zero, state)
