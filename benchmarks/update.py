"""The policy update against google-tunix's GRPO train step: tokens/s and peak memory on the same batch of episodes.

    .venv/bin/python benchmarks/update.py             about ten minutes on two cores
    .venv/bin/python benchmarks/update.py --json      print nothing but the result

A Qwen2 policy of the packaged one's shape with a vocabulary of 32,768, and 96 episodes that the packaged policy played.
google-tunix is tried in several settings first; the fastest is compared, the two taking turns. What is measured and
how: benchmarks/README.md. The first run makes tunix's virtual environment under runs/peers/. The result is also written
to runs/benchmarks/update.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from peers.figures import spread, summary
from peers.process import ROOT, Peer, open_peer

from psearch_jax.assembly import keep_compiled_programs, open_backend, open_engine, open_policy
from psearch_jax.config_files import resolve
from psearch_jax.learning.batches import from_episode
from psearch_jax.metrics_log import write_atomically
from psearch_jax.models.decoder import init_params
from psearch_jax.models.weights import save_hf_directory
from psearch_jax.questions.sources import load_questions

VOCABULARY = 32_768
GROUPS, MEMBERS = 12, 8
LEARNING_RATE = 1e-4
OURS = {
    "row_length": 512,
    "micro_rows": 1,
    "logprob_chunk": 64,
    "old_logprobs": "trainer",  # as tunix does with one iteration a batch
}
#: What tunix is tried with. `packed` 0 pads; otherwise a micro-batch is one row of so many tokens.
TUNIX = (
    {"micro_rows": 1, "remat": "none", "packed": 0},
    {"micro_rows": 4, "remat": "none", "packed": 0},
    {"micro_rows": 4, "remat": "decoder", "packed": 0},
    {"micro_rows": 1, "remat": "none", "packed": 512},
    {"micro_rows": 1, "remat": "none", "packed": 1024},
)
POLICY = ROOT / "runs" / "benchmarks" / "update_policy"


def make_batch(note: Callable[[str], None]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Episodes of the packaged policy with made-up advantages (none is 0, so none may be left out), and what else the
    participants are told; writes the policy that learns."""
    config, _ = resolve([ROOT / "configs/embedded/base.yaml"])
    keep_compiled_programs(config)
    note("playing the episodes")
    policy = open_policy(config.policy)
    engine = open_engine(config, policy, open_backend(config.retrieval))
    questions = load_questions(config.data, "train")[:GROUPS]
    played = engine.rollout(
        policy.params,
        engine.requests(questions, MEMBERS),
        key=jax.random.key(0),
        sampling=config.sampling,
    )
    advantages_N = np.random.default_rng(0).normal(size=len(played)).astype(float)
    episodes = [
        {
            "ids": list(map(int, episode.ids)),
            "weights": np.asarray(from_episode(episode, 0.0).weights).astype(int).tolist(),
            "advantage": advantage,
            # With these the gap to the rollout that the first update tells is the mean −log p of the policy's tokens.
            "logprobs": 0.0,
        }
        for episode, advantage in zip(played, advantages_N.tolist(), strict=True)
    ]
    wide = replace(policy.config, vocab_size=VOCABULARY)
    _, params = init_params(wide, jax.random.key(0))
    save_hf_directory(POLICY, wide, params, dtype="float32")
    return episodes, {
        "pad": policy.tokenizer.pad_token_id,
        "end": policy.tokenizer.eos_token_id,
    }


class Participant:
    """One side with one setting, loaded and warm."""

    def __init__(
        self, name: str, settings: dict[str, Any], episodes: list[dict[str, Any]], **ids: int
    ):
        self.settings = settings
        self.peer: Peer = (
            open_peer("", "psearch_update.py")
            if name == "ours"
            else open_peer("tunix", "tunix_update.py")
        )
        self.peer.call(
            "load",
            directory=str(POLICY),
            learning_rate=LEARNING_RATE,
            compiled=str(ROOT / "runs" / "peers" / "compiled"),
            settings=settings,
            **({} if name == "ours" else ids),
        )
        told = self.peer.call("batch", episodes=episodes)[0]
        first = self.step()  # compiles
        self.padding_share, self.nll = told["padding_share"], (told | first)["nll"]

    def step(self) -> dict[str, float]:
        told, seconds = self.peer.call("step")
        return {"seconds": seconds, **told}


def measure(repetitions: int, note: Callable[[str], None]) -> dict[str, Any]:
    """The figures; see benchmarks/README.md."""
    episodes, ids = make_batch(note)
    gc.collect()
    tokens = sum(len(episode["ids"]) for episode in episodes)
    policy_tokens = sum(sum(episode["weights"]) for episode in episodes)
    note(f"{len(episodes)} episodes, {tokens} tokens, {policy_tokens} of the policy")
    tried = []
    for settings in TUNIX:
        one = Participant("tunix", settings, episodes, **ids)
        steps = [one.step() for _ in range(2)]
        one.peer.close()
        tried.append(
            settings
            | {
                "tokens_per_second": tokens / min(step["seconds"] for step in steps),
                "peak_bytes": max(step["peak"] for step in steps),
                "padding_share": one.padding_share,
                "nll": one.nll,
            }
        )
        note(f"tunix {tried[-1]}")
    # Compiled once, as tunix's are by now: what is compared next finds its programs on disk.
    Participant("ours", OURS, episodes, **ids).peer.close()
    best = TUNIX[int(np.argmax([line["tokens_per_second"] for line in tried]))]
    sides = {
        "ours": Participant("ours", OURS, episodes, **ids),
        "tunix": Participant("tunix", best, episodes, **ids),
    }
    lines: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(repetitions + 1):  # the first is thrown away
        for name, side in sides.items():
            step = side.step()
            if number:
                lines[name].append(step)
            note(f"{name:6} " + " ".join(f"{k}={v:.4g}" for k, v in step.items()))
    nll = {name: side.nll for name, side in sides.items()}
    program_bytes = sides["ours"].peer.call("program_bytes")[0]
    for side in sides.values():
        side.peer.close()
    pairs = list(zip(lines["ours"], lines["tunix"], strict=True))
    return {
        "speedup_over_tunix": spread([b["seconds"] / a["seconds"] for a, b in pairs]),
        "peak_memory_over_tunix": spread([a["peak"] / b["peak"] for a, b in pairs]),
        "padding_share": sides["ours"].padding_share,
        "details": {
            "episodes": len(episodes),
            "tokens": tokens,
            "policy_tokens": policy_tokens,
            "cores": len(os.sched_getaffinity(0)),
            "tokens_per_second": {
                name: spread([tokens / step["seconds"] for step in steps])
                for name, steps in lines.items()
            },
            "peak_bytes": {
                name: spread([step["peak"] for step in steps]) for name, steps in lines.items()
            },
            "program_bytes": program_bytes,
            "nll": nll,
            "ours": OURS,
            "tunix": best,
            "tried": tried,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print nothing but the result")
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    os.chdir(ROOT)
    result = summary(
        measure(
            arguments.repetitions,
            (lambda line: None)
            if arguments.json
            else lambda line: print(line, file=sys.stderr, flush=True),
        )
    )
    text = json.dumps(result, indent=1)
    write_atomically(Path("runs/benchmarks/update.json"), text + "\n")
    print(text)


if __name__ == "__main__":
    main()
