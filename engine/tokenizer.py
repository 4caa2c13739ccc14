"""Text to token ids and back, from the model file alone.

The law that the callers rely on: `encode` never makes a control token, whatever the text says. Someone who
types "<|im_end|>" has typed ten characters. Control tokens come from `encode_special`, for text that is ours.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from engine.pretokenizers import BOS_BY_DEFAULT
from engine.token_table import Spelling, TokenTable
from engine.tokenizer_build import built_tokenizer, space_prefix
from engine.tokenizer_cache import cached
from engine.tokenizer_hf import read_hf_tokenizer
from engine.weights.vocabulary import GgufVocabulary, HfTokenizerFiles, TokenizerData


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A run of text; a `special` one is exactly the text of one control token, and means that token."""

    text: str
    special: bool = False


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What a model's files say about ids, beside the vocabulary itself."""

    bos_id: int | None
    eos_id: int | None
    add_bos: bool  # a prompt begins with BOS
    prefix: bytes  # what encoding puts before a text, and decoding takes away: b" " or nothing
    end_ids: frozenset[int]


class Tokenizer:
    """Ids are llama.cpp's for the same GGUF file."""

    def __init__(
        self, cutter: tokenizers.Tokenizer, table: TokenTable, rules: TokenRules, digest: str
    ) -> None:
        self._cutter = cutter
        self._table = table
        self._control_ids = frozenset(table.controls.values())
        self.rules = rules
        self.digest = digest

    @property
    def bos_id(self) -> int | None:
        return self.rules.bos_id

    @property
    def eos_id(self) -> int | None:
        return self.rules.eos_id

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids after which a reply is over: EOS, end of turn, end of text."""
        return self.rules.end_ids

    @property
    def add_bos(self) -> bool:
        """Whether a prompt of this model begins with BOS; `with_bos` puts it there."""
        return self.rules.add_bos

    @property
    def vocab_size(self) -> int:
        return len(self._table)

    def special_ids(self) -> Mapping[str, int]:
        """Every control token, text to id."""
        return self._table.controls

    def is_special(self, token: int) -> bool:
        return self._table.is_control(token)

    def token_text(self, token: int) -> str:
        """The token as the vocabulary spells it: "<|im_end|>" for a control token."""
        return self._table.text(token)

    def token_bytes(self, token: int) -> bytes:
        """Exactly the bytes that the token adds to a text; b"" for a control token."""
        return self._table.bytes_of(token)

    def encode(self, text: str) -> list[int]:
        """Ids of `text` as ordinary text: no BOS, and special-token text stays text.

        A byte that the vocabulary has no token for is left out, as llama.cpp does.
        """
        return self._plain(_without_lone_surrogates(text))

    def encode_special(self, text: str) -> list[int]:
        """Ids of `text`, where special-token text becomes the special token. No BOS."""
        ids: list[int] = []
        for piece in self._split(_without_lone_surrogates(text)):
            ids.extend(self._plain(piece) if isinstance(piece, str) else (piece,))
        return ids

    def encode_pieces(self, pieces: Iterable[TextPiece]) -> list[int]:
        """Ids of a rendered template: special pieces as tokens, the text between them as ordinary text.

        Neighbouring pieces of text are one text: how a template was put together leaves no mark. No BOS.
        """
        ids: list[int] = []
        text = ""
        for piece in pieces:
            if not piece.special:
                text += piece.text
                continue
            ids.extend(self.encode(text))
            text = ""
            ids.extend(self.encode_special(piece.text))
        return ids + self.encode(text)

    def with_bos(self, ids: Sequence[int]) -> list[int]:
        """`ids` as a prompt: BOS in front where the model wants one and it is not there yet."""
        bos = self.bos_id
        if not self.add_bos or bos is None or list(ids[:1]) == [bos]:
            return list(ids)
        return [bos, *ids]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of a whole encoding: `decode(encode(text)) == text`. Bytes that are no UTF-8 become
        U+FFFD. For text that comes bit by bit, or from the middle, use a StreamDecoder."""
        data = b"".join(map(self.token_bytes, ids))
        return data.removeprefix(self.rules.prefix).decode("utf-8", "replace")

    def _plain(self, text: str) -> list[int]:
        ids = self._cutter.encode(text, add_special_tokens=False).ids
        if self._control_ids.isdisjoint(ids) or not any(t in text for t in self._table.controls):
            return list(ids)
        return self._plain_cut(text)

    def _plain_cut(self, text: str) -> list[int]:
        """For vocabularies whose merges can end in a control token: its text is cut after one character."""
        for special in sorted((t for t in self._table.controls if t in text), key=len, reverse=True):
            at = text.find(special) + 1
            if len(special) > 1:
                return self._plain(text[:at]) + self._plain(text[at:])
        return list(self._cutter.encode(text, add_special_tokens=False).ids)

    def _split(self, text: str) -> Iterator[str | int]:
        """Text and control ids by turns. Longer specials are found first, everywhere, as llama.cpp does."""
        parts: list[str | int] = [text]
        present = [special for special in self._table.controls if special and special in text]
        for special in sorted(present, key=len, reverse=True):
            token = self._table.controls[special]
            parts = [bit for part in parts for bit in _cut(part, special, token)]
        return (part for part in parts if part != "")


