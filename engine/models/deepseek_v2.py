"""DeepSeek-V2 and its Lite: latent attention, and experts whose shares are probabilities (DeepSeek-V2,
section 2). The Lite has no latent of queries."""

from __future__ import annotations

from engine.models.base import Placement, WeightSource
from engine.models.deepseek_v3 import LatentDecoder
from engine.models.fields import Fields
from engine.models.loading import Loader
from engine.models.mla_ffn import MAX_EXPERTS, read_groups, read_num_chosen
from engine.models.routing import Groups, Softmax

ANY, LIMITED = "greedy", "group_limited_greedy"


class DeepSeekV2(LatentDecoder):
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        super().__init__(weights, placement, _read_law)


def _read_law(load: Loader, fields: Fields, prefix: str) -> Softmax:
    """Shares stay as they are: no released file wants them normalised, and implementations differ in what it
    would mean."""
    fields.only("scoring_func", "softmax", "softmax")
    fields.only("norm_topk_prob", False, False)
    count = fields.count("n_routed_experts", most=MAX_EXPERTS)
    groups = Groups()
    if fields.word("topk_method", (ANY, LIMITED), ANY) == LIMITED:
        groups = read_groups(fields, count, scored=1)
    return Softmax(
        groups, read_num_chosen(fields, count, groups), fields.number("routed_scaling_factor", 1.0)
    )
