"""Reranking: scores are the cross-encoder's, whatever the batch, in few shapes; the order follows them."""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models.tiny_bert import SIZES, VOCABULARY, write_bert, write_json

from psearch_jax.config import MeshConfig
from psearch_jax.errors import UserError
from psearch_jax.mesh import make_mesh
from psearch_jax.retrieval.passages import Hit, Passage
from psearch_jax.retrieval.reranking import Reranker, load_reranker

QUERIES = ["lyon", "a river in lyon", "city: x"]
TEXTS = ["lyon is a city", "the river", "z " * 25, "q. r. s", "in " * 70]
PAIRS = [(query, text) for query in QUERIES for text in TEXTS]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Every shape is compiled: small is quick.
    return write_bert(tmp_path_factory.mktemp("reranker"), head=True, num_hidden_layers=1)


@pytest.fixture(scope="module")
def reranker(directory: Path) -> Reranker:
    return load_reranker(str(directory))


def counting(calls: list[tuple[int, int]], **options: object) -> Reranker:
    """A reranker without weights: a pair's score is the number of the passage's letters minus the query's."""

    def tokenize(pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        return [([1] * (len(q) + len(p) + 1), [0] * (len(q) + 1) + [1] * len(p)) for q, p in pairs]

    def score(tokens: np.ndarray, types: np.ndarray, mask: np.ndarray) -> jax.Array:
        calls.append(tokens.shape)
        assert (tokens[mask == 0] == 0).all() and (types[mask == 0] == 0).all()
        return jnp.asarray((types.sum(1) - ((1 - types) * mask).sum(1) + 1).astype(np.float32))

    return Reranker(
        name="counting", fingerprint="1", score=score, tokenize=tokenize, max_tokens=128, **options
    )


def hits_of(*texts: str) -> list[Hit]:
    return [Hit(Passage(str(i), "t" * i, text), 1.0 - i) for i, text in enumerate(texts)]


def test_hits_are_reordered_with_the_new_scores() -> None:
    calls: list[tuple[int, int]] = []
    hits = [hits_of("a", "bbb", "cc"), [], hits_of("dd", "d")]
    result = counting(calls).rerank(["q", "q", "qq"], hits)
    assert [[(h.passage.text, h.score) for h in own] for own in result] == [
        [("bbb", 2.0), ("cc", 1.0), ("a", 0.0)],
        [],
        [("dd", 0.0), ("d", -1.0)],
    ]
    assert result[0][0].passage is hits[0][1].passage
    cut = counting(calls).rerank(["q", "q", "qq"], hits, k=2)
    assert cut == [own[:2] for own in result]


def test_equal_scores_keep_the_order_of_before() -> None:
    hits = hits_of("aa", "bb", "c", "dd", "ccc")
    [result] = counting([]).rerank(["q"], [hits])
    assert [hit.passage.text for hit in result] == ["ccc", "aa", "bb", "dd", "c"]


def test_the_title_is_read_where_asked() -> None:
    [result] = counting([], part="contents").rerank(["q"], [hits_of("aaa", "bb", "a")])
    # "t" * i in quotes and a line break stand before the text.
    assert [(hit.passage.text, hit.score) for hit in result] == [
        ("aaa", 5.0),
        ("bb", 5.0),
        ("a", 5.0),
    ]


def test_each_distinct_pair_is_read_once() -> None:
    calls: list[tuple[int, int]] = []
    hits = hits_of("a", "b", "c")
    counting(calls).rerank(["q"] * 50, [hits] * 50)
    assert calls == [(8, 32)]


@settings(deadline=None)
@given(lengths=st.lists(st.integers(0, 120), min_size=1, max_size=90))
def test_law_06_pairs_come_in_fixed_shapes(lengths: list[int]) -> None:
    calls: list[tuple[int, int]] = []
    reranker = counting(calls)
    reranker.warm_up()
    warmed = set(calls)
    assert warmed == {(8, length) for length in (32, 64, 96, 128)}
    scores = reranker.score_pairs([("q", "p" * n) for n in lengths])
    assert scores.tolist() == [n - 1.0 for n in lengths]
    assert set(calls) == warmed == reranker.shapes_seen


def test_law_06_a_real_cross_encoder_compiles_its_shapes_once(reranker: Reranker) -> None:
    reranker.warm_up(longest=30)
    compiled = reranker._score.func._cache_size()
    assert compiled == 1
    rng = np.random.default_rng(0)
    for count in (1, 7, 30, 100):
        reranker.score_pairs([("lyon", "a " * n) for n in rng.integers(1, 20, count)])
    assert reranker._score.func._cache_size() == compiled
    reranker.warm_up()
    assert reranker._score.func._cache_size() == 2 * compiled  # lengths 32 and 64, the model's most
    reranker.score_pairs(PAIRS)
    assert reranker._score.func._cache_size() == 2 * compiled


def test_scores_match_transformers(directory: Path, reranker: Reranker) -> None:
    """Tokenised by transformers too, pairs that are cut among them."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"), pad_token="[PAD]"
    )
    made = tokenizer(
        *map(list, zip(*PAIRS, strict=True)),
        padding=True,
        truncation=True,
        max_length=64,
        return_tensors="pt",
        return_token_type_ids=True,
    )
    assert made["attention_mask"].sum(1).max() == 64
    model = transformers.BertForSequenceClassification.from_pretrained(directory).eval()
    with torch.no_grad():
        expected = model(**made).logits.numpy()[:, 0]
    np.testing.assert_allclose(reranker.score_pairs(PAIRS), expected, atol=1e-4)
    [result] = reranker.rerank([QUERIES[0]], [hits_of(*TEXTS)])
    order = np.argsort(-expected[: len(TEXTS)])
    assert [hit.passage.text for hit in result] == [TEXTS[i] for i in order]


def test_a_mesh_scores_as_one_device(directory: Path, reranker: Reranker) -> None:
    spread = load_reranker(str(directory), mesh=make_mesh(MeshConfig(data=2, fsdp=4)))
    np.testing.assert_allclose(spread.score_pairs(PAIRS), reranker.score_pairs(PAIRS), atol=1e-5)
    assert all(rows % 8 == 0 for rows, _ in spread.shapes_seen)


def test_fingerprints_tell_rerankers_apart(directory: Path, reranker: Reranker) -> None:
    others = [
        load_reranker(str(directory), part="contents"),
        load_reranker(str(directory), dtype="bfloat16"),
    ]
    prints = {reranker.fingerprint, *(other.fingerprint for other in others)}
    assert len(prints) == 3
    assert load_reranker(str(directory)).fingerprint == reranker.fingerprint


def test_what_cannot_be(directory: Path, tmp_path: Path, reranker: Reranker) -> None:
    with pytest.raises(UserError, match="'title' of a passage; use text or contents"):
        load_reranker(str(directory), part="title")
    with pytest.raises(UserError, match="'nowhere' is not a directory"):
        load_reranker("nowhere")
    with pytest.raises(ValueError, match="2 queries, 1 lists"):
        reranker.rerank(["a", "b"], [[]])
    with pytest.raises(ValueError, match="k=0"):
        reranker.rerank(["a"], [[]], k=0)
    assert reranker.rerank([], []) == []
    assert reranker.score_pairs([]).shape == (0,)
    write_bert(tmp_path / "words", head=True, vocab_size=len(VOCABULARY) - 1)
    with pytest.raises(UserError, match="token ids up to 65"):
        load_reranker(str(tmp_path / "words"))
    write_json(tmp_path / "encoder" / "config.json", {"architectures": ["BertModel"], **SIZES})
    with pytest.raises(UserError, match="'BertModel' is not supported here"):
        load_reranker(str(tmp_path / "encoder"))


def test_a_score_that_is_no_number_is_refused() -> None:
    reranker = counting([])
    reranker._score = lambda tokens, types, mask: jnp.full(len(tokens), jnp.nan)
    with pytest.raises(FloatingPointError, match="not finite"):
        reranker.score_pairs([("a", "b")])
