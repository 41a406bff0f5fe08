"""The single measurements of `retrieval.py`; each prints a JSON object as its last line.

`faiss` runs in the peers' environment, so nothing of psearch_jax is imported at the top.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

BATCH, K = 256, 3


def timed(search: Callable[[Any], Any], queries: Any) -> tuple[list[list[int]], float]:
    """The first K of every query, and queries a second: batches of 256, the best of three rounds."""
    best = float("inf")
    for _ in range(3):
        begun = time.perf_counter()
        found = [search(queries[i : i + BATCH]) for i in range(0, len(queries), BATCH)]
        best = min(best, time.perf_counter() - begun)
    return np.concatenate(found)[:, :K].tolist(), len(queries) / best


def faiss(passages: str, queries: str) -> dict[str, Any]:
    """Flat, HNSW32, IVF-PQ with refinement."""
    import faiss as library

    library.omp_set_num_threads(len(__import__("os").sched_getaffinity(0)))
    vectors, asked = np.load(passages), np.load(queries)
    dims = vectors.shape[1]
    results: dict[str, Any] = {}

    def note(name: str, index: Any, seconds: float) -> None:
        ids, speed = timed(lambda q: index.search(q, K)[1], asked)
        results[name] = {"ids": ids, "queries_per_second": speed, "build_seconds": seconds}

    begun = time.perf_counter()
    flat = library.IndexFlatIP(dims)
    flat.add(vectors)
    note("flat", flat, time.perf_counter() - begun)
    begun = time.perf_counter()
    leaves = round(len(vectors) ** 0.5)
    quantizer = library.IndexFlatIP(dims)
    ivf = library.IndexIVFPQ(quantizer, dims, leaves, 48, 8, library.METRIC_INNER_PRODUCT)
    ivf.train(vectors[: 64 * leaves])
    ivf.add(vectors)
    refined = library.IndexRefine(ivf, flat)
    refined.k_factor = 32
    seconds = time.perf_counter() - begun
    for probes in (16, 64):
        ivf.nprobe = probes
        note(f"ivfpq_refined_nprobe{probes}", refined, seconds)
    begun = time.perf_counter()
    hnsw = library.IndexHNSWFlat(dims, 32, library.METRIC_INNER_PRODUCT)
    hnsw.hnsw.efConstruction = 100
    hnsw.add(vectors)
    seconds = time.perf_counter() - begun
    for width in (16, 32, 64, 96, 128, 160, 256):
        hnsw.hnsw.efSearch = width
        note(f"hnsw32_ef{width}", hnsw, seconds)
    return results


def make(path: str, rows: str) -> dict[str, Any]:
    """Made-up unit vectors around 4,096 centres, 384 numbers each."""
    count, rng = int(rows), np.random.default_rng(0)
    centres = rng.standard_normal((4096, 384)).astype(np.float32)
    out = np.lib.format.open_memmap(path, "w+", np.float32, (count, 384))
    for first in range(0, count, 65_536):
        size = min(65_536, count - first)
        block = centres[rng.integers(0, 4096, size)]
        block = block + 0.7 * rng.standard_normal((size, 384)).astype(np.float32)
        out[first : first + size] = block / np.linalg.norm(block, axis=1, keepdims=True)
    out.flush()
    return {}


def build(vectors: str, directory: str) -> dict[str, Any]:
    """An index of vectors that are there already: seconds, peak of memory, and the estimate made before."""
    import shutil

    from psearch_jax.retrieval import collection
    from psearch_jax.retrieval.build_options import BuildOptions
    from psearch_jax.retrieval.embedding import load_embedder
    from psearch_jax.retrieval.parts import Watch
    from psearch_jax.retrieval.passages import Passage
    from psearch_jax.retrieval.vector_files import BLOCK

    shutil.rmtree(directory, ignore_errors=True)
    shape = np.load(vectors, mmap_mode="r").shape

    def blocks(first: int) -> Any:
        with open(vectors, "rb") as stream:
            stream.seek(128 + first * shape[1] * 4)
            for row in range(first, shape[0], BLOCK):
                rows = min(BLOCK, shape[0] - row)
                yield np.fromfile(stream, np.float32, rows * shape[1]).reshape(rows, -1)

    estimates: list[Any] = []
    begun = time.perf_counter()
    collection.create(
        directory,
        lambda: (Passage(str(i), "", f"passage {i}") for i in range(shape[0])),
        BuildOptions(),
        load_embedder("all-MiniLM-L6-v2"),
        source=vectors,
        vectors=lambda count: blocks,
        watch=Watch(needs=lambda needs, count: estimates.append(needs)),
    )
    size = sum(path.stat().st_size for path in Path(directory).rglob("*") if path.is_file())
    return {
        "seconds": time.perf_counter() - begun,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "estimate": estimates[0].build,
        "disk": size,
        "disk_estimate": estimates[0].disk,
    }


def scann(directory: str, queries: str) -> dict[str, Any]:
    """ScaNN as the index searches with it (candidates scored again from the file), and with other numbers of leaves."""
    from psearch_jax.retrieval.collection import open_collection

    index = open_collection(directory, verify=False).parts[0].dense
    assert index is not None
    asked = np.load(queries)
    ids, speed = timed(lambda q: index.search_vectors(q, K)[0], asked)
    results = {"scann": {"ids": ids, "queries_per_second": speed}}
    searcher = index.neighbours._searcher  # type: ignore[attr-defined]
    for leaves in (20, 40, 60, 80, 120, 160, 240):
        ids, speed = timed(
            lambda q, n=leaves: searcher.search_batched_parallel(q, K, 100, n, 128)[0], asked
        )
        results[f"scann_alone_leaves{leaves}"] = {"ids": ids, "queries_per_second": speed}
    return results


def two_wiki(shared: str, directory: str) -> dict[str, Any]:
    """The share of 2Wiki-101's questions with all gold passages among the first three, by what is asked."""
    from psearch_jax.retrieval import collection
    from psearch_jax.retrieval.build_options import BuildOptions
    from psearch_jax.retrieval.corpus import iter_corpus
    from psearch_jax.retrieval.embedding import load_embedder
    from psearch_jax.retrieval.rankers import (
        DenseRanker,
        FusedRanker,
        LexicalRanker,
        RerankedRanker,
    )
    from psearch_jax.retrieval.reranking import load_reranker
    from psearch_jax.retrieval.searcher import CachedSearcher

    embedder = load_embedder("all-MiniLM-L6-v2")
    corpus = Path(shared) / "2wiki101_corpus.jsonl"
    hashed = {"dimensions_per_block": 2, "reorder": 100}  # as 20,000 passages and more are
    if not collection.is_collection(directory):
        collection.create(
            directory,
            lambda: iter_corpus(corpus),
            BuildOptions(kind="hybrid", **hashed),
            embedder,
            source=str(corpus),
        )
    opened = collection.open_collection(directory, verify=False)
    [part] = opened.parts
    assert part.dense is not None and part.words is not None
    rankers: dict[str, Any] = {
        "exact": DenseRanker(part.dense.exact(), embedder),
        "scann": DenseRanker(part.dense, embedder),
        "bm25": LexicalRanker(part.words, "words"),
    }
    rankers["hybrid"] = FusedRanker([rankers["scann"], rankers["bm25"]])
    # No released cross-encoder can be had as a package; this one is trained by the benchmark (reranker.py).
    trained = Path(directory).with_name("reranker")
    subprocess.run(
        [sys.executable, str(Path(__file__).with_name("reranker.py")), str(trained)], check=True
    )
    reranker = load_reranker(str(trained), part="contents")
    rankers["hybrid_reranked"] = RerankedRanker(rankers["hybrid"], reranker, opened.passages, 20)
    rows = [
        json.loads(line)
        for line in (Path(shared) / "2wiki101_questions.jsonl").read_text("utf-8").splitlines()
    ]
    result: dict[str, Any] = {}
    for name, ranker in rankers.items():
        searcher = CachedSearcher(ranker, opened.passages)
        complete = {"question": 0, "gold_titles": 0}
        for row in rows:
            gold = row["metadata"]["gold_titles"]
            for how, asked in (("question", [row["question"]]), ("gold_titles", gold)):
                hits = {hit.passage.title for own in searcher.search(asked, 3) for hit in own}
                complete[how] += set(gold) <= hits
        result |= {f"{how}_{name}": count / len(rows) for how, count in complete.items()}
    result["questions"] = len(rows)
    result["question"] = result["question_exact"]
    result["hybrid_reranked"] = result["gold_titles_hybrid_reranked"]
    return result


