"""A model's configuration as its folder gives it: fields by name, checked when they are read.

What was read is remembered, since all of it decides what the model's rows mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

from blake3 import blake3

from engine.errors import WeightsRefused
from engine.models.base import WeightSource
from engine.state import Value

Word = TypeVar("Word", bound=str)

#: More than any field of a real model says; larger ones would be allocated for.
MOST = 2**31 - 1
_MAX_LIST = 8192
#: Fields that say how a file was made, or how another library would run it: they change no number.
REMARKS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "text_config",
    }
)
_INFINITE = {"__float__": "Infinity"}


class Fields:
    """Each verb raises WeightsRefused, with the field's name, where it is missing or makes no sense."""

    def __init__(self, weights: WeightSource) -> None:
        self._values = weights.hparams
        self._path = ""
        self._read: dict[str, Value] = {}

    @property
    def meaning(self) -> Mapping[str, Value]:
        """Every field that was read, as the fingerprint has it, so that an error can name the one that
        differs; and a digest of all fields but those of `REMARKS`, for what was not read by its name."""
        fields = {name: value for name, value in self._values.items() if name not in REMARKS}
        digest = blake3(json.dumps(fields, sort_keys=True).encode()).hexdigest(length=16)
        read = {f"config.{name}": value for name, value in sorted(self._read.items())}
        return {**read, "config": digest}

    def has(self, name: str) -> bool:
        """Whether the field is there and is not null."""
        return self._values.get(name) is not None

    def section(self, name: str) -> Fields:
        """An object within the object; empty where there is none."""
        value = self._values.get(name, {})
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.refused(name, value)
        inner = object.__new__(Fields)
        inner._values, inner._path, inner._read = value, f"{self._path}{name}.", self._read
        return inner

    def count(self, name: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        """A whole number in [least, most]."""
        value = self._get(name, default)
        if type(value) is not int or not least <= value <= most:
            raise self.refused(name, value)
        self._read[self._path + name] = value
        return value

    def count_or_auto(self, name: str, auto: int) -> int:
        """A whole number of at least 1; `auto` where the field is missing or says "auto"."""
        return auto if self._values.get(name) == "auto" else self.count(name, auto)

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e15:
            raise self.refused(name, value)
        self._read[self._path + name] = float(value)
        return float(value)

    def positive(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.number(name, default)
        if value <= 0:
            raise self.refused(name, value)
        return value

    def positive_or_null(self, name: str) -> float | None:
        """A finite number above 0, or None where the file says null; it must say one of the two."""
        if name not in self._values:
            raise self.refused(name, None)
        if self._values[name] is None:
            self._read[self._path + name] = None
            return None
        return self.positive(name)

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.refused(name, value)
        self._read[self._path + name] = value
        return value

    def flag_or_count(self, name: str, default: bool) -> bool:
        """A flag that older files say as a whole number, where all but 0 is true."""
        if isinstance(self._values.get(name, default), bool):
            return self.flag(name, default)
        return self.count(name, int(default), least=0) > 0

    def word(self, name: str, allowed: Sequence[str], default: str | None = None) -> str:
        """One of `allowed`."""
        value = self._get(name, default)
        if value not in allowed:
            raise self.refused(name, value)
        self._read[self._path + name] = str(value)
        return str(value)

    def words(self, name: str, length: int | None, allowed: Sequence[str]) -> tuple[str, ...]:
        """`length` words, or any number of them but none, each one of `allowed`."""
        value = self._get(name, None)
        if not isinstance(value, list) or not set(map(str, value)) <= set(allowed):
            raise self.refused(name, value)
        if not (0 < len(value) <= _MAX_LIST if length is None else len(value) == length):
            raise self.refused(name, value)
        self._read[self._path + name] = " ".join(value)
        return tuple(value)

    def letters(self, name: str, allowed: str) -> str:
        """A word of any length out of letters that are all in `allowed`."""
        value = self._get(name, None)
        if not isinstance(value, str) or len(value) > _MAX_LIST or not set(value) <= set(allowed):
            raise self.refused(name, value)
        self._read[self._path + name] = value
        return value

    def counts(self, name: str, least: int = 0, most: int = MOST) -> tuple[int, ...]:
        """A list of whole numbers in [least, most]."""
        value = self._get(name, None)
        if not isinstance(value, list) or len(value) > _MAX_LIST:
            raise self.refused(name, value)
        for item in value:
            if type(item) is not int or not least <= item <= most:
                raise self.refused(name, item)
        self._read[self._path + name] = " ".join(map(str, value))
        return tuple(value)

    def count_each(self, name: str, length: int) -> tuple[int, ...]:
        """A whole number of at least 1 for each of `length`, where the file may say one for all."""
        if not isinstance(self._values.get(name), list):
            return (self.count(name),) * length
        given = self.counts(name, least=1)
        if len(given) != length:
            raise self.refused(name, list(given))
        return given

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of finite numbers."""
        value = self._get(name, None)
        if not isinstance(value, list) or len(value) > _MAX_LIST:
            raise self.refused(name, value)
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int | float) or not abs(item) < 1e15:
                raise self.refused(name, item)
        self._read[self._path + name] = " ".join(map(repr, value))
        return tuple(float(item) for item in value)

    def limits(self, name: str) -> tuple[float, float]:
        """The least and the most that a value may be; 0 and infinity where the field is missing.

        JSON has no word for infinity: files say Infinity, or {"__float__": "Infinity"}.
        """
        value = self._get(name, [0.0, _INFINITE])
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise self.refused(name, value)
        low, high = (math.inf if item in (_INFINITE, math.inf) else item for item in value)
        for item in (low, high):
            if isinstance(item, bool) or not isinstance(item, int | float) or math.isnan(item):
                raise self.refused(name, value)
        if not abs(low) < 1e15 or high < low:
            raise self.refused(name, value)
        self._read[self._path + name] = f"{float(low)!r} {float(high)!r}"
        return float(low), float(high)

    def only(self, name: str, value: Value, default: Value = None) -> None:
        """The field must be `value`, or be absent where `default` is it: the engine knows no other."""
        given = self._values.get(name, default)
        if given != value:
            raise self.refused(name, given)

    def refused(self, name: str, value: object) -> WeightsRefused:
        """What to raise for a field's value."""
        shown = value if isinstance(value, str) else repr(value)[:80]
        if value is None:
            return WeightsRefused(f"the model's configuration lacks {self._path}{name}")
        return WeightsRefused(f"the model's {self._path}{name}: {shown} is not supported")

    def _get(self, name: str, default: object) -> object:
        value = self._values.get(name)
        return default if value is None else value
