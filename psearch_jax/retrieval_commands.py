"""What `psearch index` does: build, import, add, delete, with progress and estimates in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from psearch_jax.config import MeshConfig
from psearch_jax.errors import UserError
from psearch_jax.mesh import make_mesh
from psearch_jax.retrieval import collection
from psearch_jax.retrieval.build_options import BuildOptions, Needs, describe_needs
from psearch_jax.retrieval.collection_search import encoder_of, open_manifest
from psearch_jax.retrieval.corpus import BadRows, iter_corpus
from psearch_jax.retrieval.embedding import Embedder, load_embedder
from psearch_jax.retrieval.faiss_files import matching_blocks, read_flat
from psearch_jax.retrieval.parts import Watch
from psearch_jax.retrieval.passages import Passage

EVERY = 5.0  # seconds between two lines of progress


def open_of_recipe(sources: Sequence[str]) -> str:
    """Build or check the index of a recipe."""
    from psearch_jax.assembly import open_backend
    from psearch_jax.config_files import resolve

    overrides = [s for s in sources if "=" in s and not Path(s).is_file()]
    config, _ = resolve([s for s in sources if s not in overrides], overrides)
    fingerprint = open_backend(config.retrieval).fingerprint
    where = config.retrieval.index or config.retrieval.directory
    return f"index {fingerprint} is ready in {where}"


def build(
    corpus: Path,
    *,
    out: Path,
    replace: bool,
    skip_bad: int,
    faiss: Path | None = None,
    encoder: str,
    pooling: str,
    query_prefix: str,
    passage_prefix: str,
    encoder_dtype: str,
    batch_tokens: int,
    **options: Any,
) -> str:
    """Build a collection from a corpus, embedding it or with the vectors of a FAISS file."""
    asked = BuildOptions(**options)
    if faiss is not None and not asked.dense:
        raise UserError(
            "--kind bm25 has no vectors, so there is none to import; use psearch index build."
        )
    embedder = None
    if asked.dense:
        embedder = load_embedder(
            encoder,
            batch_tokens,
            mesh=whole_mesh(),
            pooling=pooling,
            query_prefix=query_prefix,
            passage_prefix=passage_prefix,
            dtype=encoder_dtype,
        )
    vectors = None
    if faiss is not None:
        assert embedder is not None
        file, dims = read_flat(faiss), embedder.dims
        vectors = lambda count: matching_blocks(file, count, dims)  # noqa: E731
    bad = BadRows(allowed=skip_bad)
    state = collection.create(
        out,
        _reader(corpus, bad),
        asked,
        embedder,
        source=_source(corpus, faiss, skip_bad),
        replace=replace,
        vectors=vectors,
        watch=_watch(asked, embedder),
    )
    return _told(bad) + f"index {state.fingerprint} is ready in {out}"


def add(directory: Path, corpus: Path, *, encoder: str, skip_bad: int) -> str:
    """Add a corpus to a collection."""
    manifest = open_manifest(directory)
    options = BuildOptions(**collection.read_state(directory).options)
    embedder = encoder_of(manifest, whole_mesh(), encoder) if options.dense else None
    bad = BadRows(allowed=skip_bad)
    state = collection.add(
        directory,
        _reader(corpus, bad),
        embedder,
        source=_source(corpus, None, skip_bad),
        watch=_watch(options, embedder),
    )
    return _told(bad) + f"index {state.fingerprint} is ready in {directory}"


def delete(directory: Path, ids: Sequence[str], file: Path | None) -> str:
    """Delete passages of a collection."""
    wanted = list(ids)
    if file is not None:
        try:
            wanted += [line for line in file.read_text(encoding="utf-8").splitlines() if line]
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"{file} cannot be read ({error}); give a file with an id a line."
            ) from error
    if not wanted:
        raise UserError("No ids were given; name some, or a file with them (--from).")
    state = collection.delete(directory, wanted)
    return f"deleted {len(set(wanted))}; index {state.fingerprint} is ready in {directory}"


def whole_mesh() -> Any:
    """All devices, where there are several."""
    return make_mesh(MeshConfig()) if jax.device_count() > 1 else None


def _reader(corpus: Path, bad: BadRows) -> Callable[[], Iterator[Passage]]:
    def read() -> Iterator[Passage]:
        bad.problems.clear()
        return iter_corpus(corpus, bad, check_ids=False)

    return read


def _source(corpus: Path, faiss: Path | None, skip_bad: int) -> str:
    """Names the files with size and time: an attempt over others is not gone on with."""
    parts = [f"skip {skip_bad}"]
    for path in (corpus, faiss):
        if path is not None and path.exists():
            status = path.stat()
            parts.append(f"{path.absolute()} {status.st_size} {status.st_mtime_ns}")
        elif path is not None:
            parts.append(str(path))  # hf:NAME
    return "\n".join(parts)


def _told(bad: BadRows) -> str:
    return "".join(f"passed over {problem}\n" for problem in bad.problems)


def _watch(options: BuildOptions, embedder: Embedder | None) -> Watch:
    def needs(own: Needs, count: int) -> None:
        _say(describe_needs(own, count, embedder.dims if embedder else 0, options))

    return Watch(say=_say, needs=needs, embedded=Progress("vectors"))


class Progress:
    """Prints how far something is, how fast, and how long it will take, every few seconds."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._begun = self._last = time.monotonic()
        self._first = -1

    def __call__(self, done: int, total: int) -> None:
        """`done` of `total`."""
        now = time.monotonic()
        if self._first < 0:
            self._first, self._begun = done, now
        if now - self._last < EVERY and done < total:
            return
        self._last = now
        rate = (done - self._first) / max(now - self._begun, 1e-9)
        left = f", {_duration((total - done) / rate)} left" if rate and done < total else ""
        speed = f", {rate:,.0f} a second" if rate else ""
        _say(f"{done:,} of {total:,} {self._what}{speed}{left}")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
