"""From YAML files and `key=value` overrides to a `Config`, and back to text (law 11).

Files are merged from left to right, then overrides. A file may begin from another one with
`base: other.yaml`, a path relative to itself, or from several: `base: [one.yaml, two.yaml]`. Each value
remembers where it came from, and every error names the key and that place. YAML is read as version 1.2 has
it: `3e-4` is a number, `no` is a word, `010` is text.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from psearch_jax.config import Config
from psearch_jax.config_checks import check
from psearch_jax.errors import UserError

#: Dotted key → where its value came from: `path:line`, `override key=value` or `default`.
Origins = dict[str, str]
#: Dotted key → (value as YAML gave it, origin).
_Values = dict[str, tuple[Any, str]]

_SCALARS = (
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ("~", "n", "N", "")),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", tuple("tTfF")),
    ("tag:yaml.org,2002:int", r"[-+]?(0|[1-9][0-9_]*)", tuple("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(inf|Inf|INF))"
        r"|\.(nan|NaN|NAN)",
        tuple("-+.0123456789"),
    ),
)


class _Loader(yaml.SafeLoader):
    """A safe loader with the scalars of YAML 1.2."""


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes whatever `_Loader` would not read as text."""


for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {}  # those of YAML 1.1 are not inherited
    for _tag, _pattern, _first in _SCALARS:
        _class.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), list(_first))


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    """Text with line breaks stays on one line, as "a\\nb", so that its origin can stand behind it."""
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def resolve(files: Sequence[str | Path], overrides: Sequence[str] = ()) -> tuple[Config, Origins]:
    """Read, merge and check.

    Args:
      files: YAML files, a later one wins.
      overrides: `section.key=value`, the value written as in YAML; a later one wins.

    Returns:
      The configuration, and for every dotted key the place its value came from.

    Raises:
      UserError: an unreadable file, bad YAML, an unknown or repeated key, a wrong type or an impossible
        combination; one sentence with the key, the file and line (or the override), and what is right.
    """
    values: _Values = {}
    seen: set[Path] = set()
    for file in files:
        _read_file(Path(file), values, seen, chain=())
    for override in overrides:
        _read_override(override, values)
    converted = {key: _convert(key, value, origin) for key, (value, origin) in values.items()}
    config = _build(Config, converted)
    origins = {key: values[key][1] if key in values else "default" for key in fields()}
    check(config, flatten(config), origins)
    return config, origins


@functools.cache
def fields() -> dict[str, Any]:
    """Every dotted key → its annotation, in the order of the schema."""
    return _fields_of(Config, "")


def flatten(config: Config) -> dict[str, Any]:
    """Every dotted key → its value."""

    def get(key: str) -> Any:
        return functools.reduce(getattr, key.split("."), config)

    return {key: get(key) for key in fields()}


