"""A `tokenizers.Tokenizer` from a GGUF file's vocabulary: byte-level BPE, or SentencePiece's BPE.

Only ordinary and user-defined tokens are in it. Control tokens are left out on purpose: text can then not
become one, however it is cut or merged; `engine.tokenizer` handles them by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from engine.errors import WeightsRefused
from engine.pretokenizers import SPLITS, WHOLE_PIECES
from engine.weights.vocabulary import GgufVocabulary, TokenKind

SPACE = "\u2581"  # what SentencePiece writes for a space
_HIDDEN = frozenset({TokenKind.CONTROL, TokenKind.UNKNOWN})


def built_tokenizer(data: GgufVocabulary) -> Tokenizer:
    """Raises WeightsRefused for a kind of tokenizer that is not known, or damaged data."""
    kind = data.text("model", "")
    try:
        if kind == "gpt2":
            return _byte_level(data)
        if kind == "llama":
            return _sentencepiece(data)
    except (ValueError, TypeError, IndexError) as error:
        raise WeightsRefused(f"{data.model}: the tokenizer cannot be built: {error}") from error
    raise WeightsRefused(f"{data.model}: tokenizer.ggml.model {kind!r} is not known (gpt2 and llama are)")


def space_prefix(data: GgufVocabulary) -> bool:
    """Whether text is read as if a space stood before it."""
    sentencepiece = data.text("model", "") == "llama"
    return sentencepiece and data.flag("add_space_prefix", not data.architecture.startswith("gemma"))


def _byte_level(data: GgufVocabulary) -> Tokenizer:
    pre = data.text("pre", "default")
    if pre not in SPLITS:
        raise WeightsRefused(
            f"{data.model}: tokenizer.ggml.pre {pre!r} is not known (known: {', '.join(sorted(SPLITS))})"
        )
    vocab = _vocab(data.tokens, data.kinds)
    merges = [_pair(text) for text in data.merges]
    known = [(a, b) for a, b in merges if a in vocab and b in vocab and a + b in vocab]
    tokenizer = Tokenizer(models.BPE(vocab, known, ignore_merges=pre in WHOLE_PIECES))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[pre]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    _add_user_defined(tokenizer, data.tokens, data.kinds)
    return tokenizer


def _sentencepiece(data: GgufVocabulary) -> Tokenizer:
    vocab = _vocab(data.tokens, data.kinds)
    if data.has_merges:
        merges = [_pair(text) for text in data.merges]
    else:
        merges = list(_implied_merges(data, vocab))
    unknown = data.token_id("unknown")
    all_bytes = sum(kind == TokenKind.BYTE for kind in data.kinds) == 256
    if all_bytes or unknown is None:
        bpe = models.BPE(vocab, merges, fuse_unk=True, byte_fallback=True)
    else:
        vocab[data.tokens[unknown]] = unknown
        bpe = models.BPE(vocab, merges, unk_token=data.tokens[unknown], fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    if space_prefix(data):
        steps.insert(0, normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    _add_user_defined(tokenizer, data.tokens, data.kinds)
    return tokenizer


def _vocab(tokens: Iterable[str], kinds: Sequence[int]) -> dict[str, int]:
    return {token: i for i, token in enumerate(tokens) if kinds[i] not in _HIDDEN}


def _pair(text: str) -> tuple[str, str]:
    """A merge as files write it. The halves may hold spaces only where a space is the first character."""
    at = text.find(" ", 1)
    if at < 1 or at == len(text) - 1:
        raise ValueError(f"a merge that is no pair: {text[:40]!r}")
    return text[:at], text[at + 1 :]


def _implied_merges(data: GgufVocabulary, vocab: dict[str, int]) -> Iterator[tuple[str, str]]:
    """SentencePiece keeps no merges: any two tokens that make a third merge, the best third first.

    Best is the highest score; Gemma's scores say nothing, and its file order does. The ways to make one
    token are ordered by the ids of their halves, which decides nothing but makes the list reproducible.
    """
    by_order = data.architecture.startswith("gemma")
    scores = None if by_order else data.scores
    kinds = data.kinds
    found: list[tuple[float, int, int, str, str]] = []
    get = vocab.get
    for token, i in vocab.items():
        if kinds[i] == TokenKind.BYTE:
            continue
        rank = float(i) if scores is None else -scores[i]
        for cut in range(1, len(token)):
            left = get(token[:cut])
            if left is not None:
                right = get(token[cut:])
                if right is not None:
                    found.append((rank, left, right, token[:cut], token[cut:]))
    found.sort(key=lambda merge: merge[:3])
    return ((left, right) for _, _, _, left, right in found)


def _add_user_defined(tokenizer: Tokenizer, tokens: Iterable[str], kinds: Sequence[int]) -> None:
    """User-defined tokens (Gemma's runs of spaces too) match whole, in the raw text."""
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == TokenKind.USER_DEFINED
        ]
    )
