"""Indexes: built once, kept under their fingerprint, checked whenever they are loaded.

On disk, `<directory>/<fingerprint>/` holds `manifest.json`, `vectors.npy` (float32 [N, E], unit
rows, passage order) and ScaNN's files in `scann/`. It is put together in a hidden directory beside
it and renamed when it is complete. Embedding is kept there in shards as it proceeds, so a build
that was killed goes on where it stopped, with the same batches and so the same vectors.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Float64, Int64

from psearch_jax.config import RetrievalConfig
from psearch_jax.errors import UserError
from psearch_jax.retrieval.corpus import corpus_fingerprint
from psearch_jax.retrieval.embedding import Batch, Embedder, EmbeddingPlan, Progress, distinct_texts
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
    scann_parameters,
    scann_version,
)
from psearch_jax.retrieval.passages import Passage

KINDS = ("scann", "exact")
EMBED = ("text", "contents")
SHARD_TEXTS = 4096  # distinct texts embedded between two saves
MARGIN = 8  # candidates beyond k that are scored exactly
VECTORS = "vectors.npy"
SCANN = "scann"


@dataclass(frozen=True)
class Index:
    """Unit vectors of a corpus and a way to search them."""

    manifest: Manifest
    vectors_NxE: Float[np.ndarray, "N E"]  # float32, or float16 where a build asked for it
    neighbours: Neighbours

    @property
    def fingerprint(self) -> str:
        """See `Manifest.fingerprint`."""
        return self.manifest.fingerprint

    def __len__(self) -> int:
        """How many passages there are."""
        return self.manifest.count

    def exact(self) -> Index:
        """The same vectors searched exactly; what recall is measured against."""
        manifest = replace(self.manifest, kind="exact", parameters={})
        return Index(manifest, self.vectors_NxE, ExactNeighbours(self.vectors_NxE))

    def search_vectors(
        self, queries_QxE: Float32[np.ndarray, "Q E"], k: int
    ) -> tuple[Int64[np.ndarray, "Q K"], Float64[np.ndarray, "Q K"]]:
        """Row numbers and inner products of the K = min(k, N) best passages, best first, ties in passage order.

        Where the search found fewer, the row ends with -1 and -inf. The inner products are summed in float64 over
        the stored vectors, so they depend on the query and the passage and on nothing else.

        Raises:
          ValueError: vectors of another size or with NaN.
        """
        queries_QxE = np.ascontiguousarray(queries_QxE, np.float32)
        count, dims = self.vectors_NxE.shape
        if queries_QxE.ndim != 2 or queries_QxE.shape[1] != dims or k < 1:
            raise ValueError(f"k >= 1 and vectors of {dims} wanted; {k}, {queries_QxE.shape} given")
        if not np.isfinite(queries_QxE).all():
            raise ValueError("a query vector is not finite")
        k = min(k, count)
        ids = np.full((len(queries_QxE), k), -1, np.int64)
        scores = np.full((len(queries_QxE), k), -np.inf)
        open_rows, wanted = np.arange(len(queries_QxE)), min(k + MARGIN, count)
        while len(open_rows):
            found, found_scores = self._scored(queries_QxE[open_rows], wanted)
            ids[open_rows], scores[open_rows] = found[:, :k], found_scores[:, :k]
            # Equal passages may reach past the candidates: fetch more, or passage order would not decide.
            tied = (found[:, -1] >= 0) & (found_scores[:, -1] == found_scores[:, k - 1])
            open_rows = open_rows[tied] if wanted < count else open_rows[:0]
            wanted = min(4 * wanted, count)
        return ids, scores

    def _scored(self, queries_QxE: np.ndarray, wanted: int) -> tuple[np.ndarray, np.ndarray]:
        """The best `wanted` of the candidates of each query by exact scores, ordered by (-score, row), missing ones
        last. There are more candidates where several searches propose some."""
        ids_QxC = self.neighbours.candidates(queries_QxE, wanted)
        scores_QxC = np.full(ids_QxC.shape, -np.inf)
        for row, ids_C in enumerate(ids_QxC):
            products = self.vectors_NxE[np.maximum(ids_C, 0)] * queries_QxE[row]
            scores_QxC[row] = np.where(ids_C >= 0, products.sum(axis=1, dtype=np.float64), -np.inf)
        order = np.lexsort((ids_QxC, -scores_QxC), axis=1)[:, :wanted]
        return np.take_along_axis(ids_QxC, order, 1), np.take_along_axis(scores_QxC, order, 1)


def describe(passages: Sequence[Passage], embedder: Embedder, config: RetrievalConfig) -> Manifest:
    """The manifest (without files) of the index that this corpus, encoder and configuration ask for."""
    if config.kind not in KINDS:
        raise UserError(
            f"retrieval.kind is {config.kind!r}; an index is of kind {' or '.join(KINDS)}."
        )
    if config.embed not in EMBED:
        raise UserError(f"retrieval.embed is {config.embed!r}; use {' or '.join(EMBED)}.")
    _pattern(config.embed_without)
    if not passages:
        raise UserError("There are no passages to index; set retrieval.corpus to a file with some.")
    from psearch_jax import __version__

    versions = {"psearch_jax": __version__, "numpy": np.__version__}
    parameters: dict[str, Any] = {}
    if config.kind == "scann":
        versions["scann"] = scann_version()
        parameters = scann_parameters(len(passages), embedder.dims)
    return Manifest(
        kind=config.kind,
        corpus=corpus_fingerprint(passages),
        count=len(passages),
        dims=embedder.dims,
        encoder=embedder.name,
        encoder_hash=embedder.fingerprint,
        encoder_use=asdict(embedder.use),
        embed=config.embed,
        without=config.embed_without,
        parameters=parameters,
        versions=versions,
        files={},
    )


def _pattern(expression: str) -> re.Pattern[str]:
    """What is left out of a text before it is embedded; the empty expression leaves everything in."""
    try:
        return re.compile(expression or r"(?!)")
    except re.error as error:
        raise UserError(
            f"retrieval.embed_without is {expression!r}, which is no regular expression ({error}); mend it or leave "
            "it empty."
        ) from error


def open_or_build(
    passages: Sequence[Passage],
    embedder: Embedder,
    config: RetrievalConfig,
    progress: Progress | None = None,
) -> Index:
    """The index for these passages: loaded if it is there and whole, else built (see `build_index`)."""
    wanted = describe(passages, embedder, config)
    path = Path(config.directory) / wanted.fingerprint
    if not path.exists():
        return build_index(passages, embedder, config.directory, config, progress)
    index = load_index(path)
    if index.fingerprint != wanted.fingerprint:
        raise UserError(
            f"{path} holds the index {index.fingerprint} instead; remove the directory and it is built again."
        )
    return index


def load_index(directory: str | Path) -> Index:
    """Load an index from its own directory. Vectors stay on disk, mapped; ScaNN reads its files to memory.

    Raises:
      UserError: no index, a foreign one, another format, or a file that is missing, truncated or changed.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    check_files(directory, manifest)
    vectors_NxE = np.load(directory / VECTORS, mmap_mode="r")
    if manifest.kind == "exact":
        return Index(manifest, vectors_NxE, ExactNeighbours(vectors_NxE))
    if manifest.versions.get("scann") != scann_version():
        raise UserError(
            f"The index {directory} was written by ScaNN {manifest.versions.get('scann')} and "
            f"{scann_version()} is installed; remove the directory and the index is built again."
        )
    neighbours = ScannNeighbours.load(directory / SCANN, manifest.parameters)
    return Index(manifest, vectors_NxE, neighbours)


