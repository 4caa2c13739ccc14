"""Tiny models with random weights in real GGUF files: for laws that do not depend on what is said.

The vocabulary is every byte, one merged pair and three control tokens, so that any text has ids and any
id has text.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
HIDDEN, HEAD, FEED_FORWARD = 64, 64, 96


def write_tiny(
    path: Path,
    architecture: str = "llama",
    seed: int = 0,
    layers: int = 3,
    rope_base: float = 10000.0,
    window: int = 32,
    context: int = 8192,
    merged: str = "th",
    head: int = HEAD,
) -> Path:
    """A model file of `architecture` (llama, qwen2, qwen3 or gemma3) with weights drawn from `seed`."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture)
    tokens = [*_byte_tokens(), merged, *CONTROL]
    _hyperparameters(writer, architecture, layers, rope_base, window, context, len(tokens), head)
    _tokenizer(writer, tokens, merged)
    for name, shape in _tensors(architecture, layers, len(tokens), head).items():
        if len(shape) == 1:
            data = 1 + 0.1 * rng.standard_normal(shape)
        else:
            data = rng.standard_normal(shape) / np.sqrt(shape[-1])
        writer.add_tensor(name, data.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _hyperparameters(
    writer: gguf.GGUFWriter,
    architecture: str,
    layers: int,
    rope_base: float,
    window: int,
    context: int,
    vocab: int,
    head: int,
) -> None:
    writer.add_name(f"tiny {architecture}")
    writer.add_block_count(layers)
    writer.add_context_length(context)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(rope_base)
    writer.add_rope_dimension_count(head)
    writer.add_vocab_size(vocab)
    if architecture == "gemma3":
        writer.add_sliding_window(window)


def _tokenizer(writer: gguf.GGUFWriter, tokens: list[str], merged: str) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL] * len(CONTROL))
    writer.add_token_merges([" ".join(merged)])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(259)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def _byte_tokens() -> list[str]:
    """The byte-level alphabet: printable bytes stand for themselves, others for characters from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(spare)) for byte in range(256)]


def _tensors(architecture: str, layers: int, vocab: int, head: int) -> dict[str, tuple[int, ...]]:
    heads, kv = 2 * head, head
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocab, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(layers):
        block = {
            "attn_norm": (HIDDEN,),
            "attn_q": (heads, HIDDEN),
            "attn_k": (kv, HIDDEN),
            "attn_v": (kv, HIDDEN),
            "attn_output": (HIDDEN, heads),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (FEED_FORWARD, HIDDEN),
            "ffn_up": (FEED_FORWARD, HIDDEN),
            "ffn_down": (HIDDEN, FEED_FORWARD),
        }
        if architecture in ("gemma3", "qwen3"):
            block |= {"attn_q_norm": (head,), "attn_k_norm": (head,)}
        if architecture == "gemma3":
            block |= {
                "post_attention_norm": (HIDDEN,),
                "post_ffw_norm": (HIDDEN,),
            }
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
        if architecture == "qwen2":
            biases = {"attn_q": (heads,), "attn_k": (kv,), "attn_v": (kv,)}
            shapes |= {f"blk.{layer}.{name}.bias": shape for name, shape in biases.items()}
    return shapes
