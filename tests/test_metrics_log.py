"""Line files survive crashes and resumptions without doubled, lost or broken lines."""

from __future__ import annotations

import errno
import json
import sys

import numpy as np
import pytest

from psearch_jax import metrics_log
from psearch_jax.config import TrackingConfig
from psearch_jax.errors import UserError
from psearch_jax.metrics_log import LineFile, MetricsLog, flatten, read_lines, read_metrics


def board_points(directory, tag):
    """(step, value) pairs that TensorBoard would show, read back from the event files."""
    from tensorboardX import proto

    points = []
    for path in sorted((directory / "tensorboard").glob("events*")):
        data, at = path.read_bytes(), 0
        while at < len(data):  # length (8), its CRC (4), the event, its CRC (4)
            size = int.from_bytes(data[at : at + 8], "little")
            event = proto.event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
            at += 16 + size
            if event.HasField("session_log"):
                points = [point for point in points if point[0] < event.step]
            points += [(event.step, v.simple_value) for v in event.summary.value if v.tag == tag]
    return points


def test_steps_are_on_disk_at_once_in_both_formats(tmp_path):
    log = MetricsLog(tmp_path)
    log.write(1, {"em": np.float32(0.5), "kinds": {"bridge": {"turns": np.int32(2)}}, "note": "x"})
    assert read_lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "em": 0.5, "kinds": {"bridge": {"turns": 2}}, "note": "x"}
    ]
    log.close()
    assert board_points(tmp_path, "kinds/bridge/turns") == [(1, 2.0)]
    assert read_metrics(tmp_path)[0]["kinds/bridge/turns"] == 2


def test_law_13_a_resumed_run_repeats_no_step(tmp_path):
    with MetricsLog(tmp_path) as log:
        for step in range(1, 8):
            log.write(step, {"reward": float(step)})
    with MetricsLog(tmp_path, resumed_step=4) as log:
        for step in (5, 6):
            log.write(step, {"reward": 10.0 * step})
    expected = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 50.0), (6, 60.0)]
    assert [(r["step"], r["reward"]) for r in read_metrics(tmp_path)] == expected
    assert board_points(tmp_path, "reward") == expected


def test_a_fresh_log_forgets_an_older_run(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.write(0, {"reward": 1.0})
        log.write(1, {"reward": 1.0})
    with MetricsLog(tmp_path) as log:
        log.write(1, {"reward": 2.0})
    assert [(r["step"], r["reward"]) for r in read_metrics(tmp_path)] == [(1, 2.0)]
    assert board_points(tmp_path, "reward") == [(1, 2.0)]


@pytest.mark.parametrize("cut", [1, 9, 17])
def test_a_line_cut_by_a_crash_is_dropped_and_nothing_else(tmp_path, cut):
    path = tmp_path / "lines.jsonl"
    with LineFile(path) as lines:
        lines.write({"step": 1, "text": "ä\n"}, {"step": 2})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 3, "text": "more"}'[:cut])
    assert [r["step"] for r in read_lines(path)] == [1, 2]
    with LineFile(path) as lines:
        assert path.read_bytes() == whole
        lines.write({"step": 3})
    assert [r["step"] for r in read_lines(path)] == [1, 2, 3]


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(UserError, match=r"line 2 of .*lines\.jsonl is not a JSON object"):
        read_lines(path)


def test_numbers_that_are_not_finite_become_null(tmp_path):
    with LineFile(tmp_path / "lines.jsonl") as lines:
        lines.write({"loss": float("nan"), "norm": np.array([1.0, np.inf])})
    text = (tmp_path / "lines.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"loss": None, "norm": [1.0, None]}


def test_a_full_disk_is_one_sentence(tmp_path):
    with (
        pytest.raises(UserError, match="disk is full"),
        metrics_log.explained_disk_errors(tmp_path),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    metrics_log.write_atomically(path, "old")

    def fail(self, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(type(path), "replace", fail)
    with pytest.raises(UserError):
        metrics_log.write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_metrics_are_flattened_and_found():
    flat = flatten({"em": 0.5, "kinds": {"mixed": {"decomposed": 0.75}, "single": {"em": 1.0}}})
    assert flat == {"em": 0.5, "kinds/mixed/decomposed": 0.75, "kinds/single/em": 1.0}
    assert metrics_log.decomposition(flat) == {"mixed": 0.75}
    values = (True, 2, np.float32(0.5), "3", None, [1.0], {"a": 1})
    assert [metrics_log.as_number(v) for v in values] == [1.0, 2.0, 0.5, None, None, None, None]


# -- Weights & Biases, played by a module of the tests


class FakeWandb:
    """Keeps what it is told; `broken` raises from the second step on."""

    def __init__(self, broken=False):
        self.broken, self.inits, self.logged, self.finished = broken, [], [], 0

    def init(self, **options):
        self.inits.append(options)
        return self

    def log(self, numbers, step):
        if self.broken and step > 1:
            raise ConnectionError("no route")
        self.logged.append((step, numbers))

    def finish(self):
        self.finished += 1


TRACKED = TrackingConfig(wandb_project="p", wandb_mode="offline")


def test_steps_go_to_wandb_when_a_project_is_named(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with MetricsLog(tmp_path, tracking=TrackingConfig()) as log:
        log.write(1, {"em": 0.5})
    assert fake.inits == []
    with MetricsLog(tmp_path, tracking=TRACKED) as log:
        log.write(1, {"em": 0.5, "kinds": {"bridge": {"turns": 2}}, "note": "x"})
    with MetricsLog(tmp_path, resumed_step=1, tracking=TRACKED) as log:
        log.write(2, {"em": 0.6})
    assert fake.logged == [(1, {"em": 0.5, "kinds/bridge/turns": 2.0}), (2, {"em": 0.6})]
    first, second = fake.inits
    assert (first["project"], first["mode"], first["name"]) == ("p", "offline", tmp_path.name)
    assert first["id"] == second["id"] and fake.finished == 2
    MetricsLog(tmp_path, tracking=TRACKED).close()
    assert fake.inits[2]["id"] != first["id"]  # a fresh run is another one


def test_a_service_that_fails_costs_no_step(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(broken=True))
    with MetricsLog(tmp_path, tracking=TRACKED) as log:
        for step in (1, 2, 3):
            log.write(step, {"em": 0.5})
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]
    assert caplog.text.count("left out from here: ConnectionError: no route") == 1


def test_a_project_without_the_package_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"psearch_jax\[track\]"):
        MetricsLog(tmp_path, tracking=TRACKED)
