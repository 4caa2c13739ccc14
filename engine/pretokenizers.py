"""How byte-level BPE cuts text before merging: one list of regular expressions for each `tokenizer.ggml.pre`.

Each split works on the pieces of the one before. The names and expressions are llama.cpp's
(src/llama-vocab.cpp), because that is what the names in GGUF files mean; its `(?:'[sS]|...)` are written
here as `(?i:'s|...)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT_FORMS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _SHORT_FORMS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _SHORT_FORMS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = (
    f"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)

SPLITS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "default": _DEFAULT,
        "gpt-2": (_GPT2,),
        "smollm": (r"\p{N}", _GPT2),
        "starcoder": (r"\p{N}", _GPT2),
        "refact": (r"\p{N}", _GPT2),
        "command-r": (r"\p{N}", _GPT2),
        "llama-bpe": (_LLAMA3,),
        "llama3": (_LLAMA3,),
        "llama-v3": (_LLAMA3,),
        "falcon3": (_LLAMA3,),
        "qwen2": (_QWEN2,),
        "deepseek-r1-qwen": (_QWEN2,),
        "tekken": (_TEKKEN,),
    }
)

#: Where a whole piece that is a token is taken as it is, whatever the merges would make of it.
WHOLE_PIECES = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"})

#: Where a prompt begins with BOS unless the file says otherwise.
BOS_BY_DEFAULT = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"})
