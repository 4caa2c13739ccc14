"""DeepSeek-V4: attention over a window and compressed blocks behind it (`engine.cache.dsv4`), several
residual streams (`engine.models.hyper`), and experts that in the first layers go by the token's id
(DeepSeek-V4 technical report, section 2)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from engine.cache.memory import MemoryNeeds, View
from engine.models.base import Placement, WeightSource, digest_of_frequencies
from engine.models.deepseek_v4_config import needs_of, read_config
from engine.models.deepseek_v4_loading import DeepSeekV4Loading
from engine.models.fields import Fields
from engine.state import Value


class DeepSeekV4:
    """See `Model`."""

    def __init__(self, weights: WeightSource, placement: Placement) -> None:
        self._fields = Fields(weights)
        self._architecture = weights.architecture
        self._placement = placement
        self._config = config = read_config(self._fields, placement.n_ctx)
        load = DeepSeekV4Loading(weights, placement, config)
        self._embedding = load.embedding()
        self._blocks = tuple(load.block(layer) for layer in range(config.sizes.num_layers))
        self._last = load.hyper_head()
        self._norm = load.norm("norm", config.sizes.width)
        self._head = load.head(self._embedding)

    @property
    def needs(self) -> MemoryNeeds:
        return needs_of(self._config)

    @property
    def vocab_size(self) -> int:
        return self._config.sizes.vocab_size

    @property
    def n_ctx_train(self) -> int:
        return self._config.sizes.n_ctx_train

    @property
    def meaning(self) -> Mapping[str, Value]:
        return {
            "architecture": self._architecture,
            **self._fields.meaning,
            "rope.frequencies": digest_of_frequencies(self.needs),
        }

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, view: View, outputs: torch.Tensor
    ) -> torch.Tensor:
        dtype, device = self._placement.dtype, self._placement.device
        rotaries = self._config.rotaries
        angles = {kind: rotaries[kind].angles(positions, device) for kind in set(self._config.kinds)}
        tokens = tokens.to(device)
        x = F.embedding(tokens, self._embedding).float()
        streams = x[:, None].expand(-1, self._config.num_streams, -1)
        for block in self._blocks:
            streams = block(streams, tokens, angles[block.kind], view)
        x = self._last(streams[outputs.to(device)])
        return self._head(self._norm(x).to(dtype)).float()