class StreamDecoder:
    """Ids to text as they come, in whole characters.

    The texts returned by every `push` and the last `flush` joined are the bytes of all ids decoded at once.
    A character that is cut between tokens waits for its rest; what can never become one is U+FFFD.
    `skip` is what to leave out at the very start: `tokenizer.rules.prefix` where a text begins there.
    """

    def __init__(self, tokenizer: Tokenizer, skip: bytes = b"") -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        data = self._tokenizer.token_bytes(token)
        if data and self._skip:
            data, self._skip = data.removeprefix(self._skip), b""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is left: U+FFFD for a character that never ended. Ready for another text afterwards."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def open_tokenizer(data: TokenizerData, cache_dir: Path | None = None) -> Tokenizer:
    """The tokenizer of an opened model (`weights.tokenizer_data`).

    Where a build takes seconds, its result is kept in `cache_dir` and believed only if its digest is right.
    Raises WeightsRefused for a tokenizer that is damaged or of an unknown kind.
    """
    if isinstance(data, HfTokenizerFiles):
        found = read_hf_tokenizer(data)
        bos, eos = found.id_of("bos_token"), found.id_of("eos_token")
        ends = found.table.ends([eos, *data.settings["end_ids"]])
        rules = TokenRules(bos, eos, found.add_bos, found.prefix, ends)
        return Tokenizer(found.cutter, found.table, rules, data.digest)
    cutter = cached(cache_dir, data.digest, lambda: built_tokenizer(data))
    sentencepiece = data.text("model", "") == "llama"
    spelling = Spelling.SENTENCEPIECE if sentencepiece else Spelling.BYTE_LEVEL
    table = TokenTable(data.tokens, data.kinds, spelling)
    return Tokenizer(cutter, table, _gguf_rules(data, table), data.digest)


def _gguf_rules(data: GgufVocabulary, table: TokenTable) -> TokenRules:
    bos, eos = data.token_id("bos"), data.token_id("eos")
    bos_default = data.text("model", "") == "llama" or data.text("pre", "") in BOS_BY_DEFAULT
    named = [eos, data.token_id("eot"), data.token_id("eom")]
    return TokenRules(
        bos_id=bos,
        eos_id=eos,
        add_bos=data.flag("add_bos_token", bos_default),
        prefix=b" " if space_prefix(data) else b"",
        end_ids=table.ends(named),
    )


def _cut(part: str | int, special: str, token: int) -> Iterator[str | int]:
    if isinstance(part, int):
        yield part
        return
    first, *rest = part.split(special)
    yield first
    for text in rest:
        yield token
        yield text


def _without_lone_surrogates(text: str) -> str:
    """Half of a UTF-16 pair is no character; such text comes from damaged input and becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
