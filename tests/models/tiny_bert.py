"""Small random BERT checkpoints on disk, in Hugging Face's layout, with a word-piece tokenizer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

LETTERS = "abcdefghijklmnopqrstuvwxyz:."
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "query", "passage", "lyon", "city", "river", "in"]
VOCABULARY = [*WORDS, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
SIZES = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def write_bert(
    directory: Path, *, head: bool = False, pooling: str = "", seed: int = 0, **values: Any
) -> Path:
    """Write an encoder, or with `head` a cross-encoder. `pooling` "" writes no pooling file; `values` go into
    config.json."""
    config = {
        "architectures": ["BertForSequenceClassification" if head else "BertModel"],
        "model_type": "bert",
        "hidden_act": "gelu",
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        **({"id2label": {"0": "LABEL_0"}} if head else {}),
        **SIZES,
        **values,
    }
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", config)
    save_file(tensors(config, head, seed), directory / "model.safetensors", {"format": "pt"})
    tokenizer().save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"},
    )
    if pooling:
        write_json(directory / "1_Pooling" / "config.json", {"pooling_mode": pooling})
    return directory


def write_json(path: Path, value: Any) -> None:
    """Write JSON, folder and all."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def tensors(config: dict[str, Any], head: bool, seed: int) -> dict[str, np.ndarray]:
    """Random float32 tensors under the names of BertModel or BertForSequenceClassification; none is left at 0 or 1."""
    rng = np.random.default_rng(seed)
    d, f = config["hidden_size"], config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], d),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], d),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], d),
    }
    linears = {"pooler.dense": (d, d)}
    norms = ["embeddings.LayerNorm"]
    for i in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            linears[f"{layer}.attention.{name}"] = (d, d)
        linears[f"{layer}.intermediate.dense"] = (f, d)
        linears[f"{layer}.output.dense"] = (d, f)
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    values = {
        name: (0.3 * rng.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }
    for name in norms:
        values[f"{name}.weight"] = (1 + 0.3 * rng.standard_normal(d)).astype(np.float32)
        values[f"{name}.bias"] = (0.3 * rng.standard_normal(d)).astype(np.float32)
    if head:
        values = {f"bert.{name}": value for name, value in values.items()}
        labels = len(config["id2label"])
        values["classifier.weight"] = rng.standard_normal((labels, d)).astype(np.float32)
        values["classifier.bias"] = rng.standard_normal(labels).astype(np.float32)
    return values


def tokenizer() -> Tokenizer:
    """BERT's way of cutting words, over `VOCABULARY`."""
    ids = {word: i for i, word in enumerate(VOCABULARY)}
    result = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    result.normalizer = normalizers.BertNormalizer()
    result.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    result.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return result
