"""A part of a collection: passages, and what finds them. Written once, never changed.

`manifest.json`, `passages.arrow`, and by kind `vectors.npy` with ScaNN's files in `scann/000/` …, and `words/`.
Building goes on where it was stopped: at the block of vectors, at the ScaNN shard.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from psearch_jax.errors import UserError
from psearch_jax.retrieval.build_options import (
    BuildOptions,
    Needs,
    refuse_what_does_not_fit,
)
from psearch_jax.retrieval.embedding import Embedder, Progress
from psearch_jax.retrieval.index import SCANN, VECTORS, Index
from psearch_jax.retrieval.lexical import LexicalIndex, bm25s_version, lexical_parameters
from psearch_jax.retrieval.manifest import (
    Manifest,
    check_files,
    describe_files,
    read_manifest,
    write_manifest,
)
from psearch_jax.retrieval.neighbours import (
    ExactNeighbours,
    Neighbours,
    ScannNeighbours,
    ShardedNeighbours,
    scann_version,
)
from psearch_jax.retrieval.passage_store import PassageStore, write_store
from psearch_jax.retrieval.passages import Passage
from psearch_jax.retrieval.vector_files import Blocks, embedded_blocks, write_vectors

PASSAGES = "passages.arrow"
WORDS = "words"
CORPUS = "corpus.json"  # of the corpus that was read, while a part is built


@dataclass(frozen=True)
class Part:
    """A part that is open."""

    manifest: Manifest
    passages: PassageStore
    dense: Index | None
    words: LexicalIndex | None


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What a build tells while it runs: a line now and then, what it needs for how many passages, and (vectors done,
    in all)."""

    say: Callable[[str], None] = lambda line: None
    needs: Callable[[Needs, int], None] = lambda needs, count: None
    embedded: Progress | None = None


def build_part(
    work: Path,
    corpus: Callable[[], Iterable[Passage]],
    options: BuildOptions,
    embedder: Embedder | None,
    *,
    vectors: Callable[[int], Callable[[int], Blocks]] | None = None,
    watch: Watch | None = None,
) -> Manifest:
    """Make a part in `work`, which may hold what an earlier attempt at the same part left there.

    Args:
      corpus: called for the passages, unless they were already read.
      embedder: of passages and queries; none for bm25.
      vectors: called with the number of passages for the blocks of vectors to take instead of embedding.

    Raises:
      UserError: no passages, or an index that fits neither memory nor disk.
    """
    watch = watch or Watch()
    work.mkdir(parents=True, exist_ok=True)
    if not (work / CORPUS).is_file():
        watch.say("reading the corpus")
        count, digest = write_store(work / PASSAGES, corpus())
        _write_json(work / CORPUS, {"count": count, "digest": digest})
    read = json.loads((work / CORPUS).read_text())
    count, dims = read["count"], embedder.dims if embedder is not None else 0
    if not count:
        raise UserError("The corpus holds no passages; give a file with one a line.")
    store = PassageStore(work / PASSAGES)
    free = shutil.disk_usage(work).free + _bytes_under(work)
    text_bytes = (work / PASSAGES).stat().st_size
    watch.needs(refuse_what_does_not_fit(options, count, dims, text_bytes, free), count)
    manifest = _describe(options, embedder, count, read["digest"])
    if options.dense:
        assert embedder is not None
        blocks = (
            vectors(count)
            if vectors is not None
            else embedded_blocks(
                lambda start, stop: [getattr(p, options.embed) for p in store[start:stop]],
                count,
                embedder,
                work / "embedding.json",
            )
        )
        write_vectors(work / VECTORS, blocks, count, dims, options.vectors, watch.embedded)
    if options.scann:
        _build_shards(work, manifest, watch)
    if options.lexical and not (work / WORDS).is_dir():
        watch.say("counting words")
        shutil.rmtree(work / f"{WORDS}.partial", ignore_errors=True)
        index = LexicalIndex.build(getattr(passage, options.embed) for passage in store)
        index.save(work / f"{WORDS}.partial")
        os.rename(work / f"{WORDS}.partial", work / WORDS)
    for name in (CORPUS, "embedding.json"):
        (work / name).unlink(missing_ok=True)
    manifest = replace(manifest, files=describe_files(work))
    write_manifest(work, manifest)
    return manifest