def build_index(
    passages: Sequence[Passage],
    embedder: Embedder,
    directory: str | Path,
    config: RetrievalConfig,
    progress: Progress | None = None,
) -> Index:
    """Embed the passages and write `<directory>/<fingerprint>/`; then load it.

    The vectors of an index over the same passages by the same encoder are taken over instead of computed.
    `progress` is called with distinct texts done and in all.

    Raises:
      UserError: a full disk (what was begun is removed), a place that cannot be written, a second build
        of the same index at the same time.
    """
    manifest = describe(passages, embedder, config)
    root = Path(directory)
    final = root / manifest.fingerprint
    work = root / f".{manifest.fingerprint}.building"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _only_builder(root / f".{manifest.fingerprint}.lock", final):
            if not final.exists():
                _require_space(root, manifest)
                work.mkdir(exist_ok=True)
                _vectors_file(work, root, manifest, passages, embedder, progress)
                if manifest.kind == "scann":
                    shutil.rmtree(work / SCANN, ignore_errors=True)
                    vectors_NxE = np.load(work / VECTORS)
                    ScannNeighbours.build(vectors_NxE, manifest.parameters).save(work / SCANN)
                shutil.rmtree(work / "shards", ignore_errors=True)
                write_manifest(work, replace(manifest, files=describe_files(work)))
                os.rename(work, final)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            shutil.rmtree(work, ignore_errors=True)
            raise _disk_full(root, manifest) from error
        raise UserError(
            f"The index {final} cannot be written ({error.strerror}); set retrieval.directory to another place."
        ) from error
    return load_index(final)


