"""Turns YAML files, `--set a.b=c` and flags into one configuration; owns the wording of what is wrong with them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from jaxserve.errors import ConfigError

ConfigT = TypeVar("ConfigT", bound=BaseModel)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """Nested values and where they came from, for the error message: `--config gpu.yaml`, `--set a.b=c`, `--port`."""

    values: Mapping[str, Any]
    source: str


def read_config(
    schema: type[ConfigT],
    *,
    path: Path | None = None,
    assignments: Sequence[str] = (),
    flags: Mapping[str, tuple[str, Any]] | None = None,
) -> ConfigT:
    """Reads one configuration; what is nearer to the command line wins: file, then `--set`, then flags.

    Args:
      path: a YAML file that holds a mapping, or nothing at all.
      assignments: `a.b=value`, the value in YAML; a later one wins.
      flags: dotted key → (the flag's name, its value).

    Raises:
      ConfigError: names each wrong key or value, where it was set, and the nearest known name.
    """
    layers = [] if path is None else [_file_layer(path)]
    layers += [_assignment_layer(text) for text in assignments]
    layers += [Layer(values=_nest(key.split("."), value), source=flag) for key, (flag, value) in (flags or {}).items()]
    return build_config(schema, layers)


def build_config(schema: type[ConfigT], layers: Sequence[Layer]) -> ConfigT:
    """Merges the layers, later ones over earlier ones, and validates the whole; raises ConfigError."""
    layers = [Layer(values=_without_empty_sections(schema, layer.values), source=layer.source) for layer in layers]
    problems = [problem for layer in layers for problem in _unknown_keys(schema, layer)]
    if problems:
        raise ConfigError("; ".join(problems))
    merged: dict[str, Any] = {}
    for layer in layers:
        _merge(merged, layer.values)
    try:
        return schema.model_validate(merged)
    except ValidationError as error:
        raise ConfigError("; ".join(_describe(schema, error, layers))) from None


def config_yaml(config: BaseModel) -> str:
    """The whole configuration as YAML that `read_config` reads back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


class _StrictLoader(yaml.SafeLoader):
    """A safe loader that refuses a key given twice, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _file_layer(path: Path) -> Layer:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"cannot read the configuration {path}: {reason}") from None
    try:
        values = yaml.load(text, Loader=_StrictLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}; a configuration is a mapping of sections")
    return Layer(values=values, source=str(path))


def _assignment_layer(text: str) -> Layer:
    key, equals, raw = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {text}: write it as section.name=value")
    try:
        value = yaml.load(raw, Loader=_StrictLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"--set {text}: the value is not valid YAML: {' '.join(str(error).split())}") from None
    return Layer(values=_nest(parts, value), source=f"--set {text}")


def _nest(parts: Sequence[str], value: Any) -> dict[str, Any]:
    for part in reversed(parts):
        value = {part: value}
    return dict(value)


def _merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, Mapping):
            nested: dict[str, Any] = dict(into[key]) if isinstance(into.get(key), Mapping) else {}
            _merge(nested, value)
            into[key] = nested
        else:
            into[key] = value


def _without_empty_sections(schema: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """Drops sections whose every line is commented out: YAML reads `scheduler:` alone as null."""
    return {key: value for key, value in values.items() if value is not None or _section(schema, key) is None}


def _section(schema: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The model of a nested section, or None where `name` is a plain value."""
    field = schema.model_fields.get(name)
    if field is None:
        return None
    annotation = field.annotation
    choices = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return next((c for c in choices if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _known_paths(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name in schema.model_fields:
        yield prefix + name
        section = _section(schema, name)
        if section is not None:
            yield from _known_paths(section, f"{prefix}{name}.")


def _unknown_keys(schema: type[BaseModel], layer: Layer) -> Iterator[str]:
    def walk(section: type[BaseModel], values: Mapping[Any, Any], prefix: str) -> Iterator[str]:
        for key, value in values.items():
            if key not in section.model_fields:
                yield f"unknown key {prefix}{key} in {layer.source}{_suggestion(schema, section, prefix, str(key))}"
                continue
            nested = _section(section, key)
            if nested is not None and isinstance(value, Mapping):
                yield from walk(nested, value, f"{prefix}{key}.")

    return walk(schema, layer.values, "")


def _suggestion(schema: type[BaseModel], section: type[BaseModel], prefix: str, key: str) -> str:
    """The nearest name: of the same section first, then the same name in another section (`max_num_seqs: 4`)."""
    near = [prefix + name for name in get_close_matches(key, section.model_fields, n=1)]
    if not near:
        by_name: dict[str, str] = {}
        for path in _known_paths(schema):
            by_name.setdefault(path.rpartition(".")[2], path)
        near = [by_name[name] for name in get_close_matches(key, by_name, n=1)]
    if near:
        return f"; did you mean {near[0]}?"
    return f"; known here: {', '.join(section.model_fields)}"


def _describe(schema: type[BaseModel], error: ValidationError, layers: Sequence[Layer]) -> list[str]:
    """One line per wrong key. A key that allows several kinds of value yields several errors, joined by "or"."""
    messages: dict[tuple[str, ...], list[str]] = {}
    inputs: dict[tuple[str, ...], Any] = {}
    for detail in error.errors(include_url=False):
        path = _key_path(schema, detail["loc"])
        message = detail["msg"].removeprefix("Input should be ").removeprefix("Value error, ").partition(", unable")[0]
        known = messages.setdefault(path, [])
        if message not in known:
            known.append(message)
        # The innermost input of a list is an item of it; the first error names the item at fault.
        inputs.setdefault(path, detail["input"])
    return [
        f"{'.'.join(path)} is {inputs[path]!r}{_origin(path, layers)}; it should be {' or '.join(known)}"
        for path, known in messages.items()
    ]


def _key_path(schema: type[BaseModel], location: Sequence[int | str]) -> tuple[str, ...]:
    """The part of a pydantic location that names keys; what follows are kinds of a union and list indices."""
    path: list[str] = []
    section: type[BaseModel] | None = schema
    for part in location:
        if section is None or part not in section.model_fields:
            break
        path.append(str(part))
        section = _section(section, str(part))
    return tuple(path)


def _origin(path: Sequence[str], layers: Sequence[Layer]) -> str:
    if not path:
        return ""
    for layer in reversed(layers):
        values: Any = layer.values
        for part in path[:-1]:
            values = values.get(part) if isinstance(values, Mapping) else None
        if isinstance(values, Mapping) and path[-1] in values:
            return f" ({layer.source})"
    return ""
