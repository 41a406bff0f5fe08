"""Nearest neighbours by inner product: ScaNN, and the exact search that it is measured against.

Both give candidates only. `index.Index` scores them again with the stored vectors, so that scores do not depend
on the batch and ties can be broken by passage order.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Float32, Int64

from psearch_jax.errors import UserError

BRUTE_FORCE_BELOW = 20_000
TREE_ABOVE = 100_000
#: Where a tree puts each vector into a second leaf (ScaNN's SOAR), for most of the recall at a fifth of the leaves.
SPILLING = {"soar_lambda": 1.5, "overretrieve_factor": 2.0}
TRAINING_SAMPLE = 100_000
EXACT_BLOCK = 16_384  # passages scored at a time by exact search
ON_DISK = "disk"  # the reordering type that keeps no vectors in memory
ROWS = 16  # queries that ScaNN is given at a time, on each core
QUERY_BLOCK = 512  # queries scored at a time by exact search


@runtime_checkable
class Neighbours(Protocol):
    """Something that proposes nearest rows."""

    def candidates(
        self, queries_QxE: Float32[np.ndarray, "Q E"], k: int
    ) -> Int64[np.ndarray, "Q C"]:
        """Row numbers of about the k nearest rows, or of more, any order; -1 where there is none."""
        ...


def scann_parameters(count: int, dims: int) -> dict[str, Any]:
    """How ScaNN searches `count` vectors of `dims` dimensions, by the rules of its documentation but for the leaves.

    Brute force below 20,000; to 100,000 asymmetric hashing of two dimensions a block, the best 100 scored again in
    float32; above that the same within a tree. Its leaves are 2.25 √count and each vector is in two of them (`spill`),
    so that 8 % of the leaves are enough; without `spill` (`unspilled`) they are √count, and two fifths are searched.
    Both were measured on MiniLM's vectors (docs/retrieval.md).
    """
    if count < BRUTE_FORCE_BELOW:
        return {"scoring": "brute_force"}
    parameters: dict[str, Any] = {
        "scoring": "hashing",
        "dimensions_per_block": 2 if dims % 2 == 0 else 1,
        "anisotropic_threshold": 0.2,
        "reorder": 100,
        "training_sample": min(count, TRAINING_SAMPLE),
    }
    if count > TREE_ABOVE:
        leaves = round(2.25 * count**0.5)
        parameters |= {"spill": True, "leaves": leaves}
        parameters["leaves_to_search"] = leaves_to_search(parameters)
    return parameters


def unspilled(count: int) -> dict[str, Any]:
    """A tree of `count` vectors that keeps each of them once: half the codes, for those who count bytes."""
    tree = {"spill": False, "leaves": round(count**0.5)}
    return tree | {"leaves_to_search": leaves_to_search(tree)}


def leaves_to_search(tree: dict[str, Any]) -> int:
    """As many of the tree's leaves as find about 98 % of the first three (at least 16)."""
    share = 0.08 if tree.get("spill") else 0.4
    return max(16, round(share * tree["leaves"]))


class ScannNeighbours:
    """ScaNN over unit vectors, on the host. Missing neighbours come from ScaNN as row 0 with a NaN score."""

    def __init__(self, searcher: Any, parameters: dict[str, Any]) -> None:
        self._searcher = searcher
        self._reorder = parameters.get("reorder")
        self._rescored_here = parameters.get("reorder_type") != ON_DISK

    @classmethod
    def build(
        cls, vectors_NxE: Float32[np.ndarray, "N E"], parameters: dict[str, Any]
    ) -> ScannNeighbours:
        """Train and hash. ScaNN keeps the float32 matrix and a copy while it builds."""
        builder = _scann().scann_ops_pybind.builder(
            np.ascontiguousarray(vectors_NxE), 10, "dot_product"
        )
        if parameters["scoring"] == "brute_force":
            builder = builder.score_brute_force()
        else:
            sample = parameters["training_sample"]
            if "leaves" in parameters:
                builder = builder.tree(
                    num_leaves=parameters["leaves"],
                    num_leaves_to_search=parameters["leaves_to_search"],
                    training_sample_size=sample,
                    **(SPILLING if parameters.get("spill") else {}),
                )
            builder = builder.score_ah(
                parameters["dimensions_per_block"],
                anisotropic_quantization_threshold=parameters["anisotropic_threshold"],
                training_sample_size=sample,
            )
            builder = _reordered(builder, parameters)
        with _native_stderr_kept_back():
            searcher = builder.build()
        _give_memory_back()
        return cls(searcher, parameters)

    @classmethod
    def load(cls, directory: Path, parameters: dict[str, Any]) -> ScannNeighbours:
        """Read what `save` wrote. The caller has checked the files: ScaNN does not survive damaged ones."""
        with _native_stderr_kept_back():
            return cls(_scann().scann_ops_pybind.load_searcher(str(directory)), parameters)

    def save(self, directory: Path) -> None:
        """Write ScaNN's files; their paths are relative, so the directory can be moved."""
        directory.mkdir(parents=True)
        with _native_stderr_kept_back():
            self._searcher.serialize(str(directory), relative_path=True)
        _give_memory_back()

    def candidates(
        self, queries_QxE: Float32[np.ndarray, "Q E"], k: int
    ) -> Int64[np.ndarray, "Q C"]:
        """See `Neighbours`. Without vectors of its own to score with, it proposes all that would have been.

        Queries go in blocks of one size, the last filled up: in a batch of another size ScaNN's distances to the leaves
        of a tree differ in their last digits, and so, now and then, do the leaves that it searches. ScaNN's own
        `search_batched_parallel` divides a batch by the number of cores, and up to 256 queries not at all.
        """
        queries_QxE = np.ascontiguousarray(queries_QxE, np.float32)
        count = len(queries_QxE)
        if not count:
            return np.empty((0, k), np.int64)
        wide = None if self._reorder is None else max(k, self._reorder)

        def search(block_RxE: np.ndarray) -> np.ndarray:
            ids, scores = self._searcher.search_batched(
                block_RxE,
                final_num_neighbors=k if wide is None or self._rescored_here else wide,
                pre_reorder_num_neighbors=wide if self._rescored_here else None,
            )
            return np.where(np.isfinite(scores), np.asarray(ids, np.int64), -1)

        padded = queries_QxE[np.arange(count + -count % ROWS) % count]
        blocks = [padded[start : start + ROWS] for start in range(0, count, ROWS)]
        return np.concatenate(list(_threads().map(search, blocks)))[:count]


