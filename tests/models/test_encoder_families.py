"""How an encoder is used: what is said wins over what its files say, and these over what its family is known for."""

from pathlib import Path

import pytest
from models.tiny_bert import write_json

from psearch_jax.errors import UserError
from psearch_jax.models.encoder_families import EncoderUse, find_use

BGE = "Represent this sentence for searching relevant passages: "
PROMPTS = "config_sentence_transformers.json"


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("intfloat/e5-base-v2", ("e5", "mean", "query: ", "passage: ")),
        ("multilingual_e5-small", ("e5", "mean", "query: ", "passage: ")),
        ("BAAI/bge-small-en-v1.5", ("bge", "cls", BGE, "")),
        ("bge-large-en", ("bge", "cls", BGE, "")),
        ("bge-base-zh-v1.5", ("bge-zh", "cls", "为这个句子生成表示以用于检索相关文章：", "")),
        ("facebook/contriever-msmarco", ("contriever", "mean", "", "")),
        ("all-MiniLM-L6-v2", ("minilm", "mean", "", "")),
        ("sentence-transformers/multi-qa-MiniLM-L6-cos-v1", ("minilm", "mean", "", "")),
    ],
)
@pytest.mark.parametrize("told_by", ["user", "directory", "hub cache", "config"])
def test_a_family_is_known_by_its_name(
    tmp_path: Path, name: str, use: tuple[str, ...], told_by: str
) -> None:
    called, directory, values = "encoder", tmp_path / "encoder", {}
    if told_by == "user":
        called = name
    elif told_by == "directory":
        directory = tmp_path / name
    elif told_by == "hub cache":
        directory = tmp_path / f"models--{name.replace('/', '--')}" / "snapshots" / "0a1b2c"
    else:
        values = {"_name_or_path": f"/cache/{name}/"}
    family, pooling, query_prefix, passage_prefix = use
    assert find_use(called, directory, values) == EncoderUse(
        family=family,
        pooling=pooling,
        query_prefix=query_prefix,
        passage_prefix=passage_prefix,
    )


@pytest.mark.parametrize(
    "name", ["encoder", "nreimers/MiniLM-L6-H384-uncased", "e5-runs/mine", "some5-base", "bge-m3"]
)
def test_another_name_is_of_no_family_and_needs_its_pooling_told(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"1_Pooling.*e5, bge.*retrieval\.pooling to mean or cls"):
        find_use(name, tmp_path, {})
    assert find_use(name, tmp_path, {}, pooling="cls") == EncoderUse(pooling="cls")


@pytest.mark.parametrize(
    ("file", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode": "cls", "embedding_dimension": 8}, "cls"),
        ({"pooling_mode": ["mean"], "include_prompt": True}, "mean"),
        ({"word_embedding_dimension": 8}, "mean"),
        # The new key wins over the old ones, as in sentence-transformers.
        ({"pooling_mode": "cls", "pooling_mode_mean_tokens": True}, "cls"),
    ],
)
def test_the_pooling_file_is_read_in_both_styles(tmp_path: Path, file: dict, pooling: str) -> None:
    write_json(tmp_path / "1_Pooling" / "config.json", file)
    assert find_use("encoder", tmp_path, {}).pooling == pooling
    assert find_use("e5-base", tmp_path, {}).pooling == pooling  # the file over the family
    assert find_use("encoder", tmp_path, {}, pooling="mean").pooling == "mean"  # the user over it


@pytest.mark.parametrize(
    ("file", "word"),
    [
        ({"pooling_mode_max_tokens": True}, "'max'"),
        ({"pooling_mode": "lasttoken"}, "'lasttoken'"),
        ({"pooling_mode": ["cls", "mean"]}, "cls.mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "cls.mean"),
    ],
)
def test_other_poolings_are_named(tmp_path: Path, file: dict, word: str) -> None:
    write_json(tmp_path / "1_Pooling" / "config.json", file)
    with pytest.raises(UserError, match=word):
        find_use("encoder", tmp_path, {})


def test_modules_say_where_the_pooling_is_and_what_follows_it(tmp_path: Path) -> None:
    modules = [
        {"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.sentence_transformer.modules.Pooling", "path": "2_P"},
        {"type": "sentence_transformers.models.Normalize", "path": "3_Normalize"},
    ]
    write_json(tmp_path / "modules.json", modules)
    write_json(tmp_path / "2_P" / "config.json", {"pooling_mode": "cls"})
    assert find_use("encoder", tmp_path, {}).pooling == "cls"
    dense = {"type": "sentence_transformers.models.Dense", "path": "3_Dense"}
    write_json(tmp_path / "modules.json", [*modules, dense])
    with pytest.raises(UserError, match="Dense step"):
        find_use("encoder", tmp_path, {}, pooling="cls")
    (tmp_path / "modules.json").write_text('{"type": 1}')
    with pytest.raises(UserError, match=r"modules\.json is not a list of modules"):
        find_use("encoder", tmp_path, {})


@pytest.mark.parametrize(
    ("file", "prefixes"),
    [
        ({"prompts": {"query": "Q: ", "passage": "P: "}}, ("Q: ", "P: ")),
        ({"prompts": {"query": "Q: ", "document": "D: "}}, ("Q: ", "D: ")),
        ({"prompts": {"any": "A: "}, "default_prompt_name": "any"}, ("A: ", "A: ")),
        # Empty prompts are sentence-transformers' default, not a statement: the family speaks.
        ({"prompts": {"query": "", "document": ""}, "default_prompt_name": None}, (BGE, "")),
        ({"prompts": {"query": None}}, (BGE, "")),
        ({"__version__": {}}, (BGE, "")),
    ],
)
def test_prompts_of_the_directory(tmp_path: Path, file: dict, prefixes: tuple[str, str]) -> None:
    write_json(tmp_path / PROMPTS, file)
    use = find_use("bge-base-en", tmp_path, {})
    assert (use.query_prefix, use.passage_prefix) == prefixes


def test_what_the_user_says_wins(tmp_path: Path) -> None:
    write_json(tmp_path / PROMPTS, {"prompts": {"query": "Q: ", "passage": "P: "}})
    use = find_use("e5-base", tmp_path, {}, query_prefix="mine: ", passage_prefix="")
    assert (use.query_prefix, use.passage_prefix) == ("mine: ", "")


def test_a_pooling_without_its_prompt_is_refused_only_where_there_is_one(tmp_path: Path) -> None:
    write_json(
        tmp_path / "1_Pooling" / "config.json", {"pooling_mode": "mean", "include_prompt": False}
    )
    assert find_use("encoder", tmp_path, {}).pooling == "mean"
    with pytest.raises(UserError, match="include_prompt"):
        find_use("e5-base", tmp_path, {})


@pytest.mark.parametrize(
    ("wanted", "word"),
    [({"pooling": "max"}, r"retrieval\.pooling is 'max'"), ({"dtype": "float16"}, "'float16'")],
)
def test_wishes_that_cannot_be(tmp_path: Path, wanted: dict[str, str], word: str) -> None:
    with pytest.raises(UserError, match=word):
        find_use("e5-base", tmp_path, {}, **wanted)


def test_prompts_of_another_form(tmp_path: Path) -> None:
    write_json(tmp_path / PROMPTS, {"prompts": ["query: "]})
    with pytest.raises(UserError, match="prompts in .* must be an object"):
        find_use("e5-base", tmp_path, {})
