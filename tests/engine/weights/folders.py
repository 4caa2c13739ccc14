"""Hugging Face folders with tiny random models, as transformers writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

VOCAB = 300
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": None,
}

#: model_type -> what its config gets beside the sizes
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 24},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma3_text": {
        "sliding_window": 24,
        "num_hidden_layers": 6,
        "query_pre_attn_scalar": 20,
        "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
    },
}


def write_folder(folder: Path, model_type: str, **changes: Any) -> transformers.PreTrainedModel:
    """A model of `model_type` in float32, saved into `folder` with a byte-level tokenizer."""
    config = transformers.AutoConfig.for_model(model_type, **{**_SIZES, **FAMILIES[model_type], **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # The library's own start (norms 1, biases 0) would hide mistakes.
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def write_tokenizer(folder: Path) -> None:
    """Every byte is a token, and there are three control tokens, of which 257 and 258 end a reply."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>", "<|turn|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": {"content": "<|begin|>", "lstrip": False},
        "eos_token": "<|end|>",
        "add_bos_token": True,
        "chat_template": "{% for m in messages %}{{ m['content'] + '<|turn|>' }}{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 258]}))


def change_config(folder: Path, **changes: Any) -> None:
    """Rewrites keys of config.json; a value of ... removes the key."""
    path = folder / "config.json"
    tree = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in tree.items() if value is not ...}))
