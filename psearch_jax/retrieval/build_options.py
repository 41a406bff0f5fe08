"""What a build is asked for, and what it will need: memory and disk, said before it begins."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil

from psearch_jax.errors import UserError
from psearch_jax.retrieval.neighbours import (
    ON_DISK,
    TREE_ABOVE,
    leaves_to_search,
    scann_parameters,
    unspilled,
)

KINDS = ("scann", "exact", "bm25", "hybrid")
EMBED = ("text", "contents")
REORDER_TYPES = ("float32", "bfloat16", "int8", ON_DISK)
VECTOR_TYPES = ("float32", "float16")
SHARD_BYTES = (
    8 << 30
)  # float32 vectors in one ScaNN shard; saving is known to fail above about 16 GB
GIB = 1 << 30
#: A process that has JAX, ScaNN and a small encoder loaded.
BASE_BYTES = GIB // 2
#: What ScaNN takes, measured with 100,000 to 2,000,000 vectors of 384 dimensions (`benchmarks/retrieval.py --build`).
#: Training: its float32 copy, once more as much, and the sample 2.2 times. Saving a tree: seven bytes for every block
#: of every code, and a quarter GiB, twice where each vector is in two leaves.
TRAINING_COPIES, SAMPLE_COPIES = 2, 2.2
SAVED_BLOCK_BYTES, SAVED_TREE_BYTES = 7, GIB // 4
LEXICAL_FACTOR = (
    9.0  # bytes for a byte of text while BM25 counts; no measured build has been compared with it
)


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """How an index is built. Zero means: by the rules of `neighbours.scann_parameters`.

    Attributes:
      kind: "scann", "exact", "bm25", or "hybrid" (ScaNN and BM25).
      embed: what of a passage is embedded and cut into words, "text" or "contents" (with its title).
      vectors: how vectors are stored, "float32" or "float16".
      shard_rows: rows of one ScaNN searcher; 0: as many as make `SHARD_BYTES`.
      reorder_type: the vectors that ScaNN keeps to score its best with; "disk": none, they are read from the file.
      the others: ScaNN's parameters.
    """

    kind: str = "scann"
    embed: str = "contents"
    vectors: str = "float32"
    shard_rows: int = 0
    reorder_type: str = "float32"
    reorder: int = 0
    leaves: int = 0
    leaves_to_search: int = 0
    dimensions_per_block: int = 0
    anisotropic_threshold: float = 0.0
    training_sample: int = 0

    def __post_init__(self) -> None:
        """Raise a UserError for a value that cannot be."""
        for name, value, choices in (
            ("kind", self.kind, KINDS),
            ("embed", self.embed, EMBED),
            ("vectors", self.vectors, VECTOR_TYPES),
            ("reorder-type", self.reorder_type, REORDER_TYPES),
        ):
            if value not in choices:
                raise UserError(f"--{name} is {value!r}; use one of {', '.join(choices)}.")
        for name, value in asdict(self).items():
            if not isinstance(value, str) and value < 0:
                raise UserError(f"--{name.replace('_', '-')} is {value}; use 0 (chosen) or more.")

    @property
    def dense(self) -> bool:
        """Whether there are vectors."""
        return self.kind != "bm25"

    @property
    def scann(self) -> bool:
        """Whether ScaNN searches them."""
        return self.kind in ("scann", "hybrid")

    @property
    def lexical(self) -> bool:
        """Whether words are counted."""
        return self.kind in ("bm25", "hybrid")

    def shards(self, count: int, dims: int) -> list[int]:
        """Rows of each ScaNN shard, equal but for one."""
        limit = self.shard_rows or SHARD_BYTES // (4 * dims)
        number = -(-count // limit)
        return [count * (i + 1) // number - count * i // number for i in range(number)]

    def scann_parameters(self, rows: int, dims: int) -> dict[str, Any]:
        """Of one shard: the rules, and what was asked for instead."""
        parameters = scann_parameters(rows, dims)
        asked = {
            name: value
            for name in (
                *("reorder", "dimensions_per_block", "anisotropic_threshold", "training_sample"),
                *("leaves", "leaves_to_search"),
            )
            if (value := getattr(self, name))
        }
        if asked or self.reorder_type != "float32":
            if parameters["scoring"] == "brute_force":
                parameters = scann_parameters(TREE_ABOVE, dims) | {"training_sample": rows}
            parameters["reorder_type"] = self.reorder_type
            if "leaves" in parameters and self.reorder_type == ON_DISK:
                parameters |= unspilled(rows)
            if "leaves" in asked and "leaves" not in parameters:
                parameters["spill"] = self.reorder_type != ON_DISK
            parameters |= asked
            if "leaves" in asked and "leaves_to_search" not in asked:
                parameters["leaves_to_search"] = leaves_to_search(parameters)
        if "leaves" in parameters:
            if parameters["leaves"] > rows:
                raise UserError(
                    f"--leaves is {parameters['leaves']} and a shard has {rows} rows; use about their root."
                )
        elif "leaves_to_search" in parameters:
            raise UserError("--leaves-to-search is for a tree; give --leaves too.")
        return parameters


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes: at most in memory while building, in memory while searching, on disk while building and afterwards."""

    build: int
    search: int
    disk_build: int
    disk: int


