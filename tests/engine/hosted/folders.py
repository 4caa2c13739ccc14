"""A folder as someone has it who works with transformers: a tiny model, and a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.engine.hosted.models import tiny

TEMPLATE = (
    "{% for m in messages %}{{ '<|turn|>' + m['role'] + '\\n' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"
)


def fast_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token; 256 begins a text, 257 ends a turn, 258 begins one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    cutter = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    cutter.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    cutter.decoder = decoders.ByteLevel()
    cutter.add_special_tokens(["<|begin|>", "<|end|>", "<|turn|>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=cutter, bos_token="<|begin|>", eos_token="<|end|>", add_bos_token=True
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write(folder: Path, family: str = "llama") -> Path:
    tiny(family, bos_token_id=256, eos_token_id=257, max_position_embeddings=4096).save_pretrained(folder)
    fast_tokenizer().save_pretrained(folder)
    return folder