def to_yaml(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """The whole configuration as a YAML file; with `origins`, each line says where it came from."""
    lines: list[tuple[str, str]] = []
    opened: set[str] = set()
    for key, value in flatten(config).items():
        *parents, name = key.split(".")
        for depth, parent in enumerate(parents):
            section = ".".join(parents[: depth + 1])
            if section not in opened:
                opened.add(section)
                lines.append((f"{'  ' * depth}{parent}:", ""))
        lines.append((f"{'  ' * len(parents)}{name}: {_dump(value)}", key))
    width = max(len(text) for text, key in lines if key and len(text) <= 60)
    return "".join(
        f"{text:<{width}}  # {origins[key]}\n" if origins and key else f"{text}\n"
        for text, key in lines
    )


def config_hash(config: Config) -> str:
    """Sixteen hex digits that change with any value."""
    text = json.dumps(flatten(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _dump(value: Any) -> str:
    value = list(value) if isinstance(value, tuple) else value
    text = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=float("inf")
    )
    return text.removesuffix("\n").removesuffix("\n...")


def _fields_of(schema: type, prefix: str) -> dict[str, Any]:
    hints = typing.get_type_hints(schema)
    found: dict[str, Any] = {}
    for field in dataclasses.fields(schema):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            found.update(_fields_of(typing.cast(type, kind), f"{prefix}{field.name}."))
        else:
            found[prefix + field.name] = kind
    return found


@functools.cache
def _sections() -> frozenset[str]:
    """Dotted names of the sections, nested ones and those around them."""
    found = set()
    for key in fields():
        while key := key.rpartition(".")[0]:
            found.add(key)
    return frozenset(found)


def _build(schema: type, values: dict[str, Any], prefix: str = "") -> Any:
    hints = typing.get_type_hints(schema)
    arguments = {}
    for field in dataclasses.fields(schema):
        key, kind = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(kind):
            arguments[field.name] = _build(typing.cast(type, kind), values, f"{key}.")
        elif key in values:
            arguments[field.name] = values[key]
    return schema(**arguments)


def _read_file(path: Path, values: _Values, seen: set[Path], chain: tuple[Path, ...]) -> None:
    """Merge one file (and first the file it begins from, unless that was read before) into `values`."""
    real = path.resolve()
    if real in chain:
        raise UserError(f"{chain[-1]}: base {path} leads back to itself; remove one `base:` line")
    if chain and real in seen:
        return  # two recipes over one base: it must not undo the first of them
    seen.add(real)
    root = _parse(path, chain)
    found: _Values = {}
    if root is not None:
        _walk(root, "", path, found)
    base = found.pop("base", None)
    if base is not None:
        bases = base[0] if isinstance(base[0], list) else [base[0]]
        if not bases or not all(isinstance(name, str) and name for name in bases):
            raise UserError(
                f"{base[1]}: base must be the path of a YAML file, or a list of such paths, not {base[0]!r}"
            )
        for name in bases:
            _read_file(path.parent / name, values, seen, (*chain, real))
    values.update(found)


def _parse(path: Path, chain: tuple[Path, ...]) -> yaml.MappingNode | None:
    named_by = f" (the base of {chain[-1]})" if chain else ""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(
            f"no configuration file {path}{named_by}; overrides are written key=value"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"cannot read configuration file {path}{named_by}: {reason}") from None
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise UserError(f"{path}{_where(error, text)}: not valid YAML: {_problem(error)}") from None
    if node is None or isinstance(node, yaml.MappingNode):
        return node
    raise UserError(f"{path}:1: a configuration file is a list of `key: value` lines")


def _where(error: yaml.YAMLError, text: str) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return f":{mark.line + 1}"
    position = getattr(error, "position", None)
    return "" if position is None else f":{text.count(chr(10), 0, position) + 1}"


def _problem(error: yaml.YAMLError) -> str:
    return str(getattr(error, "problem", None) or getattr(error, "reason", None) or error)


def _walk(node: yaml.MappingNode, section: str, path: Path, found: _Values) -> None:
    """Collect the leaves of a mapping; `section` is "" at the top."""
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        origin = f"{path}:{line}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise UserError(f"{origin}: a key must be a plain word")
        key = f"{section}.{key_node.value}" if section else key_node.value
        if key in lines:
            raise UserError(
                f"{origin}: {key} is set twice, first in line {lines[key]}; keep one of them"
            )
        lines[key] = line
        if key in _sections():
            if isinstance(value_node, yaml.MappingNode):
                _walk(value_node, key, path, found)
            elif value_node.tag != "tag:yaml.org,2002:null":
                raise UserError(f"{origin}: {key} is a section: put its keys below it, indented")
        elif key in fields() or key == "base":
            found[key] = (_construct(value_node, key, origin), origin)
        else:
            raise UserError(f"{origin}: {_unknown(key)}")


def _construct(node: yaml.Node, key: str, origin: str) -> Any:
    if isinstance(node, yaml.MappingNode):
        raise UserError(f"{origin}: {key} is a single value, but has keys below it")
    loader = _Loader("")
    try:
        return loader.construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError, TypeError) as error:
        reason = _problem(error) if isinstance(error, yaml.YAMLError) else error
        raise UserError(f"{origin}: the value of {key} cannot be read: {reason}") from None
    finally:
        loader.dispose()


def _read_override(text: str, values: _Values) -> None:
    key, equals, value = text.partition("=")
    origin = f"override {text}"
    if not equals:
        raise UserError(f"{origin}: overrides are written key=value")
    if key in _sections():
        raise UserError(
            f"{origin}: {key} is a section; set one of its keys, as in {key}.name=value"
        )
    if key not in fields():
        raise UserError(f"{origin}: {_unknown(key)}")
    values[key] = (_override_value(value, fields()[key], origin), origin)


def _override_value(text: str, kind: Any, origin: str) -> Any:
    """YAML, except that a text setting takes what was typed where that is not a quoted text."""
    try:
        value = yaml.load(text, Loader=_Loader)  # a subclass of SafeLoader
    except yaml.YAMLError as error:
        if kind is str:
            return text
        raise UserError(f"{origin}: not valid YAML: {_problem(error)}") from None
    return text if kind is str and not isinstance(value, str) else value


def _unknown(key: str) -> str:
    """What is wrong with a key that the schema does not have, and the key that was probably meant."""
    known = [*fields(), "base", *_sections()]
    close = difflib.get_close_matches(key, known, n=1)
    if not close:  # the right name under the wrong section, or without its section
        name = key.rpartition(".")[2]
        close = [k for k in known if k.rpartition(".")[2] == name][:1]
    if close:
        return f"unknown key {key}; did you mean {close[0]}?"
    section = key.partition(".")[0]
    names = [k for k in fields() if k.startswith(f"{section}.")] or sorted(_sections())
    return f"unknown key {key}; there are {', '.join(names)}"


@functools.cache
def _adapter(key: str) -> TypeAdapter:
    return TypeAdapter(fields()[key])


def _convert(key: str, value: Any, origin: str) -> Any:
    """Check the type strictly (an integer may stand for a number, a list for a tuple; nothing else)."""
    try:
        return _adapter(key).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"[{index}]" for index in first["loc"])
        expected = first["msg"].removeprefix("Input should be ").replace("a valid int", "an int")
        expected = {"missing": "given"}.get(first["type"], expected.replace("a valid ", "a "))
        raise UserError(f"{origin}: {key}{place} must be {expected}, not {value!r}") from None
    except (TypeError, ValueError):
        raise UserError(f"{origin}: {key} cannot be {value!r}") from None
