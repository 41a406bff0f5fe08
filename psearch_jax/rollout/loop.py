"""The host's half of a rollout: who sits in which slot, what a paused turn says, what is appended.

Single-threaded about episodes; searches run in the background (`searches.py`). Where several processes run one engine,
each has this loop over its own slots, and before each compiled call they agree on what it must hold (`share.py`).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array

from psearch_jax.config import ProtocolConfig, SamplingConfig
from psearch_jax.rollout.environment import Found
from psearch_jax.rollout.episode import Episode, Request, Role
from psearch_jax.rollout.figures import Figures
from psearch_jax.rollout.programs import Block, RowInputs, empty_rows
from psearch_jax.rollout.protocol import parse_turn, render_results
from psearch_jax.rollout.searches import Searches
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
        sampling: Sequence[SamplingConfig],
        protocol: ProtocolConfig,
        end_ids: tuple[int, ...],
        on_event: Callable[[Event], None] | None,
        on_end: Callable[[int, Episode], None] | None = None,
    ):
        self.engine, self.params, self.protocol = engine, params, protocol
        self.share, self.context = engine.share, engine.rollout_config.context
        self.slots = self.share.part(engine.rollout_config.slots)
        self.first = self.share.first(
            engine.rollout_config.slots
        )  # our slot 0 among those of all processes
        self.key = key
        self.end_ids = frozenset(end_ids)
        self.pauses_V = engine.pauses(protocol, end_ids)
        self.on_event, self.on_end = on_event, on_end
        self.queue = deque(enumerate(zip(requests, sampling, strict=True)))
        self.runs = Runs(slots=self.slots, pieces=self.share.part(engine.pieces))
        self.seats: list[Seat | None] = [None] * self.slots
        self.held: list[tuple[int, ...]] = [
            ()
        ] * self.slots  # whose prompt each slot's cache begins with
        self.episodes: list[Episode | None] = [None] * len(requests)
        self.dirty_B = np.zeros(self.slots, bool)  # slots in whose cache something is not finite
        # Rows of a decoding block and of an append.
        self.rows = self.share.part(engine.rollout_config.decode_rows) or self.slots
        self.append_rows = self.share.part(engine.append_rows)
        self.others_decode = False  # another process decoded in the last round
        self.figures = Figures(slots=self.slots, rows=self.rows)
        self.searches = Searches(engine.environment, protocol.top_k)
        self.unsent: list[Seat] = []
        self.counts_before = Counter(vars(engine.environment.counts))
        self.compiled_before = engine.compile_count

    def play(self) -> list[Episode]:
        """Run until every episode has ended."""
        with self.figures.clock("total"):
            self.state = self.engine.start()
            while True:
                self._search()
                alive, serve = self.share.most(
                    bool(self.queue or any(self.seats)), self._should_serve()
                )
                if not alive:
                    break
                if serve:
                    self._take_seats()
                rows = self._choose_rows()
                if block := self._decode(rows):
                    self._read(block, rows)
            del self.state  # the cache is given back between rollouts
        return [episode for episode in self.episodes if episode is not None]

    # -- serving: refills and appends, when enough slots wait for them

    def _waiting(self) -> tuple[int, int]:
        """Slots that decode, and slots that could but wait (for tokens, or for an episode)."""
        active = sum(seat is not None and seat.state == "decoding" for seat in self.seats)
        appending = sum(seat is not None and seat.state == "appending" for seat in self.seats)
        empty = sum(seat is None for seat in self.seats)
        return active, appending + min(empty, len(self.queue))

    def _patience(self, active: int, waiting: int) -> int:
        """How many must wait before something is done for them. One append for many beats many appends."""
        share = self.engine.rollout_config.pause_share
        return max(1, math.ceil(share * min(active + waiting, self.rows)))

    def _should_serve(self) -> bool:
        active, waiting = self._waiting()
        return waiting > 0 and (active == 0 or waiting >= self._patience(active, waiting))

    # -- searching

    def _search(self) -> None:
        """Send what paused slots ask, in one batch; take up what has been answered."""
        self.searches.send([(seat.index, seat.episode.turns[-1].queries) for seat in self.unsent])
        self.unsent.clear()
        if not len(self.searches):
            return
        with self.figures.clock("search"):
            found = self.searches.collect(self._time_to_wait())
        for seat in [s for s in self.seats if s and s.state == "searching" and s.index in found]:
            self._answer(seat, found[seat.index])

    def _time_to_wait(self) -> float:
        """Seconds to wait for results rather than decode without their slots.

        With nothing else to do, as long as it takes. Otherwise only where it costs less than it brings: the slots that
        search would stand still for a block, those that decode would stand still meanwhile.
        """
        active, waiting = self._waiting()
        if not active and not waiting:
            if self.share.count == 1:
                return math.inf
            return 0.0 if self.others_decode else 0.02  # nobody waits for us, then all look again
        idle = self.rows - min(active + waiting, self.rows)
        worth = self.figures.block_seconds * min(idle, len(self.searches)) / max(active, 1)
        return worth if (self.searches.usual or 0.0) <= worth else 0.0

    def _answer(self, seat: Seat, found: Found) -> None:
        """Give an episode its results."""
        turn = seat.episode.turns[-1]
        turn.hits, turn.failed = found.hits, found.failed
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
        put = self.share.put
        if self.share.most(bool(self.dirty_B.any()))[0]:
            # A masked NaN still spoils what is attended beside it.
            self.state = self.engine.clear(self.state, put(self.dirty_B.copy()))
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
        if self.share.most(bool(begins_B.any()))[0]:
            with self.figures.clock("prefill"):
                self._seat(prefilled_B, copies, begins_B)

    def _append(self, prefilled_B: np.ndarray) -> None:
        """Forward all pending tokens, the longest together, in as few calls as the buckets allow."""
        rows, chunks, put = self.append_rows, self.engine.chunks, self.share.put
        while True:
            work = [(slot, seat) for slot, seat in enumerate(self.seats) if seat and seat.pending]
            work = sorted(work, key=lambda item: -len(item[1].pending))
            width = min(len(work[0][1].pending), chunks[-1]) if work else 0
            dealt = self.runs.deal(work, rows, lambda item: item[0])
            reach = max(
                (seat.length - max(0, len(seat.pending) - width) for _, (_, seat) in dealt),
                default=0,
            )
            width, reach = self.share.most(width, reach)
            if not width:
                return
            bucket = next(size for size in chunks if size >= width)
            slot_N = np.full(rows, self.engine.rollout_config.slots, np.int32)
            tokens_NxT = np.zeros((rows, bucket), np.int32)
            start_N, count_N = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
            for n, (slot, seat) in dealt:
                piece, seat.pending = seat.pending[:width], seat.pending[width:]
                slot_N[n], count_N[n] = self.first + slot, len(piece)
                start_N[n] = seat.length - len(seat.pending) - len(piece)
                tokens_NxT[n, : len(piece)] = piece
                role = "prompt" if prefilled_B[slot] else "observation"
                self.figures.forwarded[role] += len(piece)
                if not seat.pending:
                    seat.state = "decoding"
            self.figures.counts.update(append_calls=1, append_positions=rows * bucket)
            window = next(size for size in self.engine.append_windows if size >= reach)
            with self.figures.clock("prefill" if work and prefilled_B[work[0][0]] else "append"):
                self.state = self.engine.append(
                    self.params,
                    self.state,
                    put(slot_N),
                    put(tokens_NxT),
                    put(start_N),
                    put(count_N),
                    window=window,
                )
                self.state.hidden_BxD.block_until_ready()

    def _seat(
        self, prefilled_B: np.ndarray, copies: list[tuple[int, int]], begins_B: np.ndarray
    ) -> None:
        rows, put, begun = self.append_rows, self.share.put, False
        nobody = self.engine.rollout_config.slots
        no_B = np.zeros_like(begins_B)
        (reach,) = self.share.most(max((len(self.held[dst]) for _, dst in copies), default=0))
        window = next(size for size in self.engine.append_windows if size >= reach)
        while True:
            part = self.runs.deal(copies, rows, lambda copy: copy[1])
            src_N, dst_N = np.full(rows, nobody, np.int32), np.full(rows, nobody, np.int32)
            for n, (src, dst) in part:
                src_N[n], dst_N[n] = self.first + src, self.first + dst
            done = {dst for _, (_, dst) in part}
            copies = [copy for copy in copies if copy[1] not in done]
            # Prompts are there before they are copied, and copied before anyone begins behind them.
            begin_B = begins_B if not copies and not begun else no_B
            self.state = self.engine.seat(
                self.state,
                put(prefilled_B),
                put(src_N),
                put(dst_N),
                put(begin_B),
                window=window,
            )
            prefilled_B, begun = no_B, begun or not copies
            if not self.share.most(len(copies))[0]:
                break
        self.state.hidden_BxD.block_until_ready()

    # -- decoding

    def _choose_rows(self) -> list[tuple[int, Seat]]:
        """(row of the block, seat) for each that decodes next: all that can, or the earliest that find room."""
        ready = [seat for seat in self.seats if seat and seat.state == "decoding"]
        if self.rows == self.slots:
            return [(seat.slot, seat) for seat in ready]
        ready.sort(key=lambda seat: seat.index)
        return self.runs.deal(ready, self.rows, lambda seat: seat.slot)

    def _decode(self, rows: Sequence[tuple[int, Seat]]) -> Block | None:
        """One block in these rows; None when no process has any."""
        waiting = self._waiting()[1]
        stop_at = max(0, len(rows) + waiting - self._patience(len(rows), waiting))
        stop_at = max(0, min(stop_at, len(rows) - 1))
        steps = self.engine.rollout_config.decode_block
        inputs = empty_rows(self.rows, self.engine.rollout_config.slots)
        for row, seat in rows:
            seat.fill(inputs, row, self.first + seat.slot, self.protocol, self.context)
        reach_R = np.where(inputs.active_R, inputs.length_R + np.minimum(inputs.room_R, steps), 0)
        agreed = self.share.agree(int(reach_R.max()), stop_at, len(rows))
        reach, (_, stop_at, active) = int(agreed[:, 0].max()), agreed.sum(axis=0).tolist()
        self.others_decode = active > len(rows)
        if not reach:
            return None
        window = next(size for size in self.engine.windows if size >= reach)
        with self.figures.clock("decode"):
            inputs = RowInputs(*map(self.share.put, inputs[:-1]), stop_at=np.int32(stop_at))
            self.state, block = self.engine.decode(
                self.params, self.state, inputs, self.key, self.pauses_V, window=window
            )
            *by_row, taken = jax.device_get(block)
            block = Block(*map(self.share.own, by_row), steps=taken)
        self.figures.decoded(
            drawn=int(block.count_R.sum()), steps=int(taken), busy=bool(self.queue)
        )
        return block

    def _read(self, block: Block, rows: Sequence[tuple[int, Seat]]) -> None:
        """Record what was drawn; look at the text of the slots that paused and let them act or go on."""
        for row, seat in rows:
            count = int(block.count_R[row])
            ids = block.tokens_RxK[row, :count].tolist()
            seat.extend(ids, Role.POLICY, block.logprobs_RxK[row, :count].tolist())
            paused = not block.active_R[row]
            if not paused and self.on_event is None:
                continue
            text = self.engine.decode_text(seat.episode.ids[seat.turn_start :])
            self._show(seat, text, ids, complete=paused)
            if paused:
                self._act(seat, text, nan=bool(block.nan_R[row]))

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
            self.unsent.append(seat)
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
        if self.on_end is not None:
            self.on_end(seat.index, seat.episode)

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

    def stats(self) -> dict[str, Any]:
        """Figures of this rollout: `Figures.record`."""
        counts = Counter(vars(self.engine.environment.counts))
        return self.figures.record(
            episodes=len(self.episodes),
            tokens=sum(len(episode.ids) for episode in self.episodes if episode is not None),
            compiled=self.engine.compile_count - self.compiled_before,
            search={name: count - self.counts_before[name] for name, count in counts.items()},
        )
