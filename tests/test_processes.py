"""Several processes as one run: places, agreement, and the sentences when something is wrong."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psearch_jax import processes
from psearch_jax.config import MeshConfig
from psearch_jax.errors import UserError
from psearch_jax.mesh import make_mesh, replicated

#: What two processes do at their start, and then one of them dies.
PROGRAM = """
import json, os, signal, sys, time
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from psearch_jax import processes
from psearch_jax.config import MeshConfig
from psearch_jax.errors import UserError
from psearch_jax.mesh import make_mesh
rank, port = int(sys.argv[1]), sys.argv[2]
processes.HEARTBEAT = 10
assert processes.start(f"localhost:{port}", 2, rank, patience=60)
told = {"place": [processes.index(), processes.count(), len(jax.devices())]}
told["texts"] = processes.gather("é" * (rank + 1))
told["first"] = processes.from_first(f"from {rank}")
told["agree"] = [processes.agree(False), processes.agree(rank == 1)]
mesh = make_mesh(MeshConfig(data=4))
whole = np.arange(24.0).reshape(8, 3)
array = processes.place(whole, NamedSharding(mesh, PartitionSpec("data")))
assert not array.is_fully_addressable
told["sum"] = float(jax.jit(lambda x: (x * x).sum())(array))
told["back"] = bool(np.array_equal(processes.to_host(array), whole))
processes.check_agreement({"trainer.seed": 3})
try:
    processes.check_agreement({"trainer.seed": rank, "trainer.steps": 1})
except UserError as error:
    told["disagree"] = str(error)
print(json.dumps(told), flush=True)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
with processes.explained():
    for _ in range(200):
        processes.gather("still here")
        time.sleep(0.5)
"""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


@pytest.mark.slow
def test_two_processes_agree_and_the_one_left_alone_ends_with_a_sentence():
    flags = "--xla_force_host_platform_device_count=2"
    port = str(free_port())
    both = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), port],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        died = both[1].communicate(timeout=120)
        began = time.monotonic()
        left = both[0].communicate(timeout=120)
    finally:
        for process in both:
            process.kill()
    assert both[1].returncode == -signal.SIGKILL, died[1]
    assert both[0].returncode not in (0, None)
    assert time.monotonic() - began < 60
    assert (
        "start all of them again with the same command" in left[1] or "another task died" in left[1]
    )
    for rank, (out, _) in enumerate((left, died)):
        told = json.loads(out.splitlines()[-1])  # behind what gloo has to say
        assert told["place"] == [rank, 2, 4]
        assert told["texts"] == ["é", "éé"] and told["first"] == "from 0"
        assert told["agree"] == [False, True]
        assert told["sum"] == float((np.arange(24.0) ** 2).sum()) and told["back"]
        assert "trainer.seed is 0 in process 0 and 1 in process 1" in told["disagree"]


@given(st.lists(st.integers(), max_size=9), st.integers(1, 4))
def test_shares_go_together_again(items, count):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "count", lambda: count)
        shares = []
        for index in range(count):
            patch.setattr(processes, "index", lambda index=index: index)
            shares.append(processes.share(items))
    assert processes.interleave(shares) == items


def test_alone_nothing_changes():
    assert processes.gather("a") == ["a"] and processes.from_first("a") == "a"
    assert processes.agree(True) and not processes.agree(False)
    processes.check_agreement({"x": 1})
    where = replicated(make_mesh(MeshConfig()))
    array = processes.place(np.arange(3), where)
    assert array.sharding == where
    np.testing.assert_array_equal(processes.to_host(array), np.arange(3))
    with pytest.raises(jax.errors.JaxRuntimeError), processes.explained():
        raise jax.errors.JaxRuntimeError("stays what it is")
    assert not processes.start()


SLURM = {"SLURM_JOB_ID": "70001", "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2"}


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node7", "node7"),
        ("a,b", "a"),
        ("node[003-007,9],other", "node003"),
        ("n[5,7]", "n5"),
        ("gpu-a1.site,gpu-a2.site", "gpu-a1.site"),
    ],
)
def test_a_place_from_slurm(nodes, host):
    place = processes.from_slurm({**SLURM, "SLURM_STEP_NODELIST": nodes})
    assert place is not None
    assert place.coordinator == f"{host}:{61440 + 70001 % 4096}"
    assert (place.processes, place.process) == (3, 2)


def test_no_place_from_slurm():
    assert processes.from_slurm({}) is None
    assert processes.from_slurm(SLURM) is None  # an allocation, and no step of it
    one = {**SLURM, "SLURM_STEP_NODELIST": "a", "SLURM_STEP_NUM_TASKS": "1"}
    assert processes.from_slurm(one) is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("localhost:1",), "belong together"),
        (("", 2, 0), "belong together"),
        (("localhost", 2, 1), "must be HOST:PORT"),
        (("localhost:1", 2, 2), "--process is 2, but with --processes 2"),
        (("nowhere.invalid:4000", 2, 1), "nowhere.invalid:4000 cannot be found"),
        (("localhost:99999", 2, 0), "port 99999|cannot be found"),
    ],
)
def test_wrong_places_are_named(arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        processes.start(*arguments, patience=1)


def test_a_coordinator_that_does_not_answer_and_a_port_in_use():
    with pytest.raises(UserError, match="no process answers at the coordinator's address"):
        processes.start(f"localhost:{free_port()}", 2, 1, patience=0)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} of the coordinator .* cannot be used"):
            processes.start(f"localhost:{port}", 2, 0, patience=1)
