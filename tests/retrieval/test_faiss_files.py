"""FAISS's flat files: read as FAISS writes them, refused when they are something else."""

import struct
from pathlib import Path

import numpy as np
import pytest
from retrieval.samples import clustered_vectors
from retrieval.tiny_encoder import tiny_embedder

from psearch_jax.errors import UserError
from psearch_jax.retrieval import faiss_files
from psearch_jax.retrieval.build_options import BuildOptions
from psearch_jax.retrieval.collection import create, open_collection
from psearch_jax.retrieval.faiss_files import matching_blocks, read_flat
from psearch_jax.retrieval.passages import Passage

VECTORS = clustered_vectors(40, 16, 0)
CORPUS = [Passage(f"p{i}", "", f"text {i}") for i in range(40)]


def flat(path: Path, vectors: np.ndarray = VECTORS, letters: bytes = b"IxFI", cut: int = 0) -> Path:
    count, dims = vectors.shape
    head = struct.pack("<4siqqqBi", letters, dims, count, 1 << 20, 1 << 20, 1, 0)
    content = head + struct.pack("<q", vectors.size) + vectors.astype("<f4").tobytes()
    path.write_bytes(content[: len(content) - cut])
    return path


def test_imported_without_embedding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faiss_files, "BLOCK", 7)
    file = read_flat(flat(tmp_path / "e5_Flat.index"))
    calls: list[tuple[int, int]] = []
    create(
        tmp_path / "index",
        lambda: iter(CORPUS),
        BuildOptions(kind="exact"),
        tiny_embedder(calls=calls),
        source="faiss",
        vectors=lambda count: matching_blocks(file, count, 16),
    )
    assert not calls
    [part] = open_collection(tmp_path / "index").parts
    np.testing.assert_allclose(part.dense.vectors_NxE, VECTORS, atol=1e-6)
    found, _ = part.dense.search_vectors(VECTORS, 1)
    assert found[:, 0].tolist() == list(range(40))


def test_the_real_file_of_the_sample(shared_data: Path) -> None:
    file = read_flat(shared_data / "wiki18_sample_e5_flat.index")
    assert (file.count, file.dims) == (1000, 768)
    vectors = np.concatenate(list(file.blocks(0)))
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert np.array_equal(np.argmax(vectors @ vectors.T, axis=1), np.arange(1000))
    assert np.array_equal(next(file.blocks(990)), vectors[990:])


def test_what_is_no_flat_index_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.index"
    for make, says in (
        (lambda: None, "cannot be read"),
        (lambda: path.write_bytes(b"short"), "no flat FAISS index"),
        (lambda: flat(path, letters=b"IHNf"), "no flat FAISS index"),
        (lambda: flat(path, cut=4), "damaged"),
    ):
        make()
        with pytest.raises(UserError, match=says):
            read_flat(path)


def test_a_corpus_an_encoder_or_vectors_that_do_not_fit(tmp_path: Path) -> None:
    file = read_flat(flat(tmp_path / "a"))
    with pytest.raises(UserError, match="40 vectors and the corpus 41 passages"):
        matching_blocks(file, 41, 16)
    with pytest.raises(UserError, match="vectors of 16 numbers and the encoder makes 384"):
        matching_blocks(file, 40, 384)
    for row, value, says in ((3, np.nan, "vector 3 has the length nan"), (5, 9.0, "vector 5")):
        wrong = VECTORS.copy()
        wrong[row, 0] = value
        with pytest.raises(UserError, match=says):
            list(read_flat(flat(tmp_path / "b", wrong)).blocks(0))