def _bytes_needed(manifest: Manifest) -> int:
    """Disk space while building: the vectors, their shards or ScaNN's copy, and the codes."""
    return int(2.2 * manifest.count * manifest.dims * 4) + (1 << 20)


def _disk_full(root: Path, manifest: Manifest) -> UserError:
    return UserError(
        f"The disk is full: the index in {root} needs about {_bytes_needed(manifest) >> 20} MiB "
        "while it is built; free that much or set retrieval.directory to another place."
    )


def _require_space(root: Path, manifest: Manifest) -> None:
    if shutil.disk_usage(root).free < _bytes_needed(manifest):
        raise _disk_full(root, manifest)


@contextmanager
def _only_builder(lock: Path, final: Path) -> Iterator[None]:
    """Let one process build an index at a time. The kernel drops the lock of a killed process."""
    with lock.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"Another process is building the index {final}; wait until it has finished."
            ) from None
        yield
        lock.unlink(missing_ok=True)


def _vectors_file(
    work: Path,
    root: Path,
    manifest: Manifest,
    passages: Sequence[Passage],
    embedder: Embedder,
    progress: Progress | None,
) -> None:
    """Make `work/vectors.npy`: left by an earlier attempt, taken from a sibling, or embedded."""
    if (work / VECTORS).exists() or _take_over(work, root, manifest):
        return
    without = _pattern(manifest.without)
    distinct, inverse_N = distinct_texts(
        [without.sub("", getattr(p, manifest.embed)) for p in passages]
    )
    plan = embedder.plan(distinct)
    shards = _embed_shards(work / "shards", plan, embedder, progress)
    vectors_DxE = np.empty((len(distinct), manifest.dims), np.float32)
    for shard in shards:
        with np.load(shard) as content:
            vectors_DxE[content["texts"]] = content["vectors"]
    _save_whole(work / VECTORS, lambda stream: np.save(stream, vectors_DxE[inverse_N]))


def _take_over(work: Path, root: Path, manifest: Manifest) -> bool:
    """Copy the vectors of another index in `root` over the same passages and encoder, if there is a whole one."""
    for sibling in sorted(root.iterdir()):
        try:
            other = read_manifest(sibling) if sibling.is_dir() else None
            if other is None or other.vectors_fingerprint != manifest.vectors_fingerprint:
                continue
            check_files(sibling, replace(other, files={VECTORS: other.files[VECTORS]}))
        except (UserError, KeyError):
            continue  # not an index, or a damaged one: it is of no use here, and no concern
        with (sibling / VECTORS).open("rb") as source:
            _save_whole(work / VECTORS, lambda stream, s=source: shutil.copyfileobj(s, stream))
        return True
    return False


def _embed_shards(
    directory: Path, plan: EmbeddingPlan, embedder: Embedder, progress: Progress | None
) -> list[Path]:
    """Embed the plan's batches into shard files of about `SHARD_TEXTS` texts; whole shards of before are kept."""
    directory.mkdir(exist_ok=True)
    groups: list[list[Batch]] = [[]]
    for batch in plan.batches:
        if sum(len(earlier.texts) for earlier in groups[-1]) >= SHARD_TEXTS:
            groups.append([])
        groups[-1].append(batch)
    paths = [directory / f"{number:06d}.npz" for number in range(len(groups))]
    done = 0
    for path, group in zip(paths, groups, strict=True):
        texts = np.concatenate([batch.texts for batch in group])
        if _shard_is_whole(path, texts, embedder.dims):
            done += len(texts)
        else:
            sub_plan = EmbeddingPlan(plan.token_ids, group)
            vectors = []
            for positions, batch_vectors in embedder.run(sub_plan):
                vectors.append(batch_vectors)
                done += len(positions)
                if progress is not None:
                    progress(done, len(plan.token_ids))
            matrix = np.concatenate(vectors)
            _save_whole(path, lambda s, t=texts, m=matrix: np.savez(s, texts=t, vectors=m))
    return paths


def _shard_is_whole(path: Path, texts: np.ndarray, dims: int) -> bool:
    """Whether a shard of an earlier attempt holds exactly these texts (another plan makes other shards)."""
    try:
        with np.load(path) as content:
            same = np.array_equal(content["texts"], texts)
            return same and content["vectors"].shape == (len(texts), dims)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return False


def _save_whole(path: Path, write: Any) -> None:
    """Write a file by `write(stream)` so that it appears under its name only when it is complete."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as stream:
        write(stream)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(partial, path)
