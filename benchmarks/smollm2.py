"""SmolLM2-135M-Instruct here and in transformers, the same work: tokens trained on and decoded a second.

    .venv/bin/python benchmarks/smollm2.py --json        about 3 minutes on two cores, 5 GB of memory
    .venv/bin/python benchmarks/smollm2.py --curve runs/smollm2/parallel_search     the curve of a run, five steps a row

Training: an update of adapters of rank 16 on every projection (ours as configs/smollm2 has it, theirs with PEFT and
AdamW) over 4 sequences of 256 tokens, every one of them scored. Decoding: 8 prompts of 16 tokens, 32 tokens each,
greedily, prefill included. float32, all cores. Each is run once to warm up and then twice; the better time counts.
Rates are told by the clock and by the processor's time over the number of cores (`_cpu`): those are comparable on a
machine that does other work, too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from psearch_jax.assembly import Policy, lay_out, open_policy
from psearch_jax.config import SamplingConfig, SupervisedConfig
from psearch_jax.config_files import resolve
from psearch_jax.learning.batches import Sequence, pack
from psearch_jax.learning.optimizers import make_optimizer
from psearch_jax.learning.update import init_state, make_supervised_update, place_batch
from psearch_jax.models.lora import split_trainable
from psearch_jax.models.weights import save_hf_directory
from psearch_jax.questions.question import Question
from psearch_jax.retrieval.searcher import NoSearcher
from psearch_jax.rollout.engine import Engine
from psearch_jax.rollout.episode import Request

RECIPE = Path(__file__).parents[1] / "configs" / "smollm2" / "base.yaml"
ROWS, LENGTH, PROMPTS, PROMPT, NEW = 4, 256, 8, 16, 32


def timed(work: Callable[[], Any]) -> dict[str, float]:
    """The better of two runs after a first one: seconds by the clock, and of the processor over all cores."""
    work()
    found = []
    for _ in range(2):
        clock, processor = time.perf_counter(), time.process_time()
        work()
        used = (time.process_time() - processor) / len(os.sched_getaffinity(0))
        found.append((time.perf_counter() - clock, used))
    return {"clock": min(f[0] for f in found), "cpu": min(f[1] for f in found)}


def tokens(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Ids of ordinary tokens."""
    return rng.integers(1000, 40000, shape)


def ours(policy: Policy) -> dict[str, dict[str, float]]:
    """Our times."""
    config, _ = resolve([RECIPE])
    rng = np.random.default_rng(0)
    adapted = lay_out(policy, config, None)
    trainable, frozen = split_trainable(adapted.params)
    optimizer = make_optimizer(config.optimizer, 100)
    update = make_supervised_update(
        adapted.graphdef, optimizer, None, replace(SupervisedConfig(), micro_rows=1)
    )
    state = init_state(trainable, optimizer)
    sequences = [Sequence(ids=row) for row in tokens(rng, ROWS, LENGTH)]
    batch = place_batch(pack(sequences, LENGTH, ROWS), None)

    def train() -> None:
        nonlocal state
        state, metrics = update(state, batch, frozen=frozen)
        jax.block_until_ready((state, metrics))

    # Nothing but the number of tokens ends an episode.
    protocol = replace(config.protocol, turn_tokens=NEW, max_search_turns=0, feedback="")
    rollout = replace(config.rollout, slots=PROMPTS, context=128, append_rows=PROMPTS)
    engine = Engine(
        policy.graphdef,
        policy.config,
        policy.tokenizer,
        protocol,
        NoSearcher(),
        rollout,
        end_ids=(),
    )
    question = Question(id="q", text="?", golden_answers=("x",))
    requests = [
        Request(question=question, prompt_ids=tuple(map(int, row)), group=i, member=0)
        for i, row in enumerate(tokens(rng, PROMPTS, PROMPT))
    ]

    def decode() -> None:
        episodes = engine.rollout(
            policy.params,
            requests,
            key=jax.random.key(0),
            sampling=SamplingConfig(temperature=0.0),
        )
        assert all(len(episode.ids) == PROMPT + NEW for episode in episodes)

    return {"train": timed(train), "decode": timed(decode)}


def theirs(policy: Policy) -> dict[str, dict[str, float]]:
    """The times of transformers, with PEFT's adapters."""
    import peft
    import torch
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    config, _ = resolve([RECIPE])
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as directory:
        save_hf_directory(directory, policy.config, policy.params, dtype="float32")
        model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    ids = torch.as_tensor(tokens(rng, ROWS, LENGTH))
    given = torch.as_tensor(tokens(rng, PROMPTS, PROMPT))

    def decode() -> None:
        with torch.no_grad():
            made = model.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=NEW,
                min_new_tokens=NEW,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert made.shape == (PROMPTS, PROMPT + NEW)

    decoding = timed(decode)
    lora = config.model
    adapted = peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=lora.lora_rank,
            lora_alpha=lora.lora_alpha,
            target_modules=list(lora.lora_projections),
            task_type="CAUSAL_LM",
        ),
    )
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-3)

    def train() -> None:
        optimizer.zero_grad()
        for row in ids:  # micro-batches of one row, as ours
            (adapted(input_ids=row[None], labels=row[None]).loss / ROWS).backward()
        optimizer.step()

    return {"train": timed(train), "decode": decoding}


def curve(run: Path, every: int = 5) -> str:
    """A run's training as a table: means of so many steps."""
    names = ("reward", "em", "turns", "subqueries", "decomposed", "well_formed")
    lines = (run / "metrics.jsonl").read_text("utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    table = [f"| steps | {' | '.join(names)} |", "| --- " * (len(names) + 1) + "|"]
    for first in range(0, len(steps), every):
        part = steps[first : first + every]
        means = " | ".join(f"{np.mean([step[name] for step in part]):.2f}" for name in names)
        table.append(f"| {part[0]['step']}–{part[-1]['step']} | {means} |")
    return "\n".join(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print nothing but the result")
    parser.add_argument("--curve", type=Path, help="print only how this run's training went")
    arguments = parser.parse_args()
    if arguments.curve:
        print(curve(arguments.curve))
        return
    policy = open_policy("SmolLM2-135M-Instruct")
    work = {"train": ROWS * LENGTH, "decode": PROMPTS * NEW}
    result: dict[str, Any] = {}
    for side, times in (("ours", ours(policy)), ("transformers", theirs(policy))):
        for name, count in work.items():
            row = result.setdefault(name, {})
            row[side] = round(count / times[name]["clock"], 1)
            row[f"{side}_cpu"] = round(count / times[name]["cpu"], 1)
    for row in result.values():
        row["ratio_cpu"] = round(row["ours_cpu"] / row["transformers_cpu"], 2)
    result["cores"] = len(os.sched_getaffinity(0))
    if arguments.json:
        print(json.dumps(result))
    else:
        json.dump(result, sys.stdout, indent=1)
        print()


if __name__ == "__main__":
    main()
