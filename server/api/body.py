"""What every request body shares: strict reading, errors that name the field, known parameters that are refused."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationError

from jaxserve.errors import InvalidRequestError
from server.api.json_body import field_path, parse_json

MAX_QUOTED = 80  # characters of a wrong value that an error repeats

BodyT = TypeVar("BodyT", bound="Body")
Chooser = Callable[[Mapping[str, Any]], type[BodyT]]  # a route that takes several bodies tells them by their fields


class Strict(BaseModel):
    """JSON types are taken at their word: no "1" for 1, no 1.0 for 1, no true for 1; unknown keys are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class NoOp:
    """A known parameter of which only values that change nothing are taken; null always is one."""

    accepts: Callable[[Any], bool]
    why: str


def only(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(type(value) is type(allowed) and value == allowed for allowed in values)


def is_text(value: Any) -> bool:
    return isinstance(value, str)


USER = NoOp(accepts=is_text, why="it must be a string; it labels the caller and never changes an answer")


class Body(Strict):
    """A whole request. `no_ops` are names it knows and takes only with values that change nothing."""

    no_ops: ClassVar[Mapping[str, NoOp]] = {}


class ModelBody(Body):
    """A request to the model that it names; a subclass with a default lets the name be left out."""

    model: str | None


def parse_body(schema: type[BodyT] | Chooser[BodyT], raw: bytes) -> BodyT:
    """Reads one request; raises InvalidRequestError that names the first field at fault."""
    fields = parse_json(raw)
    if not isinstance(fields, dict):
        raise InvalidRequestError(f"the body is a JSON {type(fields).__name__}; it must be an object")
    return check_body(schema if isinstance(schema, type) else schema(fields), fields)


def check_body(schema: type[BodyT], fields: dict[str, Any]) -> BodyT:
    """Reads a request whose JSON was parsed before; see `parse_body`."""
    for name in [name for name in fields if name in schema.no_ops]:
        no_op = schema.no_ops[name]
        value = fields.pop(name)
        if value is not None and not no_op.accepts(value):
            raise InvalidRequestError(f"{name} is {shorten(value)}: {no_op.why}", param=name)
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        raise to_invalid_request(schema, error) from None


# --- kinds of field ---


def _token_ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, list) and all(type(item) is int for item in value):
        return tuple(value)
    raise ValueError("a list of token ids")


def _strings(value: Any) -> tuple[str, ...]:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ValueError("a list of strings")


TokenIds = Annotated[tuple[int, ...], PlainValidator(_token_ids, json_schema_input_type=list[int])]
Strings = Annotated[tuple[str, ...], PlainValidator(_strings, json_schema_input_type=list[str])]


# --- what pydantic found, in one sentence ---


def to_invalid_request(schema: type[Strict], error: ValidationError) -> InvalidRequestError:
    # An unknown name is the likeliest slip and may explain the rest, so it goes first.
    details = sorted(error.errors(include_url=False), key=lambda detail: detail["type"] != "extra_forbidden")
    detail = details[0]
    param = field_path(detail["loc"])
    if detail["type"] == "missing":
        return InvalidRequestError(f"{param} is missing", param=param, code="missing_parameter")
    if detail["type"] == "extra_forbidden":
        known = [*schema.model_fields, *(schema.no_ops if issubclass(schema, Body) else ())]
        near = get_close_matches(param, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return InvalidRequestError(f"unknown parameter {param}{hint}", param=param, code="unknown_parameter")
    if detail["type"] == "too_short":
        return InvalidRequestError(f"{param} is empty", param=param)
    message = detail["msg"].removeprefix("Value error, ").replace("Input should be ", "", 1)
    return InvalidRequestError(f"{param} is {shorten(detail['input'])}; it must be {message}", param=param)


def shorten(value: Any) -> str:
    cut = value[:MAX_QUOTED] if isinstance(value, str | list) else value  # a wrong value may be megabytes long
    text = json.dumps(cut, ensure_ascii=False)
    return text if cut == value and len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}…"
