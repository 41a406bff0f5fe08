"""What `data.questions` may name: the embedded world, files, hub and TFDS data sets, suites, and several of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from psearch_jax.config import DataConfig
from psearch_jax.errors import UserError
from psearch_jax.questions.question import Question
from psearch_jax.questions.readers import Loaded, Row, file_rows, merge, read_rows, subset
from psearch_jax.questions.suites import suites_named
from psearch_jax.questions.world import embedded_directory

_log = logging.getLogger(__name__)
_ENDINGS = (".jsonl", ".json", ".parquet")
#: Our split → what data sets also call it.
_ALSO = {"dev": ("validation", "dev"), "test": ("test",), "train": ("train",)}


def load_questions(data: DataConfig, split: str) -> list[Question]:
    """The questions of a split; rows that were left out or mended are logged as a warning."""
    loaded = load(data, split)
    if loaded.problems:
        _log.warning("%s: %s", data.questions, loaded.report())
    return loaded.questions


def load(data: DataConfig, split: str) -> Loaded:
    """Read what `data.questions` names.

    One source, or several with commas between them:

      embedded               the embedded world
      DIRECTORY              its SPLIT.jsonl or SPLIT.parquet
      FILE                   .jsonl or .parquet, whatever the split
      hf:NAME[:CONFIG]       a data set of the `datasets` library (a name on the hub, or a local directory)
      tfds:NAME[/CONFIG]     a data set of TFDS (a name, or a prepared directory), read without TensorFlow
      suite:NAME[=SOURCE]    a benchmark (`suites.SUITES`, or `seven`), in `data.directory`, else on the hub

    `@SPLIT` behind an hf: or tfds: source names its split there.

    Raises:
      UserError: a source that cannot be read or holds no questions; bad rows that `data.bad_rows` refuses.
    """
    whole = data.questions
    sources = [whole] if Path(whole).exists() else [part.strip() for part in whole.split(",")]
    loaded = merge([part for source in sources for part in _read(source, data, split)])
    refused = {"skip": 0, "readable": loaded.torn, "refuse": loaded.lost}[data.bad_rows]
    if refused:
        raise UserError(
            f"{whole}: {loaded.report()}; mend them, or set data.bad_rows=skip to go on without them."
        )
    loaded.questions = subset(loaded.questions, data.subset)
    return loaded


def _read(source: str, data: DataConfig, split: str) -> list[Loaded]:
    """One source; several results where it is a group of suites."""
    if not source.startswith("suite:"):
        return [_checked(_rows(source, split), source)]
    name, _, given = source.removeprefix("suite:").partition("=")
    parts = []
    for suite in suites_named(name):
        theirs = suite.split(split)
        local = suite.local(data.directory, split)
        where = given or (str(local) if local else suite.hub)
        try:
            rows = _rows(where, theirs)
            # The suite's name is the data set's; a file of the same benchmark may have any.
            parts.append(_checked((suite.name, rows[1]), where, kind=suite.kind))
        except UserError as error:
            if given or local:
                raise
            raise UserError(
                f"suite {suite.name}: there is no {suite.name}/{theirs}.jsonl or {suite.name}_{theirs}*.jsonl in "
                f"{data.directory} (data.directory), and {suite.hub} cannot be read: {error}"
            ) from error
    return parts


def _checked(named: tuple[str, Iterator[Row]], source: str, kind: str = "single") -> Loaded:
    loaded = read_rows(named[1], named[0], kind=kind)
    if not loaded.questions:
        first = (
            f" (of {loaded.lost} rows none is one: {loaded.problems[0].place}: {loaded.problems[0].what})"
            if loaded.problems
            else ""
        )
        raise UserError(
            f"The question file {source} holds no questions{first}; give one with rows."
        )
    return loaded


def _rows(source: str, split: str) -> tuple[str, Iterator[Row]]:
    """The data set's name and its rows."""
    kind, colon, rest = source.partition(":")
    if colon and kind in ("hf", "tfds"):
        rest, _, own = rest.partition("@")
        read = _hub_rows if kind == "hf" else _tfds_rows
        return rest.replace("/", "_").replace(":", "_"), read(rest, own or split)
    path = embedded_directory() if source == "embedded" else Path(source)
    if path.is_dir():
        files = [path / f"{split}{ending}" for ending in _ENDINGS]
        path = next((file for file in files if file.is_file()), files[0])
    if path.suffix not in _ENDINGS:
        raise UserError(
            f"The question file {path} cannot be read (its name must end in {', '.join(_ENDINGS)}); or name a "
            "directory, hf:NAME, tfds:NAME or suite:NAME."
        )
    return path.stem, file_rows(path)


def _hub_rows(name: str, split: str) -> Iterator[Row]:
    """Rows of a data set of the `datasets` library."""
    import datasets

    path, _, config = name.partition(":")
    try:
        known = datasets.get_dataset_split_names(path, config or None)
        theirs = _their_split(split, known)
        rows: Any = datasets.load_dataset(path, config or None, split=theirs)
    except UserError as error:
        raise UserError(f"hf:{name}: {error}") from error
    except (
        Exception
    ) as error:  # that library raises many kinds, for a typing error as for a lost connection
        raise UserError(f"hf:{name} cannot be read ({_reason(error)}); {_OFFLINE}") from error
    for number, row in enumerate(rows, 1):
        yield f"hf:{name} {theirs}, row {number}", row


def _tfds_rows(name: str, split: str) -> Iterator[Row]:
    """Rows of a TFDS data set through `tfds.data_source`, which needs no TensorFlow."""
    try:
        import tensorflow_datasets as tfds

        if (Path(name) / "dataset_info.json").is_file():
            builder = tfds.builder_from_directory(name)
            theirs = _their_split(split, list(builder.info.splits))
            rows: Any = builder.as_data_source(split=theirs)
        else:  # downloads and prepares it where it is not there yet
            theirs = _their_split(split, list(tfds.builder(name).info.splits))
            rows = tfds.data_source(name, split=theirs)
    except UserError as error:
        raise UserError(f"tfds:{name}: {error}") from error
    except Exception as error:
        raise UserError(f"tfds:{name} cannot be read ({_reason(error)}); {_OFFLINE}") from error
    for number in range(len(rows)):
        row: Mapping[str, Any] = rows[number]
        yield f"tfds:{name} {theirs}, row {number + 1}", row


_OFFLINE = "without a network name a local file, or prepare the data set where there is one"


def _their_split(split: str, known: list[str]) -> str:
    """The data set's name of a split. A slice (`train[:100]`) is theirs."""
    for name in (split, *_ALSO.get(split, ())):
        if name.partition("[")[0] in known:
            return name
    raise UserError(
        f"there is no split {split!r}, only {', '.join(map(str, known))}; name one as NAME@SPLIT."
    )


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
