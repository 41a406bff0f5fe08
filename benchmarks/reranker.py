"""A small cross-encoder, so that reranking can be measured where no released one can be had.

    .venv/bin/python benchmarks/reranker.py runs/benchmarks/retrieval/reranker

all-MiniLM-L6-v2 with a pooler and one output, trained to pick the passage with a title among others that look like it.
Titles and passages: the sample of Wikipedia and 2WikiMultihopQA's corpus (../shared/data) without the titles that its
questions need, so nothing that is asked later was trained on. A directory that is whole is kept.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"
QUERIES, OTHERS = 8, 5  # of a step; passages beside the right one
LENGTH = 64  # tokens of a pair; titles come first
STEPS, RATE = 200, 1e-4


def titled_passages() -> tuple[list[tuple[str, str]], list[int]]:
    """(title, contents) of all passages, and the numbers of those whose title may be trained on."""
    from psearch_jax.retrieval.passages import Passage

    rows = (SHARED / "2wiki101_questions.jsonl").read_text("utf-8").splitlines()
    asked = {title for row in rows for title in json.loads(row)["metadata"]["gold_titles"]}
    found = []
    for name in ("wiki18_sample_1000", "2wiki101_corpus"):
        for line in (SHARED / f"{name}.jsonl").open(encoding="utf-8"):
            passage = Passage.from_contents("", json.loads(line)["contents"])
            found.append((passage.title, passage.contents))
    return found, [i for i, (title, _) in enumerate(found) if title not in asked]


def look_alikes(passages: list[tuple[str, str]], rows: list[int]) -> np.ndarray:
    """[rows, C] numbers of passages of other titles, nearest first: half by MiniLM, half by words."""
    from psearch_jax.retrieval.embedding import load_embedder
    from psearch_jax.retrieval.lexical import LexicalIndex

    embedder = load_embedder("all-MiniLM-L6-v2")
    titles = embedder.embed_queries([passages[i][0] for i in rows])
    ours = embedder.embed_queries([contents[:200] for _, contents in passages])
    near = np.argsort(-(titles @ ours.T), axis=1)[:, :20]
    words = LexicalIndex.build(contents for _, contents in passages)
    ranked = words.rank([passages[i][0] for i in rows], 20)
    found = []
    for place, row in enumerate(rows):
        mixed = [
            int(x) for pair in zip(near[place], _rows(ranked[place]), strict=True) for x in pair
        ]
        others = [x for x in dict.fromkeys(mixed) if passages[x][0] != passages[row][0]]
        found.append((others * 10)[:10])
    return np.array(found)


def _rows(ranking: list[tuple[int, float]]) -> list[int]:
    rows = [row for row, _ in ranking] or [0]
    return (rows * 20)[:20]


def train(out: Path) -> None:
    """Train and write a directory that `load_reranker` reads."""
    import jax
    import jax.numpy as jnp
    import optax

    from psearch_jax.models import cross_encoder, text_encoder
    from psearch_jax.retrieval.embedding import read_tokenizer

    source = text_encoder.encoder_directory("all-MiniLM-L6-v2")
    config, _ = text_encoder.read_encoder_config(source)
    _, trunk = text_encoder.read_encoder_params(source, config)
    from flax import nnx

    model = cross_encoder.CrossEncoder(config, rngs=nnx.Rngs(params=0))
    graphdef, params = nnx.split(model, nnx.Param)
    params["trunk"] = trunk
    tokenizer = read_tokenizer(source)
    tokenizer.enable_truncation(LENGTH, strategy="longest_first")
    tokenizer.enable_padding(length=LENGTH)
    schedule = optax.warmup_cosine_decay_schedule(0.0, RATE, STEPS // 10, STEPS)
    optimizer = optax.adamw(schedule)

    @jax.jit
    def step(params: Any, state: Any, tokens: Any, types: Any, mask: Any) -> Any:
        def loss(params: Any) -> Any:
            scores = cross_encoder.score(graphdef, params, tokens, types, mask)
            right = jnp.zeros(QUERIES, jnp.int32)  # the first of each query's passages
            losses = optax.softmax_cross_entropy_with_integer_labels(
                scores.reshape(QUERIES, OTHERS + 1), right
            )
            return losses.mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    passages, rows = titled_passages()
    others = look_alikes(passages, rows)
    rng, state, losses = np.random.default_rng(0), optimizer.init(params), []
    began = time.monotonic()
    for number in range(STEPS):
        chosen = rng.choice(len(rows), QUERIES, replace=False)
        pairs = []
        for place in chosen:
            title = passages[rows[place]][0]
            beside = rng.choice(others[place], OTHERS, replace=False)
            pairs += [(title, passages[i][1]) for i in (rows[place], *beside)]
        encoded = tokenizer.encode_batch(pairs)
        arrays = (
            np.array([getattr(e, name) for e in encoded], np.int32)
            for name in ("ids", "type_ids", "attention_mask")
        )
        params, state, value = step(params, state, *arrays)
        losses.append(float(value))
        if number % 20 == 19:
            seconds = time.monotonic() - began
            print(
                f"step {number + 1} of {STEPS}: loss {np.mean(losses[-20:]):.3f}, {seconds:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    save(out, source, params)


def save(out: Path, source: Path, params: Any) -> None:
    """A Hugging Face directory, under its name only when whole."""
    from flax import nnx
    from safetensors.numpy import save_file

    from psearch_jax.models import text_encoder

    tensors = {}
    for path, leaf in nnx.to_flat_state(params):
        *place, kind = path
        value = np.asarray(leaf[...])
        if place[0] == "trunk":
            name = f"bert.{text_encoder.bert_name(tuple(place[1:]))}"
        else:
            name = {"pooler": "bert.pooler.dense", "classifier": "classifier"}[str(place[0])]
        tensors[f"{name}.{'bias' if kind == 'bias' else 'weight'}"] = np.ascontiguousarray(
            value.T if kind == "kernel" else value
        )
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text("utf-8"))
    config |= {
        "architectures": ["BertForSequenceClassification"],
        "id2label": {"0": "score"},
        "label2id": {"score": 0},
    }
    (partial / "config.json").write_text(json.dumps(config, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
        if (source / name).is_file():
            shutil.copy(source / name, partial / name)
    os.rename(partial, out)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    directory = Path(sys.argv[1])
    if not (directory / "model.safetensors").is_file():
        train(directory)
