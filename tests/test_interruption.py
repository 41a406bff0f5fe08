"""Signals: what is remembered, what is broken off, what is put back."""

import os
import signal

import pytest

from psearch_jax.interruption import GracefulStop, StopNow


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_sigterm_is_remembered_and_handlers_are_put_back():
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    stop = GracefulStop()
    with stop, stop:  # a run inside a command
        send(signal.SIGTERM)
        send(signal.SIGTERM)  # schedulers repeat themselves
        assert stop.asked and stop.preempted
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_the_second_ctrl_c_ends_at_once():
    with GracefulStop() as stop:
        send(signal.SIGINT)
        assert stop.asked and not stop.preempted
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def retry_whatever_happens() -> None:
    """As a search does; it must not keep alive a run that was told to stop."""
    try:
        send(signal.SIGTERM)
    except Exception:
        pytest.fail("caught as an error")
    pytest.fail("went on")


def test_only_what_may_be_broken_off_is():
    with GracefulStop() as stop:
        with pytest.raises(StopNow), stop.breakable():
            retry_whatever_happens()
        send(signal.SIGTERM)  # outside: nothing is raised
        with pytest.raises(StopNow), stop.breakable():
            pytest.fail("begun after the signal")


def test_ctrl_c_breaks_nothing_off():
    with GracefulStop() as stop, stop.breakable():
        send(signal.SIGINT)
        assert stop.asked
