"""Vectors and indexes for tests."""

import numpy as np

from psearch_jax.retrieval.index import Index
from psearch_jax.retrieval.manifest import Manifest
from psearch_jax.retrieval.neighbours import ExactNeighbours


def exact_index(vectors_NxE: np.ndarray) -> Index:
    manifest = Manifest(
        kind="exact",
        corpus="",
        count=len(vectors_NxE),
        dims=vectors_NxE.shape[1],
        encoder="",
        encoder_hash="",
        embed="text",
        parameters={},
        versions={},
        files={},
    )
    return Index(manifest, vectors_NxE, ExactNeighbours(vectors_NxE))


def clustered_vectors(count: int, dims: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((64, dims))
    vectors = centres[rng.integers(0, 64, count)] + 0.7 * rng.standard_normal((count, dims))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
