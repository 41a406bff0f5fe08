"""Search results in a better order: a cross-encoder reads the query and the passage together.

Pairs come in a handful of fixed shapes, as queries do in embedding.py: after a shape was seen once, nothing
compiles.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32

from psearch_jax.errors import UserError
from psearch_jax.mesh import replicated, row_shards
from psearch_jax.models import cross_encoder
from psearch_jax.models.encoder_families import EncoderUse
from psearch_jax.retrieval.embedding import (
    Batch,
    buckets_to,
    check_vocabulary,
    encoder_fingerprint,
    query_batches,
    query_rows,
    read_tokenizer,
    readable,
    up_to,
)
from psearch_jax.retrieval.passages import Hit

PAIR_LENGTHS = (32, 64, 96, 128, 192, 256, 384)
PARTS = ("text", "contents")

#: Token ids and token types (0 query, 1 passage) of a pair.
TokenPair = tuple[list[int], list[int]]


class Reranker:
    """A cross-encoder with its tokenizer.

    Attributes:
      name: what the user called it.
      fingerprint: equal for rerankers that give equal scores.
      shapes_seen: the (rows, length) shapes that went to the device.
    """

    def __init__(
        self,
        *,
        name: str,
        fingerprint: str,
        score: Callable[[np.ndarray, np.ndarray, np.ndarray], jax.Array],
        tokenize: Callable[[Sequence[tuple[str, str]]], list[TokenPair]],
        max_tokens: int,
        part: str = "text",
        row_multiple: int = 1,
    ) -> None:
        """`score` maps int32 tokens_BxL, types_BxL and mask_BxL to float32 scores_B and is compiled by its owner;
        `tokenize` maps pairs to ids and types, cut to `max_tokens`. `part`: what of a passage is read, "text" or
        "contents" (with its title). `row_multiple`: `score` wants a multiple of that many rows.

        Raises:
          UserError: another part.
        """
        if part not in PARTS:
            raise UserError(
                f"the reranker is to read the {part!r} of a passage; use {' or '.join(PARTS)}."
            )
        self.name = name
        self.fingerprint = fingerprint
        self.shapes_seen: set[tuple[int, int]] = set()
        self._score = score
        self._tokenize = tokenize
        self._part = part
        self._rows = up_to(query_rows(), row_multiple)
        self._lengths = buckets_to(max_tokens, PAIR_LENGTHS)

    def rerank(
        self, queries: Sequence[str], hits: Sequence[Sequence[Hit]], k: int | None = None
    ) -> list[list[Hit]]:
        """The hits of every query by falling score, at most k of them; equal scores keep the order of before.

        The scores of the hits that come back are the cross-encoder's logits. Each distinct pair is read once.

        Raises:
          ValueError: not as many lists of hits as queries, or k below 1.
        """
        if len(queries) != len(hits) or (k is not None and k < 1):
            raise ValueError(f"{len(queries)} queries, {len(hits)} lists of hits, k={k}")
        pairs = [
            [(query, getattr(hit.passage, self._part)) for hit in own]
            for query, own in zip(queries, hits, strict=True)
        ]
        distinct = list(dict.fromkeys(pair for own in pairs for pair in own))
        scores = dict(zip(distinct, self.score_pairs(distinct).tolist(), strict=True))
        reranked = []
        for own_pairs, own in zip(pairs, hits, strict=True):
            scored = [
                Hit(hit.passage, scores[pair]) for pair, hit in zip(own_pairs, own, strict=True)
            ]
            reranked.append(sorted(scored, key=lambda hit: -hit.score)[:k])
        return reranked

    def score_pairs(self, pairs: Sequence[tuple[str, str]]) -> Float32[np.ndarray, "N"]:
        """The logit of each (query, passage), in their order. A batch is read back after the next one was sent."""
        tokens = self._tokenize(pairs)
        scores = np.empty(len(pairs), np.float32)
        sent: deque[tuple[Batch, jax.Array]] = deque()

        def receive() -> None:
            batch, result = sent.popleft()
            scores[list(batch.texts)] = np.asarray(result)[: len(batch.texts)]

        for batch in query_batches([len(ids) for ids, _ in tokens], self._rows, self._lengths):
            sent.append((batch, self._send(batch, tokens)))
            if len(sent) > 1:
                receive()
        while sent:
            receive()
        if not np.isfinite(scores).all():
            raise FloatingPointError("the cross-encoder returned a score that is not finite")
        return scores

    def warm_up(self, longest: int | None = None) -> None:
        """Compile the shapes of pairs up to `longest` tokens (default: all), so that none compiles later."""
        for length in self._lengths:
            self._send(Batch((), self._rows, length), []).block_until_ready()
            if longest is not None and length >= longest:
                return

    def _send(self, batch: Batch, tokens: Sequence[TokenPair]) -> jax.Array:
        tokens_BxL, types_BxL, mask_BxL = np.zeros((3, batch.rows, batch.length), np.int32)
        for row, position in enumerate(batch.texts):
            ids, types = tokens[position]
            tokens_BxL[row, : len(ids)] = ids
            types_BxL[row, : len(ids)] = types
            mask_BxL[row, : len(ids)] = 1
        mask_BxL[len(batch.texts) :, 0] = 1  # an empty row attends to one token: no 0/0
        self.shapes_seen.add((batch.rows, batch.length))
        return self._score(tokens_BxL, types_BxL, mask_BxL)


def load_reranker(
    path: str, *, part: str = "text", dtype: str = "float32", mesh: Mesh | None = None
) -> Reranker:
    """The reranker of a Hugging Face directory with a BertForSequenceClassification of one output.

    A pair that is too long loses tokens of its longer side, as when the released models were trained.

    Args:
      part: what of a passage is read, "text" or "contents".
      dtype: what to compute in, "float32" or "bfloat16".
      mesh: score over all its devices.

    Raises:
      UserError: no such directory, another architecture, another part or dtype, tensors that do not fit, or a
        tokenizer that cannot be read or is that of another model.
    """
    config, graphdef, params = cross_encoder.load_cross_encoder(path, dtype)
    directory = Path(path)
    tokenizer = read_tokenizer(directory)
    check_vocabulary(directory, tokenizer, config.vocab_size)
    if mesh is not None:
        params = jax.device_put(params, replicated(mesh))
    tokenizer.enable_truncation(config.max_tokens, strategy="longest_first")
    tokenizer.no_padding()

    def tokenize(pairs: Sequence[tuple[str, str]]) -> list[TokenPair]:
        queries = readable([query for query, _ in pairs])
        passages = readable([passage for _, passage in pairs])
        encodings = tokenizer.encode_batch(list(zip(queries, passages, strict=True)))
        return [(encoding.ids, encoding.type_ids) for encoding in encodings]

    return Reranker(
        name=path,
        fingerprint=encoder_fingerprint(directory, EncoderUse(dtype=dtype)) + f"+{part}",
        score=functools.partial(cross_encoder.make_score(graphdef, mesh), params),
        tokenize=tokenize,
        max_tokens=config.max_tokens,
        part=part,
        row_multiple=row_shards(mesh, "rollout"),
    )
