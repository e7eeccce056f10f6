"""The jinja2 environment chat templates run in: Hugging Face's dialect, with limits; knows no messages.

A template is a program, and nothing can stop a thread from outside. So the compiled template stops itself: before every
piece of output, loop turn and call it spends from a budget of characters and time, and operations that could build a
huge value in one go are measured before they run. What remains uninterrupted is a single built-in filter or method over
values that are themselves within the limit.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_RENDER_CHARS = 2**24  # written, what macros and blocks pass on counted again; also the longest text or list
MAX_INTEGER_BITS = 4096
ITEM_CHARS = 16  # what an item of a list weighs beside a character
_BUDGET = " budget"  # a variable whose name no template can spell
_WIDTHS = frozenset(("center", "ljust", "rjust", "zfill", "indent", "batch", "slice", "tojson"))
_WIDE_PERCENT = re.compile(r"%(\([^)]*\))?[^a-zA-Z%(]*(\*|\d{7,})")  # "%*d", "%9999999d", "%(key).9999999f"
_WIDE_BRACES = re.compile(r"\{[^{}]*(\{|:[^{}]*\d{7,})")  # "{:{width}}", "{:>9999999}"


class RenderLimitError(Exception):
    """A template that ran too long, wrote too much or asked for too large a value."""


class Budget:
    """What one rendering may still spend."""

    def __init__(self, *, seconds: float, chars: int = MAX_RENDER_CHARS) -> None:
        self._seconds, self._chars = seconds, chars
        self._deadline = time.monotonic() + seconds
        self._written = 0

    def spend(self, chars: int = 0) -> None:
        self._written += chars
        if self._written > self._chars:
            raise RenderLimitError(f"the chat template wrote more than {self._chars} characters")
        if time.monotonic() > self._deadline:
            raise RenderLimitError(f"the chat template ran for more than {self._seconds:g} seconds")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates; render them with `render_within`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, *, now: Callable[[], datetime] = datetime.now) -> None:
        """Args: now: what `strftime_now` shows."""
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag], finalize=_counted
        )
        self.code_generator_class = _CountingCodeGenerator
        self.filters["tojson"] = _tojson
        for name in ("center", "indent", "batch", "slice", "tojson", "replace", "join", "map"):
            self.filters[name] = _measured(name, self.filters[name])
        self.filters["format"] = _measured("%", self.filters["format"])  # which formats as the operator does
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: now().strftime(form)
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace
        self.globals["lipsum"] = _no_lipsum

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _budget(__context).spend()
        if isinstance(getattr(__obj, "__self__", None), str):
            _check_growth(__obj.__name__, __obj.__self__, [*args, *kwargs.values()])
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:  # then value is a text's own `format` or `format_map`
            _check_growth("{}", value.__self__, [])
        return wrapped

    def count(self, context: Context, chars: int) -> None:
        """Called by compiled templates: before each output (with the length of its literal text), in each loop turn."""
        _budget(context).spend(chars)

    def concatenate(self, _context: Context, values: list[Any]) -> str:
        """The `~` operator."""
        texts = [value if isinstance(value, str) else str(value) for value in values]
        _check_size(sum(map(len, texts)))
        return "".join(texts)


def render_within(template: Any, variables: Mapping[str, Any], budget: Budget) -> str:
    """Renders a template of a `TemplateEnvironment`.

    Raises:
      RenderLimitError: the budget is spent.
      Exception: whatever the template provokes; it is a program.
    """
    text: str = template.render({**variables, _BUDGET: budget})
    return text


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks the assistant's own words for training; here only a scope."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _CountingCodeGenerator(CodeGenerator):
    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        super().visit_Template(_InsertCounting().visit(node), frame)

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:
        if isinstance(node.node, nodes.EnvironmentAttribute):  # ours: nothing to guard, and there are many
            self.write(f"environment.{node.node.name}(context, ")
            self.visit(node.args[0], frame)
            self.write(")")
        else:
            super().visit_Call(node, frame, forward_caller=forward_caller)


class _InsertCounting(NodeTransformer):
    """Makes a template call `TemplateEnvironment.count` as it goes along, and `concatenate` for `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._count_body(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._count_body(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._count_body(node)

    def visit_Output(self, node: nodes.Output) -> list[nodes.Node]:
        literal = sum(len(child.data) for child in node.nodes if isinstance(child, nodes.TemplateData))
        return [_count(literal, node.lineno), self.generic_visit(node)]

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concatenate", nodes.List(node.nodes, lineno=node.lineno), node.lineno)

    def _count_body(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _count(0, node.lineno))
        counted: nodes.Node = node
        return counted


def _count(chars: int, line: int) -> nodes.Node:
    return nodes.ExprStmt(_call("count", nodes.Const(chars, lineno=line), line), lineno=line)


def _call(method: str, argument: nodes.Expr, line: int) -> nodes.Call:
    target = nodes.EnvironmentAttribute(method, lineno=line)
    return nodes.Call(target, [argument], [], None, None, lineno=line)


def _budget(context: Context) -> Budget:
    budget = context.parent[_BUDGET]
    assert isinstance(budget, Budget)
    return budget


@pass_context
def _counted(context: Context, value: Any) -> str:
    text = value if isinstance(value, str) else str(value)
    _budget(context).spend(len(text))
    return text


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _no_lipsum(*_: Any, **__: Any) -> None:
    raise SecurityError("lipsum is a toy of jinja's; a chat template has no use for filler text")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; jinja's own filter escapes for HTML. The order of the parameters is transformers'."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Dict:
    """Stands for the type `dict`, without its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """jinja's `namespace`, without names that lead into Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that "self" may be a key
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace holds no name that begins with an underscore: {name!r}")


def _measured(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is measured before it runs; `wraps` keeps jinja's mark for what it wants as first argument."""
    takes_context = hasattr(function, "jinja_pass_arg")

    @wraps(function)
    def measured(*args: Any, **kwargs: Any) -> Any:
        context, args = (args[:1], args[1:]) if takes_context else ((), args)
        if name == "join" and args and isinstance(args[0], Iterator):
            args = (list(_measured_items(args[0])), *args[1:])
        if args:
            _check_growth(name, args[0], [*args[1:], *kwargs.values()])
        result = function(*context, *args, **kwargs)
        return _measured_items(result) if name == "map" else result

    return measured


def _measured_items(items: Iterable[Any]) -> Iterator[Any]:
    """The items, until their texts together are too long: many may be made of one."""
    size = 0
    for item in items:
        size += len(item) if isinstance(item, str) else ITEM_CHARS
        _check_size(size)
        yield item


def _check_growth(name: str, value: Any, args: list[Any]) -> None:
    """Refuses a filter, a string's method, `%` or `{}` formatting (of `value`) whose result could be too long."""
    numbers = [arg for arg in args if isinstance(arg, int)]
    texts = [arg for arg in args if isinstance(arg, str)]
    if name == "join" and isinstance(value, str):  # the method: separator.join(values)
        _check_joined(value, args[0] if args else ())
    elif name == "join":
        _check_joined(texts[0] if texts else "", value)
    elif name in _WIDTHS:
        _check_size(max(numbers, default=0))
    elif not isinstance(value, str):
        return
    elif name == "expandtabs":
        _check_size(len(value) + value.count("\t") * max(numbers, default=8))
    elif name == "replace" and len(texts) >= 2:
        _check_size(len(value) + value.count(texts[0]) * len(texts[1]))
    elif name == "translate" and args and isinstance(args[0], Mapping):
        _check_size(len(value) * max((len(new) for new in args[0].values() if isinstance(new, str)), default=1))
    elif (name == "%" and _WIDE_PERCENT.search(value)) or (
        name == "{}" and _WIDE_BRACES.search(value.replace("{{", "").replace("}}", ""))
    ):
        raise RenderLimitError("a format string of the chat template takes a width from elsewhere or a very large one")


def _check_joined(separator: str, values: Any) -> None:
    if isinstance(values, str | list | tuple | Mapping):
        _check_size(sum(len(value) for value in values if isinstance(value, str)) + len(separator) * len(values))


def _check_operation(operator: str, left: Any, right: Any) -> None:
    if operator == "+":
        if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _check_size(_weight(left) + _weight(right))
    elif operator == "%":
        if isinstance(left, str):
            _check_growth("%", left, [])
    elif isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_INTEGER_BITS:
            raise RenderLimitError(f"a number of the chat template has more than {MAX_INTEGER_BITS} bits")
    elif operator == "*":
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, str | list | tuple) and isinstance(times, int):
                _check_size(_weight(sequence) * times)


def _weight(sequence: str | list[Any] | tuple[Any, ...]) -> int:
    return len(sequence) * (1 if isinstance(sequence, str) else ITEM_CHARS)


def _check_size(size: int) -> None:
    if size > MAX_RENDER_CHARS:
        raise RenderLimitError(f"a value of the chat template is larger than {MAX_RENDER_CHARS} characters")
