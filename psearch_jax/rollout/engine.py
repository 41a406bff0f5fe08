"""The rollout engine: slots with a resident KV cache, decoded in blocks.

This file holds what is fixed for an engine; `programs.py` runs on the device, `loop.py` plays the episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jaxtyping import Array

from psearch_jax import processes
from psearch_jax.config import ProtocolConfig, RolloutConfig, SamplingConfig
from psearch_jax.errors import UserError
from psearch_jax.mesh import Layout, check_divides, param_shardings, replicated, resolve_dtype
from psearch_jax.models import decode_attention
from psearch_jax.models.decoder_config import DecoderConfig
from psearch_jax.models.kv_cache import cache_axes, init_cache
from psearch_jax.questions.question import Question
from psearch_jax.rollout import programs
from psearch_jax.rollout.environment import Backend, SearchEnvironment
from psearch_jax.rollout.episode import Episode, Request
from psearch_jax.rollout.loop import Player
from psearch_jax.rollout.programs import Block, SlotState, empty_rows
from psearch_jax.rollout.protocol import control_tags, prompt_text, stop_tags
from psearch_jax.rollout.seats import Event
from psearch_jax.rollout.share import our_share
from psearch_jax.rollout.sizing import Sizing
from psearch_jax.rollout.stops import check_tags, pause_table


class Engine:
    """Plays episodes in a fixed number of slots. One engine serves every rollout of a run.

    Args:
      graphdef, config: of the decoder; parameters are given to each rollout.
      tokenizer: a Hugging Face tokenizer (`encode`, `decode`, `eos_token_id`, `all_special_tokens`).
      protocol: how episodes are written; a rollout may be given another.
      backend: what answers searches.
      rollout: slots, context and shapes.
      retries, timeout, concurrency: repetitions of a failed search, seconds until it is given up, and batches that are
        searched at the same time.
      end_ids: tokens that end an episode; the tokenizer's end token unless given.
      mesh: where the engine computes, slots and weights laid out by the rollout column of `mesh.RULES`; parameters
        are brought there. The first local device unless given.

    Raises:
      UserError: no slots, or a number that the mesh does not divide.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        config: DecoderConfig,
        tokenizer: Any,
        protocol: ProtocolConfig,
        backend: Backend,
        rollout: RolloutConfig,
        *,
        retries: int = 2,
        timeout: float = 60.0,
        concurrency: int = 4,
        end_ids: Sequence[int] | None = None,
        mesh: Mesh | None = None,
    ):
        self.graphdef, self.config, self.tokenizer = graphdef, config, tokenizer
        self.protocol, self.rollout_config = protocol, rollout
        self.environment = SearchEnvironment(
            backend=backend, retries=retries, timeout=timeout, concurrency=concurrency
        )
        if end_ids is None:
            end_ids = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self.end_ids = tuple(end_ids)
        self.stats: dict[str, Any] = {}  # of the last rollout
        self.sizing: Sizing | None = None  # how the number of slots was found, where it was
        self.windows = _buckets(rollout.window_buckets, rollout.context)
        # Appends are few beside decoding steps: they use every other window, which halves their programs.
        self.append_windows = self.windows[::-1][::2][::-1]
        self.chunks = _buckets(rollout.append_buckets, rollout.context, close=False)
        self.layout = Layout(mesh if mesh is not None and mesh.size > 1 else None, "rollout")
        dtype = self.dtype = resolve_dtype(rollout.dtype, self.layout)
        self.attention = decode_attention.resolve(
            rollout.attention, self.layout, head_dim=config.head_dim, windows=self.windows
        )
        # Slots lie on devices in `pieces` runs of equal length, and so do the rows of an append.
        self.pieces = self.layout.size("rows")
        self.share = our_share(self.layout)
        if rollout.slots < 1:
            raise UserError(
                "rollout.slots is 0, which leaves the number to `assembly.open_engine`; give the engine one."
            )
        check_divides(self.layout, "rollout.slots", "rows", rollout.slots)
        if rollout.decode_rows:
            check_divides(self.layout, "rollout.decode_rows", "rows", rollout.decode_rows)
        rows = rollout.append_rows or max(1, (rollout.decode_rows or rollout.slots) // 8)
        self.append_rows = -(-rows // self.pieces) * self.pieces

        def start() -> SlotState:
            hidden_BxD = jnp.zeros((rollout.slots, config.hidden_size), dtype)
            cache = init_cache(config, rollout.slots, rollout.context, dtype)
            return SlotState(cache, hidden_BxD, jnp.zeros_like(hidden_BxD))

        # Everything has one stated place: parameters that come from a checkpoint, from an update on a mesh or
        # from a test would otherwise each get programs of their own (law 6).
        self.sharding: Sharding
        in_place: Any
        if self.layout.mesh is None:
            self.sharding = in_place = SingleDeviceSharding(jax.local_devices()[0])
        else:
            self.sharding = replicated(self.layout.mesh)
            in_place = state_shardings(self.layout, jax.eval_shape(start))
        self.start = jax.jit(start, out_shardings=in_place)
        self.decode: Callable[..., tuple[SlotState, Block]] = jax.jit(
            partial(
                programs.decode,
                graphdef,
                steps=rollout.decode_block,
                dtype=dtype,
                some=0 < rollout.decode_rows < rollout.slots,
                layout=self.layout,
                attention=self.attention,
            ),
            static_argnames="window",
            donate_argnums=1,
            out_shardings=(in_place, self.sharding),
        )
        self.append: Callable[..., SlotState] = jax.jit(
            partial(programs.append, graphdef, dtype=dtype, layout=self.layout),
            static_argnames="window",
            donate_argnums=1,
            out_shardings=in_place,
        )
        self.seat: Callable[..., SlotState] = jax.jit(
            partial(programs.seat, pieces=self.pieces),
            static_argnames="window",
            donate_argnums=0,
            out_shardings=in_place,
        )
        self.clear: Callable[..., SlotState] = jax.jit(
            programs.clear, donate_argnums=0, out_shardings=in_place
        )
        self._programs = (self.start, self.decode, self.append, self.seat, self.clear)
        self._place: Callable[[nnx.State], nnx.State] | None = None
        self._token_texts: list[str] = []
        self._pauses: dict[tuple[Any, ...], Array] = {}
        self.encode = lru_cache(maxsize=65536)(self._encode)
        tags = control_tags(protocol)
        self.reserved = tuple(
            token
            for token in tokenizer.all_special_tokens
            if token.startswith("<") and token.endswith(">") and token not in tags
        )

    @property
    def compile_count(self) -> int:
        """Programs compiled so far; does not change after `warm_up` (law 6)."""
        return sum(f._cache_size() for f in self._programs)

    def rollout(
        self,
        params: nnx.State,
        requests: Sequence[Request],
        *,
        key: Array,
        sampling: SamplingConfig | Sequence[SamplingConfig],
        protocol: ProtocolConfig | None = None,
        end_ids: Sequence[int] | None = None,
        on_event: Callable[[Event], None] | None = None,
        on_end: Callable[[int, Episode], None] | None = None,
    ) -> list[Episode]:
        """Play one episode for every request and return them in that order.

        An episode depends on its prompt, `fold_in(fold_in(key, group), member)`, its sampling settings and the
        search results, and on nothing else. `protocol` and `end_ids` replace the engine's for this call.
        `on_event` gets an `Event` for everything that is appended, `on_end` each episode when it has ended, with its
        place among the requests. Afterwards `stats` holds the figures.

        Raises UserError for an empty question or prompt, one that does not fit the context, or a tag that the tokenizer
        cannot write.
        """
        _check(requests, self.rollout_config.context, protocol or self.protocol)
        each = [sampling] * len(requests) if isinstance(sampling, SamplingConfig) else sampling
        places = self.share.mine(requests)
        player = Player(
            self,
            self.place(params),
            [requests[i] for i in places],
            key=self._everywhere(key),
            sampling=[each[i] for i in places],
            protocol=protocol or self.protocol,
            end_ids=self.end_ids if end_ids is None else tuple(end_ids),
            on_event=on_event,
            on_end=on_end and (lambda i, episode: on_end(places[i], episode)),
        )
        episodes = player.play()
        self.stats = player.stats()
        return self.share.exchange(requests, places, episodes)

    def requests(
        self, questions: Sequence[Question], members: int = 1, *, first_group: int = 0
    ) -> list[Request]:
        """`members` requests for every question, side by side, so that they share a prefill."""
        prompts = [
            self.encode(prompt_text(self.protocol, question, self.tokenizer))
            for question in questions
        ]
        return [
            Request(question=question, prompt_ids=ids, group=first_group + i, member=member)
            for i, (question, ids) in enumerate(zip(questions, prompts, strict=True))
            for member in range(members)
        ]

    def warm_up(self, params: nnx.State) -> None:
        """Compile every program that a rollout can need, by running each once on empty slots."""
        slots, rows = self.rollout_config.slots, self.append_rows
        put, part = self.share.put, self.share.part
        none_B, nobody_N = (
            put(np.zeros(part(slots), bool)),
            put(np.full(part(rows), slots, np.int32)),
        )
        zero_N, one_N = (put(np.full(part(rows), n, np.int32)) for n in (0, 1))
        params = self.place(params)
        key = self._everywhere(jax.random.key(0))
        state = self.start()
        smaller = 0
        for chunk in self.chunks:
            for window in self.append_windows:
                if window > smaller:
                    tokens_NxT = put(np.zeros((part(rows), chunk), np.int32))
                    state = self.append(
                        params, state, nobody_N, tokens_NxT, zero_N, one_N, window=window
                    )
            smaller = chunk
        state = self.clear(state, none_B)
        for window in self.append_windows:
            state = self.seat(state, none_B, nobody_N, nobody_N, none_B, window=window)
        inputs = empty_rows(part(self.rollout_config.decode_rows or slots), slots)
        inputs = inputs._replace(**{name: put(x) for name, x in inputs._asdict().items() if x.ndim})
        pauses_V = self.pauses(self.protocol, self.end_ids)
        for window in self.windows:
            state, _ = self.decode(params, state, inputs, key, pauses_V, window=window)
        jax.block_until_ready(state)

    def place(self, params: nnx.State) -> nnx.State:
        """Parameters where the engine computes; on a mesh also in the dtype that it computes in, so that they are
        cast once and not at every token."""
        if self.layout.mesh is None:
            return jax.device_put(params, self.sharding)
        if self._place is None:
            shardings = param_shardings(self.layout.mesh, params, "rollout")
            self._place = jax.jit(
                lambda tree: jax.tree.map(lambda x: x.astype(self.dtype), tree),
                out_shardings=shardings,
            )
        return self._place(params)

    def pauses(self, protocol: ProtocolConfig, end_ids: Sequence[int]) -> Array:
        """bool [V]: where a slot pauses: at end tokens, and at those that could complete a stop tag.

        Raises UserError for a tag that the tokenizer cannot write.
        """
        tags = stop_tags(protocol)
        wanted = (tags, tuple(end_ids))
        if wanted not in self._pauses:
            check_tags(self.tokenizer, control_tags(protocol))
            if not self._token_texts:
                every = [[i] for i in range(min(self.config.vocab_size, len(self.tokenizer)))]
                self._token_texts = self.tokenizer.batch_decode(every, skip_special_tokens=False)
            table_V = pause_table(self._token_texts, tags, end_ids, self.config.vocab_size)
            self._pauses[wanted] = processes.place(table_V, self.sharding)
        return self._pauses[wanted]

    def _everywhere(self, key: Array) -> Array:
        """A key, typed, on every device."""
        typed = jax.numpy.issubdtype(key.dtype, jax.dtypes.prng_key)
        if self.share.count == 1:
            key = jax.device_put(key, self.sharding)
            return key if typed else jax.random.wrap_key_data(key)
        data = np.asarray(jax.random.key_data(key) if typed else key)
        return jax.random.wrap_key_data(processes.place(data, self.sharding))

    def decode_text(self, ids: Sequence[int]) -> str:
        """The text of sampled tokens, control tokens included."""
        return self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))


