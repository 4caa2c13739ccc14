"""The jinja2 environment in which templates from model files run: sandboxed, bounded, with what they expect.

A template is a program by a stranger. It can call nothing but what is here, cannot change what it is given,
and no single step of it makes a text of more than MAX_TEXT characters: what could is measured before it runs,
or is not here. (It can still waste time, as every program with loops in loops.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Environment, nodes, pass_environment
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEXT = 16 * 2**20  # characters of a rendered prompt, and of any text a template makes on the way
_MAX_POWER = 64
_MAX_INDENT = 64
_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
#: Where a format text says how wide something gets, by the mark that begins it.
_FIELDS = {"%": re.compile(r"%(?:\([^)]*\))?[^a-zA-Z%]*"), "{": re.compile(r"\{[^{}]*")}
#: Filters that make much of little, or another thing each time, and that no chat template needs.
_LEFT_OUT = ("batch", "center", "pprint", "random", "slice", "sum", "urlize", "wordwrap", "xmlattr")


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks replies for training; here its body is just text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a set of the instance

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _MeasuredConcat(CodeGenerator):
    """`a ~ b` asks the environment, as operators do."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concatenated((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class Sandbox(ImmutableSandboxedEnvironment):
    """Raises SecurityError where a template reaches for what is unsafe or too large."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _MeasuredConcat

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: now().strftime(str(form)[:256])
        for name in _LEFT_OUT:
            del self.filters[name]
        self.filters |= {"tojson": _tojson, "replace": _replace, "join": _join, "format": _format}
        self.filters["indent"] = _indent

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and _sized(left) and _sized(right):
            _allow(len(left) + len(right))
        elif operator == "*":
            for one, other in ((left, right), (right, left)):
                if _sized(one) and isinstance(other, int):
                    _allow(len(one) * other)
        elif operator == "**" and (abs(left) > 2**32 or abs(right) > _MAX_POWER):
            raise SecurityError("the template computes a number that is too large")
        elif operator == "%" and isinstance(left, str):
            values = right if isinstance(right, tuple) else (right,)
            _allow(_formatted_size(left, "%", "*" in left, values))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        text = getattr(obj, "__self__", None)  # a bound method has what it is bound to
        if isinstance(text, str):
            _check_method(text, obj.__name__, args, kwargs)
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text = value.__self__
        nested = re.search(r"\{[^{}]*\{", text) is not None

        def measured(*args: Any, **kwargs: Any) -> str:
            _allow(_formatted_size(text, "{", nested, (*args, *kwargs.values())))
            return wrapped(*args, **kwargs)

        return measured

    def concatenated(self, parts: Iterable[object]) -> str:
        texts = [str(part) for part in parts]
        _allow(sum(map(len, texts)))
        return "".join(texts)


def _allow(size: int) -> None:
    if size > MAX_TEXT:
        raise SecurityError("the template makes a text that is too large")


def _sized(value: object) -> bool:
    return isinstance(value, str | list | tuple)


def _check_method(text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Methods of a text whose result may be much longer than it is."""
    if name in _PADDING:
        widths = [value for value in (*args, *kwargs.values()) if isinstance(value, int)]
        _allow(max(widths, default=0) * (text.count("\t") if name == "expandtabs" else 1))
    elif name == "replace" and len(args) >= 2:
        _allow_replacing(text, str(args[0]), str(args[1]))
    elif name == "join" and args and _sized(args[0]):
        _allow_joining(text, args[0])
    elif name == "translate":
        raise SecurityError("the template translates a text by a table")


def _allow_replacing(text: str, old: str, new: str) -> None:
    _allow(text.count(old) * len(new))


def _allow_joining(between: str, items: Iterable[object]) -> None:
    _allow(sum(len(between) + (len(item) if isinstance(item, str) else 0) for item in items))


def _formatted_size(text: str, mark: str, by_argument: bool, values: Iterable[object]) -> int:
    """At least the length of the formatted text, where its widths are numbers in it or arguments."""
    fields = _FIELDS[mark].findall(text)
    widths = sum(int(digits[:12]) for field in fields for digits in re.findall(r"\d+", field))
    longest = 0
    for value in _flat(values):
        if isinstance(value, str):
            longest += len(value)
        elif by_argument and isinstance(value, int):
            longest += abs(value)
    return len(text) + widths + len(fields) * longest


def _flat(values: Iterable[object]) -> Iterator[object]:
    """Values that are named stand in a mapping."""
    for value in values:
        if isinstance(value, Mapping):
            yield from value.values()
        else:
            yield value


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _replace(value: object, old: object, new: object, count: int | None = None) -> str:
    text = str(value)
    _allow_replacing(text, str(old), str(new))
    return text.replace(str(old), str(new), -1 if count is None else count)


@pass_environment
def _join(
    environment: Environment, value: Iterable[Any], d: object = "", attribute: str | int | None = None
) -> str:
    items = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    texts = [str(item) for item in items]
    _allow_joining(str(d), texts)
    return str(d).join(texts)


def _format(value: object, *args: Any, **kwargs: Any) -> str:
    text = str(value)
    _allow(_formatted_size(text, "%", "*" in text, (*args, *kwargs.values())))
    return text % (kwargs or args)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    margin = len(width) if isinstance(width, str) else width
    _allow(len(text) + margin * (1 + len(text.splitlines())))
    return do_indent(text, width, first, blank)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: jinja2's own filter escapes for HTML, which models were not trained on."""
    if indent is not None and indent > _MAX_INDENT:
        raise SecurityError("the template indents by too much")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
