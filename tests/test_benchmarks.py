"""The benchmarks against other implementations, without these: the lock-step loop, the pipe, the summary."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from rollout import toys

from benchmarks.peers import figures, lockstep, process
from benchmarks.retrieval import beside_peers
from psearch_jax.config import SamplingConfig
from psearch_jax.rollout import reference
from psearch_jax.rollout.environment import SearchEnvironment
from psearch_jax.rollout.protocol import stop_tags


@pytest.mark.parametrize("kind", ["whole", "split"])
def test_lockstep_plays_as_the_reference(kind):
    """Whether the sampler stops at a tag's own token, or runs past a tag of several tokens to the end of its budget."""
    tokenizer = toys.make_tokenizer(kind)
    _, graphdef, params = toys.make_policy(tokenizer, toys.FOLLOWS[kind])
    requests = toys.make_requests(tokenizer, ["a b\n", "b1\n", "c2 a\n", "ob\n", "2 1\n", "nc\n"])
    end, protocol = tokenizer.eos_token_id, replace(toys.PROTOCOL, turn_tokens=20)
    closing = {tokenizer.convert_tokens_to_ids(tag) for tag in stop_tags(toys.PROTOCOL)}
    stops = {end} | (closing if kind == "whole" else set())
    settings = (np.ones(1, np.float32), np.zeros(1, np.int32), np.ones(1, np.float32))
    key, batches = jax.random.key(2), []

    def generate(prompts, steps):
        batches.append(len(prompts))
        return [turn(list(prompt), steps) for prompt in prompts], 0.0

    def turn(ids, steps):
        (group,) = (r.group for r in requests if tuple(ids[: len(r.prompt_ids)]) == r.prompt_ids)
        own = jax.random.fold_in(jax.random.fold_in(key, group), 0)
        drawn = []
        while len(drawn) < steps and (not drawn or drawn[-1] not in stops):
            tokens_1xL = np.zeros((1, toys.ROLLOUT.context + 20), np.int32)
            tokens_1xL[0, : len(ids) + len(drawn)] = ids + drawn
            token, _ = reference.draw(
                graphdef,
                params,
                tokens_1xL,
                np.int32(len(ids) + len(drawn)),
                own,
                settings,
            )
            drawn.append(int(token[0]))
        return drawn

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    played = lockstep.play(
        generate,
        requests,
        protocol,
        SearchEnvironment(backend=toys.Corpus()),
        encode=encode,
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        context=toys.ROLLOUT.context,
        end_ids=(end,),
    )
    kinds = set()
    for request, episode in zip(requests, played.episodes, strict=True):
        expected = reference.play(
            graphdef,
            params,
            tokenizer,
            protocol,
            SearchEnvironment(backend=toys.Corpus()),
            request,
            key=key,
            sampling=SamplingConfig(temperature=1.0),
            context=toys.ROLLOUT.context,
            end_ids=(end,),
        )
        assert episode.ids == expected.ids
        assert episode.roles == expected.roles
        assert episode.end_reason == expected.end_reason
        assert [t.kind for t in episode.turns] == [t.kind for t in expected.turns]
        assert [t.queries for t in episode.turns] == [t.queries for t in expected.turns]
        assert episode.answer == expected.answer
        kinds |= {t.kind for t in episode.turns}
    assert "search" in kinds, "nothing was searched: the test shows little"
    assert batches[0] == len(requests) and batches == sorted(batches, reverse=True)
    assert len(batches) == max(len(episode.turns) for episode in played.episodes)


def test_lockstep_leaves_the_pipe_out():
    """A peer is charged with what it says that a call took, not with JSON and waiting."""
    tokenizer = toys.make_tokenizer("whole")
    requests = toys.make_requests(tokenizer, ["a\n"], members=3)

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    def generate(prompts, steps):
        time.sleep(0.3)
        return [encode("<answer>b</answer>")] * len(prompts), 0.125

    played = lockstep.play(
        generate,
        requests,
        toys.PROTOCOL,
        SearchEnvironment(backend=toys.Corpus()),
        encode=encode,
        decode=tokenizer.decode,
        context=96,
    )
    assert played.drawing == 0.125
    assert 0.125 <= played.seconds < 0.25
    assert [episode.answer for episode in played.episodes] == ["b"] * 3
    assert played.forwarded == sum(len(episode.ids) for episode in played.episodes)


