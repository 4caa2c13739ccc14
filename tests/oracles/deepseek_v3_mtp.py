"""deepseek_v3 with layers that predict further tokens: transformers' MtpModel, without its cache."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from tests.oracles.base import build, randomize
from tests.oracles.mtp import Oracle, by_expert, foreseeable, seeing


@functools.cache
def oracle(num_depths: int = 2, share: float | None = None, **changes: Any) -> Oracle:
    """With `share`, what is said can be foreseen in part (see `foreseeable`)."""
    trunk = copy.deepcopy(build("deepseek_v3", num_mtp_layers=num_depths, **changes))
    torch.manual_seed(1)
    mtp = MtpModel(trunk, num_depths).eval()
    for layer in mtp.layers:
        randomize(layer)
        if share is not None:
            seeing(layer.eh_proj, share)
            layer.post_norm.load_state_dict(trunk.model.norm.state_dict())
    if share is not None:
        foreseeable(trunk, *mtp.layers, share=share)

    def forward(cache: MtpCache | None, depth: int, hidden: Tensor, tokens: Tensor, at: Tensor) -> Tensor:
        with torch.no_grad():
            left: Tensor = mtp.forward_layer(depth, hidden[None], at[None], cache, input_ids=tokens[None])
        return left[0]

    def keys(depth: int, hidden: Tensor, tokens: Tensor, at: Tensor) -> Tensor:
        cache = MtpCache(config=trunk.config.get_mtp_config())
        forward(cache, depth, hidden, tokens, at)
        turned: Tensor = cache.layers[depth].values  # the library puts latents in the place of keys
        return turned[0].transpose(0, 1)

    tensors = _tensors(mtp, trunk.config.num_hidden_layers)
    return Oracle(trunk, num_depths, functools.partial(forward, None), keys, tensors)


def _tensors(mtp: MtpModel, first: int) -> dict[str, Tensor]:
    """With the copies of embedding and output matrix that published files have."""
    out = {}
    for depth, layer in enumerate(mtp.layers):
        prefix = f"model.layers.{first + depth}"
        out[f"{prefix}.embed_tokens.weight"] = mtp.embed_tokens.weight
        out[f"{prefix}.shared_head.head.weight"] = mtp.shared_head.weight
        for name, tensor in layer.state_dict().items():
            name = name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
            if ".experts." in name:
                out |= by_expert(f"{prefix}.mlp", name.rpartition(".")[2], tensor)
            else:
                out[f"{prefix}.{name}"] = tensor
    return out
