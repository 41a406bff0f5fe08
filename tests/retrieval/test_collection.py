"""Collections: built whole, gone on with after a kill, added to and deleted from, never a wrong passage."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from retrieval.tiny_encoder import tiny_embedder

from psearch_jax.config import MeshConfig
from psearch_jax.errors import UserError
from psearch_jax.mesh import make_mesh
from psearch_jax.retrieval import build_options, collection, vector_files
from psearch_jax.retrieval.build_options import BuildOptions, estimate
from psearch_jax.retrieval.collection import add, create, delete, open_collection, read_state
from psearch_jax.retrieval.collection_search import CollectionSearcher, SearchOptions
from psearch_jax.retrieval.manifest import MANIFEST
from psearch_jax.retrieval.parts import Watch
from psearch_jax.retrieval.passages import Passage

TEXT = "population area capital currency Lyon Turin France Italy city river old large"
WORDS = TEXT.split(" ")
EXACT = BuildOptions(kind="exact")


def passages(first: int, count: int) -> list[Passage]:
    rng = np.random.default_rng(first)
    return [
        Passage(f"p{i}", f"T{i}", f"{' '.join(rng.choice(WORDS, 4))} number{i}")
        for i in range(first, first + count)
    ]


CORPUS = passages(0, 60)


def build(directory: Path, options: BuildOptions = EXACT, corpus=CORPUS, **more):
    embedder = None if options.kind == "bm25" else tiny_embedder(calls=more.pop("calls", None))
    return create(directory, lambda: iter(corpus), options, embedder, source="test", **more)


def searcher(directory: Path, **options) -> CollectionSearcher:
    follow = options.pop("follow", False)
    kind = read_state(directory).options["kind"]
    embedder = None if kind == "bm25" else tiny_embedder()
    return CollectionSearcher(directory, embedder, SearchOptions(**options), follow=follow)


def ids(found: CollectionSearcher, query: str, k: int = 3) -> list[str]:
    return [hit.passage.id for hit in found.search([query], k)[0]]


@pytest.mark.parametrize("kind", ["exact", "scann", "bm25", "hybrid"])
def test_every_kind_finds_a_passage_by_its_own_text(tmp_path: Path, kind: str) -> None:
    build(tmp_path / "index", BuildOptions(kind=kind))
    found = searcher(tmp_path / "index")
    for passage in CORPUS[:10]:
        [hit, *_] = found.search([passage.contents], 3)[0]
        assert hit.passage == passage
    assert sorted(p.name for p in tmp_path.iterdir()) == ["index"]
    assert len(found) == 60


def test_shards_answer_as_the_whole(tmp_path: Path) -> None:
    """Hashing with reordering, in one searcher and in four; from the file's vectors as from ScaNN's own."""
    corpus = passages(0, 400)
    asked = [passage.text for passage in corpus[::9]]
    results = []
    for name, changes in {
        "whole": {},
        "sharded": {"shard_rows": 110},
        "disk": {"shard_rows": 110, "reorder_type": "disk", "vectors": "float16"},
        "tree": {"shard_rows": 200, "leaves": 4, "leaves_to_search": 4},
    }.items():
        options = replace(BuildOptions(reorder=100, dimensions_per_block=2), **changes)
        build(tmp_path / name, options, corpus)
        found = searcher(tmp_path / name)
        results.append([[h.passage.id for h in hits] for hits in found.search(asked, 3)])
    assert results[0] == results[1] == results[2] == results[3]
    shards = sorted((tmp_path / "sharded" / "parts" / "000000" / "scann").iterdir())
    assert [shard.name for shard in shards] == ["000", "001", "002", "003"]


class Killed(BaseException):
    """Not an Exception: nothing may clean up after it."""


def test_a_killed_build_goes_on_at_its_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vector_files, "BLOCK", 16)
    whole_calls: list[tuple[int, int]] = []
    build(tmp_path / "whole", calls=whole_calls)
    killed_calls: list[tuple[int, int]] = []

    def kill(done: int, total: int) -> None:
        if done >= 32:
            raise Killed

    with pytest.raises(Killed):
        build(tmp_path / "index", calls=killed_calls, watch=Watch(embedded=kill))
    assert not (tmp_path / "index").exists()
    lines: list[str] = []
    calls: list[tuple[int, int]] = []
    build(tmp_path / "index", calls=calls, watch=Watch(say=lines.append))
    assert killed_calls + calls == whole_calls and calls
    assert "reading the corpus" not in lines
    name = Path("parts", "000000", "vectors.npy")
    assert (tmp_path / "index" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    vectors = np.load(tmp_path / "index" / name)
    expected = tiny_embedder().embed([p.contents for p in CORPUS])
    np.testing.assert_allclose(vectors, expected, atol=1e-6)


def test_an_attempt_with_other_options_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(done: int, total: int) -> None:
        raise Killed

    with pytest.raises(Killed):
        build(tmp_path / "index", watch=Watch(embedded=kill))
    build(tmp_path / "index", replace(EXACT, embed="text"), CORPUS[:20])
    assert len(open_collection(tmp_path / "index")) == 20


def test_add_and_delete_are_seen_by_a_searcher_that_follows(tmp_path: Path) -> None:
    directory = tmp_path / "index"
    build(directory, BuildOptions(kind="hybrid"))
    following, still = searcher(directory, follow=True), searcher(directory)
    text = CORPUS[7].contents
    assert ids(following, text)[0] == "p7"
    new = [Passage("new", "Fresh", "a wholly fresh passage"), *passages(100, 30)]
    add(directory, lambda: iter(new), tiny_embedder(), source="more")
    assert ids(following, "wholly fresh passage")[0] == "new"
    delete(directory, ["p7", "new"])
    assert "p7" not in ids(following, text, 60)
    assert "new" not in ids(following, "wholly fresh passage", 95)
    assert len(following) == 60 + 31 - 2
    assert ids(still, text)[0] == "p7"
    fresh = searcher(directory)
    assert fresh.fingerprint == following.fingerprint != still.fingerprint
    add(directory, lambda: iter([CORPUS[7]]), tiny_embedder(), source="again")
    assert ids(following, text)[0] == "p7"


def test_an_index_of_another_encoder_in_its_place_is_not_searched(tmp_path: Path) -> None:
    directory = tmp_path / "index"
    build(directory)
    following = searcher(directory, follow=True)
    other = tiny_embedder(fingerprint="b")
    create(directory, lambda: iter(CORPUS), EXACT, other, source="test", replace=True)
    with pytest.raises(UserError, match="search it with the same one"):
        following.search(["Lyon"], 1)


def test_what_cannot_be_added_or_deleted(tmp_path: Path) -> None:
    directory = tmp_path / "index"
    before = build(directory)
    with pytest.raises(UserError, match="'p3' is in .* already"):
        add(directory, lambda: iter(CORPUS[3:5]), tiny_embedder(), source="x")
    with pytest.raises(UserError, match="no passage 'p99'"):
        delete(directory, ["p1", "p99"])
    with pytest.raises(UserError, match="same one"):
        add(directory, lambda: iter(passages(70, 3)), tiny_embedder(fingerprint="b"), source="x")
    assert read_state(directory) == before
    assert ids(searcher(directory), CORPUS[1].contents)[0] == "p1"


def test_there_is_room_for_all_that_were_deleted_among_the_best(tmp_path: Path) -> None:
    directory = tmp_path / "index"
    build(directory, corpus=[Passage(f"p{i}", "same", f"same text {i}") for i in range(60)])
    delete(directory, [f"p{i}" for i in range(0, 60, 2)])
    assert len(ids(searcher(directory), "same text", 25)) == 25


def test_two_builds_and_what_is_there_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "index"

    def second(done: int, total: int) -> None:
        with pytest.raises(UserError, match="Another process is building"):
            build(directory)

    first = build(directory, watch=Watch(embedded=second))
    with pytest.raises(UserError, match="there already"):
        build(directory, corpus=CORPUS[:5])
    assert read_state(directory) == first
    build(directory, corpus=CORPUS[:5], replace=True)
    assert len(open_collection(directory)) == 5
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match="there already"):
        build(tmp_path / "other", replace=True)


def test_a_full_disk_leaves_the_old_index_and_the_work_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "index"
    first = build(directory, corpus=CORPUS[:5])
    monkeypatch.setattr(vector_files, "BLOCK", 16)
    whole = vector_files.VectorFile.append

    def full(self, block) -> None:
        if self.rows >= 32:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        whole(self, block)

    monkeypatch.setattr(vector_files.VectorFile, "append", full)
    with pytest.raises(UserError, match="No space left .* as it was"):
        build(directory, replace=True)
    assert read_state(directory) == first and len(open_collection(directory)) == 5
    monkeypatch.setattr(vector_files.VectorFile, "append", whole)
    done: list[int] = []
    build(directory, replace=True, watch=Watch(embedded=lambda d, t: done.append(d)))
    assert done == [48, 60]


def test_empty_corpora_and_estimates_that_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="holds no passages"):
        build(tmp_path / "index", corpus=[])
    wiki = estimate(BuildOptions(), 21_015_324, 768, 14 << 30)
    assert wiki.search > 64e9  # reordering in float32
    small = estimate(
        BuildOptions(reorder_type="disk", shard_rows=1 << 20), 21_015_324, 768, 14 << 30
    )
    assert small.search < 6e9 and small.build < 11e9
    # What two builds took (`benchmarks/retrieval.py --only vectors`, `--build 2000000`).
    for rows, took in ((200_000, 1_911_889_920), (2_000_000, 10_092_802_048)):
        assert estimate(BuildOptions(), rows, 384, 0).build == pytest.approx(took, rel=0.15)
    free = int(0.51 * build_options.GIB)
    monkeypatch.setattr(build_options, "available_memory", lambda: free)
    with pytest.raises(UserError, match="use a machine with more memory"):
        build(tmp_path / "index", BuildOptions(kind="bm25"), passages(0, 30_000))
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == []
    monkeypatch.setattr(build_options, "available_memory", lambda: 24 << 30)
    monkeypatch.setattr(build_options, "SHARD_BYTES", 64 << 30)
    with pytest.raises(UserError, match=r"with --reorder-type bfloat16 --shard-rows 5253831"):
        build_options.refuse_what_does_not_fit(BuildOptions(), 21_015_324, 384, 1 << 30, 1 << 50)


def test_damaged_and_foreign_ones_are_refused(tmp_path: Path) -> None:
    directory = tmp_path / "index"
    with pytest.raises(UserError, match="no index of"):
        searcher(directory)
    build(directory)
    part = directory / "parts" / "000000"
    for path, content, says in (
        (directory / collection.STATE, b"{", "cannot be read"),
        (directory / collection.STATE, b'{"format": "other"}', "not written by psearch_jax"),
        (part / "vectors.npy", b"x" * 10, "bytes instead of"),
        (part / "passages.arrow", None, "missing"),
        (part / MANIFEST, b"{}", "not written by psearch_jax"),
    ):
        kept = path.read_bytes()
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(UserError, match=says):
            open_collection(directory)
        path.write_bytes(kept)
    state = json.loads((directory / collection.STATE).read_text())
    (directory / collection.STATE).write_text(json.dumps({**state, "deleted": "x.npy"}))
    with pytest.raises(UserError, match="damaged"):
        open_collection(directory)
    vectors = bytearray((part / "vectors.npy").read_bytes())
    (directory / collection.STATE).write_text(json.dumps(state))
    vectors[-1] ^= 1
    (part / "vectors.npy").write_bytes(vectors)
    with pytest.raises(UserError, match="was changed"):
        open_collection(directory)
    assert open_collection(directory, verify=False)


def test_on_the_mesh_and_with_another_encoder(tmp_path: Path) -> None:
    directory = tmp_path / "index"
    build(directory)
    mesh = make_mesh(MeshConfig(), jax.devices()[:2])
    on_mesh = searcher(directory, device_matrix="int8", mesh=mesh)
    for passage in CORPUS[:4]:
        assert ids(on_mesh, passage.text) == ids(searcher(directory), passage.text)
    with pytest.raises(UserError, match="search it with the same one"):
        CollectionSearcher(directory, tiny_embedder(fingerprint="b"), SearchOptions())
