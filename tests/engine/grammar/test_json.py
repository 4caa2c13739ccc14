"""The automaton knows JSON as others do, and a mask what it knows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.grammar.json_bytes import BEGIN, MAX_DEPTH, Place, State, in_string, read
from engine.grammar.json_object import MAX_BLANKS, JsonObject
from engine.grammar.masks import JsonMasks
from engine.token_table import Spelling, TokenTable
from engine.tokenizer import Tokenizer, TokenRules
from engine.weights.vocabulary import TokenKind

TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
HALF = st.booleans()
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=5)
DUMPS: Sequence[dict[str, Any]] = (
    {"ensure_ascii": False},
    {"ensure_ascii": True},
    {"indent": 3},
    {"separators": (",", ":")},
)
#: Pieces of JSON that come together in a token of a real vocabulary.
MERGED = (
    *(
        '"}',
        '"},',
        '":',
        '": ',
        '":"',
        '": "',
        '","',
        '", "',
        "{}",
        "[]",
        "[]}",
        "}}",
        "}}}",
        "]}",
        "}]",
        "]]",
    ),
    *(
        '{"',
        "[[",
        "[{",
        '[{"',
        "},{",
        '"},{"',
        '":[{"',
        "],[",
        "null",
        "true}",
        "false,",
        ":1",
        ":-0.5e+3",
        "12",
    ),
    *(
        "  ",
        "\n  ",
        "\n\n",
        ",\n",
        '\\"',
        "\\u00",
        "\\ud8",
        "\\ude00",
        "the",
        "é",
        "日本",
        "🙂",
        "{{",
        "]:",
        "}:",
    ),
)


class _Table(TokenTable):
    """A vocabulary of the given bytes, with one more token that ends a reply."""

    def __init__(self, words: Sequence[bytes]) -> None:
        super().__init__(["?"] * (len(words) + 1), [TokenKind.NORMAL] * (len(words) + 1), Spelling.BYTE_LEVEL)
        self.words = (*words, b"")

    def bytes_of(self, token: int) -> bytes:
        return self.words[token]


WORDS = (*(bytes([byte]) for byte in range(256)), *(text.encode() for text in MERGED))
END = len(WORDS)


class _Vocabulary(Tokenizer):
    """Cuts no text: only its tokens are asked for."""

    def __init__(self) -> None:
        self._table = _Table(WORDS)
        self.rules = TokenRules(None, END, False, b"", frozenset({END}))


MASKS = JsonMasks(_Vocabulary())


def ids_of(*words: bytes) -> list[int]:
    return [WORDS.index(word) for word in words]


def place_of(text: str | bytes) -> Place | None:
    return read(BEGIN, text if isinstance(text, bytes) else text.encode())


@given(OBJECTS, st.sampled_from(DUMPS), st.sampled_from(["", " ", "\n\t"]))
def test_every_object_is_read_to_its_end_and_no_further(
    value: dict[str, Any], how: dict[str, Any], before: str
) -> None:
    data = (before + json.dumps(value, **how)).encode()
    assert place_of(data) == Place(State.END, "")
    for cut in range(len(data)):
        place = place_of(data[:cut])
        assert place is not None
        assert place.state != State.END
    assert place_of(data + b" ") is None


@given(st.data())
@settings(max_examples=300)
def test_what_is_read_to_its_end_is_an_object_to_others_too(data: st.DataObject) -> None:
    """Random bytes that the automaton takes, until it is at the end of an object."""
    place, text = BEGIN, b""
    for _ in range(60):
        choices = [byte for byte in range(256) if read(place, bytes([byte])) is not None]
        if not choices:
            break
        # A closing bracket or quote where there can be one half of the time, so that there are ends.
        closing = [byte for byte in b'}]"' if byte in choices]
        ends = bool(closing) and data.draw(HALF)
        byte = data.draw(st.sampled_from(closing if ends else choices))
        text += bytes([byte])
        moved = read(place, bytes([byte]))
        assert moved is not None
        place = moved
    if place.state == State.END:
        value = json.loads(text.decode("utf-8"))
        assert isinstance(value, dict)
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # no half of a character


@pytest.mark.parametrize(
    "text",
    [
        *(
            "[",
            '"',
            "1",
            "}",
            "{,",
            "{1",
            '{"a"}',
            '{"a":}',
            '{"a":1,}',
            '{"a":01',
            '{"a":+1',
            '{"a":.5',
            '{"a":1.}',
        ),
        *(
            '{"a":1e}',
            '{"a":-}',
            '{"a":nul}',
            '{"a":True',
            '{"a":NaN',
            "{'a'",
            '{"a":[1,]',
            '{"a":[1}',
            '{"a":{]',
        ),
        *(
            '{"\\x',
            '{"\\u12g',
            '{"\n',
            '{"\x00',
            '{"\\udc00',
            '{"\\ud800x',
            '{"\\ud800\\n',
            '{"\\ud800\\ud800',
        ),
        *('{"a" "b"', '{"a":1 2', '{"a":[1 2', "{}{", "{}x", '{"a"::', "//", '{"a":tru,'),
    ],
)
def test_what_is_not_json_is_refused_where_it_stops_being_so(text: str) -> None:
    assert place_of(text) is None


@pytest.mark.parametrize(
    "data",
    [b"\x80", b"\xc1\x80", b"\xc3x", b"\xe0\x80\x80", b"\xed\xa0\x80", b"\xf0\x80", b"\xf4\x90", b"\xff"],
)
def test_strings_are_utf_8(data: bytes) -> None:
    assert place_of(b'{"' + data) is None


def test_brackets_nest_as_deep_as_they_may() -> None:
    deep = '{"a":' + "[" * (MAX_DEPTH - 1)
    place = place_of(deep)
    assert place is not None
    assert place_of(deep + "[") is None
    mask = MASKS.mask(place)
    assert not mask[ids_of(b"[", b"{", b"[[", b"[{", b"[]")].any()
    assert mask[ids_of(b"1", b"]", b"]]")].all()


def places() -> Iterator[Place]:
    texts = [
        *(
            "",
            "{",
            '{"',
            '{"a',
            '{"a"',
            '{"a":',
            '{"a":"',
            '{"a":"x',
            '{"a":1',
            '{"a":0',
            '{"a":-',
            '{"a":1.',
            '{"a":1e',
        ),
        *(
            '{"a":[',
            '{"a":[1',
            '{"a":[1,',
            '{"a":[[',
            '{"a":[{',
            '{"a":{"b":[',
            '{"a":{"b":1',
            '{"a":t',
            '{"a":nul',
        ),
        *(
            '{"a":"\\',
            '{"a":"\\u',
            '{"a":"\\ud8',
            '{"a":"\\ud83d',
            '{"a":"\\ud83d\\',
            '{"a":1,',
            '{"a":[{"b":"c"}',
            "{}",
        ),
        *('{"a":[[[[', '{"a":{"b":{"c":"d"'),
    ]
    for text in texts:
        place = place_of(text)
        assert place is not None, text
        yield place
    for data in (b'{"\xc3', b'{"\xe0', b'{"a":"\xf0\x9f', b'{"a":"\xf4'):
        place = place_of(data)
        assert place is not None
        yield place


@pytest.mark.parametrize("place", tuple(places()))
def test_a_mask_has_those_tokens_that_can_be_read(place: Place) -> None:
    mask = MASKS.mask(place)
    if place.state == State.END:
        assert np.flatnonzero(mask).tolist() == [END]
        return
    wanted = [read(place, word) is not None for word in WORDS] + [False]
    assert mask.tolist() == wanted
    assert MASKS.mask(place) is mask  # remembered


@pytest.mark.parametrize("seed", range(30))
def test_tokens_that_are_allowed_make_an_object_whatever_a_model_wants(seed: int) -> None:
    rng = np.random.default_rng(seed)
    wish = rng.standard_normal(END + 1) * 2
    closing = np.zeros(END + 1)  # so that it comes to an end
    closing[ids_of(b"}", b'"', b"]")] = 1
    constraint, said = JsonObject(MASKS), b""
    for step in range(4000):
        scores = np.where(
            constraint.allowed(), wish + rng.gumbel(size=END + 1) + step / 50 * closing, -np.inf
        )
        token = int(np.argmax(scores))
        assert np.isfinite(scores[token])
        constraint.push(token)
        if token == END:
            break
        said += WORDS[token]
    else:
        pytest.fail("it never came to an end")
    assert isinstance(json.loads(said.decode("utf-8")), dict)


def test_blanks_end_where_something_solid_may_follow() -> None:
    constraint, blank = JsonObject(MASKS), WORDS.index(b" ")
    for _ in range(MAX_BLANKS):
        assert constraint.allowed()[blank]
        constraint.push(blank)
    assert not constraint.allowed()[blank]
    assert constraint.allowed()[WORDS.index(b"{")]
    constraint.push(WORDS.index(b'{"'))
    for _ in range(MAX_BLANKS + 5):  # those in a string are its own
        assert constraint.allowed()[blank]
        constraint.push(blank)


def test_only_strings_are_in_strings() -> None:
    inside = place_of('{"a":"b')
    outside = place_of('{"a":"b"')
    assert inside is not None
    assert outside is not None
    assert (in_string(inside.state), in_string(outside.state)) == (True, False)
