"""Numbers of a run on disk: one JSON object a line, and the same in TensorBoard's format.

A line file survives a crash: every line is flushed when it is written, a last line that was cut is
dropped when the file is opened again, and a resumed run throws away what lies beyond the step it
resumes from, so that no step stands in the file twice.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from psearch_jax.config import TrackingConfig
from psearch_jax.errors import UserError
from psearch_jax.questions.question import KINDS

_log = logging.getLogger(__name__)
METRICS_FILE = "metrics.jsonl"
EPISODES_FILE = "episodes.jsonl"  # some of the episodes of every training step
WANDB_FILE = "wandb_id.txt"


@contextmanager
def explained_disk_errors(path: Path) -> Iterator[None]:
    """Turn a full or read-only disk into one sentence (UserError) that names the file."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"{path} could not be written because the disk is full; free some space and run "
                "the same command again."
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise UserError(
                f"{path} could not be written ({error.strerror}); choose a directory that you may "
                "write to."
            ) from error
        raise


def read_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The objects of a JSONL file in order; a missing file is empty, a last line cut by a crash is left out.

    Raises:
      UserError: a line that is not the last one is no JSON object (the file was damaged otherwise).
    """
    path = Path(path)
    if not path.exists():
        return []
    return [record for record, _ in _records(path)]


def _records(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields (object, byte offset behind its line) for every whole line."""
    end = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # only the last line can lack its newline: the write was cut
            end += len(line)
            try:
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise ValueError("not an object")
            except ValueError as error:
                raise UserError(
                    f"line {number} of {path} is not a JSON object ({error}); repair or remove "
                    "that line."
                ) from error
            yield record, end


