"""The layers of DeepSeek-V3 that predict further tokens: `model.layers.{num_hidden_layers + depth}`.

Files repeat the embedding and the output matrix in each of them (README_WEIGHTS of the release): they are the
model's and are not read again. What one depth hands to the next is what its norm gives, as transformers'
MtpModel has it.
"""

from __future__ import annotations

from engine.cache.memory import MemoryNeeds
from engine.models.base import Placement, WeightSource
from engine.models.decoder import Ends
from engine.models.deepseek_v3 import LatentLayers
from engine.models.mla_ffn import SPARSE, load_biased_sigmoid
from engine.models.mtp import Mtp, MtpLayer
from engine.models.sizes import FULL

#: More than any release has. All depths of some tokens are computed in one pass (see `engine.placing`).
_MAX_DEPTHS = 8
#: the parts of such a layer that others have not
_OWN = ("enorm", "hnorm", "eh_proj", "shared_head.norm")


def load_latent_mtp(weights: WeightSource, placement: Placement, ends: Ends) -> Mtp | None:
    """None where the file has none, whatever its configuration says. Raises WeightsRefused for some parts."""
    layers = LatentLayers.read(weights, placement, load_biased_sigmoid)
    fields = layers.fields
    count = fields.count("num_mtp_layers", 0, least=0, most=_MAX_DEPTHS)
    count = fields.count("num_nextn_predict_layers", count, least=0, most=_MAX_DEPTHS)
    numbers = [layers.sizes.num_layers + depth for depth in range(count)]
    own = [f"model.layers.{number}.{part}.weight" for number in numbers for part in _OWN]
    if not any(layers.load.has(name) for name in own):
        return None
    return Mtp(
        MemoryNeeds("kv", tuple(layers.rows(number) for number in numbers)),
        [_load_depth(layers, number) for number in numbers],
        {FULL: layers.rotary},
        ends,
        placement,
    )


def _load_depth(layers: LatentLayers, number: int) -> MtpLayer:
    """Its second half is a mixture, however many of the model's own layers are dense."""
    load, width, eps, prefix = layers.load, layers.sizes.width, layers.eps, f"model.layers.{number}"
    return MtpLayer(
        embedding_norm=load.norm(f"{prefix}.enorm", width, eps),
        hidden_norm=load.norm(f"{prefix}.hnorm", width, eps),
        join=load.linear((f"{prefix}.eh_proj",), (width,), 2 * width),
        block=layers.block(number, SPARSE),
        norm=load.norm(f"{prefix}.shared_head.norm", width, eps),
    )
