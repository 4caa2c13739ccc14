"""Text leaves in whole characters, never with a piece of a stop string; the last piece says why it ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from engine.reply import Piece, Reply
from engine.runner import Engine
from engine.tokenizer import Tokenizer

END = 259  # <|im_end|>, the tiny models' end of a reply


@pytest.fixture
def tokenizer(engine: Engine) -> Tokenizer:
    return engine.tokenizer


def played(
    tokenizer: Tokenizer, ids: Iterable[int], stop: Sequence[str] = (), max_tokens: int | None = None
) -> list[Piece]:
    """The pieces that `ids` give until the reply ends, or the ids do and it is cancelled."""
    reply = Reply(tokenizer, stop, max_tokens)
    pieces = []
    for token in ids:
        if reply.ended is not None:
            break
        pieces.append(reply.push(token))
    ended = reply.ended or "cancelled"
    if reply.unsaid(ended):
        pieces.append(reply.end(ended))
    return pieces


def text_of(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def test_tokens_become_their_text_one_piece_each(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello")
    pieces = played(tokenizer, ids)
    assert [piece.token for piece in pieces] == [*ids, None]
    assert text_of(pieces) == "hello"
    assert [piece.finish for piece in pieces[:-1]] == [None] * len(ids)
    assert pieces[-1].finish == "cancelled"


def test_a_character_waits_until_it_is_whole(tokenizer: Tokenizer) -> None:
    text = "aé€😀z"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert [piece.text for piece in played(tokenizer, ids)] == [
        *("a", "", "é", "", "", "€", "", "", "", "😀", "z"),
        "",
    ]


def test_a_character_that_never_ends_is_no_text(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("ok"), *tokenizer.encode("😀")[:2]]
    for pieces in (played(tokenizer, ids), played(tokenizer, [*ids, END]), played(tokenizer, ids, (), 4)):
        assert text_of(pieces) == "ok"


def test_an_end_token_ends_the_reply_without_text(tokenizer: Tokenizer) -> None:
    pieces = played(tokenizer, [*tokenizer.encode("hi"), END, *tokenizer.encode("no")])
    assert text_of(pieces) == "hi"
    assert pieces[-1] == Piece(END, "", "eos")


@pytest.mark.parametrize("cut", ["STOP", "ST|OP", "S|T|O|P", "STO|P"])
def test_a_stop_string_ends_the_reply_before_it(tokenizer: Tokenizer, cut: str) -> None:
    """However it is cut into tokens: every character is one here."""
    text = f"go on {cut.replace('|', '')} and on"
    pieces = played(tokenizer, tokenizer.encode(text), ("STOP",))
    assert text_of(pieces) == "go on "
    assert pieces[-1].finish == "stop"
    assert pieces[-1].token == tokenizer.encode("P")[0]


def test_what_may_become_a_stop_string_waits(tokenizer: Tokenizer) -> None:
    pieces = played(tokenizer, tokenizer.encode("a\nUx\nUser"), ("\nUser:",))
    assert [piece.text for piece in pieces[:-1]] == ["a", "", "", "\nUx", "", "", "", "", ""]
    assert pieces[-1].text == "\nUser", "it never came: the text is said at the end"


def test_a_stop_string_that_begins_again_is_found(tokenizer: Tokenizer) -> None:
    pieces = played(tokenizer, tokenizer.encode("xaaab more"), ("aab",))
    assert text_of(pieces) == "xa"
    assert pieces[-1].finish == "stop"


def test_the_first_of_several_stop_strings_counts(tokenizer: Tokenizer) -> None:
    pieces = played(tokenizer, tokenizer.encode("one two three"), ("three", "two", ""))
    assert text_of(pieces) == "one "
    assert len(tokenizer.encode("th")) == 1  # both are found in one token
    assert text_of(played(tokenizer, tokenizer.encode("xth"), ("h", "th"))) == "x"


def test_the_length_counts_tokens_and_says_what_was_held(tokenizer: Tokenizer) -> None:
    pieces = played(tokenizer, tokenizer.encode("abcST"), ("STOP",), max_tokens=5)
    assert [piece.token for piece in pieces] == tokenizer.encode("abcST")
    assert text_of(pieces) == "abcST"
    assert pieces[-1].finish == "length"


def test_a_stop_string_on_the_last_token_is_a_stop(tokenizer: Tokenizer) -> None:
    pieces = played(tokenizer, tokenizer.encode("aSTOP"), ("STOP",), max_tokens=5)
    assert (text_of(pieces), pieces[-1].finish) == ("a", "stop")


def test_an_end_token_says_what_was_held(tokenizer: Tokenizer) -> None:
    pieces = played(tokenizer, [*tokenizer.encode("aST"), END], ("STOP",))
    assert (text_of(pieces), pieces[-1].finish) == ("aST", "eos")


def test_no_tokens_are_a_reply_that_ends_at_once(tokenizer: Tokenizer) -> None:
    assert played(tokenizer, tokenizer.encode("abc"), (), max_tokens=0) == [Piece(None, "", "length")]
