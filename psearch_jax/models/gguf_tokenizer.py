"""The tokenizer that a GGUF file carries: its vocabulary, merges, special tokens and chat template.

A file names how text is cut before merging (`tokenizer.ggml.pre`) instead of saying it; the table here says it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as cut
from transformers import PreTrainedTokenizerFast

from psearch_jax.errors import UserError

#: Kinds of tokens in `tokenizer.ggml.token_type`.
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5


def _words(digits: int) -> cut.PreTokenizer:
    """The pattern of GPT-4 and its followers, with numbers cut into pieces of `digits`."""
    number = r"\p{N}" if digits == 1 else rf"\p{{N}}{{1,{digits}}}"
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + number
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return cut.Sequence(
        [
            cut.Split(Regex(pattern), behavior="isolated"),
            cut.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2(single_digits: bool) -> cut.PreTokenizer:
    byte_level = cut.ByteLevel(add_prefix_space=False, use_regex=True)
    return (
        cut.Sequence([cut.Digits(individual_digits=True), byte_level])
        if single_digits
        else byte_level
    )


#: `tokenizer.ggml.pre` → how text is cut.
CUTS: dict[str, Callable[[], cut.PreTokenizer]] = {
    "smollm": lambda: _gpt2(single_digits=True),
    "gpt-2": lambda: _gpt2(single_digits=False),
    "llama-bpe": lambda: _words(digits=3),
    "qwen2": lambda: _words(digits=1),
}


def read_tokenizer(metadata: Mapping[str, Any], path: Path) -> PreTrainedTokenizerFast:
    """Build the tokenizer from a file's metadata; `path` is for messages.

    Tokens of the kind "unused" (rows that pad the table) are left out.

    Raises:
      UserError: there is none, or it is of a kind that is not supported.
    """
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in CUTS:
        raise UserError(
            f"{path} has a tokenizer of kind {kind!r} with pre-tokenizer {pre!r}, which is not supported (supported: "
            f"'gpt2' with {', '.join(CUTS)}); use the model's Hugging Face directory."
        )
    try:
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        kinds: list[int] = metadata["tokenizer.ggml.token_type"]
        merges = [tuple(pair.split(" ")) for pair in metadata["tokenizer.ggml.merges"]]
        vocabulary = {
            token: i
            for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind != UNUSED
        }
        # Llama 3 lists whole words that no merges lead to.
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe")
    except (
        Exception
    ) as error:  # the library raises bare Exception for merges outside the vocabulary
        raise UserError(f"{path} has a broken tokenizer ({error!r}); fetch it again.") from error
    tokenizer = Tokenizer(model)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = CUTS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == CONTROL, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (CONTROL, USER_DEFINED)
        ]
    )
    names = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id",
    }
    special = {
        ours: tokens[metadata[f"tokenizer.ggml.{theirs}"]]
        for ours, theirs in names.items()
        if metadata.get(f"tokenizer.ggml.{theirs}") is not None
    }
    if metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") and "bos_token" in special:
        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B:1",
            special_tokens=[(bos, vocabulary[bos])],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **special,
    )
