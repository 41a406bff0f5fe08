"""Whole episodes packed into rows of a fixed shape.

Everything in a `Batch` is aligned to the token it is about: index t holds the weight, advantage and old
log-probability of token t, which the model predicts from the tokens up to t − 1. The first token of a
segment is predicted from nothing, so its weight is always 0.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from psearch_jax.errors import UserError
from psearch_jax.rollout.episode import Episode, Role


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """One episode or demonstration of n tokens.

    Attributes:
      ids: int token ids, [n].
      weights: which tokens are to be predicted and how much they count, [n] or one number for all.
      advantages: [n] or one number for all; supervised training does not read it.
      old_logprobs: log-probabilities at the time of sampling, [n] or one number for all.
    """

    ids: np.ndarray | list[int] | tuple[int, ...]
    weights: np.ndarray | list[float] | float = 1.0
    advantages: np.ndarray | list[float] | float = 0.0
    old_logprobs: np.ndarray | list[float] | float = 0.0


class Batch(NamedTuple):
    """R packed rows of L tokens. Segments count from 1 within a row; 0 is padding."""

    tokens_RxL: Int[np.ndarray, "R L"]
    positions_RxL: Int[np.ndarray, "R L"]
    segments_RxL: Int[np.ndarray, "R L"]
    weights_RxL: Float[np.ndarray, "R L"]
    advantages_RxL: Float[np.ndarray, "R L"]
    old_logprobs_RxL: Float[np.ndarray, "R L"]


def from_episode(episode: Episode, advantage: float) -> Sequence:
    """The training view of an episode: policy tokens get weight 1, all others 0 (law 1, law 2)."""
    roles = np.asarray(episode.roles)
    return Sequence(
        ids=episode.ids,
        weights=(roles == Role.POLICY).astype(np.float32),
        advantages=advantage,
        old_logprobs=episode.logprobs,
    )


def first_fit_decreasing(
    lengths: Many[int], row_length: int, rows: int
) -> tuple[list[list[int]], list[int]]:
    """Assign lengths to at most `rows` bins of `row_length`, longest first, each to the first bin with room.

    Returns the members of every bin that was opened, and the members that found no room.
    """
    lengths_N = np.asarray(lengths, np.int64)
    free_R = np.full(rows, row_length, np.int64)
    bins: list[list[int]] = []
    left: list[int] = []
    for index in np.argsort(-lengths_N, kind="stable"):
        fits_R = free_R >= lengths_N[index]
        row = int(np.argmax(fits_R)) if rows else 0
        if rows == 0 or not fits_R[row]:
            left.append(int(index))
            continue
        if row == len(bins):
            bins.append([])
        bins[row].append(int(index))
        free_R[row] -= lengths_N[index]
    return bins, sorted(left)


def fill(sequences: Many[Sequence], row_length: int, rows: int) -> tuple[Batch, list[int]]:
    """Fill exactly `rows` rows; also return the indices of the sequences that found no room.

    Carry those over to the next batch: they are mostly the short ones, and dropping them would
    under-weight what is short.

    Raises:
      UserError: a sequence is longer than a row (it is never cut).
    """
    lengths = [len(sequence.ids) for sequence in sequences]
    if lengths and max(lengths) > row_length:
        raise UserError(
            f"A sequence of {max(lengths)} tokens does not fit rows of {row_length}; set row_length to at "
            f"least {max(lengths)} (an episode is never cut)."
        )
    bins, left = first_fit_decreasing(lengths, row_length, rows)
    shape = (rows, row_length)
    batch = Batch(
        np.zeros(shape, np.int32),
        np.zeros(shape, np.int32),
        np.zeros(shape, np.int32),
        np.zeros(shape, np.float32),
        np.zeros(shape, np.float32),
        np.zeros(shape, np.float32),
    )
    for row, members in enumerate(bins):
        start = 0
        for segment, member in enumerate(members, 1):
            sequence, length = sequences[member], lengths[member]
            here = slice(start, start + length)
            batch.tokens_RxL[row, here] = sequence.ids
            batch.positions_RxL[row, here] = np.arange(length)
            batch.segments_RxL[row, here] = segment
            batch.weights_RxL[row, here] = sequence.weights
            batch.weights_RxL[row, start : start + 1] = 0.0
            batch.advantages_RxL[row, here] = sequence.advantages
            batch.old_logprobs_RxL[row, here] = sequence.old_logprobs
            start += length
    return batch, left


def pack(
    sequences: Many[Sequence], row_length: int, rows: int | None = None, *, rows_multiple: int = 1
) -> Batch:
    """Pack all sequences; the number of rows is `rows`, or as few as needed rounded up to `rows_multiple`.

    Raises:
      UserError: a sequence is longer than a row.
      ValueError: `rows` is given and too small.
    """
    if rows is None:
        lengths = [min(len(sequence.ids), row_length) for sequence in sequences]
        needed = len(first_fit_decreasing(lengths, row_length, len(lengths))[0])
        rows = max(1, -(-needed // rows_multiple)) * rows_multiple
    batch, left = fill(sequences, row_length, rows)
    if left:
        raise ValueError(
            f"{len(left)} of {len(sequences)} sequences do not fit {rows} rows of {row_length}."
        )
    return batch


def unpack(array_RxL: np.ndarray, sequences: Many[Sequence], row_length: int) -> list[np.ndarray]:
    """What stands in an array at the tokens of each sequence of `pack(sequences, row_length, rows)`, [n] each."""
    lengths = [len(sequence.ids) for sequence in sequences]
    bins, _ = first_fit_decreasing(lengths, row_length, len(array_RxL))
    found: dict[int, np.ndarray] = {}
    for row, members in enumerate(bins):
        start = 0
        for member in members:
            found[member] = np.asarray(array_RxL[row, start : start + lengths[member]])
            start += lengths[member]
    return [found[member] for member in range(len(sequences))]


def split(batch: Batch, parts: int) -> list[Batch]:
    """Cut a batch into `parts` of equally many rows, dealing the rows out in turn.

    Rows are filled longest first, so contiguous parts would sort the episodes by length.
    """
    rows = batch.tokens_RxL.shape[0]
    if rows % parts:
        raise ValueError(f"{rows} rows cannot be dealt out to {parts} minibatches.")
    return [Batch(*(array[part::parts] for array in batch)) for part in range(parts)]


def micro_batch_rows(rows: int, micro_rows: int, shards: int = 1) -> int:
    """Rows of a micro-batch: `micro_rows`, at most all, rounded up to a multiple of the row shards of the mesh."""
    return -(-min(micro_rows, rows) // shards) * shards


def padding_share(batches: Many[Batch], micro_rows: int, shards: int = 1) -> float:
    """Padding among the tokens that an update computes; micro-batches without weights are stepped over."""
    held = computed = 0
    for batch in batches:
        rows, length = batch.tokens_RxL.shape
        step = micro_batch_rows(rows, micro_rows, shards)
        for start in range(0, rows, step):
            here = slice(start, start + step)
            if np.any(batch.weights_RxL[here] > 0):
                held += int(np.count_nonzero(batch.segments_RxL[here]))
                computed += step * length
    return 1.0 - held / computed if computed else 0.0
