"""Retrieval against its peers: recall and speed of ScaNN, 2Wiki-101, a server under load, the encoder, memory.

    .venv/bin/python benchmarks/retrieval.py --json
    .venv/bin/python benchmarks/retrieval.py --only vectors --rows 50000

FAISS is installed into an environment of its own (runs/benchmarks/peers) by the same command. Vectors: MiniLM over real
text: passages, sentences (bare and with their title), pairs and triples of sentences and clauses of 2WikiMultihopQA and
of a sample of Wikipedia, questions of seven sets (../shared/data), and passages of the embedded world. They are kept,
and a run that is stopped goes on. Queries are questions that are not among them. Everything runs on the cores that the
process is given.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"
KEPT = Path("runs/benchmarks/retrieval")
PEERS = Path("runs/benchmarks/peers")
BATCH, K = 256, 3
QUESTIONS = (
    *("hotpotqa_dev_types", "musique_train", "musique_dev", "nq_test_1000"),
    *("triviaqa_test_1000", "popqa_test_1000", "bamboogle_test"),
)
SECTIONS = ("vectors", "leaves", "2wiki", "server", "encoder")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def texts(rows: int) -> tuple[list[str], list[str]]:
    """`rows` different real texts, and questions to search them with."""
    found: dict[str, None] = {}
    asked: list[str] = []
    for text in _sources(asked):
        text = text.strip()
        if len(text) >= 15:
            found.setdefault(text)
        if len(found) == rows:
            break
    return list(found), asked


def _sources(asked: list[str]) -> Iterator[str]:
    if SHARED.is_dir():
        questions = [
            json.loads(line)["question"]
            for name in QUESTIONS
            for line in (SHARED / f"{name}.jsonl").open(encoding="utf-8")
        ]
        asked += questions[::16]
        yield from (question for i, question in enumerate(questions) if i % 16)
        for name in ("2wiki101_corpus", "wiki18_sample_1000"):
            for line in (SHARED / f"{name}.jsonl").open(encoding="utf-8"):
                title, _, text = json.loads(line)["contents"].partition("\n")
                sentences = re.split(r"(?<=[.!?])\s+", text)
                title = title.strip('"')
                yield from (f"{title}: {sentence}" for sentence in sentences)
                for size in (1, 2, 3):
                    firsts = range(len(sentences) + 1 - size)
                    yield from (" ".join(sentences[i : i + size]) for i in firsts)
                yield from re.split(r"[,;:(]\s*", text)
                yield text
    from psearch_jax.questions.world import embedded_directory
    from psearch_jax.retrieval.corpus import iter_corpus

    for number, passage in enumerate(iter_corpus(embedded_directory() / "corpus.jsonl")):
        if number % 100 == 0:
            asked.append(passage.title)
        yield f"{passage.title}: {passage.text}"


def vectors(rows: int) -> tuple[Path, Path]:
    """Files of passage and query vectors; made once."""
    import numpy as np

    from psearch_jax.retrieval.embedding import load_embedder
    from psearch_jax.retrieval.vector_files import embedded_blocks, write_vectors
    from psearch_jax.retrieval_commands import Progress

    KEPT.mkdir(parents=True, exist_ok=True)
    passages, queries = KEPT / f"passages{rows}.npy", KEPT / f"queries{rows}.npy"
    if not queries.exists():
        found, asked = texts(rows)
        if len(found) < rows:
            raise SystemExit(f"there are {len(found)} different texts; ask for so many (--rows)")
        embedder = load_embedder("all-MiniLM-L6-v2")
        blocks = embedded_blocks(lambda a, b: found[a:b], rows, embedder, KEPT / f"{rows}.json")
        write_vectors(passages, blocks, rows, embedder.dims, "float32", Progress("vectors"))
        np.save(queries, embedder.embed_queries(asked[:2048]))
    return passages, queries


def peers() -> Path:
    """The interpreter of an environment with FAISS."""
    python = PEERS / "bin" / "python"
    if not (PEERS / "installed").exists():
        venv.create(PEERS, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "faiss-cpu", "numpy"], check=True)
        (PEERS / "installed").touch()
    return python


def measure(section: str, *more: str) -> dict[str, Any]:
    """One measurement in a process of its own, so that peaks of memory do not mix."""
    here = Path(__file__).with_name("retrieval_measures.py")
    python = str(peers()) if section == "faiss" else sys.executable
    done = subprocess.run([python, str(here), section, *more], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def recall(found: Any, exact: Any) -> float:
    """The share of the exact first K that were found."""
    return sum(len(set(a[:K]) & set(b[:K])) for a, b in zip(found, exact, strict=True)) / (
        K * len(exact)
    )


def compare_vectors(rows: int) -> dict[str, Any]:
    """ScaNN and the peers on the same vectors."""
    passages, queries = map(str, vectors(rows))
    build = measure("build", passages, str(KEPT / f"index{rows}"))
    say(f"build: {build}")
    ours = measure("scann", str(KEPT / f"index{rows}"), queries)
    theirs = measure("faiss", passages, queries)
    exact = theirs["flat"].pop("ids")
    table = []
    for name, own in [*ours.items(), *theirs.items()]:
        ids = own.pop("ids", exact)
        table.append({"search": name, "recall_at_3": recall(ids, exact), **own})
        say(json.dumps(table[-1]))
    return {
        "rows": rows,
        **beside_peers(table),
        "build_peak_over_estimate": build["peak"] / build["estimate"],
        "build": build,
        "table": table,
    }


def beside_peers(table: list[dict[str, Any]]) -> dict[str, Any]:
    """What the index's own search (`scann`) reaches, and speeds over FAISS.

    At equal recall: for every setting of HNSW the quickest row of ours, ScaNN alone among them, that finds as much; the
    smallest of these ratios. At our recall: the index's own search over the quickest HNSW that finds as much.
    """
    chosen = next(row for row in table if row["search"] == "scann")
    flat = next(row for row in table if row["search"] == "flat")
    ours = [row for row in table if row["search"].startswith("scann")]
    hnsw = [row for row in table if row["search"].startswith("hnsw")]

    def quickest(rows: list[dict[str, Any]], recall: float) -> float | None:
        found = [row["queries_per_second"] for row in rows if row["recall_at_3"] >= recall]
        return max(found, default=None)

    pairs = [(quickest(ours, row["recall_at_3"]), row["queries_per_second"]) for row in hnsw]
    ratios = [best / theirs for best, theirs in pairs if best is not None]
    as_good = quickest(hnsw, chosen["recall_at_3"])
    return {
        "recall_at_3": chosen["recall_at_3"],
        "speedup_over_faiss_flat": chosen["queries_per_second"] / flat["queries_per_second"],
        "speedup_over_hnsw_at_equal_recall": min(ratios, default=None),
        "speedup_over_hnsw_at_our_recall": (
            chosen["queries_per_second"] / as_good if as_good else None
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print nothing but the result")
    parser.add_argument("--rows", type=int, default=200_000, help="vectors to search")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="measure this alone")
    parser.add_argument("--build", type=int, help="measure only a build of so many made-up vectors")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path("runs/compiled").absolute()))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
    KEPT.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"cores": len(os.sched_getaffinity(0))}
    if arguments.build:
        made = KEPT / f"made{arguments.build}.npy"
        measure("make", str(made), str(arguments.build))
        build = measure("build", str(made), str(KEPT / "made"))
        ratio = build["peak"] / build["estimate"]
        print(json.dumps(result | {"build_peak_over_estimate": ratio, "build": build}))
        return
    wanted = arguments.only or SECTIONS
    if "vectors" in wanted:
        result |= compare_vectors(arguments.rows)
    if "leaves" in wanted:
        result["recall_at_3_by_leaves"] = measure("leaves")
    if "2wiki" in wanted:
        result["all_gold_rate_2wiki101"] = measure("2wiki", str(SHARED), str(KEPT / "2wiki"))
    if "server" in wanted:
        result["server"] = measure("server", str(SHARED), str(KEPT / "2wiki"))
    if "encoder" in wanted:
        result["encoder"] = measure("encoder", str(SHARED))
        result["encoder_over_sentence_transformers"] = result["encoder"].pop("ratio")
    print(json.dumps(result, indent=None if arguments.json else 2))


if __name__ == "__main__":
    main()
