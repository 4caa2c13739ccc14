"""Tokenizers built from GGUF files: ids are llama.cpp's, text comes back to the byte, text stays text.

The rows of `fixtures/` were made with llama-cpp-python 0.3.36 from the same two files: `plain` is the ids of
a text where special-token text is ordinary text, `special` where it is the special token, both without BOS.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import models

from engine.errors import BatchRefused, WeightsRefused
from engine.token_table import Spelling, TokenTable
from engine.tokenizer import StreamDecoder, TextPiece, Tokenizer, TokenRules, open_tokenizer
from engine.tokenizer_build import built_tokenizer
from engine.weights.source import open_weights
from engine.weights.vocabulary import GgufVocabulary, TokenKind
from tests.tiny import CONTROL, write_tiny

FIXTURES = Path(__file__).parent / "fixtures"
FILES = {"smollm2": "smollm2_path", "gemma3": "gemma3_path"}
SPACE = "\u2581"  # SentencePiece's mark for a space: a literal one cannot be told from a space

pytestmark = pytest.mark.real


@pytest.fixture(scope="module", params=FILES)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tokenizer(
    model: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    path = request.getfixturevalue(FILES[model])
    return open_tokenizer(open_weights(path).tokenizer_data, tmp_path_factory.mktemp("tokenizers"))


@pytest.fixture(scope="module")
def rows(model: str) -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = json.loads((FIXTURES / f"{model}.json").read_text())
    assert len(loaded) > 150
    return loaded


def expected_text(model: str, text: str) -> str:
    return text.replace(SPACE, " ") if model == "gemma3" else text


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [*(decoder.push(token) for token in ids), decoder.flush()]


def test_ids_of_text_are_those_of_llama_cpp(tokenizer: Tokenizer, rows: list[dict[str, Any]]) -> None:
    wrong = [row["text"] for row in rows if tokenizer.encode(row["text"]) != row["plain"]]
    assert wrong == []


def test_ids_of_text_with_special_tokens_are_those_of_llama_cpp(
    tokenizer: Tokenizer, rows: list[dict[str, Any]]
) -> None:
    wrong = [row["text"] for row in rows if tokenizer.encode_special(row["text"]) != row["special"]]
    assert wrong == []


def test_the_rows_hold_special_text_that_must_stay_text(rows: list[dict[str, Any]]) -> None:
    assert sum(row["plain"] != row["special"] for row in rows) >= 3


def test_text_comes_back_from_its_ids_byte_for_byte(
    model: str, tokenizer: Tokenizer, rows: list[dict[str, Any]]
) -> None:
    for row in rows:
        text = expected_text(model, row["text"])
        assert tokenizer.decode(row["plain"]) == text
        assert b"".join(map(tokenizer.token_bytes, row["plain"])) == text.encode()


def test_text_streams_in_whole_characters(
    model: str, tokenizer: Tokenizer, rows: list[dict[str, Any]]
) -> None:
    cut = 0
    for row in rows:
        pieces = streamed(tokenizer, row["plain"])
        assert "".join(pieces) == expected_text(model, row["text"])
        assert pieces[-1] == ""  # nothing is left over
        assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in row["text"]
        cut += pieces[:-1].count("")
    assert cut > 20, "the rows cut no character, so this shows nothing"


@pytest.fixture(scope="module")
def spelled(tokenizer: Tokenizer) -> frozenset[int]:
    """The bytes that the vocabulary has a token for."""
    singles = (tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size))
    return frozenset(data[0] for data in singles if len(data) == 1)


@settings(max_examples=150)
@given(text=st.text(st.characters(exclude_categories=("Cs",), exclude_characters=SPACE), max_size=60))
def test_any_text_comes_back_and_is_never_a_control_token(
    tokenizer: Tokenizer, spelled: frozenset[int], text: str
) -> None:
    assume(spelled.issuperset(text.encode()))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert "".join(streamed(tokenizer, ids)) == text
    assert not any(map(tokenizer.is_special, ids))


def test_a_byte_that_the_vocabulary_lacks_is_left_out_as_llama_cpp_does(
    model: str, tokenizer: Tokenizer, spelled: frozenset[int]
) -> None:
    if model == "smollm2":
        # Rare control characters, and lead bytes of planes that hold no character.
        assert set(range(256)) - spelled >= {0x04, 0xF1, 0xF2}
        assert tokenizer.decode(tokenizer.encode("a\x04b")) == "ab"
    else:
        assert len(spelled) == 256


def test_special_text_that_is_typed_is_never_a_control_token(tokenizer: Tokenizer) -> None:
    specials = tokenizer.special_ids()
    assert len(specials) > 3
    for special, token in list(specials.items())[:400]:
        for text in (special, f"a{special}b", special * 2, f" {special}\n"):
            ids = tokenizer.encode(text)
            assert not any(map(tokenizer.is_special, ids)), text
            assert tokenizer.decode(ids) == text
        assert tokenizer.encode_special(special) == [token]
        assert tokenizer.token_bytes(token) == b""
        assert tokenizer.token_text(token) == special


def test_pieces_of_text_between_specials_are_one_text(tokenizer: Tokenizer) -> None:
    special = next(iter(tokenizer.special_ids()))
    pieces = [TextPiece("hel"), TextPiece("lo wor"), TextPiece("ld"), TextPiece(special, special=True)]
    ids = tokenizer.encode_pieces([*pieces, TextPiece(special)])
    assert ids == [
        *tokenizer.encode("hello world"),
        tokenizer.special_ids()[special],
        *tokenizer.encode(special),
    ]


def test_half_of_a_surrogate_pair_does_not_stop_anything(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud83db")) == "a\ufffdb"
    assert tokenizer.encode("\ud83d\ude42") == tokenizer.encode("🙂")
    assert tokenizer.encode_special("a\udfffb") == tokenizer.encode("a\ufffdb")


def test_a_character_that_never_ends_is_told_at_the_flush(tokenizer: Tokenizer) -> None:
    ids = [token for token in tokenizer.encode("🫨") if tokenizer.token_bytes(token)]
    assert len(ids) > 1, "the emoji is one token, so nothing is cut"
    decoder = StreamDecoder(tokenizer)
    assert "".join(decoder.push(token) for token in ids[:-1]) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.push(tokenizer.encode("a")[0]) == "a"


def test_an_id_outside_of_the_vocabulary_is_refused(tokenizer: Tokenizer) -> None:
    for token in (-1, tokenizer.vocab_size, 2**40):
        for ask in (tokenizer.token_bytes, tokenizer.token_text, tokenizer.is_special):
            with pytest.raises(BatchRefused):
                ask(token)


def test_what_the_files_say_about_prompts_is_kept(model: str, tokenizer: Tokenizer) -> None:
    specials = tokenizer.special_ids()
    if model == "smollm2":
        assert (tokenizer.add_bos, tokenizer.vocab_size) == (False, 49_152)
        assert tokenizer.end_ids == {specials["<|im_end|>"], specials["<|endoftext|>"]}
        assert tokenizer.with_bos([5]) == [5]
    else:
        assert (tokenizer.add_bos, tokenizer.vocab_size) == (True, 262_144)
        assert {specials["<eos>"], specials["<end_of_turn>"]} <= tokenizer.end_ids
        assert tokenizer.with_bos([5]) == [2, 5] == tokenizer.with_bos([2, 5])


def test_one_vocabulary_has_one_digest(model: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    other = open_tokenizer(open_weights(write_tiny(tmp_path / "tiny.gguf", layers=1)).tokenizer_data)
    assert tokenizer.digest.startswith("b3-")
    assert tokenizer.digest != other.digest


def test_control_tokens_are_not_in_what_cuts_text(tmp_path: Path) -> None:
    data = open_weights(write_tiny(tmp_path / "tiny.gguf", layers=1)).tokenizer_data
    assert isinstance(data, GgufVocabulary)
    cutter = built_tokenizer(data)
    assert cutter.token_to_id("a") is not None
    assert [cutter.token_to_id(text) for text in CONTROL] == [None] * len(CONTROL)


def test_of_two_control_tokens_at_one_place_the_longer_is_meant() -> None:
    tokens = ["<", ">", "<>", "<><"]
    kinds = [TokenKind.NORMAL, TokenKind.NORMAL, TokenKind.CONTROL, TokenKind.CONTROL]
    cutter = tokenizers.Tokenizer(models.BPE({"<": 0, ">": 1}, []))
    table = TokenTable(tokens, [int(kind) for kind in kinds], Spelling.BYTE_LEVEL)
    rules = TokenRules(bos_id=None, eos_id=None, add_bos=False, prefix=b"", end_ids=frozenset())
    tokenizer = Tokenizer(cutter, table, rules, "b3-0")
    assert tokenizer.encode_special("<><>") == [3, 1]
    assert tokenizer.encode_special("<>>") == [2, 1]
    assert tokenizer.encode("<><>") == [0, 1, 0, 1]


def test_an_unknown_kind_of_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", layers=1)
    content = path.read_bytes()
    for old, new in ((b"gpt2", b"rwkv"), (b"gpt-2", b"bert!")):
        assert content.count(old) == 1
        path.write_bytes(content.replace(old, new))
        with pytest.raises(WeightsRefused, match=new.decode()):
            open_tokenizer(open_weights(path).tokenizer_data)
