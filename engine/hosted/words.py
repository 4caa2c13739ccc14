"""The tokenizer of a hosted model: that of transformers, read as one of a folder; or none, ids alone."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import tokenizers
from tokenizers import models
from transformers import PreTrainedTokenizerBase

from engine.errors import Unsupported
from engine.template import ChatTemplate, template_for
from engine.token_table import Spelling, TokenTable
from engine.tokenizer import Tokenizer, TokenRules, open_tokenizer
from engine.weights.vocabulary import HfTokenizerFiles, TokenKind


def read_tokenizer(tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int]) -> Tokenizer:
    """The tokenizer that transformers would save. `end_ids` end a reply, beside its own EOS. Text never
    becomes a control token by it, as with those of other models (see `engine.tokenizer`).

    Raises Unsupported for one that is not made of the `tokenizers` library, WeightsRefused for one that
    writes bytes in a way that is not known.
    """
    name = type(tokenizer).__name__
    if not tokenizer.is_fast:
        raise Unsupported(
            f"{name} cuts text by a program of its own, which cannot be kept apart from control tokens; "
            "give a fast tokenizer, or none and work with ids"
        )
    backend: Any = tokenizer
    settings = {
        "bos_token": _text(backend.bos_token),
        "eos_token": _text(backend.eos_token),
        "add_bos_token": backend.init_kwargs.get("add_bos_token"),
        "end_ids": tuple(sorted(end_ids)),
    }
    source = backend.backend_tokenizer.to_str().encode()
    return open_tokenizer(HfTokenizerFiles(name, source, settings))


def read_template(tokenizer: PreTrainedTokenizerBase, words: Tokenizer) -> ChatTemplate | None:
    """Its chat template (the default one of several), run in our sandbox. Raises TemplateRefused."""
    found: Any = tokenizer.chat_template
    source = found.get("default") if isinstance(found, dict) else found
    return None if source is None else template_for(words, source)


def _text(token: object) -> str | None:
    return None if token is None else str(token)


class IdsOnly(Tokenizer):
    """No tokenizer: ids go in and out, and mean no text. Replies are of ids, their text is empty."""

    def __init__(self, vocab_size: int, end_ids: Collection[int]) -> None:
        cutter = tokenizers.Tokenizer(models.WordLevel({}, unk_token=""))
        table = TokenTable([""] * vocab_size, [int(TokenKind.UNUSED)] * vocab_size, Spelling.BYTE_LEVEL)
        super().__init__(cutter, table, TokenRules(None, None, False, b"", frozenset(end_ids)), "ids-only")

    def _plain(self, text: str) -> list[int]:
        if not text:
            return []
        raise Unsupported("this engine was given no tokenizer: it knows ids alone")
