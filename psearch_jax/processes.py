"""Several processes as one run: start, agreement, and arrays that no process holds whole.

With one process everything here is free of cost and changes nothing. What travels between processes is text
(JSON where it has structure); nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding

T = TypeVar("T")


def count() -> int:
    """Processes of this run."""
    return jax.process_count()


def index() -> int:
    """Which of them this is, from 0."""
    return jax.process_index()


def is_first() -> bool:
    """Whether this process does what is done once: writing files, talking to the terminal."""
    return index() == 0


def share(items: Sequence[T]) -> list[T]:
    """The items that fall to this process; `interleave` puts all of them together again."""
    return list(items[index() :: count()])


def interleave(shares: Sequence[Sequence[T]]) -> list[T]:
    """The inverse of `share`, given the share of every process."""
    total = sum(map(len, shares))
    return [shares[i % len(shares)][i // len(shares)] for i in range(total)]


def gather(text: str) -> list[str]:
    """The text of every process, in their order. A collective: all call it at the same place."""
    if count() == 1:
        return [text]
    own = np.frombuffer(text.encode(), np.uint8)
    sizes_P = np.asarray(multihost_utils.process_allgather(np.int32(own.size))).reshape(-1)
    padded = np.zeros(max(1, int(sizes_P.max())), np.uint8)
    padded[: own.size] = own
    texts_PxN = np.asarray(multihost_utils.process_allgather(padded)).reshape(count(), -1)
    return [row[:size].tobytes().decode() for row, size in zip(texts_PxN, sizes_P, strict=True)]


def from_first(text: str) -> str:
    """The first process's text, on every process. A collective."""
    return gather(text)[0]


def agree(wish: bool) -> bool:
    """Whether any process wishes it. A collective."""
    return wish if count() == 1 else "1" in gather("1" if wish else "0")


def place(array: np.ndarray, where: Sharding) -> jax.Array:
    """An array that every process has whole, laid out over the devices of all of them."""
    if count() == 1:
        return jax.device_put(array, where)
    return jax.make_array_from_callback(array.shape, where, lambda part: array[part])


def to_host(array: Any) -> np.ndarray:
    """A device array as NumPy, also where its parts lie with several processes. A collective there."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        if array.is_fully_replicated:
            return np.asarray(array.addressable_data(0))
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)
