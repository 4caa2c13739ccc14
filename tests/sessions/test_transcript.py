"""Generated ids are kept, whatever the template says; where it disagrees is found to the token."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import EditRefused
from engine.tokenizer import TextPiece, Tokenizer, open_tokenizer
from engine.weights.source import open_weights
from sessions.transcript import align, align_tail
from tests.tiny import write_tiny

START, END = TextPiece("<|im_start|>", True), TextPiece("<|im_end|>", True)


@pytest.fixture(scope="module")
def smol(smollm2_path: Path) -> Tokenizer:
    return open_tokenizer(open_weights(smollm2_path).tokenizer_data)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf")
    return open_tokenizer(open_weights(path).tokenizer_data)


def turn(role: str, text: str) -> list[TextPiece]:
    return [START, TextPiece(f"{role}\n{text}"), END, TextPiece("\n")]


def test_nothing_at_hand_is_all_new(smol: Tokenizer) -> None:
    pieces = turn("user", "Hello")
    plan = align((), pieces, smol)
    assert plan.kept == 0
    assert plan.diverged is None
    assert list(plan.ids) == smol.encode_pieces(pieces)


def test_ids_that_no_tokenizer_would_choose_are_kept(smol: Tokenizer) -> None:
    """A model may spell "hello" letter by letter; encoding its text again would give other ids."""
    spelled = [token for letter in "hello" for token in smol.encode(letter)]
    assert spelled != smol.encode("hello")
    ids = [*smol.encode_pieces([START, TextPiece("assistant\n")]), *spelled]
    pieces = [*turn("assistant", "hello"), *turn("user", "again")]
    plan = align(ids, pieces, smol)
    assert plan.kept == len(ids)
    assert plan.diverged is None
    assert smol.decode(plan.ids).endswith("user\nagain\n")


def test_a_rewritten_past_is_found_at_its_first_wrong_token(smol: Tokenizer) -> None:
    said = turn("assistant", "one two three")
    ids = smol.encode_pieces(said)
    plan = align(ids, turn("assistant", "one two four"), smol)
    assert plan.diverged is not None
    assert plan.kept == plan.diverged
    again = smol.encode_pieces(turn("assistant", "one two four"))
    assert [*ids[: plan.kept], *plan.ids] == again


def test_typed_control_text_does_not_match_a_control_token(smol: Tokenizer) -> None:
    ids = smol.encode_pieces([START, TextPiece("user\nhi"), END])
    plan = align(ids, [START, TextPiece("user\nhi<|im_end|>")], smol)
    assert plan.diverged == len(ids) - 1


def test_a_character_is_never_cut(tiny: Tokenizer) -> None:
    """Ids are bytes here: the text parts inside the last letter, after equal first bytes."""
    ids = tiny.encode("caf\u00e9")
    plan = align(ids, [TextPiece("caf\u00e8 noir")], tiny)
    assert plan.kept == 3
    assert tiny.decode(plan.ids) == "\u00e8 noir"


def test_after_a_shift_the_last_words_are_the_anchor(tiny: Tokenizer) -> None:
    whole = [*turn("user", "a long story"), *turn("assistant", "and its end")]
    ids = tiny.encode_pieces(whole)
    shifted = [*ids[:4], *ids[12:]]
    plan = align_tail(shifted, [*whole, *turn("user", "more")], tiny)
    assert plan.kept == len(shifted)
    assert list(plan.ids) == tiny.encode_pieces(turn("user", "more"))


def test_after_a_shift_a_rewritten_end_is_refused(tiny: Tokenizer) -> None:
    ids = tiny.encode_pieces(turn("assistant", "the end"))
    with pytest.raises(EditRefused, match="context shift"):
        align_tail(ids, turn("assistant", "The End"), tiny)
