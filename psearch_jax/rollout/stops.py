"""Which sampled tokens a slot pauses at (law 3): end tokens, and every token that could complete a stop tag.

Tags are plain text and tokenise in many ways: `>` may never stand alone, may begin with the end of a word and may
carry text behind it. So a table says of each token what is possible, and the host looks at the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

from psearch_jax.errors import UserError


def could_complete(token: str, tag: str) -> bool:
    """Whether appending this token's text to some text could complete the tag.

    It can when the token up to one of its characters is a suffix of the tag, or has the tag as its suffix. (So `>`
    can complete `</search>`, `h>.` can, `</think>` cannot.) Tokens that hold a broken character say nothing about
    their text; they count when the tag is not plain ASCII.
    """
    if "\ufffd" in token and not tag.isascii():
        return True
    return tag[-1] in token and any(
        tag.endswith(token[:end]) or token[:end].endswith(tag)
        for end in range(1, len(token) + 1)
        if token[end - 1] == tag[-1]
    )


def pause_table(
    texts: Sequence[str], tags: Sequence[str], end_ids: Sequence[int], size: int
) -> Bool[np.ndarray, "V"]:
    """bool [size]: whether a slot pauses at a token, given the text of each. Ids beyond the texts never do."""
    table_V = np.zeros(size, bool)
    for i, text in enumerate(texts[:size]):
        table_V[i] = any(could_complete(text, tag) for tag in tags)
    table_V[list(end_ids)] = True
    return table_V


def check_tags(tokenizer: Any, tags: Sequence[str]) -> None:
    """Raise a UserError for a tag that the tokenizer cannot write: no episode could ever hold it."""
    for tag in tags:
        ids = tokenizer.encode(tag, add_special_tokens=False)
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if tag not in text:
            raise UserError(
                f"the policy's tokenizer cannot write the tag {tag!r} of the protocol (it makes {text!r} of it); name "
                "tags of characters that it has, or use another policy."
            )
