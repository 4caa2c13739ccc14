"""Typed reading of unpacked msgpack: every value's type and size is checked where it is taken.

All raise Corrupt for a wrong type or a number out of range below, LimitExceeded for one above.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engine.errors import Corrupt
from serialization.limits import refuse_above

#: a map that was unpacked, whose values nobody has looked at yet
Values = dict[str, Any]


def integer(value: Any, limit: int, what: str) -> int:
    """An integer in [0, limit]."""
    if type(value) is not int or value < 0:
        raise Corrupt(f"{what}: not a count")
    refuse_above(what, value, limit)
    return value


def real(value: Any, what: str) -> float:
    """A finite real number, spelt as one."""
    if type(value) is not float or not math.isfinite(value):
        raise Corrupt(f"{what}: not a finite real number")
    return value


def text(value: Any, limit: int, what: str) -> str:
    """Text of at most `limit` bytes of UTF-8."""
    if not isinstance(value, str):
        raise Corrupt(f"{what}: not text")
    try:
        refuse_above(what, len(value.encode("utf-8")), limit)
    except UnicodeEncodeError as error:
        raise Corrupt(f"{what}: text that is not Unicode") from error
    return value


def items(value: Any, limit: int, what: str) -> list[Any]:
    """An array of at most `limit` items."""
    if not isinstance(value, list):
        raise Corrupt(f"{what}: not an array")
    refuse_above(what, len(value), limit)
    return value


def exactly(value: Any, count: int, what: str) -> list[Any]:
    """An array of `count` items."""
    if not isinstance(value, list) or len(value) != count:
        raise Corrupt(f"{what}: not an array of {count}")
    return value


def values_of(value: Any, what: str) -> Values:
    """A map."""
    if not isinstance(value, dict):
        raise Corrupt(f"{what}: not a map")
    return value


class Record:
    """A map whose keys are taken one by one; `end` refuses what nobody took."""

    def __init__(self, values: Values, what: str) -> None:
        self._values = dict(values)
        self._what = what

    @classmethod
    def of(cls, value: Any, what: str) -> Record:
        return cls(values_of(value, what), what)

    def value(self, key: str) -> Any:
        if key not in self._values:
            raise Corrupt(f"{self._what}: {key} is missing")
        return self._values.pop(key)

    def integer(self, key: str, limit: int) -> int:
        return integer(self.value(key), limit, f"{self._what}: {key}")

    def real(self, key: str) -> float:
        return real(self.value(key), f"{self._what}: {key}")

    def text(self, key: str, limit: int) -> str:
        return text(self.value(key), limit, f"{self._what}: {key}")

    def text_or_none(self, key: str, limit: int) -> str | None:
        value = self.value(key)
        return None if value is None else text(value, limit, f"{self._what}: {key}")

    def items(self, key: str, limit: int) -> list[Any]:
        return items(self.value(key), limit, f"{self._what}: {key}")

    def record(self, key: str) -> Record:
        return Record.of(self.value(key), f"{self._what}: {key}")

    def record_or_none(self, key: str) -> Record | None:
        value = self.value(key)
        return None if value is None else Record.of(value, f"{self._what}: {key}")

    def rest(self) -> Mapping[str, Any]:
        """Everything that was not taken yet, taken."""
        values, self._values = self._values, {}
        return values

    def end(self) -> None:
        """Raises Corrupt if a key was not taken."""
        if self._values:
            raise Corrupt(f"{self._what}: unknown field {min(self._values)!r}")
