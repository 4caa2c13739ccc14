"""qwen3_next with its layer that predicts further tokens, which transformers ignores: written out here,
around the library's own layer and norms."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer, Qwen3NextRMSNorm

from tests.oracles.base import build, randomize
from tests.oracles.mtp import Oracle, by_expert, foreseeable, seeing


class Predictor(nn.Module):
    """The parameters of `mtp.*`, by their names."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        config = copy.deepcopy(config)
        config.layer_types = ["full_attention"]
        config._attn_implementation = "eager"
        self.pre_fc_norm_embedding = Qwen3NextRMSNorm(width, eps=eps)
        self.pre_fc_norm_hidden = Qwen3NextRMSNorm(width, eps=eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([Qwen3NextDecoderLayer(config, 0)])
        self.norm = Qwen3NextRMSNorm(width, eps=eps)

    def forward(self, embedded: Tensor, hidden: Tensor, angles: Any, cache: Cache | None) -> Tensor:
        """[1, n, width] both."""
        x = self.fc(torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), -1))
        count = x.shape[1]
        ahead = torch.full((count, count), float("-inf")).triu(1)[None, None]
        x = self.layers[0](x, position_embeddings=angles, attention_mask=ahead, past_key_values=cache)
        out: Tensor = self.norm(x)
        return out


@functools.cache
def oracle(num_depths: int = 1, share: float | None = None, **changes: Any) -> Oracle:
    """With `share`, what is said can be foreseen in part (see `foreseeable`)."""
    assert num_depths == 1, "there is one"
    trunk = copy.deepcopy(build("qwen3_next", **changes))
    torch.manual_seed(1)
    predictor = Predictor(trunk.config).eval()
    randomize(predictor)
    if share is not None:
        seeing(predictor.fc, share)
        predictor.norm.load_state_dict(trunk.model.norm.state_dict())
        foreseeable(trunk, predictor, share=share)

    def forward(cache: Cache | None, depth: int, hidden: Tensor, tokens: Tensor, at: Tensor) -> Tensor:
        with torch.no_grad():
            embedded = trunk.model.embed_tokens(tokens[None])
            angles = trunk.model.rotary_emb(embedded, at[None])
            left: Tensor = predictor(embedded, hidden[None], angles, cache)
        return left[0]

    def keys(depth: int, hidden: Tensor, tokens: Tensor, at: Tensor) -> Tensor:
        cache = DynamicCache()
        forward(cache, depth, hidden, tokens, at)
        of_heads: Tensor = cache.layers[0].keys
        return of_heads[0].transpose(0, 1)[..., : trunk.model.rotary_emb.inv_freq.numel() * 2]

    return Oracle(trunk, 1, functools.partial(forward, None), keys, _tensors(predictor))


def _tensors(predictor: Predictor) -> dict[str, Tensor]:
    out = {}
    for name, tensor in predictor.state_dict().items():
        if ".experts." in name:
            prefix, _, part = name.rpartition(".experts.")
            out |= by_expert(f"mtp.{prefix}", part, tensor)
        else:
            out[f"mtp.{name}"] = tensor
    return out
