"""A text encoder of no weight for tests: a token's vector is a fixed random row, a text is their mean."""

import time
import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from psearch_jax.retrieval.embedding import Embedder

VOCABULARY = 997
TABLE_VxE = np.random.default_rng(0).standard_normal((VOCABULARY, 16)).astype(np.float32)


def tokenize(texts: Sequence[str]) -> list[list[int]]:
    """[CLS]-like 1, then one id a word; at most 256."""
    return [
        [1, *(2 + zlib.crc32(word.encode()) % (VOCABULARY - 2) for word in text.split())][:256]
        for text in texts
    ]


def encode(tokens_BxL: np.ndarray, mask_BxL: np.ndarray) -> jax.Array:
    """Mean of the token rows under the mask, of length one. In NumPy: tests need not wait for compiling."""
    mask_BxLx1 = mask_BxL[..., None]
    mean_BxE = (TABLE_VxE[tokens_BxL] * mask_BxLx1).sum(1) / mask_BxLx1.sum(1)
    unit_BxE = mean_BxE / np.linalg.norm(mean_BxE, axis=1, keepdims=True)
    return jnp.asarray(unit_BxE.astype(np.float32))


def tiny_embedder(
    *,
    batch_tokens: int = 512,
    fingerprint: str = "tiny-1",
    calls: list[tuple[int, int]] | None = None,
    seconds: float = 0.0,
) -> Embedder:
    """`calls` collects the shapes of the device calls; `seconds` slows every call down."""

    def recorded(tokens_BxL: np.ndarray, mask_BxL: np.ndarray) -> jax.Array:
        if calls is not None:
            calls.append(tokens_BxL.shape)
        time.sleep(seconds)
        return encode(tokens_BxL, mask_BxL)

    return Embedder(
        name="tiny",
        fingerprint=fingerprint,
        dims=TABLE_VxE.shape[1],
        encode=recorded,
        tokenize=tokenize,
        batch_tokens=batch_tokens,
    )
