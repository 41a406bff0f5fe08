"""Prompts: our text, a file's, a data set's own; plain or as a chat."""

import re
from types import SimpleNamespace

import pytest

from psearch_jax.config import ProtocolConfig
from psearch_jax.config_files import resolve
from psearch_jax.errors import UserError
from psearch_jax.questions.question import Question
from psearch_jax.rollout.protocol import control_tags, prompt_text

MESSAGES = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]


def ask(text: str = "who?", **metadata) -> Question:
    return Question(id="nq:1", text=text, golden_answers=("a",), metadata=metadata)


def template(messages, *, tokenize, add_generation_prompt):
    assert not tokenize and add_generation_prompt
    return "".join(f"[{m['role']}]{m['content']}" for m in messages) + "[assistant]"


CHAT = SimpleNamespace(chat_template="{{x}}", apply_chat_template=template)


def test_only_the_place_of_the_question_is_a_field():
    protocol = ProtocolConfig(prompt='{question} {"a": \\boxed{x}} {question}')
    assert prompt_text(protocol, "{y}") == '{y} {"a": \\boxed{x}} {y}'
    assert prompt_text(protocol, ask("{y}")) == '{y} {"a": \\boxed{x}} {y}'


def test_a_file_replaces_the_prompt(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("Q: {question}\nanswer in {curly}: é", encoding="utf-8")
    protocol = ProtocolConfig(prompt_file=str(path))
    assert prompt_text(protocol, "who?") == "Q: who?\nanswer in {curly}: é"
    path.write_text("changed {question}")  # a run keeps the prompt that it began with
    assert prompt_text(protocol, "who?").startswith("Q: ")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(None, "No such file"), (b"\xe9{question}", "not UTF-8"), (b"none", "has no {question}")],
)
def test_a_file_that_is_no_prompt(tmp_path, content, sentence):
    path = tmp_path / "prompt.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=f"{re.escape(str(path))}.*{re.escape(sentence)}"):
        prompt_text(ProtocolConfig(prompt_file=str(path)), "who?")


def test_the_column_of_a_data_set_replaces_the_prompt():
    protocol = ProtocolConfig(prompt_column="prompt")
    assert prompt_text(protocol, ask(prompt="As published {x}")) == "As published {x}"
    assert prompt_text(protocol, ask(prompt=MESSAGES[1:])) == "U"
    assert prompt_text(protocol, ask(prompt=tuple(MESSAGES))) == "S\n\nU"


@pytest.mark.parametrize(
    "value", [None, "", [], 7, ["U"], [{"role": "user"}], [{"role": "user", "content": None}]]
)
def test_a_column_that_is_no_prompt_names_the_question(value):
    protocol = ProtocolConfig(prompt_column="prompt")
    with pytest.raises(UserError, match="nq:1 has no prompt in its column 'prompt'"):
        prompt_text(protocol, ask(prompt=value))


def test_a_bare_question_has_no_column():
    with pytest.raises(UserError, match="a bare question is asked"):
        prompt_text(ProtocolConfig(prompt_column="prompt"), "who?")


def test_a_chat_goes_through_the_tokenizers_template():
    protocol = ProtocolConfig(chat=True)
    assert prompt_text(protocol, ask(), CHAT) == "[user]who?\n[assistant]"
    protocol = ProtocolConfig(chat=True, prompt_column="prompt")
    assert prompt_text(protocol, ask(prompt=MESSAGES), CHAT) == "[system]S[user]U[assistant]"


@pytest.mark.parametrize("tokenizer", [None, SimpleNamespace(chat_template=None)])
def test_a_chat_needs_a_template(tokenizer):
    with pytest.raises(UserError, match=r"protocol\.chat is true, but .* no chat template"):
        prompt_text(ProtocolConfig(chat=True), "who?", tokenizer)


def test_every_shipped_prompt_explains_its_tags(root):
    for path in (root / "configs" / "protocols").glob("*.yaml"):
        protocol = resolve([path])[0].protocol
        text = prompt_text(protocol, "who?")
        assert "who?" in text and "{question}" not in text
        assert all(tag in text for tag in control_tags(protocol)), path
        assert not protocol.separator or protocol.query_form != "text" or protocol.separator in text


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["protocol.prompt_file=a", "protocol.prompt_column=b"], "both replace the prompt"),
        (["protocol.passage={title}"], "one of contents and text among them"),
        (["protocol.information=[' <search>', x]"], "eight different texts"),
        (["protocol.answer=[' ', x]"], "eight different texts"),
        (["protocol.opening=middle"], "must be one of last, first"),
        (["protocol.query_form=xml"], "must be one of text, tool_call"),
        (["protocol.answer_form=x"], "must be one of whole, boxed"),
        (["protocol.format=x"], "must be one of strict, paired"),
    ],
)
def test_law_11_impossible_protocols(overrides, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        resolve([], overrides)
    resolve([], ["protocol.query_form=tool_call", "protocol.separator="])  # reads no separator
