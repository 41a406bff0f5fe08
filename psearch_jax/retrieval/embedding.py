"""Texts to unit vectors, in batches of a few fixed shapes.

Passages go through `plan` and `run`: sorted by length, packed into batches of about `batch_tokens`
tokens whose padded lengths are the few (at most `MAX_LENGTHS`) that waste least on this corpus.
Queries go through `embed_queries`: a handful of small shapes, so that a search during a rollout
never compiles after its shape was seen once, and the shape of a query depends on that query alone:
whatever is asked beside it, its vector is the same to the bit (and so is what ScaNN finds). What
the encoder's family writes before passages and queries is written on these two ways only.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32
from tokenizers import Tokenizer

from psearch_jax.errors import UserError
from psearch_jax.mesh import replicated, row_shards
from psearch_jax.models import text_encoder
from psearch_jax.models.encoder_families import EncoderUse

#: Called with (texts done, texts in all).
Progress = Callable[[int, int], None]

COMPILE_TOKENS = 4000  # compiling one more shape takes about as long as computing this many tokens
MAX_LENGTHS = 12  # different padded lengths in one plan
ROW_STEP = 16  # rows of the last, smaller batch are rounded up to a multiple of this
QUERY_LENGTHS = (8, 12, 16, 24, 32, 64, 128, 256)


def query_rows() -> int:
    """Queries of one call, always: in a call of another size the last digits of a vector would be others."""
    return 8 if jax.default_backend() == "cpu" else 64


def passage_tokens() -> int:
    """Tokens of a batch of passages, about: on a CPU as many as its caches hold."""
    return 1024 if jax.default_backend() == "cpu" else 8192


@dataclass(frozen=True)
class Batch:
    """Rows of one device call: positions in the list of texts, and the padded shape."""

    texts: tuple[int, ...]
    rows: int
    length: int


@dataclass(frozen=True)
class EmbeddingPlan:
    """Token ids of every text and the batches that cover each text once, longest first."""

    token_ids: list[list[int]]
    batches: list[Batch]

    @property
    def shapes(self) -> set[tuple[int, int]]:
        """The (rows, length) shapes that will be compiled."""
        return {(batch.rows, batch.length) for batch in self.batches}

    @property
    def padding(self) -> float:
        """The share of computed tokens that are padding, whole padding rows included."""
        computed = sum(batch.rows * batch.length for batch in self.batches)
        return 1.0 - sum(map(len, self.token_ids)) / computed if computed else 0.0


def choose_lengths(
    lengths: Sequence[int], limit: int = MAX_LENGTHS, compile_tokens: int = COMPILE_TOKENS
) -> list[int]:
    """The padded lengths for these texts, ascending, at most `limit`.

    They minimise the padded tokens plus `compile_tokens` for every length, by a dynamic programme: the cheapest
    way to cover all texts up to length j with n lengths ends with some i < j, and everything longer than i is
    padded to j.
    """
    if not len(lengths):
        return []
    top = max(lengths)
    covered = np.cumsum(np.bincount(lengths, minlength=top + 1))
    cost = np.full((limit + 1, top + 1), np.inf)
    came_from = np.zeros((limit + 1, top + 1), int)
    cost[0, 0] = 0.0
    for used in range(1, limit + 1):
        for j in range(1, top + 1):
            padded = (covered[j] - covered[:j]) * j
            candidates = cost[used - 1, :j] + padded + compile_tokens
            came_from[used, j] = int(np.argmin(candidates))
            cost[used, j] = candidates[came_from[used, j]]
    chosen, j, used = [], top, int(np.argmin(cost[:, top]))
    while j > 0:
        chosen.append(j)
        j, used = int(came_from[used, j]), used - 1
    return chosen[::-1]


def plan_batches(
    lengths: Sequence[int],
    batch_tokens: int,
    row_multiple: int = 1,
    padded_lengths: Sequence[int] = (),
) -> list[Batch]:
    """Cover texts of these token counts, longest first, by batches of at most about `batch_tokens` tokens.

    A batch that the texts of its own length do not fill takes the next shorter ones, so only the very last batch has
    empty rows. Equal lengths keep their order. row_multiple: of the rows of every batch. padded_lengths: instead of
    the best ones for these texts, for corpora that come in blocks; then the rows of the last batch are a step times a
    power of two, so that all blocks need the same few shapes.
    """
    step = math.lcm(ROW_STEP, row_multiple)
    order = np.argsort(-np.asarray(lengths, int), kind="stable")
    fixed, padded_lengths = bool(padded_lengths), padded_lengths or choose_lengths(lengths)
    batches, start = [], 0
    while start < len(order):
        longest = lengths[order[start]]
        length = next(padded for padded in padded_lengths if padded >= longest)
        rows = batch_tokens // length
        rows -= rows % (step if rows > step else row_multiple)
        rows = max(row_multiple, rows)
        taken = order[start : start + rows]
        if len(taken) < rows:
            few = step << (-(-len(taken) // step) - 1).bit_length()
            rows = min(rows, few if fixed else up_to(len(taken), step))
        batches.append(Batch(tuple(int(i) for i in taken), rows, length))
        start += len(taken)
    return batches


def query_batches(
    lengths: Sequence[int],
    rows: int,
    length_buckets: Sequence[int] = QUERY_LENGTHS,
) -> list[Batch]:
    """Cover queries by batches of so many rows, each as long as the smallest of the ascending buckets that fits."""
    by_length: dict[int, list[int]] = {}
    for i, count in enumerate(lengths):
        fitting = (length for length in length_buckets if length >= count)
        beyond = up_to(count, length_buckets[-1])
        by_length.setdefault(next(fitting, beyond), []).append(i)
    batches = []
    for length, members in sorted(by_length.items()):
        batches += [
            Batch(tuple(members[first : first + rows]), rows, length)
            for first in range(0, len(members), rows)
        ]
    return batches


def buckets_to(limit: int, buckets: Sequence[int]) -> tuple[int, ...]:
    """The buckets below a limit and the limit itself: a text of that length needs no longer row."""
    return (*(bucket for bucket in buckets if bucket < limit), limit)


def up_to(count: int, step: int) -> int:
    """The next multiple of a step."""
    return -(-count // step) * step


class Embedder:
    """An encoder with its tokenizer.

    Attributes:
      name: what the user called the encoder; told in manifests.
      fingerprint: a hash of all that decides what vectors passages and queries get; a changed one makes a new
        index. See `encoder_fingerprint`.
      dims: E, the size of a vector.
      use: the pooling and the prefixes.
      max_tokens: a longer text is cut.
      batch_tokens: tokens of one batch of passages, about.
    """

    def __init__(
        self,
        *,
        name: str,
        fingerprint: str,
        dims: int,
        encode: Callable[[np.ndarray, np.ndarray], jax.Array],
        tokenize: Callable[[Sequence[str]], list[list[int]]],
        batch_tokens: int = 8192,
        use: EncoderUse | None = None,
        row_multiple: int = 1,
        max_tokens: int = QUERY_LENGTHS[-1],
    ) -> None:
        """`encode` maps int32 tokens_BxL and mask_BxL to float32 vectors_BxE and is compiled by its owner;
        `tokenize` maps texts to token ids, never none for a text, cut to `max_tokens`. `row_multiple`: `encode` wants
        a multiple of that many rows."""
        self.name = name
        self.fingerprint = fingerprint
        self.dims = dims
        self.use = use or EncoderUse()
        self.batch_tokens = batch_tokens
        self.shapes_seen: set[tuple[int, int]] = set()
        self._encode = encode
        self._tokenize = tokenize
        self._row_multiple = row_multiple
        self._query_rows = up_to(query_rows(), row_multiple)
        self.max_tokens = max_tokens
        self._query_lengths = buckets_to(max_tokens, QUERY_LENGTHS)

    def plan(self, texts: Sequence[str], padded_lengths: Sequence[int] = ()) -> EmbeddingPlan:
        """Tokenise all passages at once, the passage prefix before each, and lay out their batches."""
        token_ids = self._tokenize([self.use.passage_prefix + text for text in texts])
        lengths = [len(ids) for ids in token_ids]
        batches = plan_batches(lengths, self.batch_tokens, self._row_multiple, padded_lengths)
        return EmbeddingPlan(token_ids, batches)

    def run(
        self, plan: EmbeddingPlan, first: int = 0
    ) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        """Yield (text positions, float32 unit vectors) of every batch from batch `first` on.

        A batch is read back after the next one was sent off, so the device does not wait for the host.
        """
        sent: deque[tuple[Batch, jax.Array]] = deque()
        for batch in plan.batches[first:]:
            sent.append((batch, self._send(batch, plan.token_ids)))
            if len(sent) > 1:
                done, vectors = sent.popleft()
                yield done.texts, _unit_rows(np.asarray(vectors)[: len(done.texts)])
        while sent:
            done, vectors = sent.popleft()
            yield done.texts, _unit_rows(np.asarray(vectors)[: len(done.texts)])

    def embed(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> Float32[np.ndarray, "N E"]:
        """Unit vectors of passages, in their order; equal texts are computed once and get equal vectors."""
        distinct, inverse_N = distinct_texts(texts)
        plan = self.plan(distinct)
        vectors = np.empty((len(distinct), self.dims), np.float32)
        done = 0
        for positions, batch_vectors in self.run(plan):
            vectors[list(positions)] = batch_vectors
            done += len(positions)
            if progress is not None:
                progress(done, len(distinct))
        return vectors[inverse_N]

    def embed_queries(self, queries: Sequence[str]) -> Float32[np.ndarray, "Q E"]:
        """Unit vectors of queries, the query prefix before each, by the fixed query shapes."""
        token_ids = self._tokenize([self.use.query_prefix + query for query in queries])
        vectors = np.empty((len(queries), self.dims), np.float32)
        lengths = [len(ids) for ids in token_ids]
        batches = query_batches(lengths, self._query_rows, self._query_lengths)
        sent = [(batch, self._send(batch, token_ids)) for batch in batches]
        for batch, result in sent:
            vectors[list(batch.texts)] = _unit_rows(np.asarray(result)[: len(batch.texts)])
        return vectors

    def warm_up(self) -> None:
        """Compile the query shapes ahead, so that none compiles during a rollout: the three shortest lengths that hold
        the prefix and a word."""
        [empty] = self._tokenize([self.use.query_prefix])
        lengths = [length for length in self._query_lengths if length > len(empty)]
        for length in lengths[:3]:
            self._send(Batch((), self._query_rows, length), []).block_until_ready()

    def _send(self, batch: Batch, token_ids: Sequence[Sequence[int]]) -> jax.Array:
        tokens_BxL = np.zeros((batch.rows, batch.length), np.int32)
        mask_BxL = np.zeros((batch.rows, batch.length), np.int32)
        for row, position in enumerate(batch.texts):
            ids = token_ids[position]
            tokens_BxL[row, : len(ids)] = ids
            mask_BxL[row, : len(ids)] = 1
        mask_BxL[len(batch.texts) :, 0] = 1  # an empty row attends to one token: no 0/0
        self.shapes_seen.add((batch.rows, batch.length))
        return self._encode(tokens_BxL, mask_BxL)


def distinct_texts(texts: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """Each different text once, in order of first sight; for every text its position there (int64 [N])."""
    position: dict[str, int] = {}
    inverse = np.fromiter(
        (position.setdefault(text, len(position)) for text in texts), np.int64, len(texts)
    )
    return list(position), inverse


def _unit_rows(vectors_BxE: np.ndarray) -> np.ndarray:
    """Rows of length one; NaN, infinite and zero rows are a fault of the encoder, not of the user."""
    vectors_BxE = np.asarray(vectors_BxE, np.float32)
    norms_Bx1 = np.linalg.norm(vectors_BxE, axis=1, keepdims=True)
    if not (np.isfinite(norms_Bx1).all() and (norms_Bx1 > 0).all()):
        raise FloatingPointError("the text encoder returned a vector that is zero or not finite")
    return vectors_BxE / norms_Bx1


def load_embedder(
    path_or_name: str, batch_tokens: int = 0, *, mesh: Mesh | None = None, **wanted: str
) -> Embedder:
    """The embedder of a Hugging Face directory, or of an encoder that a package carries.

    Texts are cut to the number of word pieces that the encoder was trained for (256 for MiniLM), the prefix
    included.

    Args:
      path_or_name: see `text_encoder.encoder_directory`.
      batch_tokens: of one batch of passages on one device, about; 0: see `passage_tokens`.
      mesh: embed over all its devices; the rows of a batch are spread over them.
      wanted: pooling, query_prefix, passage_prefix, dtype: see `encoder_families.find_use`.

    Raises:
      UserError: there is no such encoder, it is of another kind, its pooling is unknown, or its tokenizer cannot
        be read or is that of another model.
    """
    directory = text_encoder.encoder_directory(path_or_name)
    tokenizer = read_tokenizer(directory)
    config, use = text_encoder.read_encoder_config(path_or_name, **wanted)
    check_vocabulary(directory, tokenizer, config.vocab_size)
    graphdef, params = text_encoder.read_encoder_params(path_or_name, config)
    if mesh is not None:
        params = jax.device_put(params, replicated(mesh))
    tokenizer.enable_truncation(config.max_tokens)
    tokenizer.no_padding()

    def tokenize(texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(readable(texts))]

    shards = row_shards(mesh, "rollout")
    return Embedder(
        name=path_or_name,
        fingerprint=encoder_fingerprint(directory, use),
        dims=config.hidden_size,
        encode=functools.partial(text_encoder.make_encode(graphdef, mesh), params),
        tokenize=tokenize,
        batch_tokens=(batch_tokens or passage_tokens()) * shards,
        use=use,
        row_multiple=shards,
        max_tokens=config.max_tokens,
    )


def embed_texts(
    path_or_name: str,
    texts: Sequence[str],
    *,
    batch_tokens: int = 0,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
    **wanted: str,
) -> Float32[np.ndarray, "N E"]:
    """Unit vectors of passages, in their order; the arguments are those of `load_embedder` and `Embedder.embed`."""
    return load_embedder(path_or_name, batch_tokens, mesh=mesh, **wanted).embed(texts, progress)


def readable(texts: Sequence[str]) -> list[str]:
    """Texts without half surrogates, which no tokenizer takes."""
    return [text.encode("utf-8", "replace").decode("utf-8") for text in texts]


def read_tokenizer(directory: Path) -> Tokenizer:
    """The Rust tokenizer by itself: batches run in parallel, and transformers takes seconds to import."""
    path = directory / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise UserError(
            f"The tokenizer {path} cannot be read ({error}); give an encoder directory that has one."
        ) from error


def check_vocabulary(directory: Path, tokenizer: Tokenizer, rows: int) -> None:
    """Raise a UserError when the tokenizer knows ids that the model has no row for: they would be read as others."""
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= rows:
        raise UserError(
            f"The tokenizer in {directory} has token ids up to {largest}, but the model has {rows} rows; "
            "put the tokenizer of this model beside it."
        )


def encoder_fingerprint(directory: Path, use: EncoderUse) -> str:
    """What decides the vector of a passage, hashed (SHA-256, hex); with a query prefix, "+" and a hash of it.

    So an index is never searched with queries of another prefix, and yet vectors of passages can be taken over
    from one to the other. An encoder that is used in the plainest way (mean, no prefixes, float32) has the hash
    of its files.
    """
    digest = hashlib.sha256()
    for path in sorted([*directory.rglob("*.json"), *directory.rglob("*.safetensors")]):
        with path.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        digest.update(f"{path.relative_to(directory).as_posix()} {content}\n".encode())
    passages = digest.hexdigest()
    settings = [use.pooling, use.passage_prefix, use.dtype]
    if settings != ["mean", "", "float32"]:
        passages = hashlib.sha256(json.dumps([passages, *settings]).encode()).hexdigest()
    if not use.query_prefix:
        return passages
    return f"{passages}+{hashlib.sha256(use.query_prefix.encode()).hexdigest()[:16]}"
