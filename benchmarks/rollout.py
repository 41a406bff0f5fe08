"""The rollout engine against lock-step rollouts with google-tunix's sampler and with transformers.generate.

    .venv/bin/python benchmarks/rollout.py             about ten minutes on two cores
    .venv/bin/python benchmarks/rollout.py --json      print nothing but the result

Same checkpoint (the packaged Qwen2 directory), questions, protocol, retrieval and budgets, in float32 at temperature 1;
the three take turns, each repetition with other questions. What is measured and how: benchmarks/README.md. The first
run makes the peers' virtual environments under runs/peers/. The result is also written to runs/benchmarks/rollout.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from peers.figures import Compiled, Slow, speedups, spread, summary
from peers.lockstep import Played, play
from peers.process import ROOT, Peer, open_peer

from psearch_jax.assembly import (
    EMBEDDED_POLICY,
    Policy,
    keep_compiled_programs,
    open_backend,
    open_engine,
    open_policy,
)
from psearch_jax.config import Config, SamplingConfig
from psearch_jax.config_files import resolve
from psearch_jax.learning.batches import from_episode, pack, unpack
from psearch_jax.learning.rescoring import make_logprobs
from psearch_jax.metrics_log import write_atomically
from psearch_jax.questions.question import Question
from psearch_jax.questions.sources import load_questions
from psearch_jax.retrieval.searcher import SearchBackend
from psearch_jax.rollout import reference
from psearch_jax.rollout.engine import Engine
from psearch_jax.rollout.environment import SearchEnvironment
from psearch_jax.rollout.episode import Episode, Role

PEERS = {"tunix": "tunix_sampler.py", "transformers": "transformers_generate.py"}
#: Half of the slots decode while the others wait for a search: on two cores a step of 32 rows costs least a token.
ENGINE = ("rollout.slots=64", "rollout.decode_rows=32")
#: Repetitions of what concerns our engine alone.
FEWER = 3
#: Shapes that the tunix sampler is compiled for.
ROWS = (32, 64, 128)
LENGTHS = (64, 128, 192, 256, 320, 384, 448)


class Bench:
    """The engine, warm, and everything that is measured with it."""

    def __init__(self, config: Config, questions: int, members: int, note: Callable[[str], None]):
        self.config, self.members, self.note = config, members, note
        note("opening the policy and the index")
        self.policy: Policy = open_policy(config.policy)
        self.backend: SearchBackend = open_backend(config.retrieval)
        self.backend.warm_up()
        self.engine = open_engine(config, self.policy, self.backend)
        self.pool, self.questions = load_questions(config.data, "train"), questions
        note("compiling")
        self.engine.warm_up(self.policy.params)

    def draw(self, number: int, count: int | None = None) -> list[Question]:
        """The questions of repetition `number`; no two repetitions share one."""
        count = self.questions if count is None else count
        start = number * count % (len(self.pool) - count)
        return self.pool[start : start + count]

    def roll(
        self, questions: Sequence[Question], seed: int, engine: Engine | None = None, **options: Any
    ) -> tuple[list[Episode], float]:
        """Episodes of our engine, with nothing found by an earlier search, and the seconds that they took."""
        engine = engine or self.engine
        requests = engine.requests(questions, self.members)
        self.backend.forget()
        options = {"sampling": self.config.sampling, "key": jax.random.key(seed)} | options
        began = time.perf_counter()
        episodes = engine.rollout(self.policy.params, requests, **options)
        return episodes, time.perf_counter() - began

    def lockstep(
        self, peer: Peer, questions: Sequence[Question], seed: int, temperature: float
    ) -> Played:
        """The same with a peer."""
        engine, calls = self.engine, 0

        def generate(prompts: list[list[int]], steps: int) -> tuple[list[list[int]], float]:
            nonlocal calls
            calls += 1
            return peer.call(
                "generate", prompts=prompts, temperature=temperature, seed=1000 * seed + calls
            )

        self.backend.forget()
        return play(
            generate,
            engine.requests(questions, self.members),
            engine.protocol,
            SearchEnvironment(backend=self.backend, retries=0),
            encode=engine.encode,
            decode=engine.decode_text,
            context=engine.rollout_config.context,
            end_ids=engine.end_ids,
        )

    def open_peers(self, names: Sequence[str], stack: ExitStack) -> dict[str, Peer]:
        """Peers with the checkpoint loaded, warmed up."""
        protocol, tokenizer = self.engine.protocol, self.policy.tokenizer
        tags = {}
        for opening, closing in (protocol.search, protocol.answer):
            ids = [self.engine.encode(tag.strip()) for tag in (opening, closing)]
            assert all(len(each) == 1 for each in ids), "the peers stop at single tokens"
            tags[str(ids[0][0])] = ids[1][0]
        peers = {}
        for name in names:
            self.note(f"starting {name}")
            peer = peers[name] = stack.enter_context(open_peer(name, PEERS[name]))
            rows = self.questions * self.members
            versions, _ = peer.call(
                "load",
                directory=str(EMBEDDED_POLICY),
                steps=protocol.turn_tokens,
                rows=sorted({size for size in ROWS if size < rows} | {rows}),
                lengths=LENGTHS,
                end=tokenizer.eos_token_id,
                pad=tokenizer.pad_token_id,
                tags=tags,
                threads=len(os.sched_getaffinity(0)),
                compiled=str(ROOT / "runs" / "peers" / "compiled"),
            )
            programs, seconds = peer.call("warm_up", temperature=self.config.sampling.temperature)
            self.note(f"  {versions}, warmed up in {seconds:.0f} s, {programs} programs")
        return peers

    # -- against the peers

    def speed(self, peers: dict[str, Peer], repetitions: int) -> dict[str, list[dict[str, Any]]]:
        """A line for every repetition of every system, taking turns."""
        lines: dict[str, list[dict[str, Any]]] = {name: [] for name in ("ours", *peers)}
        temperature = self.config.sampling.temperature
        for number in range(repetitions + 1):  # the first is thrown away
            questions = self.draw(number)
            for name in lines:
                if name == "ours":
                    episodes, seconds = self.roll(questions, number)
                    stats = self.engine.stats
                    drawing = stats["seconds"]["total"] - stats["seconds"]["host"]
                    forwarded = sum(stats["forwarded"].values())
                else:
                    played = self.lockstep(peers[name], questions, number, temperature)
                    episodes, seconds = played.episodes, played.seconds
                    drawing, forwarded = played.drawing, played.forwarded
                line = {
                    "seconds": seconds,
                    "episodes_per_second": len(episodes) / seconds,
                    "device_seconds": drawing,
                    "forwarded_over_episode_tokens": forwarded / count(episodes),
                    "policy_tokens": count(episodes, Role.POLICY) / len(episodes),
                    "turns": statistics.fmean(len(episode.turns) for episode in episodes),
                    "correct": statistics.fmean(map(correct, episodes)),
                }
                self.note(
                    f"{number} {name:13} " + " ".join(f"{k}={v:.3g}" for k, v in line.items())
                )
                lines[name].append(line)
        return {name: values[1:] for name, values in lines.items()}

    def agreement(self, peers: dict[str, Peer]) -> dict[str, float]:
        """The share of greedy episodes that a peer plays to the token as we do: it is the same model, driven alike."""
        questions = self.draw(0)
        greedy = SamplingConfig(temperature=0.0)
        ours, _ = self.roll(questions, 0, sampling=greedy)
        return {
            name: statistics.fmean(
                mine.ids == theirs.ids
                for mine, theirs in zip(
                    ours, self.lockstep(peer, questions, 0, 0.0).episodes, strict=True
                )
            )
            for name, peer in peers.items()
        }

    # -- the engine alone

    def own_figures(self, repetitions: int) -> dict[str, Any]:
        """Figures of the engine's own counts over rollouts with different questions, temperatures, budgets and end
        tokens, and what compiled in them."""
        compiled = Compiled()
        protocol, lines = self.engine.protocol, []
        for number in range(repetitions):
            self.roll(self.draw(20 + number), number)
            lines.append(self.engine.stats)
        before = compiled.count
        for number, (temperature, turn_tokens, end_ids) in enumerate(
            ((0.5, 48, self.engine.end_ids), (1.3, 32, (0, 1, 7)), (0.0, 64, ()))
        ):
            self.roll(
                self.draw(30 + number, 16),
                number,
                sampling=SamplingConfig(temperature=temperature, top_k=20 * number),
                protocol=replace(protocol, turn_tokens=turn_tokens),
                end_ids=end_ids,
            )
        found = {
            "forwarded_over_episode_tokens": [x["forwarded_over_episode_tokens"] for x in lines],
            "occupancy_busy": [x["occupancy_busy"] for x in lines],
            "occupancy_total": [x["occupancy"] for x in lines],
            "host_share": [x["host_share"] for x in lines],
        }
        last = {key: lines[-1][key] for key in ("forwarded", "episode_tokens", "seconds")}
        return {key: spread(values) for key, values in found.items()} | {
            "compiles_after_warmup": compiled.count - before,
            "last_rollout": last,
        }

    def capacity_slowdown(self, repetitions: int) -> dict[str, Any]:
        """Milliseconds of decoding a token in a cache of 4,096 against 512, for the same greedy episodes."""
        protocol = replace(self.engine.protocol, response_tokens=400)
        rollout = replace(
            self.config.rollout,
            context=4096,
            window_buckets=(*self.config.rollout.window_buckets, 1024),
        )
        large = open_engine(replace(self.config, rollout=rollout), self.policy, self.backend)
        self.note("compiling for a context of 4,096")
        large.warm_up(self.policy.params)
        questions, greedy = self.draw(40, 24), SamplingConfig(temperature=0.0)
        took: dict[int, list[float]] = {512: [], 4096: []}
        for _ in range(repetitions):
            for engine in (self.engine, large):
                self.roll(questions, 0, engine, sampling=greedy, protocol=protocol)
                stats = engine.stats
                took[engine.rollout_config.context].append(
                    1e3 * stats["seconds"]["decode"] / stats["forwarded"]["policy"]
                )
        ratios = [b / a for a, b in zip(took[512], took[4096], strict=True)]
        return spread(ratios) | {f"ms_per_token_{size}": spread(took[size]) for size in took}

    def latency_growth(self, repetitions: int, seconds: float = 0.2) -> dict[str, Any]:
        """By how much a rollout takes longer when every search takes `seconds` more."""
        quick, took = self.engine.environment, {0.0: [], seconds: []}
        for number in range(repetitions):
            for extra, times in took.items():
                self.engine.environment = SearchEnvironment(backend=Slow(self.backend, extra))
                times.append(self.roll(self.draw(50 + number), number)[1])
        self.engine.environment = quick
        return spread([b / a - 1.0 for a, b in zip(*took.values(), strict=True)])

    def mismatches(self, count: int) -> dict[str, int]:
        """Tokens in which episodes differ from those of rollout/reference.py, half of them greedy, half sampled."""
        engine, config, different, tokens = self.engine, self.policy, 0, 0
        for temperature in (0.0, 1.0):
            sampling = SamplingConfig(temperature=temperature)
            questions = self.draw(60)
            episodes, _ = self.roll(questions, 7, sampling=sampling)
            requests = engine.requests(questions, self.members)
            for place in np.linspace(0, len(requests) - 1, count // 2).astype(int):
                expected = reference.play(
                    config.graphdef,
                    config.params,
                    config.tokenizer,
                    engine.protocol,
                    SearchEnvironment(backend=self.backend),
                    requests[place],
                    key=jax.random.key(7),
                    sampling=sampling,
                    context=engine.rollout_config.context,
                    end_ids=engine.end_ids,
                )
                pairs = zip_longest(expected.ids, episodes[place].ids)
                different += sum(a != b for a, b in pairs)
                tokens += len(expected.ids)
        return {"mismatches": different, "tokens": tokens, "episodes": 2 * (count // 2)}

    def max_logprob_gap(self) -> float:
        """The largest difference between a rollout's log-probability and the trainer's."""
        episodes, _ = self.roll(self.draw(70), 3)
        algorithm = self.config.algorithm
        sequences = [from_episode(episode, 0.0) for episode in episodes]
        batch = pack(sequences, algorithm.row_length)
        score = make_logprobs(self.policy.graphdef, None, algorithm, self.config.sampling)
        scored = unpack(
            np.asarray(score(self.policy.params, nnx.State({}), batch)),
            sequences,
            algorithm.row_length,
        )
        return max(
            float(np.max(np.abs(own - np.asarray(s.old_logprobs)) * np.asarray(s.weights)))
            for own, s in zip(scored, sequences, strict=True)
        )


def count(episodes: Sequence[Episode], role: Role | None = None) -> int:
    """Tokens of the episodes, all or those of a role."""
    return sum(len(e.ids) if role is None else e.count(role) for e in episodes)


def correct(episode: Episode) -> bool:
    """Whether the answer is one of the gold ones, to the letter but for blanks."""
    answer = (episode.answer or "").strip()
    return answer in {gold.strip() for gold in episode.question.golden_answers}


def measure(arguments: argparse.Namespace, note: Callable[[str], None]) -> dict[str, Any]:
    config, _ = resolve([ROOT / "configs/embedded/base.yaml"], ENGINE)
    keep_compiled_programs(config)
    bench = Bench(config, arguments.questions, arguments.members, note)
    note("the engine alone")
    figures = bench.own_figures(FEWER)
    details: dict[str, Any] = {"last_rollout": figures.pop("last_rollout")}
    details["cores"] = len(os.sched_getaffinity(0))
    note(json.dumps(figures | details))
    figures["latency_growth"] = bench.latency_growth(FEWER)
    note(json.dumps(figures["latency_growth"]))
    figures["capacity_slowdown"] = bench.capacity_slowdown(FEWER)
    note(json.dumps(figures["capacity_slowdown"]))
    note("the reference")
    details["mismatches"] = bench.mismatches(arguments.reference)
    figures["token_mismatches"] = details["mismatches"]["mismatches"]
    figures["max_logprob_gap"] = bench.max_logprob_gap()
    note(json.dumps({key: figures[key] for key in ("token_mismatches", "max_logprob_gap")}))
    names = [name for name in arguments.peers.split(",") if name]
    with ExitStack() as stack:
        peers = bench.open_peers(names, stack)
        details["lines"] = bench.speed(peers, arguments.repetitions)
        details["agreement"] = bench.agreement(peers)
    figures |= speedups(details["lines"])
    return summary(figures | {"details": details})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print nothing but the result")
    parser.add_argument("--questions", type=int, default=32)
    parser.add_argument("--members", type=int, default=8, help="episodes of a question")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--reference", type=int, default=16, help="episodes checked against it")
    parser.add_argument("--peers", default="tunix,transformers")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    result = measure(
        arguments,
        (lambda line: None)
        if arguments.json
        else lambda line: print(line, file=sys.stderr, flush=True),
    )
    text = json.dumps(result, indent=1)
    write_atomically(Path("runs/benchmarks/rollout.json"), text + "\n")
    print(text)


if __name__ == "__main__":
    main()
