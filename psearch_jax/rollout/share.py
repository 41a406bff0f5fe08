"""One process's part of an engine that runs on several: a stretch of the slots, and the same calls as the others.

Every process plays its own requests in its own slots. Before each compiled call the processes tell each other what
they need (`agree`), so that all make the same call with the same shapes; one without work passes rows of nobody. With
one process all of this is the identity.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jaxtyping import Array

from psearch_jax import processes
from psearch_jax.errors import UserError
from psearch_jax.mesh import Layout
from psearch_jax.retrieval.passages import Hit, Passage
from psearch_jax.rollout.episode import Episode, Request, Turn


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which part is ours: the stretch number `index` of `count` equal ones."""

    layout: Layout
    count: int = 1
    index: int = 0

    def part(self, size: int) -> int:
        """How many of `size` slots or rows a process has."""
        return size // self.count

    def first(self, size: int) -> int:
        """The first of our slots or rows among `size`."""
        return self.index * self.part(size)

    def put(self, local: np.ndarray) -> np.ndarray | Array:
        """Our part of an array over all slots or rows → the whole array, for a compiled call."""
        if self.count == 1:
            return local
        assert self.layout.mesh is not None
        spec = self.layout.spec("rows", *[None] * (local.ndim - 1))
        where = NamedSharding(self.layout.mesh, spec)
        whole = (local.shape[0] * self.count, *local.shape[1:])
        return jax.make_array_from_process_local_data(where, local, whole)

    def own(self, whole: np.ndarray) -> np.ndarray:
        """Our part of what a compiled call returned for all rows."""
        first = self.first(whole.shape[0])
        return whole[first : first + self.part(whole.shape[0])]

    def agree(self, *numbers: int) -> np.ndarray:
        """The numbers of every process, [processes, numbers]. A collective."""
        if self.count == 1:
            return np.array([numbers])
        # One shape for all, so that there is one program.
        padded = np.zeros(4, np.int32)
        padded[: len(numbers)] = numbers
        return np.asarray(multihost_utils.process_allgather(padded))[:, : len(numbers)]

    def most(self, *numbers: int) -> list[int]:
        """The largest of each number over the processes. A collective."""
        return self.agree(*numbers).max(axis=0).tolist()

    def mine(self, requests: Sequence[Request]) -> list[int]:
        """The places of the requests that we play: whole groups, which share a prompt, dealt in turn."""
        groups = {request.group: None for request in requests}
        turn = {group: i % self.count for i, group in enumerate(groups)}
        return [i for i, request in enumerate(requests) if turn[request.group] == self.index]

    def exchange(
        self, requests: Sequence[Request], places: Sequence[int], episodes: Sequence[Episode]
    ) -> list[Episode]:
        """All episodes in the order of the requests, given our own and their places. A collective."""
        if self.count == 1:
            return list(episodes)
        own = [[place, _pack(episode)] for place, episode in zip(places, episodes, strict=True)]
        every: list[Any] = [None] * len(requests)
        for text in processes.gather(json.dumps(own)):
            for place, packed in json.loads(text):
                every[place] = _unpack(requests[place], packed)
        return every


def our_share(layout: Layout) -> Share:
    """The part of the slots that lies on this process's devices.

    Raises:
      UserError: a stretch of slots lies on devices of several processes, or ours do not lie side by side.
    """
    if layout.mesh is None or processes.count() == 1:
        return Share(layout=layout)
    pieces, count = layout.size("rows"), processes.count()
    where = NamedSharding(layout.mesh, layout.spec("rows")).devices_indices_map((pieces,))
    holders: dict[int, set[int]] = {}
    device: Any
    for device, (part,) in where.items():
        for piece in range(*part.indices(pieces)):
            holders.setdefault(device.process_index, set()).add(piece)
    own = sorted(holders[processes.index()])
    share = pieces // count
    first = own[0]
    if len(own) * count != pieces or first % share or own != list(range(first, first + share)):
        raise UserError(
            f"the rollout's slots lie in {pieces} piece(s) over {count} processes, which do not give each process a "
            "stretch of its own; make mesh.data a multiple of the number of processes, and keep mesh.tensor within one."
        )
    return Share(layout=layout, count=count, index=first // share)


def _pack(episode: Episode) -> dict[str, Any]:
    """What JSON can hold of an episode, exactly. Its question is known to everybody."""
    hits = [
        [
            [[*asdict(hit.passage).values(), float(hit.score)] for hit in found]
            for found in turn.hits
        ]
        for turn in episode.turns
    ]
    turns = [
        {name: value for name, value in vars(turn).items() if name != "hits"}
        for turn in episode.turns
    ]
    return {
        "ids": episode.ids,
        "roles": episode.roles,
        "logprobs": episode.logprobs,
        "end_reason": episode.end_reason,
        "turns": turns,
        "hits": hits,
    }


def _unpack(request: Request, packed: dict[str, Any]) -> Episode:
    turns = [
        Turn(
            **{**turn, "queries": tuple(turn["queries"])},
            hits=tuple(tuple(Hit(Passage(*words), score) for *words, score in row) for row in hits),
        )
        for turn, hits in zip(packed["turns"], packed["hits"], strict=True)
    ]
    return Episode(
        question=request.question,
        group=request.group,
        member=request.member,
        ids=packed["ids"],
        roles=packed["roles"],
        logprobs=packed["logprobs"],
        turns=turns,
        end_reason=packed["end_reason"],
    )
