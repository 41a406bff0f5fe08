"""A collection: an index that stands by itself, passages and all, and that can be added to and deleted from.

`<directory>/collection.json` names the parts (`parts/000000/` …, see `parts`) and the file of deleted rows. It is
replaced as a whole, so a reader sees the state before a change or after it. A build goes on in a hidden directory
beside `<directory>` and takes its place when it is complete.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from psearch_jax.errors import UserError
from psearch_jax.retrieval.build_options import BuildOptions
from psearch_jax.retrieval.embedding import Embedder
from psearch_jax.retrieval.manifest import Manifest, read_manifest
from psearch_jax.retrieval.parts import PASSAGES, Part, Watch, build_part, open_part
from psearch_jax.retrieval.passage_store import JoinedPassages, PassageStore
from psearch_jax.retrieval.passages import Passage
from psearch_jax.retrieval.rankers import short_hash
from psearch_jax.retrieval.vector_files import Blocks

STATE = "collection.json"
FORMAT, FORMAT_VERSION = "psearch_jax collection", 1
PARTS = "parts"


@dataclass(frozen=True, kw_only=True)
class State:
    """What `collection.json` says: the parts in order, and the file of deleted rows, if any."""

    parts: tuple[str, ...]
    fingerprints: tuple[str, ...]
    deleted: str = ""
    options: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        """Equal for collections that answer alike."""
        return short_hash([*self.fingerprints, self.deleted])


@dataclass(frozen=True)
class OpenCollection:
    """A collection's parts, all their passages, and the rows that are deleted (sorted)."""

    state: State
    parts: tuple[Part, ...]
    passages: Sequence[Passage]
    deleted: np.ndarray

    @property
    def manifest(self) -> Manifest:
        """Of the first part; kind and encoder are those of all."""
        return self.parts[0].manifest

    def __len__(self) -> int:
        return len(self.passages) - len(self.deleted)


def is_collection(directory: str | Path) -> bool:
    """Whether there is one."""
    return (Path(directory) / STATE).is_file()


def create(
    directory: str | Path,
    corpus: Callable[[], Iterable[Passage]],
    options: BuildOptions,
    embedder: Embedder | None,
    *,
    source: str,
    replace: bool = False,
    vectors: Callable[[int], Callable[[int], Blocks]] | None = None,
    watch: Watch | None = None,
) -> State:
    """Build a collection of one part; the same call after a kill goes on where it stopped.

    Args:
      source: names the corpus with its state; an attempt at another one is not gone on with.
      replace: put it in the place of a collection that is there.
      corpus, embedder, vectors, watch: see `parts.build_part`.

    Raises:
      UserError: something is there already, another process builds here, the disk is full, or see `build_part`.
    """
    directory = Path(directory)
    work = directory.with_name(f".{directory.name}.building")
    settings = json.dumps([source, asdict(options), embedder.fingerprint if embedder else ""])
    with _writer(directory):
        if directory.exists() and not (replace and is_collection(directory)):
            raise UserError(
                f"{directory} is there already; choose another place (--out), or replace an index by --replace."
            )
        with suppress(FileNotFoundError):
            if (work / "settings").read_text() != settings:
                shutil.rmtree(work)
        work.mkdir(exist_ok=True)
        (work / "settings").write_text(settings)
        with _refused_work_removed(work):
            manifest = build_part(
                work / PARTS / _name(0), corpus, options, embedder, vectors=vectors, watch=watch
            )
        state = State(
            parts=(_name(0),), fingerprints=(manifest.fingerprint,), options=asdict(options)
        )
        (work / "settings").unlink()
        _write_state(work, state)
        old = directory.with_name(f".{directory.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if directory.exists():
            os.rename(directory, old)
        os.rename(work, directory)
        shutil.rmtree(old, ignore_errors=True)
    return state


def add(
    directory: str | Path,
    corpus: Callable[[], Iterable[Passage]],
    embedder: Embedder | None,
    *,
    source: str,
    watch: Watch | None = None,
) -> State:
    """Add the passages of a corpus as one more part.

    Raises:
      UserError: no collection, another encoder, an id that is there already, or see `create`.
    """
    directory = Path(directory)
    with _writer(directory):
        state = read_state(directory)
        first = read_manifest(directory / PARTS / state.parts[0])
        if (embedder.fingerprint if embedder else "") != first.encoder_hash:
            raise UserError(
                f"{directory} was built with the encoder {first.encoder} {first.encoder_use}; add with the same one."
            )
        name = _name(int(state.parts[-1]) + 1)
        work = directory / PARTS / f".{name}.building"
        with suppress(FileNotFoundError):
            if (work.parent / f".{name}.source").read_text() != source:
                shutil.rmtree(work, ignore_errors=True)
        (work.parent / f".{name}.source").write_text(source)

        def fresh() -> Iterator[Passage]:
            known = set(_live_ids(directory, state).values())
            for passage in corpus():
                if passage.id in known:
                    raise UserError(
                        f"The id {passage.id!r} is in {directory} already; delete it first (psearch index delete)."
                    )
                yield passage

        with _refused_work_removed(work):
            manifest = build_part(work, fresh, BuildOptions(**state.options), embedder, watch=watch)
        os.rename(work, directory / PARTS / name)
        (work.parent / f".{name}.source").unlink()
        state = State(
            parts=(*state.parts, name),
            fingerprints=(*state.fingerprints, manifest.fingerprint),
            deleted=state.deleted,
            options=state.options,
        )
        _write_state(directory, state)
    return state


def delete(directory: str | Path, ids: Collection[str]) -> State:
    """Delete passages by id. Their rows stay on disk, and nothing finds them any more.

    Raises:
      UserError: no collection, or an id that is not in it (then nothing is deleted).
    """
    directory = Path(directory)
    with _writer(directory):
        state = read_state(directory)
        wanted = set(ids)
        rows = {row: i for row, i in _live_ids(directory, state).items() if i in wanted}
        missing = wanted - set(rows.values())
        if missing:
            raise UserError(
                f"{directory} has no passage {sorted(missing)[0]!r} ({len(missing)} of {len(wanted)} ids are not in "
                "it); nothing was deleted. Leave them out."
            )
        deleted = np.union1d(_read_deleted(directory, state), np.fromiter(rows, np.int64))
        name = f"deleted-{hashlib.sha256(deleted.tobytes()).hexdigest()[:16]}.npy"
        partial = directory / f".{name}.partial"
        with partial.open("wb") as stream:
            np.save(stream, deleted)
        os.replace(partial, directory / name)
        old, state = (
            state.deleted,
            State(
                parts=state.parts,
                fingerprints=state.fingerprints,
                deleted=name,
                options=state.options,
            ),
        )
        _write_state(directory, state)
        if old and old != name:
            (directory / old).unlink(missing_ok=True)
    return state


def read_state(directory: str | Path) -> State:
    """Read and check `collection.json`.

    Raises:
      UserError: it is missing, foreign, of another version or damaged.
    """
    path = Path(directory) / STATE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            f"{directory} is no index of `psearch index build` ({STATE} is missing); build one there."
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); build the index again.") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path} was not written by psearch_jax; give the directory of an index.")
    if content.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"{path} has format version {content.get('format_version')!r} and this program reads {FORMAT_VERSION}; "
            "build the index again."
        )
    try:
        state = State(
            parts=tuple(content["parts"]),
            fingerprints=tuple(content["fingerprints"]),
            deleted=content["deleted"],
            options=content["options"],
        )
        BuildOptions(**state.options)
        whole = state.fingerprint == content["fingerprint"] and bool(state.parts)
    except (KeyError, TypeError, UserError):
        whole = False
    if not whole:
        raise UserError(f"{path} is damaged; build the index again.")
    return state