def estimate(options: BuildOptions, count: int, dims: int, text_bytes: int) -> Needs:
    """What an index of `count` passages with `text_bytes` bytes of text will need.

    A ScaNN shard takes its float32 matrix and what ScaNN trains with; then, without the matrix, what ScaNN keeps and
    what it saves with. Afterwards the codes and the reordering vectors of all shards stay. Vectors and passages on disk
    are mapped and are not counted: the system drops them when it needs their pages.
    """
    row = 4 * dims
    build = search = BASE_BYTES
    stored = count * dims * (2 if options.vectors == "float16" else 4) if options.dense else 0
    disk = stored + int(1.1 * text_bytes)
    if options.scann:
        largest = max(options.shards(count, dims))
        parameters = options.scann_parameters(largest, dims)
        kept, saved = _scann_bytes(parameters, dims)
        sample = int(SAMPLE_COPIES * parameters.get("training_sample", 0) * row)
        training = largest * row * (1 + TRAINING_COPIES) + sample
        saving = largest * kept
        if "leaves" in parameters:
            copies = 2 if parameters.get("spill") else 1
            saving += copies * SAVED_TREE_BYTES + largest * saved * SAVED_BLOCK_BYTES
        build = max(build, BASE_BYTES + max(training, saving))
        search += count * kept
        disk += count * (kept + saved)
    if options.lexical:
        build = max(build, BASE_BYTES + int(LEXICAL_FACTOR * text_bytes))
        disk += int(1.2 * text_bytes)
    return Needs(build=build, search=search, disk_build=disk, disk=disk)


def _scann_bytes(parameters: dict[str, Any], dims: int) -> tuple[int, int]:
    """Of one row: what ScaNN keeps in memory (codes, reordering vectors), and its codes in a file (a byte a block)."""
    if parameters["scoring"] == "brute_force":
        return 4 * dims, 0
    blocks = -(-dims // parameters["dimensions_per_block"])
    codes = blocks // 2 + 8  # four bits a block; the leaf's list
    if "leaves" in parameters:
        copies = 2 if parameters.get("spill") else 1
        codes, blocks = (codes + 8) * copies, blocks * copies
    size = {"float32": 4, "bfloat16": 2, "int8": 1, ON_DISK: 0}
    return codes + dims * size[parameters.get("reorder_type", "float32")], blocks


def refuse_what_does_not_fit(
    options: BuildOptions, count: int, dims: int, text_bytes: int, free_disk: int
) -> Needs:
    """The estimate, if memory and disk have room for it.

    Raises:
      UserError: they have not; says which options would fit.
    """
    needs = estimate(options, count, dims, text_bytes)
    free = available_memory()
    if needs.build > free or (options.scann and needs.search > free):
        raise UserError(
            f"Building this index needs {_gib(needs.build)} of memory and searching it {_gib(needs.search)}, and "
            f"{_gib(free)} are available; {_remedy(options, count, dims, text_bytes, free)}."
        )
    if needs.disk_build > free_disk:
        raise UserError(
            f"Building this index needs {_gib(needs.disk_build)} of disk, and {_gib(free_disk)} are free; "
            "choose another place (--out), or --vectors float16."
        )
    return needs


def _remedy(options: BuildOptions, count: int, dims: int, text_bytes: int, free: int) -> str:
    """The mildest change that fits."""
    if options.scann:
        for reorder_type in REORDER_TYPES[REORDER_TYPES.index(options.reorder_type) :]:
            for shards in (1, 2, 4, 8, 16, 32, 64):
                rows = -(-count // shards)
                changed = replace(options, reorder_type=reorder_type, shard_rows=rows)
                if rows * dims * 4 > SHARD_BYTES:
                    continue
                needs = estimate(changed, count, dims, text_bytes)
                if max(needs.build, needs.search) <= free:
                    return (
                        f"it fits with --reorder-type {reorder_type} --shard-rows {rows} "
                        f"({_gib(needs.build)} while building, {_gib(needs.search)} while searching)"
                    )
    if options.lexical and options.dense:
        return "leave the words out (--kind scann), or use a machine with more memory"
    return "use a machine with more memory, or a smaller corpus"


def describe_needs(needs: Needs, count: int, dims: int, options: BuildOptions) -> str:
    """One line for the terminal."""
    shards = f", {len(options.shards(count, dims))} ScaNN shard(s)" if options.scann else ""
    size = f" of {dims} dimensions" if options.dense else ""
    return (
        f"{count:,} passages{size}, {options.kind}{shards}: needs {_gib(needs.build)} of memory while building, "
        f"{_gib(needs.search)} while searching, {_gib(needs.disk_build)} of disk"
    )


def available_memory() -> int:
    """Bytes that a process can still get."""
    return int(psutil.virtual_memory().available)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
