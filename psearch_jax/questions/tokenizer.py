"""The small policy's tokenizer: byte-level BPE trained on the world, saved as an ordinary Hugging Face directory.

Tags, `##`, every digit and every order of magnitude (` 10^5*`, with the blank before it) are one token each, so
that a turn is short and the digits of two numbers line up.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from psearch_jax.config import ProtocolConfig
from psearch_jax.questions.world import World

PAD, END = "<|pad|>", "<|end|>"
MAGNITUDES = tuple(f" 10^{exponent}*" for exponent in range(-5, 11))


def world_texts(world: World) -> Iterable[str]:
    """What the tokenizer is trained on: every passage, and the training questions with their queries and answers."""
    for passage in world.passages:
        yield passage.text + "\n"
    for question in world.splits["train"]:
        yield question.text + "\n"
        for hop in question.metadata["queries"]:
            yield from hop
        yield from (f" {answer}\n" for answer in question.golden_answers)


def train_tokenizer(
    texts: Iterable[str], protocol: ProtocolConfig, vocab_size: int, directory: str | Path
) -> PreTrainedTokenizerFast:
    """Train on `texts`, save into `directory`, and return the loaded tokenizer."""
    pairs = (protocol.think, protocol.search, protocol.information, protocol.answer)
    whole = [tag for pair in pairs for tag in pair] + [protocol.separator, *MAGNITUDES]
    added = [AddedToken(text, normalized=False, special=False) for text in whole]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(whole),
        special_tokens=[PAD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Numbers stand in every passage; without them the merges are spent on words.
    split = (_without_magnitudes(text) for text in texts)
    tokenizer.train_from_iterator((piece for pieces in split for piece in pieces), trainer)
    tokenizer.add_tokens(added)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    fast.save_pretrained(str(directory))
    return fast


def _without_magnitudes(text: str) -> list[str]:
    for magnitude in MAGNITUDES:
        text = text.replace(magnitude, "\0")
    return text.split("\0")
