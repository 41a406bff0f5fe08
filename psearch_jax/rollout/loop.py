"""The host's half of a rollout: who sits in which slot, what a paused turn says, what is appended.

Single-threaded, and every decision depends on token counts alone, never on a clock: the same requests
give the same sequence of device calls.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array

from psearch_jax.config import ProtocolConfig, SamplingConfig
from psearch_jax.rollout.episode import Episode, Request, Role
from psearch_jax.rollout.programs import Block, SlotInputs
from psearch_jax.rollout.protocol import parse_turn, render_results
from psearch_jax.rollout.seats import Event, Runs, Seat

if TYPE_CHECKING:
    from psearch_jax.rollout.engine import Engine


class Player:
    """One rollout. Made by `Engine.rollout`, used once."""

    def __init__(
        self,
        engine: Engine,
        params: nnx.State,
        requests: Sequence[Request],
        *,
        key: Array,
        sampling: SamplingConfig | Sequence[SamplingConfig],
        protocol: ProtocolConfig,
        end_ids: tuple[int, ...],
        on_event: Callable[[Event], None] | None,
    ):
        self.engine, self.params, self.protocol = engine, params, protocol
        self.slots, self.context = engine.rollout_config.slots, engine.rollout_config.context
        samplings = [sampling] * len(requests) if isinstance(sampling, SamplingConfig) else sampling
        is_raw = not jax.numpy.issubdtype(key.dtype, jax.dtypes.prng_key)
        self.key = jax.random.wrap_key_data(key) if is_raw else key
        self.end_ids = frozenset(end_ids)
        self.pauses_V = engine.pauses(protocol, end_ids)
        self.on_event = on_event
        self.queue = deque(enumerate(zip(requests, samplings, strict=True)))
        self.runs = Runs(slots=self.slots, pieces=engine.pieces)
        self.seats: list[Seat | None] = [None] * self.slots
        self.held: list[tuple[int, ...]] = [
            ()
        ] * self.slots  # whose prompt each slot's cache begins with
        self.episodes: list[Episode | None] = [None] * len(requests)
        self.dirty_B = np.zeros(self.slots, bool)  # slots in whose cache something is not finite
        self.figures: Counter[str] = Counter()
        self.forwarded = Counter(prompt=0, policy=0, observation=0)  # real tokens
        self.seconds: Counter[str] = Counter()
        self.counts_before = Counter(vars(engine.environment.counts))
        self.compiled_before = engine.compile_count

    def play(self) -> list[Episode]:
        """Run until every episode has ended."""
        began = time.perf_counter()
        self.state = self.engine.start()
        while self.queue or any(self.seats):
            if self._should_serve():
                self._search()
                self._take_seats()
            if any(seat and seat.state == "decoding" for seat in self.seats):
                self._read(self._decode())
        del self.state  # the cache is given back between rollouts
        self.seconds["total"] = time.perf_counter() - began
        return [episode for episode in self.episodes if episode is not None]

    # -- serving: searches, refills and appends, when enough slots wait for them

    def _waiting(self) -> tuple[int, int]:
        """Slots that decode, and slots that could but wait (for results, for tokens, for an episode)."""
        active = sum(seat is not None and seat.state == "decoding" for seat in self.seats)
        empty = sum(seat is None for seat in self.seats)
        return active, self.slots - active - empty + min(empty, len(self.queue))

    def _patience(self) -> tuple[int, int]:
        """(active slots, slots that must wait before they are served). One append for many beats many appends."""
        active, waiting = self._waiting()
        share = self.engine.rollout_config.pause_share
        return active, max(1, math.ceil(share * (active + waiting)))

    def _should_serve(self) -> bool:
        active, waiting = self._waiting()
        return active == 0 or waiting >= self._patience()[1]

    def _search(self) -> None:
        """Answer every search that waits, in one batch."""
        seats = [seat for seat in self.seats if seat and seat.state == "searching"]
        if not seats:
            return
        with self._clock("search"):
            found = self.engine.environment.search(
                [seat.episode.turns[-1].queries for seat in seats], self.protocol.top_k
            )
        for seat, results in zip(seats, found, strict=True):
            turn = seat.episode.turns[-1]
            turn.hits, turn.failed = results.hits, results.failed
            text = render_results(
                self.protocol,
                turn.queries,
                turn.hits,
                lambda line: len(self.engine.encode(line)),
                reserved=self.engine.reserved,
            )
            self._observe(seat, text)

    def _observe(self, seat: Seat, text: str) -> None:
        """Queue an observation for appending, or end the episode when it leaves no room for a token after it."""
        if len(seat.episode.turns) == self.protocol.max_search_turns:
            text += self.protocol.last_turn
        ids = self.engine.encode(text)
        if seat.length + len(ids) >= seat.limit(self.protocol, self.context):
            self._finish(seat, "context")
            return
        seat.extend(ids, Role.OBSERVATION)
        seat.pending, seat.state = list(ids), "appending"
        self._emit(seat, "observation", text, ids)

    def _take_seats(self) -> None:
        """Fill empty slots from the queue, forward all pending tokens, begin behind shared prompts."""
        if self.dirty_B.any():  # a masked NaN still spoils what is attended beside it
            self.state = self.engine.clear(self.state, self.dirty_B)
            self.held = [
                () if dirty else ids for ids, dirty in zip(self.held, self.dirty_B, strict=True)
            ]
            self.dirty_B[:] = False
        empty = [slot for slot in range(self.slots) if self.seats[slot] is None]
        taken = [self.queue.popleft() for _ in range(min(len(empty), len(self.queue)))]
        # An episode whose prompt an empty slot holds already takes that slot. So a slot that others copy a
        # prompt from is never given away to a different prompt in the same round.
        # A prompt is copied within the run of slots that one device holds, never between devices.
        slot_of: dict[int, int] = {}
        for index, (request, _) in taken:
            for slot in empty:
                if self.held[slot] == request.prompt_ids:
                    slot_of[index] = slot
                    empty.remove(slot)
                    break
        begins_B, prefilled_B = np.zeros(self.slots, bool), np.zeros(self.slots, bool)
        sources = {
            (self.runs.run_of(slot), ids): slot
            for slot, ids in enumerate(self.held)
            if slot not in empty
        }
        copies: list[tuple[int, int]] = []
        for index, (request, sampling) in taken:
            prompt = request.prompt_ids
            slot = slot_of[index] if index in slot_of else self.runs.choose(empty, prompt, sources)
            run = self.runs.run_of(slot)
            seat = Seat(request=request, index=index, slot=slot, sampling=sampling)
            if (run, prompt) not in sources:
                sources[run, prompt] = slot
                prefilled_B[slot] = True
                seat.pending = list(prompt)
            elif self.held[slot] != prompt:
                copies.append((sources[run, prompt], slot))
            self.held[slot] = prompt
            self.seats[slot] = seat
            begins_B[slot] = True
        self._append(prefilled_B)
        if begins_B.any():
            with self._clock("prefill"):
                self._seat(prefilled_B, copies, begins_B)

    def _append(self, prefilled_B: np.ndarray) -> None:
        """Forward all pending tokens, the longest together, in as few calls as the buckets allow."""
        rows, chunks = self.engine.append_rows, self.engine.chunks
        while True:
            work = [(slot, seat) for slot, seat in enumerate(self.seats) if seat and seat.pending]
            if not work:
                return
            work = sorted(work, key=lambda item: -len(item[1].pending))
            width = min(len(work[0][1].pending), chunks[-1])
            dealt = self.runs.deal(work, rows, lambda item: item[0])
            bucket = next(size for size in chunks if size >= width)
            slot_N = np.full(rows, self.slots, np.int32)
            tokens_NxT = np.zeros((rows, bucket), np.int32)
            start_N, count_N = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
            for n, (slot, seat) in dealt:
                piece, seat.pending = seat.pending[:width], seat.pending[width:]
                slot_N[n], count_N[n] = slot, len(piece)
                start_N[n] = seat.length - len(seat.pending) - len(piece)
                tokens_NxT[n, : len(piece)] = piece
                self.forwarded["prompt" if prefilled_B[slot] else "observation"] += len(piece)
                if not seat.pending:
                    seat.state = "decoding"
            self.figures["append_calls"] += 1
            self.figures["append_positions"] += rows * bucket
            reach = int((start_N + count_N).max())
            window = next(size for size in self.engine.append_windows if size >= reach)
            with self._clock("prefill" if prefilled_B[work[0][0]] else "append"):
                self.state = self.engine.append(
                    self.params, self.state, slot_N, tokens_NxT, start_N, count_N, window=window
                )
                self.state.hidden_BxD.block_until_ready()

    def _seat(
        self, prefilled_B: np.ndarray, copies: list[tuple[int, int]], begins_B: np.ndarray
    ) -> None:
        rows, first = self.engine.append_rows, True
        while copies or first:
            part = self.runs.deal(copies, rows, lambda copy: copy[1])
            src_N, dst_N = np.full(rows, self.slots, np.int32), np.full(rows, self.slots, np.int32)
            for n, (src, dst) in part:
                src_N[n], dst_N[n] = src, dst
            done = {dst for _, (_, dst) in part}
            copies = [copy for copy in copies if copy[1] not in done]
            nobody = np.zeros_like(begins_B)
            self.state = self.engine.seat(
                self.state,
                prefilled_B if first else nobody,
                src_N,
                dst_N,
                nobody if copies else begins_B,
            )
            first = False
        self.state.hidden_BxD.block_until_ready()

    # -- decoding

    def _decode(self) -> Block:
        """One block in every slot that decodes."""
        active, patience = self._patience()
        waiting = self._waiting()[1]
        inputs = self._inputs(stop_at=max(0, active + waiting - patience))
        steps = self.engine.rollout_config.decode_block
        reach_B = inputs.length_B + np.minimum(inputs.room_B, steps)
        reach = int(reach_B[inputs.active_B].max())
        window = next(size for size in self.engine.windows if size >= reach)
        with self._clock("decode"):
            self.state, block = self.engine.decode(
                self.params, self.state, inputs, self.key, self.pauses_V, window=window
            )
            block = jax.device_get(block)
        drawn, steps = int(block.count_B.sum()), int(block.steps)
        self.forwarded["policy"] += drawn
        self.figures["blocks"] += 1
        self.figures["steps"] += steps
        if self.queue:
            self.figures["busy_steps"] += steps
            self.figures["busy_drawn"] += drawn
        return block

    def _inputs(self, *, stop_at: int) -> SlotInputs:
        slots = self.slots
        inputs = SlotInputs(
            active_B=np.zeros(slots, bool),
            length_B=np.zeros(slots, np.int32),
            room_B=np.zeros(slots, np.int32),
            group_B=np.zeros(slots, np.uint32),
            member_B=np.zeros(slots, np.uint32),
            temperature_B=np.zeros(slots, np.float32),
            top_k_B=np.zeros(slots, np.int32),
            top_p_B=np.ones(slots, np.float32),
            stop_at=np.int32(stop_at),
        )
        for slot, seat in enumerate(self.seats):
            if seat is None or seat.state != "decoding":
                continue
            inputs.active_B[slot] = True
            inputs.length_B[slot] = seat.length
            inputs.room_B[slot] = seat.room(self.protocol, self.context)
            inputs.group_B[slot] = seat.request.group
            inputs.member_B[slot] = seat.request.member
            inputs.temperature_B[slot] = seat.sampling.temperature
            inputs.top_k_B[slot] = seat.sampling.top_k
            inputs.top_p_B[slot] = seat.sampling.top_p
        return inputs

    def _read(self, block: Block) -> None:
        """Record what was drawn; look at the text of the slots that paused and let them act or go on."""
        for slot, seat in enumerate(self.seats):
            if seat is None or seat.state != "decoding":
                continue
            count = int(block.count_B[slot])
            ids = block.tokens_BxK[slot, :count].tolist()
            seat.extend(ids, Role.POLICY, block.logprobs_BxK[slot, :count].tolist())
            paused = not block.active_B[slot]
            if not paused and self.on_event is None:
                continue
            text = self.engine.decode_text(seat.episode.ids[seat.turn_start :])
            self._show(seat, text, ids, complete=paused)
            if paused:
                self._act(seat, text, nan=bool(block.nan_B[slot]))

    def _act(self, seat: Seat, text: str, *, nan: bool) -> None:
        """Decide about a paused turn: what it asks for, why its episode ends, or that it goes on."""
        action = parse_turn(self.protocol, text)
        full = seat.length >= seat.limit(self.protocol, self.context)
        over = seat.episode.ids[-1] in self.end_ids or seat.drawn >= self.protocol.turn_tokens
        goes_on = (
            self.protocol.feedback_always
            and len(seat.episode.turns) < self.protocol.max_search_turns
        )
        if nan:
            seat.end_turn("none", text)
            self.dirty_B[seat.slot] = True
            self._finish(seat, "nan")
        elif action.kind == "answer":
            seat.end_turn("answer", text, answer=action.answer)
            self._finish(seat, "answer")
        elif action.kind != "none" and len(seat.episode.turns) >= self.protocol.max_search_turns:
            # The last turn may only answer: its search is not carried out and not counted as one.
            seat.end_turn("invalid", text)
            self._finish(seat, "turns")
        elif action.kind == "search" and not full:
            seat.end_turn("search", text, queries=action.queries)
            seat.state = "searching"
            self._emit(seat, "search", "\n".join(action.queries))
        elif action.kind == "invalid" or (over and goes_on and not full):
            seat.end_turn("invalid", text)
            self._observe(seat, self.protocol.feedback)
        elif seat.episode.ids[-1] in self.end_ids:
            seat.end_turn("invalid", text)
            self._finish(seat, "end")
        elif full or seat.drawn >= self.protocol.turn_tokens:
            seat.end_turn("none", text)
            self._finish(seat, "context" if full else "budget")

    # -- an episode's end, and events

    def _finish(self, seat: Seat, reason: str) -> None:
        seat.episode.end_reason = reason
        self.episodes[seat.index] = seat.episode
        self.seats[seat.slot] = None
        self._emit(seat, "end", reason)

    def _show(self, seat: Seat, text: str, ids: Sequence[int], *, complete: bool) -> None:
        """Emit the new text of a turn; characters whose bytes are not all there yet wait."""
        if self.on_event is None:
            return
        whole = text if complete else text.rstrip("\ufffd")
        self._emit(seat, "policy", whole[seat.shown :], ids)
        seat.shown = max(seat.shown, len(whole))

    def _emit(self, seat: Seat, kind: str, text: str, ids: Sequence[int] = ()) -> None:
        if self.on_event is not None:
            self.on_event(Event(request=seat.request, kind=kind, text=text, ids=tuple(ids)))

    # -- figures

    @contextmanager
    def _clock(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - began

    def stats(self) -> dict[str, Any]:
        """Figures of this rollout; `forwarded` counts real tokens, `episode_tokens` those of the episodes."""
        seconds = {name: self.seconds[name] for name in ("prefill", "append", "decode", "search")}
        seconds["host"] = self.seconds["total"] - sum(seconds.values())
        tokens = sum(len(episode.ids) for episode in self.episodes if episode is not None)
        steps, busy = self.figures["steps"], self.figures["busy_steps"]
        counts = Counter(vars(self.engine.environment.counts))
        return {
            "episodes": len(self.episodes),
            "episode_tokens": tokens,
            "forwarded": dict(self.forwarded),
            "forwarded_over_episode_tokens": self.forwarded.total() / max(tokens, 1),
            "decode_steps": steps,
            "decode_blocks": self.figures["blocks"],
            "append_calls": self.figures["append_calls"],
            "append_positions": self.figures["append_positions"],
            "occupancy": self.forwarded["policy"] / max(steps * self.slots, 1),
            "occupancy_busy": self.figures["busy_drawn"] / (busy * self.slots) if busy else None,
            "compiled": self.engine.compile_count - self.compiled_before,
            "search": {name: count - self.counts_before[name] for name, count in counts.items()},
            "seconds": {**seconds, "total": self.seconds["total"]},
        }
