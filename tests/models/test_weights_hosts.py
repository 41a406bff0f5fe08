"""Weights in a run of two processes: each reads what its devices hold, and one writes what all hold."""

import json
import os
import socket
import subprocess
import sys

import pytest
from models.random_decoder import random_params
from safetensors.numpy import load_file

from psearch_jax.models import weights
from psearch_jax.models.decoder_config import DecoderConfig

CONFIG = DecoderConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=7,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    tie_embeddings=False,
)
PROGRAM = """
import json, sys
import jax
rank, port, source, target = int(sys.argv[1]), *sys.argv[2:]
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", 2, rank)
from psearch_jax.config import MeshConfig
from psearch_jax.mesh import make_mesh
from psearch_jax.models import tensor_files, weights
read, reader = 0, tensor_files._reader
def counted(path, name):
    fetch = reader(path, name)
    def count(index):
        global read
        value = fetch(index)
        read += value.nbytes
        return value
    return count
tensor_files._reader = counted
mesh = make_mesh(MeshConfig(data=1, fsdp=4, tensor=2))
config, _, params = weights.load_hf_directory(source, mesh=mesh)
whole = [leaf.is_fully_addressable for leaf in jax.tree.leaves(params)]
weights.save_hf_directory(target, config, params, dtype="float32", max_shard_bytes=100_000)
print(json.dumps({"read": read, "whole": any(whole)}))
"""


@pytest.mark.slow
def test_two_processes_load_their_shares_and_save_one_checkpoint(tmp_path):
    params = random_params(CONFIG)[1]
    source, target = tmp_path / "source", tmp_path / "target"
    weights.save_hf_directory(source, CONFIG, params, dtype="float32", max_shard_bytes=100_000)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(port), str(source), str(target)],
            stdout=subprocess.PIPE,
            env=environment | {"JAX_PLATFORMS": "cpu"},
            text=True,
        )
        for rank in range(2)
    ]
    results = [
        json.loads(process.communicate(timeout=300)[0].splitlines()[-1]) for process in processes
    ]
    total = sum(
        value.nbytes for file in source.glob("*.safetensors") for value in load_file(file).values()
    )
    # fsdp 4 × tensor 2: a process holds half of what is cut, and all of the norms and biases that are not.
    assert all(0.5 <= result["read"] / total < 0.6 for result in results)
    assert not any(result["whole"] for result in results)
    names = sorted(file.name for file in source.iterdir())
    assert sorted(file.name for file in target.iterdir()) == names
    assert len(names) > 6
    for name in names:
        assert (source / name).read_bytes() == (target / name).read_bytes(), name