SCRIPT = """
import sys, time
sys.path.insert(0, sys.argv[0].rsplit("/", 1)[0])
sys.path.insert(0, {scripts!r})
from serve import serve

def double(values):
    print("a library talks")
    time.sleep(0.05)
    return [2 * value for value in values]

def fail():
    raise ValueError("no such weights")

def die():
    print("out of memory", file=sys.stderr, flush=True)
    sys.exit(3)

serve({{"double": double, "fail": fail, "die": die}})
"""


@pytest.fixture
def peer(tmp_path):
    script = tmp_path / "peer.py"
    script.write_text(SCRIPT.format(scripts=str(process.SCRIPTS)))
    with process.Peer(sys.executable, script, tmp_path / "logs" / "peer.log") as running:
        yield running


def test_a_peer_answers(peer):
    result, seconds = peer.call("double", values=[1, 2.5])
    assert result == [2, 5.0] and 0.05 <= seconds < 1.0


def test_a_peer_that_fails_says_why_and_goes_on(peer):
    with pytest.raises(process.PeerError, match="fail: (.|\n)*ValueError: no such weights"):
        peer.call("fail")
    assert peer.call("double", values=[3])[0] == [6]


def test_a_peer_that_dies_leaves_its_last_words(peer):
    with pytest.raises(process.PeerError, match="die: the process ended(.|\n)*out of memory"):
        peer.call("die")
    with pytest.raises(process.PeerError, match="out of memory"):
        peer.call("double", values=[1])


def test_peers_have_our_versions():
    constraints = "jax==0.10.2\nflax==0.12.8\n# a comment\n"
    wanted = process.pinned(["google-tunix==0.1.7", "jax"], constraints)
    assert wanted == ["google-tunix==0.1.7", "jax==0.10.2"]
    with pytest.raises(KeyError):
        process.pinned(["torch"], constraints)
    real = (Path(process.ROOT) / "constraints.txt").read_text(encoding="utf-8")
    for names in process.REQUIREMENTS.values():
        assert len(process.pinned(names, real)) == len(names)


def test_speedups_pair_the_repetitions():
    lines = {
        "ours": [{"episodes_per_second": x} for x in (30.0, 60.0, 40.0)],
        "tunix": [{"episodes_per_second": x} for x in (10.0, 10.0, 20.0)],
    }
    assert figures.speedups(lines) == {
        "speedup_over_tunix": {"median": 3.0, "low": 2.0, "high": 6.0}
    }


def test_the_summary_holds_medians_and_keeps_ranges():
    told = figures.summary(
        {
            "speedup_over_tunix": figures.spread([3.0, 2.0, 6.0]),
            "token_mismatches": 0,
            "details": {"cores": 2},
        }
    )
    assert told["speedup_over_tunix"] == 3.0 and told["token_mismatches"] == 0
    assert told["details"]["cores"] == 2
    assert told["details"]["ranges"]["speedup_over_tunix"] == {
        "median": 3.0,
        "low": 2.0,
        "high": 6.0,
    }
    assert set(told) == {"speedup_over_tunix", "token_mismatches", "details"}


def test_compiled_counts_what_jax_compiles():
    compiled = figures.Compiled()
    before = compiled.count
    twice = jax.jit(lambda x: x * 2 + before)
    twice(np.ones(3))
    once = compiled.count
    twice(np.ones(3))
    assert once > before and compiled.count == once
    twice(np.ones(5))
    assert compiled.count > once


def test_memory_sees_a_peak_that_is_gone():
    from benchmarks.peers import memory

    before = memory.resident()
    memory.start_peak()
    block = np.ones(200_000_000, np.uint8)
    del block
    assert memory.peak() - before > 150_000_000
    memory.start_peak()
    assert memory.peak() - before < 100_000_000


def test_speeds_are_compared_where_as_much_is_found():
    table = [
        {"search": name, "recall_at_3": recall, "queries_per_second": speed}
        for name, recall, speed in (
            *(
                ("scann", 0.98, 50.0),
                ("scann_alone_a", 0.90, 100.0),
                ("scann_alone_b", 0.985, 70.0),
            ),
            *(("flat", 1.0, 2.0), ("hnsw32_a", 0.90, 80.0), ("hnsw32_b", 0.97, 90.0)),
            *(("hnsw32_c", 0.98, 40.0), ("hnsw32_d", 0.999, 5.0)),
        )
    ]
    told = beside_peers(table)
    assert (told["recall_at_3"], told["speedup_over_faiss_flat"]) == (0.98, 25.0)
    # 100 over 80, 70 over 90, 70 over 40; nothing of ours finds what the last does.
    assert told["speedup_over_hnsw_at_equal_recall"] == pytest.approx(70 / 90)
    assert told["speedup_over_hnsw_at_our_recall"] == 50 / 40