def open_collection(
    directory: str | Path, *, verify: bool = True, known: Collection[Part] = ()
) -> OpenCollection:
    """Open a collection.

    Args:
      verify: see `parts.open_part`.
      known: parts that are open already, taken instead of being opened again.

    Raises:
      UserError: see `read_state` and `parts.open_part`; a part that is another than the state names.
    """
    directory = Path(directory)
    state = read_state(directory)
    already = {part.manifest.fingerprint: part for part in known}
    parts = []
    for name, fingerprint in zip(state.parts, state.fingerprints, strict=True):
        part = already.get(fingerprint) or open_part(directory / PARTS / name, verify=verify)
        if part.manifest.fingerprint != fingerprint:
            raise UserError(
                f"{directory / PARTS / name} is another part than {STATE} names; build the index again."
            )
        parts.append(part)
    return OpenCollection(
        state,
        tuple(parts),
        JoinedPassages([part.passages for part in parts]),
        _read_deleted(directory, state),
    )


def _read_deleted(directory: Path, state: State) -> np.ndarray:
    if not state.deleted:
        return np.empty(0, np.int64)
    try:
        return np.load(directory / state.deleted)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(
            f"{directory / state.deleted} cannot be read ({error}); build the index again."
        ) from error


def _live_ids(directory: Path, state: State) -> dict[int, str]:
    """Row → id of every passage that is not deleted."""
    gone = set(_read_deleted(directory, state).tolist())
    ids: dict[int, str] = {}
    first = 0
    for name in state.parts:
        store = PassageStore(directory / PARTS / name / PASSAGES)
        ids |= {first + i: own for i, own in enumerate(store.ids()) if first + i not in gone}
        first += len(store)
    return ids


def _write_state(directory: Path, state: State) -> None:
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "fingerprint": state.fingerprint,
        **asdict(state),
    }
    partial = directory / f".{STATE}.partial"
    with partial.open("w", encoding="utf-8") as stream:
        stream.write(json.dumps(content, indent=2) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(partial, directory / STATE)


def _name(number: int) -> str:
    return f"{number:06d}"


@contextmanager
def _writer(directory: Path) -> Iterator[None]:
    """Let one process change a collection at a time, and say in a sentence what a disk refuses."""
    lock = directory.with_name(f".{directory.name}.lock")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with lock.open("w") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"Another process is building or changing {directory}; wait until it has finished."
                ) from None
            yield
            lock.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"The index {directory} cannot be written ({error.strerror or error}); what was there is as it was. Free "
            "some space or choose another place, and run the same command again: it goes on where it stopped."
        ) from error


@contextmanager
def _refused_work_removed(work: Path) -> Iterator[None]:
    """What a corpus or an estimate refused is of no use to the next attempt."""
    try:
        yield
    except UserError:
        shutil.rmtree(work, ignore_errors=True)
        raise