@cache
def _threads() -> ThreadPoolExecutor:
    """One thread for each core that the process may use; ScaNN lets go of the interpreter while it searches."""
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)), "scann")


def _reordered(builder: Any, parameters: dict[str, Any]) -> Any:
    """The hashing's best are scored again with vectors that ScaNN keeps in memory, unless they are read from disk."""
    kind = parameters.get("reorder_type", "float32")
    if kind == ON_DISK:
        return builder
    if kind == "float32":
        return builder.reorder(parameters["reorder"])
    from scann.scann_ops.py.scann_builder import ReorderType

    return builder.reorder(parameters["reorder"], quantize=ReorderType[kind.upper()])


class ShardedNeighbours:
    """Neighbours over consecutive ranges of rows, as one: each proposes, and what they propose is scored together."""

    def __init__(self, shards: Sequence[Neighbours], first_rows: Sequence[int]) -> None:
        self._shards = shards
        self._first_rows = first_rows

    def candidates(
        self, queries_QxE: Float32[np.ndarray, "Q E"], k: int
    ) -> Int64[np.ndarray, "Q C"]:
        """See `Neighbours`; up to k of every shard."""
        found = []
        for shard, first in zip(self._shards, self._first_rows, strict=True):
            ids = shard.candidates(queries_QxE, k)
            found.append(np.where(ids >= 0, ids + first, -1))
        return np.concatenate(found, axis=1)


class ExactNeighbours:
    """Every inner product, block by block: memory beside the vectors stays near 100 MB."""

    def __init__(self, vectors_NxE: Float[np.ndarray, "N E"]) -> None:
        self._vectors_NxE = vectors_NxE

    def candidates(
        self, queries_QxE: Float32[np.ndarray, "Q E"], k: int
    ) -> Int64[np.ndarray, "Q k"]:
        """See `Neighbours`."""
        found = np.full((len(queries_QxE), k), -1, np.int64)
        for start in range(0, len(queries_QxE), QUERY_BLOCK):
            part = slice(start, start + QUERY_BLOCK)
            found[part] = self._best(queries_QxE[part], k)
        return found

    def _best(self, queries_QxE: np.ndarray, k: int) -> np.ndarray:
        scores = np.full((len(queries_QxE), k), -np.inf, np.float32)
        ids = np.full((len(queries_QxE), k), -1, np.int64)
        for start in range(0, len(self._vectors_NxE), EXACT_BLOCK):
            block = np.asarray(self._vectors_NxE[start : start + EXACT_BLOCK], np.float32)
            scores_QxP = queries_QxE @ block.T
            kept = min(k, scores_QxP.shape[1])
            best = np.argpartition(scores_QxP, -kept, axis=1)[:, -kept:]
            ids = np.concatenate([ids, best + start], axis=1)
            scores = np.concatenate([scores, np.take_along_axis(scores_QxP, best, axis=1)], axis=1)
            best = np.argpartition(scores, -k, axis=1)[:, -k:]
            ids = np.take_along_axis(ids, best, axis=1)
            scores = np.take_along_axis(scores, best, axis=1)
        return ids


def scann_version() -> str:
    """The installed ScaNN's version, without importing it."""
    try:
        return version("scann")
    except PackageNotFoundError:
        raise _no_scann() from None


def _no_scann() -> UserError:
    return UserError(
        "ScaNN is not installed; run `pip install scann` (Linux x86-64), "
        "or set retrieval.kind to exact."
    )


def _scann() -> ModuleType:
    """Import ScaNN without TensorFlow, which it would load, slowly and loudly, where it is installed."""
    hidden = "tensorflow" not in sys.modules
    if hidden:
        sys.modules["tensorflow"] = None  # type: ignore[assignment]  # makes the import fail
    try:
        import scann
        from scann.scann_ops.py import scann_ops_pybind  # noqa: F401
    except ImportError as error:
        raise _no_scann() from error
    finally:
        if hidden:
            del sys.modules["tensorflow"]
    return scann


def _give_memory_back() -> None:
    """Let the C library return what ScaNN has freed: it keeps up to four times the vectors after a tree is saved."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's own
    if trim is not None:
        trim(0)


@contextmanager
def _native_stderr_kept_back() -> Iterator[None]:
    """Keep ScaNN's C++ log off the terminal; pass it on if the call fails, when it is worth reading."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as log:
        kept = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            yield
        except Exception as error:
            log.seek(0)
            error.add_note(log.read().decode(errors="replace")[-2000:])
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
