"""JSON (RFC 8259) read byte by byte: one object, in UTF-8.

A table says for each state and byte what comes next; what only the open brackets can tell, which are closed
and what a comma separates, is left to whoever knows them. Strings are whole characters, and of surrogates in
escapes pairs alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

#: How deep brackets may nest.
MAX_DEPTH = 48

BLANKS = b" \t\n\r"
_DIGITS = b"0123456789"
_HEX = b"0123456789abcdefABCDEF"


class Do(IntEnum):
    """What a byte does beside leading to a state. From `CLOSE_OBJECT` on the innermost bracket counts."""

    GO = 0
    OPEN_OBJECT = 1
    OPEN_ARRAY = 2
    CLOSE_OBJECT = 3
    CLOSE_ARRAY = 4
    COMMA = 5


class State(IntEnum):
    """Outside of strings."""

    START = 0  # before the object
    END = 1  # behind it
    OBJECT = 2  # behind {
    ARRAY = 3  # behind [
    KEY = 4  # a key must come
    COLON = 5
    VALUE = 6  # a value must come
    AFTER = 7  # behind a value
    MINUS = 8
    ZERO = 9
    INTEGER = 10
    POINT = 11
    FRACTION = 12
    E = 13
    E_SIGN = 14
    EXPONENT = 15


#: Where a number may be over.
_NUMBERS = (State.ZERO, State.INTEGER, State.FRACTION, State.EXPONENT)
_WORDS = ("true", "false", "null")
#: Inside of a string: its text; behind a backslash; how many hexadecimal digits are to come; of a surrogate's
#: escape what is to come of it and its second half; how many bytes of a character, and after the first bytes
#: that not every byte may follow.
_IN_STRING = (
    *("text", "escape", "hex4", "hex3", "hex2", "hex1"),
    *("hexD", "high2", "high1", "pair", "pairU", "pairD", "pairC"),
    *("more1", "more2", "more3", "moreE0", "moreED", "moreF0", "moreF4"),
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a text stands: the state, and the brackets that are open, the innermost last."""

    state: int
    open: str


