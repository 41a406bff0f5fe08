"""Search results on disk, shared by runs: an SQLite file, a row a (source, query, k)."""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from psearch_jax.errors import UserError
from psearch_jax.retrieval.passages import Hit, Passage

_log = logging.getLogger(__name__)
_TABLE = "CREATE TABLE IF NOT EXISTS results (key BLOB PRIMARY KEY, hits TEXT NOT NULL)"


class AnswerCache:
    """Results by query, k and what was searched (a fingerprint). Safe for several threads and processes.

    Reading and writing never fail a search: what cannot be read is not there, what cannot be written is logged.
    """

    def __init__(self, path: str | Path) -> None:
        """Open or make the file.

        Raises:
          UserError: it cannot be written, or is another kind of file.
        """
        self._path = Path(path)
        self._lock = threading.Lock()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(self._path, timeout=30, check_same_thread=False)
            with self._connection:
                self._connection.execute("PRAGMA journal_mode=WAL")
                self._connection.execute(_TABLE)
                self._connection.execute("SELECT key, hits FROM results LIMIT 1").fetchall()
        except (OSError, sqlite3.Error) as error:
            raise UserError(
                f"The cache {path} cannot be used ({error}); name another file, or leave it empty."
            ) from error

    def read(self, source: str, queries: Sequence[str], k: int) -> dict[str, tuple[Hit, ...]]:
        """The results that are there."""
        found = {}
        try:
            with self._lock:
                for query in queries:
                    row = self._connection.execute(
                        "SELECT hits FROM results WHERE key = ?", (_key(source, query, k),)
                    ).fetchone()
                    if row is not None:
                        found[query] = tuple(
                            Hit(Passage(*passage), score) for *passage, score in json.loads(row[0])
                        )
        except (sqlite3.Error, ValueError, TypeError) as error:
            _log.warning("the cache %s cannot be read: %s", self._path, error)
        return found

    def write(self, source: str, found: Mapping[str, Sequence[Hit]], k: int) -> None:
        """Keep results."""
        rows = [
            (
                _key(source, query, k),
                json.dumps(
                    [(h.passage.id, h.passage.title, h.passage.text, h.score) for h in hits]
                ),
            )
            for query, hits in found.items()
        ]
        try:
            with self._lock, self._connection:
                self._connection.executemany("INSERT OR REPLACE INTO results VALUES (?, ?)", rows)
        except sqlite3.Error as error:
            _log.warning("the cache %s cannot be written: %s", self._path, error)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()


def _key(source: str, query: str, k: int) -> bytes:
    return hashlib.sha256(json.dumps([source, query, k]).encode()).digest()
