"""Ctrl-C and SIGTERM: a run that is asked to stop leaves a checkpoint and says how to go on.

Ctrl-C lets the step in progress finish; the second one ends at once. SIGTERM is what a scheduler or a preempted
machine sends, and little time is left after it: what may be broken off (a rollout; played again, it gives the same
episodes) is broken off, and what may not (an update, half of which nobody could resume) is finished.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopNow(BaseException):
    """Raised where the program is, when SIGTERM comes inside `GracefulStop.breakable`.

    No `Exception`: what retries a failed search must not take it for one.
    """


class GracefulStop:
    """Remembers what was asked: `asked` by either signal, `preempted` by SIGTERM. May be entered again inside."""

    def __init__(self) -> None:
        self.asked = self.preempted = False
        self._main = threading.current_thread() is threading.main_thread()
        self._depth = 0
        self._breakable = False

    def __enter__(self) -> GracefulStop:
        if self._main and self._depth == 0:
            self._before = (
                signal.signal(signal.SIGINT, self._interrupt),
                signal.signal(signal.SIGTERM, self._terminate),
            )
        self._depth += 1
        return self

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self.asked = self.preempted = True
        if self._breakable:
            self._breakable = False
            raise StopNow

    @contextmanager
    def breakable(self) -> Iterator[None]:
        """Where SIGTERM raises `StopNow`, also one that came before."""
        self._breakable = True
        try:
            if self.preempted:
                raise StopNow
            yield
        finally:
            self._breakable = False

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._main and self._depth == 0:
            signal.signal(signal.SIGINT, self._before[0])
            signal.signal(signal.SIGTERM, self._before[1])
