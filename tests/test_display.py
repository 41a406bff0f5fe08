"""The display: whole lines without a terminal, a moving picture on one, little work in both."""

from __future__ import annotations

import io
import time

import pytest

from psearch_jax import display
from psearch_jax.display import Display, duration, sparkline

METRICS = {
    "reward": 0.5,
    "em": 0.25,
    "turns": 2.5,
    "search_rate": 1.0,
    "kinds": {"parallelizable": {"decomposed": 0.75}, "bridge": {"decomposed": 0.0}},
    "tokens_per_second": 12345.6,
}


class Clock:
    """A clock that the test moves."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(display.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_without_a_terminal_a_step_is_one_plain_line(clock):
    out = io.StringIO()
    with Display(stream=out) as shown:
        for step in (1, 2, 3):
            clock.now += 10
            shown.step("em_reward", step, 30, METRICS)
    lines = out.getvalue().splitlines()
    assert lines[0] == "em_reward …"
    assert lines[2] == (
        "em_reward 2/30 | reward 0.500 | EM 0.250 | turns 2.50 | search rate 1.00 | "
        "tokens/s 12,346 | decomposed by kind: parallelizable 0.75, bridge 0.00 | 4 min 40 s left"
    )
    assert lines[-1] == "✓ em_reward (3/30): 20 s"
    assert len(lines) == 5
    assert "\x1b" not in out.getvalue()


def test_the_estimate_forgets_the_slow_first_step(clock):
    out = io.StringIO()
    with Display(stream=out) as shown:
        shown.phase("em_reward", 10)
        clock.now += 500  # compiling
        for step in range(1, 4):
            shown.step("em_reward", step, 10, METRICS)
            clock.now += 2
    assert out.getvalue().splitlines()[3].endswith("| 14 s left")


def test_plain_progress_says_something_every_ten_seconds(clock):
    out = io.StringIO()
    with Display(stream=out) as shown:
        shown.phase("Building the index", 100)
        for _ in range(50):
            clock.now += 1
            shown.advance()
        shown.phase("Evaluating")
        shown.update(7)
    assert out.getvalue().splitlines() == [
        "Building the index …",
        "Building the index: 10/100, 1 min 30 s left",
        "Building the index: 20/100, 1 min 20 s left",
        "Building the index: 30/100, 1 min 10 s left",
        "Building the index: 40/100, 1 min 00 s left",
        "Building the index: 50/100, 50 s left",
        "✓ Building the index (50/100): 50 s",
        "Evaluating …",
        "✓ Evaluating (7): 0 s",
    ]


def test_the_estimate_does_not_count_what_was_done_before(clock):
    out = io.StringIO()
    with Display(stream=out) as shown:
        shown.phase("Building the index", 200)
        for done in (104, 105, 106):
            clock.now += 20
            shown.update(done)
    assert out.getvalue().splitlines()[1:4] == [
        "Building the index: 104/200",
        "Building the index: 105/200, 31 min 40 s left",
        "Building the index: 106/200, 31 min 20 s left",
    ]


def test_a_phase_that_an_error_ends_is_not_ticked_off():
    out = io.StringIO()

    def stop() -> None:
        with Display(stream=out) as shown:
            shown.phase("Training")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stop()
    assert out.getvalue().splitlines()[-1] == "✗ Training: 0 s, stopped"


def test_a_live_bar_moves_while_the_program_computes():
    """Nobody calls the display for a while: its thread goes on drawing, and takes hardly any CPU."""
    out = io.StringIO()
    with Display(stream=out, live=True) as shown:
        shown.phase("Building the index")
        shown.step("em_reward", 1, 30, METRICS)
        time.sleep(0.3)
        before, cpu, wall = len(out.getvalue()), time.process_time(), time.monotonic()
        time.sleep(1.2)
        used = (time.process_time() - cpu) / (time.monotonic() - wall)
        assert len(out.getvalue()) > before
    assert used < 0.2  # of one core; measured 0.01 to 0.02, the rest is room for a busy machine
    assert "decomposed by kind" in out.getvalue()


def test_markup_in_a_title_is_text():
    out = io.StringIO()
    with Display(stream=out) as shown:
        shown.note("[bold]not bold[/bold] [/]")
    assert out.getvalue() == "[bold]not bold[/bold] [/]\n"


def test_the_table_shows_every_row_with_intervals():
    kinds = {"parallelizable": {"questions": 4, "em": 0.5, "turns": 2.04}}
    rows = {
        "closed_book": {"em": 0.25, "turns": 1.0, "intervals": {"em": [0.2, 0.31]}},
        "parallel_search": {
            "em": 0.75,
            "em_sampled": 0.7,
            "turns": 2.5,
            "searches": 1.5,
            "subqueries": 2.0,
            "policy_tokens": 118.4,
            "kinds": kinds,
            "intervals": {"em": [0.7, 0.8], "em_sampled": [0.6, 0.8]},
        },
    }
    out = io.StringIO()
    with Display(stream=out) as shown:
        shown.table({"rows": rows})
    lines = [line.split() for line in out.getvalue().splitlines() if line.strip()]
    assert lines[1] == ["closed_book", "0.250", "±0.055", "–", "1.00", "–", "–", "–"]
    all_columns = ["0.750", "±0.050", "0.700", "±0.100", "2.50", "1.50", "2.00", "118"]
    assert lines[2] == ["parallel_search", *all_columns]
    assert lines[4] == ["parallel_search", "0.500", "2.04", "–", "–", "–"]
    assert max(map(len, out.getvalue().splitlines())) <= 80


def test_sparklines_span_their_own_range():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([2.0, float("nan"), 2.0]) == "▁▁"
    assert sparkline([]) == ""


def test_durations():
    assert [duration(s) for s in (0.2, 59.4, 61, 3725)] == [
        "0 s",
        "59 s",
        "1 min 01 s",
        "1 h 02 min",
    ]