class LineFile:
    """A JSONL file that is appended to; every line is handed to the operating system at once."""

    def __init__(self, path: str | os.PathLike[str], *, last_step: int | None = None) -> None:
        """Opens the file for appending and cuts a broken tail off.

        Args:
          path: the file; its directory is made if need be.
          last_step: keep the lines up to this "step" and drop all from the first later one; None
            keeps every whole line.
        """
        self.path = Path(path)
        self._open(last_step)

    def _open(self, last_step: int | None) -> None:
        keep = 0
        if self.path.exists():
            for record, end in _records(self.path):
                if last_step is not None and record.get("step", 0) > last_step:
                    break
                keep = end
        with explained_disk_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = self.path.open("ab")
            self._file.truncate(keep)

    def write(self, *records: Mapping[str, Any]) -> None:
        """Appends one line a record. Numbers that are not finite become null, as JSON has none."""
        lines = "".join(
            json.dumps(_plain(record), ensure_ascii=False, allow_nan=False) + "\n"
            for record in records
        )
        with explained_disk_errors(self.path):
            self._file.write(lines.encode())
            self._file.flush()

    def rewind(self, last_step: int) -> None:
        """Drops the lines from the first later one than `last_step`: the run goes on from there."""
        self._file.close()
        self._open(last_step)

    def close(self) -> None:
        """Closes the file; what was written is already in it."""
        self._file.close()

    def __enter__(self) -> LineFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_atomically(path: Path, text: str) -> None:
    """Writes a whole text file beside its place and then moves it there: never half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explained_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


class MetricsLog:
    """Metrics of one training run: `metrics.jsonl` and TensorBoard event files in `directory`; W&B when asked for."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        resumed_step: int | None = None,
        tracking: TrackingConfig | None = None,
    ) -> None:
        """Opens the log.

        Args:
          directory: the run directory; event files go to its `tensorboard` folder.
          resumed_step: the last step that the resumed checkpoint contains. Later lines are dropped, and
            TensorBoard is told to hide later points. None starts the log afresh.
          tracking: where a project is named, steps go to Weights & Biases too.

        Raises:
          UserError: a directory that cannot be written, or a project without the package wandb.
        """
        self.directory = Path(directory)
        self._tracker = None
        if tracking is not None and tracking.wandb_project:
            self._tracker = _Wandb(self.directory, tracking, fresh=resumed_step is None)
        self._open(resumed_step)

    def _open(self, resumed_step: int | None) -> None:
        from tensorboardX import SummaryWriter  # imported here: it costs start-up time

        fresh = resumed_step is None
        last_step = -1 if resumed_step is None else resumed_step
        self._lines = LineFile(self.directory / METRICS_FILE, last_step=last_step)
        with explained_disk_errors(self.directory):
            self._board = SummaryWriter(
                logdir=str(self.directory / "tensorboard"),
                purge_step=0 if fresh else last_step + 1,
                flush_secs=10,
                filename_suffix=f".{time.time_ns()}",  # runs of the same second keep apart
            )

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Logs one step. Nested mappings keep their shape in JSON and become `outer/inner` tags in
        TensorBoard; values that are no numbers go to JSON only."""
        self._lines.write({"step": int(step), **metrics})
        for tag, value in flatten(metrics).items():
            number = as_number(value)
            if number is not None:
                self._board.add_scalar(tag, number, global_step=int(step))
        if self._tracker is not None:
            self._tracker.write(int(step), metrics)

    def rewind(self, step: int) -> None:
        """Drops what was logged after `step`: the run goes on from there. (Weights & Biases keeps what it has.)"""
        self._lines.close()
        self._board.close()
        self._open(step)

    def close(self) -> None:
        """Flushes and closes all of them."""
        self._lines.close()
        self._board.close()
        if self._tracker is not None:
            self._tracker.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Wandb:
    """The same steps in Weights & Biases. Local files are the record: whatever fails there is said once, and the run
    goes on."""

    def __init__(self, directory: Path, tracking: TrackingConfig, *, fresh: bool) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                f"tracking.wandb_project is {tracking.wandb_project!r}, but the package wandb is not installed; "
                "run `pip install psearch_jax[track]`, or leave the project empty."
            ) from error
        # A resumed run goes on in the same place; a fresh one gets a new one.
        place = directory / WANDB_FILE
        if fresh or not place.is_file():
            write_atomically(place, f"{uuid.uuid4().hex[:16]}\n")
        self._run: Any = None
        try:
            self._run = wandb.init(
                project=tracking.wandb_project,
                name=tracking.wandb_name or directory.resolve().name,
                id=place.read_text(encoding="utf-8").strip(),
                mode=tracking.wandb_mode,
                dir=str(directory),
                resume="allow",
            )
        except Exception as error:  # the run must not depend on a service
            self._fail(error)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Logs the numbers of one step."""
        if self._run is None:
            return
        numbers = {tag: as_number(value) for tag, value in flatten(metrics).items()}
        try:
            self._run.log({t: n for t, n in numbers.items() if n is not None}, step=step)
        except Exception as error:
            self._fail(error)

    def close(self) -> None:
        """Tells the service that the run is over."""
        if self._run is not None:
            try:
                self._run.finish()
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        _log.warning("Weights & Biases is left out from here: %s: %s", type(error).__name__, error)
        self._run = None


def read_metrics(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The logged steps of a run directory, flattened (`outer/inner`), in order."""
    return [flatten(record) for record in read_lines(Path(directory) / METRICS_FILE)]


def flatten(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one level with names joined by a slash."""
    flat: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}/"))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def decomposition(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Share of decomposed episodes by question kind, from flattened metrics of a training step."""
    shares = {kind: as_number(metrics.get(f"kinds/{kind}/decomposed")) for kind in KINDS}
    return {kind: share for kind, share in shares.items() if share is not None}


def as_number(value: Any) -> float | None:
    """The value as a float if it is a single number (Python, NumPy or JAX), else None."""
    if value is None or isinstance(value, str | bytes | Mapping | list | tuple):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _plain(value: Any) -> Any:
    """A value as JSON can hold it."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if hasattr(value, "tolist"):  # NumPy and JAX arrays and scalars
        return _plain(value.tolist())
    number = float(value)
    return number if math.isfinite(number) else None
