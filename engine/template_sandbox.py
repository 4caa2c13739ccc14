"""The jinja2 environment in which templates from model files run: sandboxed, bounded, with what they expect.

A template is a program by a stranger. It can call nothing but what is here, cannot change what it is given,
and cannot make texts without end.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEXT = 64 * 2**20  # characters of a rendered prompt, and of any text a template multiplies
_MAX_POWER = 64
_PADDING = ("center", "ljust", "rjust", "zfill", "expandtabs")


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks replies for training; here its body is just text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a set of the instance

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """Raises SecurityError where a template reaches for what is unsafe or too large."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: now().strftime(str(form)[:256])
        self.filters["tojson"] = _tojson

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        for one, other in ((left, right), (right, left)):
            sized = isinstance(one, str | list | tuple) and isinstance(other, int)
            if operator == "*" and sized and len(one) * other > MAX_TEXT:
                raise SecurityError("the template makes a text that is too large")
        if operator == "**" and (abs(left) > 2**32 or abs(right) > _MAX_POWER):
            raise SecurityError("the template computes a number that is too large")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        text_method = isinstance(getattr(obj, "__self__", None), str)  # a bound method of a text
        if text_method and obj.__name__ in _PADDING and any(_large(a) for a in (*args, *kwargs.values())):
            raise SecurityError("the template makes a text that is too large")
        return super().call(context, obj, *args, **kwargs)


def _large(argument: object) -> bool:
    return isinstance(argument, int) and argument > MAX_TEXT


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: jinja2's own filter escapes for HTML, which models were not trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
