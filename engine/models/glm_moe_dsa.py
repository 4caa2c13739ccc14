"""GLM-5: DeepSeek-V3.2, of which not every layer has an indexer. Layers without one attend to what the last
indexer before them chose for the same tokens ("IndexCache", arXiv 2603.12201).

RoPE of the indexer is of consecutive values, as that of the attention.
"""

from __future__ import annotations

from engine.models.base import Placement, WeightSource
from engine.models.deepseek_v32 import IndexedDecoder
from engine.models.fields import Fields
from engine.models.sizes import read_sizes

OWN, SHARED = "full", "shared"
_BY_LETTER = {"F": OWN, "S": SHARED}


class GlmMoeDsa(IndexedDecoder):
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        fields = Fields(weights)
        kinds = _read_indexer_types(fields, read_sizes(fields).num_layers)
        leaders = [layer for layer, kind in enumerate(kinds) if kind == OWN]
        eps = fields.number("rms_norm_eps", 1e-5)
        super().__init__(weights, placement, fields, leaders, pairs=True, eps=eps)


def _read_indexer_types(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """OWN or SHARED of each layer: by name, by letters, or every so many from some layer on."""
    if fields.has("indexer_types"):
        name, kinds = "indexer_types", fields.words("indexer_types", num_layers, (OWN, SHARED))
    elif fields.has("index_topk_pattern"):
        name, kinds = "index_topk_pattern", _read_pattern(fields, num_layers)
    else:
        name = "index_skip_topk_offset"
        every, start = fields.count("index_topk_freq", 1), fields.count(name, 2)
        kinds = tuple(
            OWN if max(layer - start + 1, 0) % every == 0 else SHARED for layer in range(num_layers)
        )
    if kinds[0] != OWN:
        raise fields.refused(name, kinds[0])
    return kinds


def _read_pattern(fields: Fields, num_layers: int) -> tuple[str, ...]:
    pattern = fields.letters("index_topk_pattern", "".join(_BY_LETTER))
    if len(pattern) != num_layers:
        raise fields.refused("index_topk_pattern", pattern)
    return tuple(_BY_LETTER[letter] for letter in pattern)
