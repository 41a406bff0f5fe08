"""What an episode begins with: our own text, a file's, or the data set's own prompt."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from psearch_jax.config import ProtocolConfig
from psearch_jax.errors import UserError
from psearch_jax.questions.question import Question

#: Stands for the question in a prompt. Every other brace is text.
PLACE = "{question}"


def prompt_text(protocol: ProtocolConfig, question: Question | str, tokenizer: Any = None) -> str:
    """The prompt of a question.

    The question's metadata under `protocol.prompt_column` where that is set (a text, or messages `{"role",
    "content"}` as in Search-R1's parquet); else the text of `protocol.prompt_file`, else `protocol.prompt`, with the
    question in place of `{question}`. With `protocol.chat` it goes through the tokenizer's chat template, a text as
    the user's message; without, the messages' contents stand one after the other with a blank line between them.

    Args:
      question: a question, or its text (which has no column).
      tokenizer: needed for a chat only.

    Raises:
      UserError: a prompt file that cannot be read or has no place for the question, a question without the column, a
        column that is no prompt, or a tokenizer without a chat template.
    """
    prompt = _prompt(protocol, question)
    if not protocol.chat:
        messages = [{"content": prompt}] if isinstance(prompt, str) else prompt
        return "\n\n".join(message["content"] for message in messages)
    if getattr(tokenizer, "chat_template", None) is None:
        raise UserError(
            "protocol.chat is true, but the policy's tokenizer has no chat template; set protocol.chat to false, or "
            "use a policy that was trained on chats."
        )
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _prompt(protocol: ProtocolConfig, question: Question | str) -> str | list[dict[str, str]]:
    """The text, or the messages of the data set."""
    if protocol.prompt_column:
        if isinstance(question, str):
            raise UserError(
                f"protocol.prompt_column is {protocol.prompt_column!r}, but here a bare question is asked; leave it "
                "empty."
            )
        return _column(protocol.prompt_column, question)
    text = question if isinstance(question, str) else question.text
    pattern = _read(protocol.prompt_file) if protocol.prompt_file else protocol.prompt
    return pattern.replace(PLACE, text)


def _column(name: str, question: Question) -> str | list[dict[str, str]]:
    value = question.metadata.get(name)
    if isinstance(value, str) and value:
        return value
    messages = list(value) if isinstance(value, (list, tuple)) else []
    if messages and all(
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in messages
    ):
        return [{"role": message["role"], "content": message["content"]} for message in messages]
    raise UserError(
        f"The question {question.id} has no prompt in its column {name!r} (a text, or messages with role and "
        "content); set protocol.prompt_column to the right one, or leave it empty."
    )


@lru_cache(maxsize=8)
def _read(path: str) -> str:
    """A prompt file, read once: a run has one prompt, whatever becomes of the file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(
            f"protocol.prompt_file {path} cannot be read ({reason}); check the path."
        ) from error
    if PLACE not in text:
        raise UserError(
            f"protocol.prompt_file {path} has no {PLACE}; put it where the question is to stand."
        )
    return text
