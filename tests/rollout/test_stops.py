"""Law 3: a turn ends at the token that closes a tag, however the tag is cut into tokens."""

import base64
import importlib.util
import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from rollout import toys
from transformers import PreTrainedTokenizerFast

from psearch_jax.assembly import EMBEDDED_POLICY
from psearch_jax.config import ProtocolConfig
from psearch_jax.errors import UserError
from psearch_jax.rollout.protocol import parse_turn, stop_tags
from psearch_jax.rollout.stops import check_tags, pause_table

#: What is found in the Qwen vocabulary, by hand: `>` with text after it, the end of a word before it, `</` with
#: something in front, two tags that share a token.
LIKE_QWEN = (
    *("</", " </", ".</", "?</", '"</', ")</", "<", "search", "answer", "think", "sea", "rch"),
    *(">", ">\n\n", ">.", "><", "></", ' ">', "=>", "->", ">>", ">>>", "h>", "r>a", "</s", "/>"),
    *("</search", "</answer>", "<search>", "rch>\n", "wer", " ##", "##", "é"),
    *(chr(i) for i in range(32, 127)),
    "\n",
)
#: Turns are made of these: tags that end one, tags that do not, and what looks like tags.
PARTS = (
    *("<search>", "</search>", "<answer>", "</answer>", "</think>", "<think>", "</information>"),
    *("a", "Who?", " ", "\n\n", ".", ">", "<", "</", "search", "</sea", "rch>", "=>", " ## ", "->"),
)


def qwen() -> tuple[str, ...] | None:
    """The texts of the Qwen vocabulary where the package that carries it is installed (it is not imported)."""
    found = importlib.util.find_spec("dashscope")
    if found is None:
        return None
    path = Path(found.submodule_search_locations[0]) / "resources" / "qwen.tiktoken"
    lines = path.read_bytes().splitlines()
    return tuple(base64.b64decode(line.split()[0]).decode(errors="replace") for line in lines)


@cache
def vocabulary(name: str) -> tuple[tuple[str, ...], dict[str, list[int]], np.ndarray]:
    """Texts of the tokens, ids by first character of those that can be part of a turn, and where slots pause."""
    texts = {"like Qwen": LIKE_QWEN, "embedded": embedded_texts, "Qwen": qwen}[name]
    texts = texts() if callable(texts) else texts
    if texts is None:
        pytest.skip("no package with the Qwen vocabulary (dashscope)")
    by_first: dict[str, list[int]] = {}
    for i, text in enumerate(texts):
        if text and "\ufffd" not in text and text in WRITTEN:
            by_first.setdefault(text[0], []).append(i)
    return texts, by_first, pause_table(texts, TAGS, (), len(texts))


def embedded_texts() -> tuple[str, ...]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(EMBEDDED_POLICY)
    every = [[i] for i in range(len(tokenizer))]
    return tuple(tokenizer.batch_decode(every, skip_special_tokens=False))


PROTOCOL = ProtocolConfig(feedback="")
TAGS = stop_tags(PROTOCOL)
#: What can stand in a turn, in one text.
WRITTEN = "\0".join(part + other for part in PARTS for other in PARTS)


@pytest.mark.parametrize("name", ["like Qwen", "embedded", "Qwen"])
@pytest.mark.parametrize("feedback", ["", "?\n"])
def test_law_03_no_way_to_write_a_turn_is_missed(name, feedback):
    texts, by_first, pauses = vocabulary(name)
    protocol = replace(PROTOCOL, feedback=feedback)
    stopped = set()
    for seed in range(600):
        chance = random.Random(seed)
        begin = chance.choice(["", "<search>", "<answer>"])
        whole = begin + "".join(chance.choices(PARTS, k=chance.randint(1, 12)))
        text = ""
        while len(text) < len(whole):
            rest = whole[len(text) :]
            fitting = [i for i in by_first[rest[0]] if rest.startswith(texts[i])]
            # Long tokens as often as short ones, though there are fewer.
            size = chance.choice(sorted({len(texts[i]) for i in fitting}))
            token = chance.choice([i for i in fitting if len(texts[i]) == size])
            text += texts[token]
            action = parse_turn(protocol, text)
            if action.kind != "none":
                # The engine looks at the very token after which there is something to see …
                assert pauses[token], (texts[token], text)
                # … and what the token holds beyond the tag does not change what was read.
                closed = max(text.rfind(tag) + len(tag) for tag in TAGS if tag in text)
                assert action == parse_turn(protocol, text[:closed])
                stopped.add(texts[token])
                break
    if name != "embedded":  # there a tag is one token or single characters
        assert {">", ">\n\n"} <= stopped
        assert any(len(text) > 1 and text.startswith(">") for text in stopped)


def test_law_03_few_tokens_pause():
    """Looking costs the host time: of the real vocabulary only what can close a stop tag is looked at."""
    texts, _, pauses = vocabulary("Qwen")
    holding = [text for text in texts if ">" in text]
    assert len(texts) == 151_643
    assert len(holding) == 653
    paused = {text for text, pauses in zip(texts, pauses, strict=True) if pauses}
    assert paused <= set(holding)
    assert {">", ">\n\n", ">.", "><"} <= paused
    assert not paused & {"=>", " ->", "/>", "-->"}


def test_embedded_tags_are_one_token_and_can_be_spelled():
    tokenizer = PreTrainedTokenizerFast.from_pretrained(EMBEDDED_POLICY)
    texts, _, pauses = vocabulary("embedded")
    for tag in TAGS:
        (token,) = tokenizer.encode(tag, add_special_tokens=False)
        assert pauses[token]
    spelled = [texts.index(character) for character in "</search>"]
    assert tokenizer.decode(spelled) == "</search>"
    assert [bool(pauses[token]) for token in spelled] == [False] * 8 + [True]
    assert not any(pauses[texts.index(tag)] for tag in ("<search>", "</think>", "</information>"))


def test_a_tokenizer_without_the_characters_of_a_tag_is_named():
    for kind in toys.PIECES:
        check_tags(toys.make_tokenizer(kind), TAGS)
    with pytest.raises(UserError, match=r"cannot write the tag '\[find\]'"):
        check_tags(toys.make_tokenizer("whole"), ("[find]",))
