"""The cross-encoder: parity with transformers, token types, padding, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.tiny_bert import SIZES, write_bert, write_json

from psearch_jax.config import MeshConfig
from psearch_jax.errors import UserError
from psearch_jax.mesh import make_mesh
from psearch_jax.models import cross_encoder

SCORE = jax.jit(cross_encoder.score, static_argnums=0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_bert(tmp_path_factory.mktemp("cross-encoder"), head=True)


@pytest.fixture(scope="module")
def loaded(directory):
    return cross_encoder.load_cross_encoder(directory)


def pairs(rows=8, length=24, seed=0):
    """Tokens, types and mask: a query, a passage, padding."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, SIZES["vocab_size"], (rows, length)).astype(np.int32)
    ends = rng.integers(4, length + 1, (rows, 1))
    types = (np.arange(length) >= rng.integers(1, 4, (rows, 1))).astype(np.int32)
    mask = (np.arange(length) < ends).astype(np.int32)
    return tokens, types * mask, mask


def test_logits_match_transformers(directory, loaded):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config, graphdef, params = loaded
    tokens, types, mask = pairs()
    model = transformers.BertForSequenceClassification.from_pretrained(
        directory, attn_implementation="eager"
    ).eval()

    def theirs(types):
        with torch.no_grad():
            return model(
                input_ids=torch.tensor(tokens.astype(int)),
                token_type_ids=torch.tensor(types.astype(int)),
                attention_mask=torch.tensor(mask.astype(int)),
            ).logits.numpy()[:, 0]

    expected = theirs(types)
    scores = SCORE(graphdef, params, tokens, types, mask)
    assert scores.shape == (8,)
    np.testing.assert_allclose(scores, expected, atol=1e-4)
    assert np.abs(expected - theirs(0 * types)).max() > 1e-2  # the types do matter here

    _, graphdef, params = cross_encoder.load_cross_encoder(directory, "bfloat16")
    half = SCORE(graphdef, params, tokens, types, mask)
    assert half.dtype == jnp.float32
    np.testing.assert_allclose(half, expected, atol=0.15)
    assert np.abs(half - expected).max() > 1e-4  # it does compute in bfloat16


def test_law_10_padding_and_neighbours_do_not_change_a_score(loaded):
    _, graphdef, params = loaded
    tokens, types, mask = pairs()
    together = SCORE(graphdef, params, tokens, types, mask)
    for row in (int(mask.sum(1).argmin()), int(mask.sum(1).argmax())):
        end = mask[row].sum()
        alone = SCORE(graphdef, params, *(x[row : row + 1, :end] for x in (tokens, types, mask)))
        np.testing.assert_allclose(together[row], alone[0], atol=1e-4)


def test_a_mesh_gives_the_scores_of_one_device(loaded):
    _, graphdef, params = loaded
    made = cross_encoder.make_score(graphdef, make_mesh(MeshConfig(data=2, fsdp=4)))
    scores = made(params, *pairs())
    np.testing.assert_allclose(scores, SCORE(graphdef, params, *pairs()), atol=1e-5)
    assert len(scores.sharding.device_set) == 8


def test_too_long_pairs_are_a_user_error(loaded):
    row = jnp.ones((1, 65), jnp.int32)
    with pytest.raises(UserError, match="65 tokens"):
        cross_encoder.score(*loaded[1:], row, row, row)


def test_the_longest_pair_is_what_the_tokenizer_says(tmp_path):
    write_bert(tmp_path, head=True)
    for said, tokens in ((40, 40), (10**30, 64)):
        write_json(tmp_path / "tokenizer_config.json", {"model_max_length": said})
        assert cross_encoder.load_cross_encoder(tmp_path)[0].max_tokens == tokens


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"architectures": ["BertModel"]}, "'BertModel' .* BertForSequenceClassification"),
        ({"model_type": "xlm-roberta"}, "model_type 'xlm-roberta' .* only 'bert' is"),
        ({"id2label": {"0": "no", "1": "maybe", "2": "yes"}}, "3 labels"),
        ({"id2label": None}, "2 labels"),
    ],
)
def test_what_is_no_cross_encoder_is_named(tmp_path, values, words):
    write_bert(tmp_path, head=True)
    config = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "x"}, **SIZES}
    write_json(tmp_path / "config.json", config | values)
    with pytest.raises(UserError, match=words):
        cross_encoder.load_cross_encoder(tmp_path)


def test_what_is_missing_is_named(tmp_path, directory):
    with pytest.raises(UserError, match="'nowhere' is not a directory"):
        cross_encoder.load_cross_encoder("nowhere")
    with pytest.raises(UserError, match="'half'"):
        cross_encoder.load_cross_encoder(directory, "half")
    write_bert(tmp_path)  # without the head
    write_json(
        tmp_path / "config.json",
        {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "x"}, **SIZES},
    )
    with pytest.raises(UserError, match=r"missing classifier\.weight"):
        cross_encoder.load_cross_encoder(tmp_path)
