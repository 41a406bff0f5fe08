"""Against torch and transformers: logits, gradients, exports, sentence vectors. Skipped where torch is absent."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from psearch_jax.errors import UserError
from psearch_jax.models import decoder, text_encoder, weights

torch = pytest.importorskip("torch", reason="parity tests need torch (pip install torch)")
transformers = pytest.importorskip("transformers", reason="parity tests need transformers")
torch.set_num_threads(1)

BATCH, LENGTH = 3, 11
PADDING = np.array([0, 4, 7])  # of each row


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 12,  # short, so that frequencies of all three kinds occur
}
#: Name → (family of transformers, what differs from the common sizes).
CHECKPOINTS = {
    "Qwen2.5 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "Qwen2.5 untied": ("Qwen2", {"tie_word_embeddings": False}),
    "Qwen3": ("Qwen3", {"tie_word_embeddings": False, "head_dim": 12}),
    "Llama 3": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "SmolLM2": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
}


@pytest.fixture(scope="module", params=CHECKPOINTS.values(), ids=CHECKPOINTS.keys())
def checkpoint(request, tmp_path_factory):
    """A random model of transformers with every tensor random, saved; biases and norms are not left at 0 and 1."""
    family, differences = request.param
    sizes = {
        "vocab_size": 67,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_theta": 5000.0,
        "rms_norm_eps": 1e-5,
        "attn_implementation": "eager",
    }
    config = getattr(transformers, f"{family}Config")(**sizes | differences)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    path = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(path)
    return path, model


def batch_of(side):
    """Tokens, attention mask and positions of rows padded on one side."""
    tokens = np.random.default_rng(0).integers(1, 67, (BATCH, LENGTH))
    columns = np.arange(LENGTH)
    real = LENGTH - PADDING[:, None]
    mask = columns < real if side == "right" else columns >= PADDING[:, None]
    positions = np.where(mask, np.cumsum(mask, 1) - 1, 0)
    return tokens, mask, positions


@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_and_gradients_match_transformers(checkpoint, side):
    path, model = checkpoint
    tokens, mask, positions = batch_of(side)
    targets = np.roll(tokens, -1, axis=1)
    scored = mask & np.roll(mask, -1, axis=1)
    scored[:, -1] = False
    model.zero_grad()
    expected = model(
        input_ids=torch.tensor(tokens),
        attention_mask=torch.tensor(mask.astype(int)),
        position_ids=torch.tensor(positions),
    ).logits
    loss = torch.nn.functional.cross_entropy(expected[scored], torch.tensor(targets[scored]))
    loss.backward()

    config, graphdef, params = weights.load_hf_directory(path)

    @jax.jit
    def ours(params):
        hidden = decoder.hidden_states(
            graphdef, params, jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(mask, int)
        )
        logits = decoder.unembed(graphdef, params, hidden)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
        return -jnp.sum(jnp.where(scored, picked, 0.0)) / scored.sum(), logits

    (value, logits), gradient = jax.value_and_grad(ours, has_aux=True)(params)
    np.testing.assert_allclose(np.asarray(logits)[mask], expected.detach().numpy()[mask], atol=1e-4)
    np.testing.assert_allclose(value, loss.item(), rtol=1e-5)
    named = dict(model.named_parameters())
    exported = weights.to_hf_tensors(config, gradient, np.float32)
    assert set(exported) == set(named)
    for name, tensor in exported.items():
        theirs = named[name].grad.numpy()
        # The gradient of a key bias is zero in theory (it shifts all scores alike), so relative to at least 1e-3.
        error = np.linalg.norm(tensor - theirs) / max(np.linalg.norm(theirs), 1e-3)
        assert error <= 1e-4, (name, error)


def test_transformers_loads_our_export(checkpoint, tmp_path):
    """Through scanned storage and back, generation settings included; the logits are those of the source."""
    path, model = checkpoint
    config, _, params = weights.load_hf_directory(path)
    weights.save_hf_directory(
        tmp_path, config, params, dtype="float32", generation={"eos_token_id": 1, "pad_token_id": 0}
    )
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager"
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert again.dtype == torch.float32
    assert again.generation_config.eos_token_id == 1
    tokens = torch.tensor(batch_of("right")[0])
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_a_deep_checkpoint_is_stacked_on_reading_with_the_same_logits(checkpoint, monkeypatch):
    path, model = checkpoint
    config, _, params = weights.load_hf_directory(path)
    deep = replace(config, max_unrolled_layers=2)
    stacked = weights.from_hf_tensors(deep, weights.to_hf_tensors(config, params, np.float32))
    graphdef, _ = decoder.abstract_params(deep)
    tokens = jnp.asarray(batch_of("right")[0])
    positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
    hidden = decoder.hidden_states(graphdef, stacked, tokens, positions, jnp.ones_like(tokens))
    with torch.no_grad():
        expected = model(torch.tensor(np.asarray(tokens))).logits.numpy()
    np.testing.assert_allclose(decoder.unembed(graphdef, stacked, hidden), expected, atol=1e-4)


SUBJECTS = ("Lyon", "the river Rhône", "hydrogen", "10^5×5.22 people", "Zürich's old town")
FORMS = (
    "population of {}",
    "{}",
    "Where is {} and why would anyone want to go there in the winter of 1961?",
    "capital: {}",
    "{} — first seen in 1766",
    "a ## b {}",
    "élan, naïveté & {}",
    "{} is larger than the others, but smaller than it was",
    "What is the atomic number of {}?",
    "<search>{}</search>",
)


def test_sentence_vectors_match_transformers():
    """50 sentences of MiniLM, padded in one batch: cosine >= 0.9999 with BertModel, mean pooling."""
    try:
        directory = text_encoder.encoder_directory("all-MiniLM-L6-v2")
    except UserError as error:
        pytest.skip(str(error))
    _, graphdef, params, tokenizer = text_encoder.load_text_encoder("all-MiniLM-L6-v2")
    texts = [form.format(subject) for form in FORMS for subject in SUBJECTS]
    batch = tokenizer(texts, padding=True, return_tensors="np")
    mask = batch["attention_mask"]
    model = transformers.BertModel.from_pretrained(directory, attn_implementation="eager").eval()
    with torch.no_grad():
        states = model(
            input_ids=torch.tensor(batch["input_ids"]), attention_mask=torch.tensor(mask)
        ).last_hidden_state.numpy()
    expected = (states * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    ours = text_encoder.encode(graphdef, params, jnp.asarray(batch["input_ids"]), jnp.asarray(mask))
    assert len(texts) == 50
    np.testing.assert_allclose(np.linalg.norm(ours, axis=1), 1, atol=1e-5)
    assert (np.asarray(ours) * expected).sum(1).min() >= 0.9999
