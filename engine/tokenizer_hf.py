"""A Hugging Face folder's `tokenizer.json`, read so that plain text never becomes a control token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from engine.errors import WeightsRefused
from engine.token_table import Spelling, TokenTable
from engine.weights.vocabulary import HfTokenizerFiles, TokenKind

MAX_VOCAB = 2**24


@dataclass(frozen=True, slots=True)
class HfTokenizer:
    """`cutter` makes ordinary text of everything; control tokens are in `table` alone."""

    cutter: Tokenizer
    table: TokenTable
    settings: Mapping[str, Any]
    add_bos: bool
    prefix: bytes

    def id_of(self, key: str) -> int | None:
        """The id of the token that the settings name under `key`, or None."""
        text = self.settings.get(key)
        if text is None:
            return None
        found = self.table.controls.get(text)
        return found if found is not None else self.cutter.token_to_id(text)


def read_hf_tokenizer(files: HfTokenizerFiles) -> HfTokenizer:
    """Raises WeightsRefused for a file that is damaged or writes bytes in a way that is not known."""
    try:
        tree = json.loads(files.source)
        cutter = Tokenizer.from_str(files.source.decode("utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise WeightsRefused(f"{files.model}: tokenizer.json cannot be read: {error}") from error
    cutter.encode_special_tokens = True
    cutter.no_padding()
    cutter.no_truncation()
    spelling = _spelling(files.model, tree)
    table = _table(files.model, cutter, spelling)
    sample = cutter.encode("a", add_special_tokens=False).ids
    prefix = b" " if sample and table.bytes_of(sample[0]).startswith(b" ") else b""
    return HfTokenizer(cutter, table, files.settings, _adds_bos(files, cutter), prefix)


def _adds_bos(files: HfTokenizerFiles, cutter: Tokenizer) -> bool:
    """The setting where there is one; otherwise what the file's own post-processor does to no text."""
    setting = files.settings.get("add_bos_token")
    if isinstance(setting, bool):
        return setting
    bos = files.settings.get("bos_token")
    made = cutter.encode("", add_special_tokens=True).ids
    return bos is not None and made[:1] == [cutter.token_to_id(bos)]


def _spelling(model: str, tree: Mapping[str, Any]) -> Spelling:
    """Told by the decoder, whose job is to undo it."""
    decoder = tree.get("decoder") or {}
    steps = {step.get("type") for step in [decoder, *decoder.get("decoders", ())]}
    if "ByteLevel" in steps:
        return Spelling.BYTE_LEVEL
    if steps & {"ByteFallback", "Metaspace"}:
        return Spelling.SENTENCEPIECE
    raise WeightsRefused(f"{model}: tokenizer.json has an unknown decoder: {sorted(map(str, steps))}")


def _table(model: str, cutter: Tokenizer, spelling: Spelling) -> TokenTable:
    vocab = cutter.get_vocab(with_added_tokens=True)
    size = max(vocab.values(), default=-1) + 1
    if not 0 < size <= MAX_VOCAB:
        raise WeightsRefused(f"{model}: tokenizer.json has a vocabulary of {size}")
    tokens = [""] * size
    kinds = [int(TokenKind.UNUSED)] * size
    for text, i in vocab.items():
        tokens[i], kinds[i] = text, int(_kind(text, spelling))
    for i, token in cutter.get_added_tokens_decoder().items():
        tokens[i] = token.content
        kinds[i] = int(TokenKind.CONTROL if token.special else TokenKind.USER_DEFINED)
    return TokenTable(tokens, kinds, spelling)


def _kind(text: str, spelling: Spelling) -> TokenKind:
    if spelling is Spelling.SENTENCEPIECE and len(text) == 6 and text.startswith("<0x") and text[5] == ">":
        return TokenKind.BYTE
    return TokenKind.NORMAL
