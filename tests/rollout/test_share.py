"""Several processes, one engine: the episodes of one process, whoever plays them."""

import json
import os
import socket
import subprocess
import sys

import pytest
from rollout import toys
from rollout.test_engine import KEY, PROMPTS, SAMPLED, assert_same, engine, policy

from psearch_jax.mesh import NOWHERE
from psearch_jax.rollout.share import Share, _pack, _unpack

#: Five groups over two processes: one has more to do, and its last episodes find the other with nothing left.
MANY = (*PROMPTS, "a1\n", "be\n")
PROGRAM = """
import json, sys
import jax
rank, port, rows = map(int, sys.argv[1:])
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", 2, rank)
from dataclasses import replace
from rollout import toys
from rollout.test_share import KEY, MANY, SAMPLED
from psearch_jax.config import MeshConfig
from psearch_jax.mesh import make_mesh
from psearch_jax.rollout.engine import Engine
from psearch_jax.rollout.share import _pack
tokenizer = toys.make_tokenizer("whole")
config, graphdef, params = toys.make_policy(tokenizer, toys.FOLLOWS["whole"])
# One shape of each program: compiling is what takes time here.
rollout = replace(
    toys.ROLLOUT, slots=8, decode_rows=rows, window_buckets=(96,), append_buckets=(32,)
)
corpus = toys.Corpus()
engine = Engine(
    graphdef, config, tokenizer, toys.PROTOCOL, corpus, rollout, mesh=make_mesh(MeshConfig(data=4))
)
engine.warm_up(params)
requests = toys.make_requests(tokenizer, MANY, 3)
episodes = engine.rollout(params, requests, key=KEY, sampling=SAMPLED)
own = [episodes[i] for i in engine.share.mine(requests)]
asked = sorted({query for call in corpus.calls for query in call})
print(json.dumps({
    "episodes": [_pack(episode) for episode in episodes],
    "compiled": engine.stats["compiled"],
    "own": len(own),
    "asked": asked == sorted({q for e in own for turn in e.searches for q in turn.queries}),
}))
"""


def play_together(rows: int):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    paths = [os.path.dirname(os.path.dirname(__file__)), *sys.path]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("XLA_FLAGS", None)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(port), str(rows)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = []
    try:
        for process in started:
            out, error = process.communicate(timeout=240)
            assert process.returncode == 0, error[-2000:]
            told.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in started:
            process.kill()
    return told


@pytest.mark.slow
def test_two_processes_play_the_episodes_of_one():
    told = play_together(rows=4)
    e = engine("whole")
    requests = toys.make_requests(e.tokenizer, MANY, 3)
    want = e.rollout(policy("whole"), requests, key=KEY, sampling=SAMPLED)
    for process in told:
        pairs = zip(requests, process["episodes"], strict=True)
        assert_same([_unpack(request, packed) for request, packed in pairs], want)
        assert process["compiled"] == 0
        assert process["asked"]  # each searches for its own episodes alone
    assert [process["own"] for process in told] == [9, 6]


def test_an_episode_travels_unchanged():
    e = engine("whole")
    requests = toys.make_requests(e.tokenizer, PROMPTS, 3)
    episodes = e.rollout(policy("whole"), requests, key=KEY, sampling=SAMPLED)
    assert any(turn.hits for episode in episodes for turn in episode.turns)
    for request, episode in zip(requests, episodes, strict=True):
        assert _unpack(request, json.loads(json.dumps(_pack(episode)))) == episode


def test_groups_are_dealt_whole():
    tokenizer = engine("whole").tokenizer
    requests = toys.make_requests(tokenizer, MANY, 2)
    shares = [Share(layout=NOWHERE, count=3, index=i).mine(requests) for i in range(3)]
    assert shares == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5]]