def server(shared: str, directory: str, clients: int = 200, requests: int = 50) -> dict[str, Any]:
    """A server process under load: every answer compared with the direct call; then killed and restarted meanwhile."""
    from psearch_jax.retrieval.collection_search import SearchOptions, open_index

    titles = [
        json.loads(line)["contents"].partition("\n")[0].strip('"')
        for line in (Path(shared) / "2wiki101_corpus.jsonl").open(encoding="utf-8")
    ]
    direct = open_index(directory, SearchOptions(verify=False))
    right = dict(zip(titles, direct.search(titles, 3), strict=True))
    port = 8571
    command = [sys.executable, "-m", "psearch_jax", "serve", directory, "--port", str(port)]
    process = subprocess.Popen([*command, "--no-verify"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert any("passages" in line for line in process.stderr), "the server did not start"
        url = f"http://127.0.0.1:{port}"
        steady = asyncio.run(_load(url, titles, right, clients, requests))
        restarted = _kill_and_restart(url, process, command, titles, right)
        return steady | {"killed_and_restarted": restarted}
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


async def _load(
    url: str, titles: list[str], right: dict[str, Any], clients: int, requests: int
) -> dict[str, Any]:
    import httpx

    seconds: list[float] = []
    failures = wrong = 0
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:

        async def one(number: int) -> None:
            nonlocal failures, wrong
            rng = random.Random(number)
            for _ in range(requests):
                asked = rng.sample(titles, rng.randint(1, 8))
                begun = time.perf_counter()
                try:
                    body = {"queries": asked, "topk": 3, "return_scores": True}
                    answer = await client.post("/retrieve", json=body)
                    answer.raise_for_status()
                    seconds.append(time.perf_counter() - begun)
                    wrong += not _same(answer.json()["result"], [right[q] for q in asked])
                except httpx.HTTPError as error:
                    failures += 1
                    print(f"failed: {error!r}", file=sys.stderr)

        begun = time.perf_counter()
        await asyncio.gather(*(one(i) for i in range(clients)))
        whole = time.perf_counter() - begun
    p50, p99 = np.percentile(seconds, [50, 99])
    return {
        "requests": clients * requests,
        "failures": failures,
        "wrong": wrong,
        "p50_seconds": p50,
        "p99_over_p50": p99 / p50,
        "requests_per_second": clients * requests / whole,
    }


def _same(answer: list[list[dict]], hits: list[list[Any]]) -> bool:
    """The same passages with the same scores."""
    return [[(e["document"]["id"], e["score"]) for e in own] for own in answer] == [
        [(hit.passage.id, hit.score) for hit in own] for own in hits
    ]


def _kill_and_restart(
    url: str,
    process: subprocess.Popen[str],
    command: list[str],
    titles: list[str],
    right: dict[str, Any],
) -> dict[str, Any]:
    """Clients with repetitions while the server is killed with SIGKILL and started again: what do they lose?"""
    import threading
    from concurrent.futures import ThreadPoolExecutor

    from psearch_jax.retrieval.client import RemoteSearcher

    remote = RemoteSearcher([url], cache_size=0, timeout=20, patience=120)
    again: list[subprocess.Popen[str]] = []

    def restart() -> None:
        process.kill()
        process.wait()
        again.append(subprocess.Popen([*command, "--no-verify"], stderr=subprocess.DEVNULL))

    timer = threading.Timer(1.0, restart)
    timer.start()

    def one(number: int) -> str:
        asked = random.Random(number).sample(titles, 4)
        try:
            found = remote.search(asked, 3)
        except Exception:
            return "lost"
        ids = [[hit.passage.id for hit in hits] for hits in found]
        expected = [[hit.passage.id for hit in right[query]] for query in asked]
        return "right" if ids == expected else "wrong"

    with ThreadPoolExecutor(32) as pool:
        results = list(pool.map(one, range(2000)))
    timer.join()
    remote.close()
    again[0].terminate()
    again[0].wait(60)
    return {kind: results.count(kind) for kind in ("right", "wrong", "lost")}


def encoder(shared: str) -> dict[str, Any]:
    """Passages a second of our encoder, compiled beforehand, and of sentence-transformers: every other passage."""
    import os

    from psearch_jax.models.text_encoder import encoder_directory
    from psearch_jax.retrieval.embedding import load_embedder

    lines = (Path(shared) / "2wiki101_corpus.jsonl").read_text("utf-8").splitlines()[::2]
    passages = [json.loads(line)["contents"] for line in lines]
    embedder = load_embedder("all-MiniLM-L6-v2")
    plan = embedder.plan(passages)
    ours = embedder.embed(passages)
    begun = time.perf_counter()
    embedder.embed(passages)
    own = len(passages) / (time.perf_counter() - begun)
    import sentence_transformers
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = sentence_transformers.SentenceTransformer(
        str(encoder_directory("all-MiniLM-L6-v2")), device="cpu"
    )
    theirs = model.encode(passages[:32], batch_size=32, normalize_embeddings=True)
    begun = time.perf_counter()
    theirs = model.encode(passages, batch_size=32, normalize_embeddings=True)
    peer = len(passages) / (time.perf_counter() - begun)
    return {
        "passages_per_second": own,
        "sentence_transformers_per_second": peer,
        "ratio": own / peer,
        "padding": plan.padding,
        "smallest_cosine": float((ours * theirs).sum(1).min()),
    }


def leaves() -> dict[str, Any]:
    """Recall of the first three in the embedded world's index, by hashing alone, in a tree of √n leaves, and in one of
    2.25 √n with each vector in two of them: 500 titles and 500 titles with an attribute as queries."""
    from psearch_jax.assembly import open_backend
    from psearch_jax.config_files import resolve
    from psearch_jax.questions.world import embedded_directory
    from psearch_jax.retrieval.corpus import iter_corpus
    from psearch_jax.retrieval.embedding import load_embedder
    from psearch_jax.retrieval.neighbours import ScannNeighbours, scann_parameters
    from psearch_jax.retrieval.searcher import Searcher

    config, _ = resolve(["configs/embedded/base.yaml"])
    backend = open_backend(config.retrieval)
    assert isinstance(backend, Searcher)
    index = backend.index
    titles = [passage.title for passage in iter_corpus(embedded_directory() / "corpus.jsonl")]
    draw = random.Random(0)
    asked = [f"inhabitants {title}" for title in draw.sample(titles, 500)]
    asked += draw.sample(titles, 500)
    queries = load_embedder(config.retrieval.encoder).embed_queries(asked)
    exact, _ = index.exact().search_vectors(queries, K)
    count, dims = index.vectors_NxE.shape
    number = round(count**0.5)
    shapes = {"hashing": scann_parameters(count, dims)}
    for share in (0.05, 0.1, 0.2, 0.4):
        tree = {"leaves": number, "leaves_to_search": round(share * number)}
        shapes[f"tree_{share}"] = shapes["hashing"] | tree
        number_spilled = round(2.25 * count**0.5)
        tree = {"leaves": number_spilled, "leaves_to_search": round(share * number_spilled)}
        shapes[f"tree_spilled_{share}"] = shapes["hashing"] | tree | {"spill": True}
    result: dict[str, Any] = {"rows": count, "leaves": number}
    for name, parameters in shapes.items():
        neighbours = ScannNeighbours.build(np.asarray(index.vectors_NxE, np.float32), parameters)
        found = neighbours.candidates(queries, K)
        same = sum(
            len(set(a) & set(b)) for a, b in zip(found.tolist(), exact.tolist(), strict=True)
        )
        result[name] = same / (K * len(asked))
    return result


MEASURES: dict[str, Callable[..., dict[str, Any]]] = {
    "faiss": faiss,
    "make": make,
    "build": build,
    "scann": scann,
    "leaves": leaves,
    "2wiki": two_wiki,
    "server": server,
    "encoder": encoder,
}

if __name__ == "__main__" and len(sys.argv) > 1:
    print(json.dumps(MEASURES[sys.argv[1]](*sys.argv[2:])))
