"""Ctrl-C that lets the step in progress finish."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class GracefulStop:
    """Remembers the first Ctrl-C, so that the step in progress can be finished; the second one ends at once."""

    def __init__(self) -> None:
        self.asked = False
        self._main = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> GracefulStop:
        if self._main:
            self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *_: object) -> None:
        if self._main:
            signal.signal(signal.SIGINT, self._before)
