"""What an index says of itself, and the checks that a directory is that index, whole and ours."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from psearch_jax.errors import UserError

FORMAT = "psearch_jax index"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """An index's description.

    Attributes:
      kind: "scann", "exact", or of a part of a collection "bm25" or "hybrid".
      corpus: `corpus_fingerprint` of its passages, in order.
      count, dims: the matrix of vectors is float32 [count, dims].
      encoder: the encoder's name as given.
      encoder_hash: of all that decides a passage's vector (weights, tokenizer, pooling, prefix) and, after a "+",
        of what decides a query's beside that; see `embedding.encoder_fingerprint`.
      encoder_use: pooling, prefixes and so on in words; told only, since encoder_hash covers them.
      embed: what of a passage was embedded, "text" or "contents".
      without: the regular expression whose matches were left out of it; empty: nothing was.
      parameters: of the nearest-neighbour search.
      versions: of the libraries that wrote it. ScaNN's is part of the fingerprint, the others are told only.
      files: relative path → {"bytes", "sha256"}.
    """

    kind: str
    corpus: str
    count: int
    dims: int
    encoder: str
    encoder_hash: str
    embed: str
    without: str = ""
    parameters: dict[str, Any]
    versions: dict[str, str]
    files: dict[str, dict[str, Any]]
    encoder_use: dict[str, str] = field(default_factory=dict)

    @property
    def vectors_fingerprint(self) -> str:
        """Equal for indexes over the same vectors, whatever searches them."""
        return _short_hash(
            [
                FORMAT_VERSION,
                self.corpus,
                self.count,
                self.dims,
                self.encoder_hash.partition("+")[0],
                self.embed,
                self.without,
            ]
        )

    @property
    def fingerprint(self) -> str:
        """The name of the index: changes with corpus, encoder, embedded part, kind, parameters, ScaNN, format."""
        parts = [self.vectors_fingerprint, self.kind, self.parameters, self.versions.get("scann")]
        queries = self.encoder_hash.partition("+")[2]
        return _short_hash([*parts, queries] if queries else parts)


def _short_hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def describe_files(directory: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file under a directory but the manifest, by relative path."""
    files = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and name != MANIFEST:
            files[name] = {"bytes": path.stat().st_size, "sha256": file_hash(path)}
    return files


def file_hash(path: Path) -> str:
    """SHA-256 (hex) of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write manifest.json."""
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "fingerprint": manifest.fingerprint,
        **asdict(manifest),
    }
    (directory / MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_manifest(directory: Path) -> Manifest:
    """Read and check manifest.json; anything that is not our index of this format is a UserError."""
    path = directory / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            f"{directory} is not an index of psearch_jax ({MANIFEST} is missing); "
            "set retrieval.directory to another place, or build one there."
        ) from error
    except (OSError, ValueError) as error:
        raise _damaged(directory, f"{MANIFEST} cannot be read") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(
            f"{path} was not written by psearch_jax; set retrieval.directory to another place."
        )
    if content.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"The index {directory} has format version {content.get('format_version')!r} and this program reads "
            f"{FORMAT_VERSION}; remove the directory and the index is built again."
        )
    try:
        content.setdefault("encoder_use", {})  # older indexes do not tell it
        manifest = Manifest(**{name: content[name] for name in Manifest.__dataclass_fields__})
        consistent = manifest.fingerprint == content["fingerprint"]
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged(directory, f"{MANIFEST} is incomplete") from error
    if not consistent:
        raise _damaged(directory, f"{MANIFEST} contradicts its own fingerprint")
    return manifest


def check_files(directory: Path, manifest: Manifest, *, hashes: bool = True) -> None:
    """Compare every file with the manifest: a missing, truncated or changed one is a UserError.

    hashes: read every file and compare its checksum too.
    """
    for name, expected in manifest.files.items():
        path = directory / name
        try:
            size = path.stat().st_size
            if size != expected["bytes"]:
                raise _damaged(directory, f"{name} has {size} bytes instead of {expected['bytes']}")
            if hashes and file_hash(path) != expected["sha256"]:
                raise _damaged(directory, f"{name} was changed")
        except FileNotFoundError as error:
            raise _damaged(directory, f"{name} is missing") from error
        except OSError as error:
            raise UserError(
                f"{path} cannot be read ({error.strerror}); check the permissions or the disk."
            ) from error


def _damaged(directory: Path, what: str) -> UserError:
    return UserError(
        f"The index {directory} is damaged: {what}; remove the directory and the index is built again."
    )