class _Table:
    """Codes `state + 256 * Do`, -1 where a byte may not be."""

    def __init__(self) -> None:
        names = [state.name for state in State]
        names += [word[:count] for word in _WORDS for count in range(1, len(word))]
        names += [f"{kind} {name}" for kind in ("key", "value") for name in _IN_STRING]
        self.index = {name: at for at, name in enumerate(names)}
        self.codes = np.full((len(names), 256), -1, np.int16)
        self._fill()

    def _set(self, state: str, among: Iterable[int], then: str, do: Do = Do.GO) -> None:
        for byte in among:
            self.codes[self.index[state], byte] = self.index[then] + 256 * do

    def _fill(self) -> None:
        for state in (
            State.START,
            State.OBJECT,
            State.ARRAY,
            State.KEY,
            State.COLON,
            State.VALUE,
            State.AFTER,
        ):
            self._set(state.name, BLANKS, state.name)
        self._set("START", b"{", "OBJECT", Do.OPEN_OBJECT)
        for state in (State.OBJECT, State.KEY):
            self._set(state.name, b'"', "key text")
        self._set("OBJECT", b"}", "AFTER", Do.CLOSE_OBJECT)
        self._set("COLON", b":", "VALUE")
        self._values("VALUE")
        self._values("ARRAY")
        self._set("ARRAY", b"]", "AFTER", Do.CLOSE_ARRAY)
        self._behind_values("AFTER")
        self._numbers()
        for word in _WORDS:
            for count in range(1, len(word)):
                then = "AFTER" if count + 1 == len(word) else word[: count + 1]
                self._set(word[:count], word[count].encode(), then)
        self._strings("key", "COLON")
        self._strings("value", "AFTER")

    def _values(self, state: str) -> None:
        self._set(state, b"{", "OBJECT", Do.OPEN_OBJECT)
        self._set(state, b"[", "ARRAY", Do.OPEN_ARRAY)
        self._set(state, b'"', "value text")
        self._set(state, b"-", "MINUS")
        self._set(state, b"0", "ZERO")
        self._set(state, _DIGITS[1:], "INTEGER")
        for word in _WORDS:
            self._set(state, word[0].encode(), word[:1])

    def _behind_values(self, state: str) -> None:
        self._set(state, BLANKS, "AFTER")
        self._set(state, b",", "AFTER", Do.COMMA)
        self._set(state, b"}", "AFTER", Do.CLOSE_OBJECT)
        self._set(state, b"]", "AFTER", Do.CLOSE_ARRAY)

    def _numbers(self) -> None:
        for number in _NUMBERS:
            self._behind_values(number.name)
        self._set("MINUS", b"0", "ZERO")
        self._set("MINUS", _DIGITS[1:], "INTEGER")
        self._set("INTEGER", _DIGITS, "INTEGER")
        for state in ("ZERO", "INTEGER"):
            self._set(state, b".", "POINT")
        self._set("POINT", _DIGITS, "FRACTION")
        self._set("FRACTION", _DIGITS, "FRACTION")
        for state in ("ZERO", "INTEGER", "FRACTION"):
            self._set(state, b"eE", "E")
        self._set("E", b"+-", "E_SIGN")
        for state in ("E", "E_SIGN", "EXPONENT"):
            self._set(state, _DIGITS, "EXPONENT")

    def _strings(self, kind: str, behind: str) -> None:
        def go(state: str, among: Iterable[int], then: str) -> None:
            self._set(f"{kind} {state}", among, f"{kind} {then}")

        go("text", set(range(0x20, 0x80)) - set(b'"\\'), "text")
        self._set(f"{kind} text", b'"', behind)
        go("text", b"\\", "escape")
        go("escape", b'"\\/bfnrt', "text")
        go("escape", b"u", "hex4")
        go("hex4", set(_HEX) - set(b"dD"), "hex3")
        go("hex4", b"dD", "hexD")
        go("hexD", b"01234567", "hex2")
        go("hexD", b"89abAB", "high2")
        for state, among, then in (
            *(("hex3", _HEX, "hex2"), ("hex2", _HEX, "hex1"), ("hex1", _HEX, "text")),
            *(("high2", _HEX, "high1"), ("high1", _HEX, "pair"), ("pair", b"\\", "pairU")),
            *(("pairU", b"u", "pairD"), ("pairD", b"dD", "pairC"), ("pairC", b"cdefCDEF", "hex2")),
        ):
            go(state, among, then)
        rest = range(0x80, 0xC0)
        for first, then in (
            *((range(0xC2, 0xE0), "more1"), (range(0xE1, 0xF0), "more2"), (range(0xF1, 0xF4), "more3")),
            *(((0xE0,), "moreE0"), ((0xED,), "moreED"), ((0xF0,), "moreF0"), ((0xF4,), "moreF4")),
        ):
            go("text", first, then)
        go("moreE0", range(0xA0, 0xC0), "more1")
        go("moreED", range(0x80, 0xA0), "more1")
        go("moreF0", range(0x90, 0xC0), "more2")
        go("moreF4", range(0x80, 0x90), "more2")
        go("more3", rest, "more2")
        go("more2", rest, "more1")
        go("more1", rest, "text")


_TABLE = _Table()
#: int16 [states, 256]: the code of a byte in a state.
CODES: npt.NDArray[np.int16] = _TABLE.codes
NUM_STATES = len(CODES)
BEGIN = Place(State.START, "")
_ROWS: list[list[int]] = CODES.tolist()
_FIRST_IN_STRING = _TABLE.index["key text"]


def in_string(state: int) -> bool:
    return state >= _FIRST_IN_STRING


def read(place: Place, data: bytes) -> Place | None:
    """Where a text stands that goes on with `data`; None where it cannot."""
    state, brackets = place.state, place.open
    for byte in data:
        code = _ROWS[state][byte]
        if code < 0:
            return None
        state, do = code & 255, code >> 8
        if do == Do.GO:
            continue
        if do <= Do.OPEN_ARRAY:
            brackets += "{" if do == Do.OPEN_OBJECT else "["
            if len(brackets) > MAX_DEPTH:
                return None
        elif do == Do.COMMA:
            state = State.KEY if brackets[-1] == "{" else State.VALUE
        elif brackets[-1] != ("{" if do == Do.CLOSE_OBJECT else "["):
            return None
        else:
            brackets = brackets[:-1]
            state = State.AFTER if brackets else State.END
    return Place(state, brackets)
