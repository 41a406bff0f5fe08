"""Tokenizers of a few dozen pieces, a policy that often writes tags, and a corpus in a dict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import jax
import jax.numpy as jnp
from flax import nnx
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from psearch_jax.config import ProtocolConfig, RolloutConfig
from psearch_jax.models.decoder import DecoderConfig, init_params
from psearch_jax.questions.question import Question
from psearch_jax.retrieval.passages import Hit, Passage
from psearch_jax.rollout.episode import Request

LETTERS = ["a", "b", "c", " ", "\n", "#", ":", "?", "1", "2", "n", "o", "e"]
TAGS = [
    f"<{slash}{word}>"
    for word in ("think", "search", "information", "answer")
    for slash in ("", "/")
]

#: Pieces of each toy tokenizer, and what likes to follow what.
PIECES = {
    # every tag is one token
    "whole": [*TAGS, *LETTERS, "##"],
    # tags are split, and their last piece may carry text
    "split": [
        "<",
        "</",
        "think",
        "search",
        "information",
        "answer",
        ">",
        ">\n",
        ">.",
        "b</",
        "##",
        *LETTERS,
    ],
    # `>` never stands alone
    "glued": [
        *(
            "<think>",
            "</think>",
            "<sea",
            "rch>",
            "rch>a",
            "</sea",
            "<ans",
            "wer>",
            "wer>\n\n",
            "</ans",
        ),
        *("<info", "rmation>", "</info", *LETTERS),
    ],
}
FOLLOWS = {
    "whole": [
        ("\n </information>", "<search> <answer>"),
        ("<search> <answer> ##", "a b c"),
        ("a b c", "</search> </answer> ## b"),
    ],
    "split": [
        ("\n", "<"),
        ("<", "search answer"),
        ("</ b</", "search answer"),
        ("search answer think", "> >\n >."),
        ("> >\n >. a b ##", "a b </ b</ ##"),
    ],
    "glued": [
        ("\n rmation>", "<sea <ans"),
        ("<sea </sea", "rch> rch>a"),
        ("<ans </ans", "wer> wer>\n\n"),
        ("rch> rch>a wer> a", "a </sea </ans"),
    ],
}
Follows = Sequence[tuple[str, str]]  # (pieces, pieces that like to follow them), split at blanks


def make_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer that knows only the pieces of `kind`; other characters become `?`."""
    pieces = PIECES[kind]
    vocabulary = [("<|pad|>", 0.0), ("<|end|>", 0.0)] + [(p, -10.0 / len(p)) for p in pieces]
    tokenizer = Tokenizer(
        models.Unigram(vocabulary, unk_id=2 + pieces.index("?"), byte_fallback=False)
    )
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<|pad|>", "<|end|>")]
    )
    tokenizer.add_tokens(
        [AddedToken(p, normalized=False) for p in pieces if kind == "whole" and p in TAGS]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>", unk_token="?"
    )


def make_policy(
    tokenizer: PreTrainedTokenizerFast,
    follows: Follows,
    *,
    strength: float = 7.0,
    mixing: float = 0.3,
    seed: int = 0,
) -> tuple[DecoderConfig, nnx.GraphDef, nnx.State]:
    """A real decoder whose next token mostly depends on the last one, as `follows` says.

    Embeddings are one-hot and the head is a table of successors; attention and MLP add what the rest of the
    sequence has to say, scaled by `mixing` (0: a pure table).
    """
    size = len(tokenizer)
    width = size + size % 2
    config = DecoderConfig(
        vocab_size=size,
        hidden_size=width,
        intermediate_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        tie_embeddings=False,
    )
    graphdef, params = init_params(config, jax.random.key(seed))
    table_VxV = jnp.zeros((size, size))
    vocabulary = tokenizer.get_vocab()
    for firsts, seconds in follows:
        for first in firsts.split(" "):
            for second in seconds.split(" "):
                table_VxV = table_VxV.at[vocabulary[first], vocabulary[second]].set(strength)
    for layer in params["layers"].values():
        for matrix in (layer["self_attn"]["o_proj"]["kernel"], layer["mlp"]["down_proj"]["kernel"]):
            matrix.set_value(matrix.get_value() * mixing)
    head_DxV = params["lm_head"]["kernel"].get_value().at[:size].add(table_VxV / width**0.5)
    params["lm_head"]["kernel"].set_value(head_DxV)
    params["embed_tokens"]["embedding"].set_value(jnp.eye(size, width))
    return config, graphdef, params


def chain(*pieces: str) -> Follows:
    """Write these pieces one after the other; no piece may occur twice."""
    assert len(set(pieces)) == len(pieces)
    return list(pairwise(pieces))


@dataclass
class Corpus:
    """Answers every query with passages made from it; counts what it was asked."""

    passages: int = 2
    suffix: str = ""

    def __post_init__(self) -> None:
        self.calls: list[list[str]] = []

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        self.calls.append(list(queries))
        return [
            [
                Hit(
                    Passage(f"{query}-{i}", "c", f"{query[:4]} {'abc'[i % 3]}{self.suffix}"),
                    1.0 - i,
                )
                for i in range(min(k, self.passages if "c" not in query else 0))
            ]
            for query in queries
        ]


PROTOCOL = ProtocolConfig(
    prompt="{question}\n",
    turn_tokens=8,
    max_search_turns=2,
    observation_tokens=24,
    feedback="??\n",
    after_information="\n",
)
ROLLOUT = RolloutConfig(
    slots=4,
    context=96,
    decode_block=5,
    append_buckets=(8, 32),
    window_buckets=(32, 64, 96),
)


def make_requests(
    tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str], members: int = 1
) -> list[Request]:
    """`members` requests a prompt, side by side."""
    return [
        Request(
            question=Question(id=f"q{group}", text=prompt, golden_answers=("a",)),
            prompt_ids=tuple(tokenizer.encode(prompt, add_special_tokens=False)),
            group=group,
            member=member,
        )
        for group, prompt in enumerate(prompts)
        for member in range(members)
    ]
