"""How a text encoder is used: what its hidden states are pooled by, and what is written before queries and passages.

These are facts of the released weights: an encoder that was trained with a prefix finds less without it, and nothing
fails. So they are looked up, in this order: what the caller says; what the directory says in the files of
sentence-transformers; what is known of the family that the encoder's name tells.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psearch_jax.errors import UserError
from psearch_jax.models import weights

AUTO = "auto"
POOLINGS = ("mean", "cls")
DTYPES = ("float32", "bfloat16")

#: What sentence-transformers may do after the transformer that is the same here, or that every vector gets anyway.
MODULES = ("Transformer", "Pooling", "Normalize")
#: Its older pooling files have a switch for each way.
POOLING_SWITCHES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True, kw_only=True)
class EncoderFamily:
    """Encoders that were trained to be used alike. `pattern` is searched in the encoder's name, in lower case and
    with `-` for `_`."""

    name: str
    pattern: str
    pooling: str
    query_prefix: str = ""
    passage_prefix: str = ""


#: Sources: the model cards of intfloat/e5-*, BAAI/bge-*, facebook/contriever and sentence-transformers/all-MiniLM-*.
FAMILIES = (
    EncoderFamily(
        name="e5",
        pattern=r"\be5-",
        pooling="mean",
        query_prefix="query: ",
        passage_prefix="passage: ",
    ),
    EncoderFamily(
        name="bge",
        pattern=r"\bbge-(small|base|large)-en\b",
        pooling="cls",
        query_prefix="Represent this sentence for searching relevant passages: ",
    ),
    EncoderFamily(
        name="bge-zh",
        pattern=r"\bbge-(small|base|large)-zh\b",
        pooling="cls",
        query_prefix="为这个句子生成表示以用于检索相关文章：",
    ),
    EncoderFamily(name="contriever", pattern=r"contriever\b", pooling="mean"),
    # The names of the sentence encoders, not those of the bare MiniLM that others were trained from as well.
    EncoderFamily(
        name="minilm",
        pattern=r"\b(all|multi-qa|msmarco|paraphrase(-multilingual)?)-minilm-",
        pooling="mean",
    ),
)


@dataclass(frozen=True, kw_only=True)
class EncoderUse:
    """How an encoder is used.

    Attributes:
      family: the row of `FAMILIES` that its name tells, or "" for none.
      pooling: "mean" over the tokens of a text, or "cls", its first token.
      query_prefix, passage_prefix: written before every query and every passage; "" is nothing.
      dtype: what is computed in, "float32" or "bfloat16"; a vector is float32 in any case.
    """

    family: str = ""
    pooling: str = "mean"
    query_prefix: str = ""
    passage_prefix: str = ""
    dtype: str = "float32"


def find_use(
    name: str | Path,
    directory: Path,
    values: Mapping[str, Any],
    *,
    pooling: str = AUTO,
    query_prefix: str = AUTO,
    passage_prefix: str = AUTO,
    dtype: str = "float32",
) -> EncoderUse:
    """How the encoder in `directory` is used.

    Args:
      name: what the user called the encoder: a name or a path.
      directory: where its files are.
      values: its config.json.
      pooling, query_prefix, passage_prefix: what the user wants, or "auto". An empty prefix means none.
      dtype: what to compute in.

    A prefix that neither the files nor the family tell is none. A prompt that is empty in the files is no
    statement: sentence-transformers writes empty ones by default.

    Raises:
      UserError: a pooling or dtype that does not exist, one that is unknown, or a step after pooling that
        cannot be computed.
    """
    if pooling not in (AUTO, *POOLINGS):
        raise UserError(
            f"retrieval.pooling is {pooling!r}; use {AUTO} or one of {', '.join(POOLINGS)}."
        )
    if dtype not in DTYPES:
        raise UserError(f"retrieval.encoder_dtype is {dtype!r}; use {' or '.join(DTYPES)}.")
    family = find_family(name, directory, values)
    said = _said_prompts(directory)
    stated, include_prompt = _said_pooling(directory)
    if pooling == AUTO:
        pooling = stated or (family.pooling if family else "")
    if not pooling:
        raise UserError(
            f"{directory} does not say how its text encoder pools (1_Pooling/config.json is missing) and its name is "
            f"of none of the families {', '.join(f.name for f in FAMILIES)}; set retrieval.pooling to "
            f"{' or '.join(POOLINGS)}."
        )
    if pooling not in POOLINGS:
        raise UserError(
            f"{directory} pools its text encoder by {pooling!r}, which is not supported; "
            f"use an encoder that pools by {' or '.join(POOLINGS)}."
        )
    use = EncoderUse(
        family=family.name if family else "",
        pooling=pooling,
        query_prefix=_prefix(query_prefix, said["query"], family.query_prefix if family else ""),
        passage_prefix=_prefix(
            passage_prefix, said["passage"], family.passage_prefix if family else ""
        ),
        dtype=dtype,
    )
    if not include_prompt and (use.query_prefix or use.passage_prefix):
        raise UserError(
            f"{directory} leaves the prefix out of the pooling (include_prompt is false), which is not supported; "
            'set retrieval.query_prefix and retrieval.passage_prefix to "", or use another encoder.'
        )
    return use


def find_family(
    name: str | Path, directory: Path, values: Mapping[str, Any]
) -> EncoderFamily | None:
    """The first row of `FAMILIES` that fits what the encoder is called: by the user, on disk, in its config.json."""
    for called in (str(name), str(directory), str(values.get("_name_or_path", ""))):
        path = Path(called)
        # The hub's cache keeps a model in models--owner--name/snapshots/<commit>.
        own = path.parent.parent.name if path.parent.name == "snapshots" else path.name
        for family in FAMILIES:
            if re.search(family.pattern, own.lower().replace("_", "-")):
                return family
    return None


def _prefix(wanted: str, said: str, known: str) -> str:
    return wanted if wanted != AUTO else said or known


def _said_prompts(directory: Path) -> dict[str, str]:
    """What config_sentence_transformers.json says of the prefixes of queries and passages; "" for nothing."""
    path = directory / "config_sentence_transformers.json"
    values = weights.read_json(path) if path.is_file() else {}
    prompts = values.get("prompts") or {}
    if not isinstance(prompts, dict):
        raise UserError(f"prompts in {path} is {prompts!r}, but must be an object; fetch it again.")
    default = prompts.get(values.get("default_prompt_name"))
    names = {"query": ("query",), "passage": ("passage", "document", "corpus")}
    return {
        role: next((prompts[key] for key in keys if prompts.get(key)), default or "")
        for role, keys in names.items()
    }


def _said_pooling(directory: Path) -> tuple[str, bool]:
    """What the files say of the pooling ("" for nothing), and whether it includes the prefix.

    Raises UserError when the files ask for a step that is none of `MODULES`.
    """
    folder = "1_Pooling"
    for kind, path in _modules(directory):
        if kind not in MODULES:
            raise UserError(
                f"{directory} has a {kind} step in its modules.json, which is not supported; "
                f"use an encoder made of {', '.join(MODULES)}."
            )
        folder = path if kind == "Pooling" else folder
    file = directory / folder / "config.json"
    if not file.is_file():
        return "", True
    values = weights.read_json(file)
    modes = values.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in POOLING_SWITCHES.items() if values.get(key)]
    if isinstance(modes, list):
        modes = "+".join(map(str, modes))  # several are put side by side
    # As sentence-transformers reads it: no switch on means the mean.
    return str(modes) or "mean", bool(values.get("include_prompt", True))


def _modules(directory: Path) -> list[tuple[str, str]]:
    """(class, folder) of each step in modules.json; none where it is missing."""
    path = directory / "modules.json"
    if not path.is_file():
        return []
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
        kinds = [(module["type"], module["path"]) for module in modules]
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is not a list of modules ({error}); fetch it again.") from error
    return [(str(kind).rpartition(".")[2], str(folder)) for kind, folder in kinds]