def _describe(
    options: BuildOptions, embedder: Embedder | None, count: int, digest: str
) -> Manifest:
    from psearch_jax import __version__

    versions = {"psearch_jax": __version__, "numpy": np.__version__}
    parameters: dict[str, Any] = {}
    if options.dense:
        parameters["vectors"] = options.vectors
    if options.scann:
        assert embedder is not None
        versions["scann"] = scann_version()
        rows = options.shards(count, embedder.dims)
        parameters["shards"] = [
            {"rows": own, **options.scann_parameters(own, embedder.dims)} for own in rows
        ]
    if options.lexical:
        parameters["words"] = {**lexical_parameters(), "bm25s": bm25s_version()}
    return Manifest(
        kind=options.kind,
        corpus=digest,
        count=count,
        dims=embedder.dims if embedder is not None else 0,
        encoder=embedder.name if embedder is not None else "",
        encoder_hash=embedder.fingerprint if embedder is not None else "",
        encoder_use=asdict(embedder.use) if embedder is not None else {},
        embed=options.embed,
        parameters=parameters,
        versions=versions,
        files={},
    )


def _build_shards(work: Path, manifest: Manifest, watch: Watch) -> None:
    """Train ScaNN on each range of rows; whole shards of before are kept."""
    (work / SCANN).mkdir(exist_ok=True)
    mapped = np.load(work / VECTORS, mmap_mode="r")
    first = 0
    shards = manifest.parameters["shards"]
    for number, parameters in enumerate(shards):
        rows = parameters["rows"]
        final = work / SCANN / f"{number:03d}"
        partial = work / SCANN / f"{number:03d}.partial"
        if not final.is_dir():
            watch.say(f"ScaNN shard {number + 1} of {len(shards)}: training on {rows:,} vectors")
            shutil.rmtree(partial, ignore_errors=True)
            # Nothing holds the vectors while ScaNN saves.
            built = ScannNeighbours.build(
                _read_rows(work / VECTORS, mapped, first, rows), parameters
            )
            built.save(partial)
            del built
            os.rename(partial, final)
        first += rows


def _read_rows(path: Path, mapped: np.memmap, first: int, rows: int) -> np.ndarray:
    """Some rows as float32, read rather than mapped, so that their pages do not count twice."""
    dims = mapped.shape[1]
    with path.open("rb") as stream:
        stream.seek(mapped.offset + first * dims * mapped.dtype.itemsize)
        flat = np.fromfile(stream, mapped.dtype, rows * dims)
    return flat.reshape(rows, dims).astype(np.float32, copy=False)


def open_part(directory: Path, *, verify: bool = True) -> Part:
    """Open a part; vectors, passages and words stay on disk, mapped, and ScaNN's files are read.

    verify: compare the checksum of every file, which reads them all; the sizes are compared in any case.

    Raises:
      UserError: it is missing, foreign, of another version, or damaged.
    """
    manifest = read_manifest(directory)
    check_files(directory, manifest, hashes=verify)
    passages = PassageStore(directory / PASSAGES)
    dense = words = None
    if manifest.kind != "bm25":
        vectors_NxE = np.load(directory / VECTORS, mmap_mode="r")
        dense = Index(manifest, vectors_NxE, _neighbours(directory, manifest, vectors_NxE))
    if manifest.kind in ("bm25", "hybrid"):
        words = LexicalIndex.load(directory / WORDS)
    return Part(manifest, passages, dense, words)


def _neighbours(directory: Path, manifest: Manifest, vectors_NxE: np.ndarray) -> Neighbours:
    if manifest.kind == "exact":
        return ExactNeighbours(vectors_NxE)
    if manifest.versions.get("scann") != scann_version():
        raise UserError(
            f"The index {directory} was written by ScaNN {manifest.versions.get('scann')} and {scann_version()} is "
            "installed; build it again, or install the other."
        )
    shards = manifest.parameters["shards"]
    searchers = [
        ScannNeighbours.load(directory / SCANN / f"{number:03d}", parameters)
        for number, parameters in enumerate(shards)
    ]
    if len(searchers) == 1:
        return searchers[0]
    rows = [parameters["rows"] for parameters in shards]
    return ShardedNeighbours(searchers, [0, *accumulate(rows[:-1])])


def _bytes_under(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _write_json(path: Path, value: Any) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value))
    os.replace(partial, path)