def state_shardings(layout: Layout, state: SlotState) -> SlotState:
    """Where the state of all slots lies on a mesh."""

    def where(*logical: str | None) -> NamedSharding:
        assert layout.mesh is not None
        return NamedSharding(layout.mesh, layout.spec(*logical))

    rows = where("rows", None)
    return SlotState(jax.tree.map(lambda x: where(*cache_axes(x.ndim)), state.cache), rows, rows)


def _check(requests: Sequence[Request], context: int, protocol: ProtocolConfig) -> None:
    for request in requests:
        length = len(request.prompt_ids)
        if not request.question.text.strip() and not protocol.prompt_column:
            raise UserError(
                f"question {request.question.id!r} is empty; give it a text or leave it out."
            )
        if not length:
            raise UserError(
                f"question {request.question.id!r} has an empty prompt; give the question some text."
            )
        if length >= context:
            raise UserError(
                f"question {request.question.id!r} has a prompt of {length} tokens, which leaves no room in a "
                f"context of {context}; raise rollout.context or drop the question."
            )


def _buckets(sizes: Sequence[int], limit: int, *, close: bool = True) -> tuple[int, ...]:
    """Ascending sizes up to the limit; `close` adds the limit itself, as does an otherwise empty list."""
    if any(size < 1 for size in sizes):
        raise UserError(
            f"a bucket of the rollout is {min(sizes)}; every bucket must be at least 1."
        )
    fitting = {size for size in sizes if size < limit}
    return tuple(sorted(fitting | ({limit} if close or not fitting else set())))
