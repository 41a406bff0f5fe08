"""Files of played episodes, one JSON object a line, and the training batches that come of them.

A line has `segments` ([role, text] in order), as the rows of an evaluation have them, and `token_ids` ([role, [id, …]])
where it was written to be trained on: the ids that were sampled are the ids that are trained on (law 1). Rows without
them are encoded a segment at a time, as a rollout does it. Only policy tokens count (law 2).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import numpy as np

from psearch_jax.errors import UserError
from psearch_jax.learning.batches import Batch, Sequence, fill
from psearch_jax.metrics_log import read_lines
from psearch_jax.rollout.episode import Episode, Role

ROLES = {role.name.lower(): role for role in Role}


def role_runs(episode: Episode) -> list[list[Any]]:
    """The `token_ids` of a line: [role, ids] of each run of tokens with equal role."""
    runs: list[list[Any]] = []
    for token, role in zip(episode.ids, episode.roles, strict=True):
        name = Role(role).name.lower()
        if not runs or runs[-1][0] != name:
            runs.append([name, []])
        runs[-1][1].append(int(token))
    return runs


def read_episodes(path: str | Path, tokenizer: Any) -> list[Sequence]:
    """The episodes of a file as sequences with weight 1 on policy tokens.

    Raises:
      UserError: the file is missing, empty or damaged, a line is no episode, or its ids are another tokenizer's.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(
            f"supervised.episodes: there is no file {path}; write one with `psearch sample`, or leave the key empty "
            "for scripted episodes."
        )
    sequences = []
    for number, line in enumerate(read_lines(path), start=1):
        try:
            sequences.append(_sequence(line, tokenizer))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise UserError(f"{path}, line {number}: {error}; mend or remove the line.") from error
    if not sequences:
        raise UserError(f"supervised.episodes: {path} holds no episodes; give a file that does.")
    return sequences


def _sequence(line: Mapping[str, Any], tokenizer: Any) -> Sequence:
    segments = line.get("segments")
    if not isinstance(segments, list) or not segments:
        raise ValueError('no episode: it has no "segments"')
    for role, text in segments:
        if role not in ROLES or not isinstance(text, str):
            raise ValueError(f"a segment is [role, text], the role one of {', '.join(ROLES)}")
    if "token_ids" in line:
        pairs = [(role, [int(i) for i in ids]) for role, ids in line["token_ids"]]
        texts = [[role, tokenizer.decode(ids, skip_special_tokens=False)] for role, ids in pairs]
        if texts != segments:
            raise ValueError(
                'its "token_ids" are not those of its "segments" for this policy\'s tokenizer (without "token_ids" '
                "the text is encoded)"
            )
    else:
        pairs = [(r, tokenizer.encode(text, add_special_tokens=False)) for r, text in segments]
    weights = np.concatenate(
        [np.full(len(ids), float(ROLES[role] is Role.POLICY), np.float32) for role, ids in pairs]
    )
    if not weights[1:].any():
        raise ValueError("the policy wrote nothing in this episode")
    return Sequence(ids=[i for _, ids in pairs for i in ids], weights=weights)


class EpisodeStream:
    """Batches of an endless order of episodes in which each epoch is a fresh shuffle.

    The batch of a step follows from the seed and the step alone; an episode that found no room comes first in the next.
    """

    def __init__(self, sequences: Many[Sequence], row_length: int, rows: int, seed: int) -> None:
        """Raises UserError for an episode that is longer than a row."""
        longest = max(len(sequence.ids) for sequence in sequences)
        if longest > row_length:
            raise UserError(
                f"supervised.row_length is {row_length}, but the longest episode has {longest} tokens (an episode is "
                f"never cut); set it to {longest} or more."
            )
        self.sequences, self.row_length, self.rows, self.seed = sequences, row_length, rows, seed
        self._epoch, self._waiting = 0, []  # type: tuple[int, list[int]]
        self._batches: list[list[int]] = []  # members of each step so far

    def batch(self, step: int) -> Batch:
        """The packed batch of a step."""
        while len(self._batches) <= step:
            self._batches.append(self._next())
        chosen = [self.sequences[i] for i in self._batches[step]]
        return fill(chosen, self.row_length, self.rows)[0]

    def _next(self) -> list[int]:
        room = self.rows * self.row_length
        taken: list[int] = []
        while True:
            if not self._waiting:
                rng = np.random.default_rng([self.seed, 2, self._epoch])
                self._waiting = rng.permutation(len(self.sequences)).tolist()
                self._epoch += 1
            room -= len(self.sequences[self._waiting[0]].ids)
            if room < 0:
                break
            taken.append(self._waiting.pop(0))
        # Lengths that add up may still not pack into rows: the last drawn wait.
        while fill([self.sequences[i] for i in taken], self.row_length, self.rows)[1]:
            self._waiting.insert(0, taken.pop())
        return taken


def file_digest(path: str | Path) -> str:
    """Sixteen hexadecimal digits of what a file holds."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
