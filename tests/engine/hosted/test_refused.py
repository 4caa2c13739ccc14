"""What a hosted engine cannot hold whole, or cannot do, it refuses by name."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import transformers
from transformers import AutoConfig, DynamicCache, LlamaForCausalLM, StaticCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    Fp8QuantizedLayer,
    LinearAttentionAndStaticFullAttentionLayer,
)

from engine.errors import CacheRefused, ConfigError, EditRefused, TenutoError, Unsupported
from engine.hosted.laws import check_cache
from engine.hosted.model import HostedModel
from engine.hosted.trial import trial
from tests.engine.hosted.models import hosted, ids, tiny


class Remembering(LlamaForCausalLM):
    """Keeps something beside its cache: what it said last sways what it says next."""

    last: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        if self.last is not None:
            out.logits = out.logits + 0.01 * self.last
        self.last = out.logits[:, -1:].clone()
        return out


class ByPosition(LlamaForCausalLM):
    """Keeps tokens by their positions, for whichever sequence comes."""

    seen: ClassVar[dict[int, int]] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        positions = kwargs["position_ids"][0].tolist()
        self.seen.update(zip(positions, kwargs["input_ids"][0].tolist(), strict=True))
        out.logits = out.logits + 1e-4 * sum(self.seen[at] for at in range(positions[-1] + 1))
        return out


class Astray(LlamaForCausalLM):
    """Counts positions from the beginning of what it is given, whatever came before."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["position_ids"] = kwargs["position_ids"] - kwargs["position_ids"][:, :1]
        return super().forward(*args, **kwargs)


class Forgetful(LlamaForCausalLM):
    """Makes a cache of its own each time."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["past_key_values"] = DynamicCache(config=self.config)
        return super().forward(*args, **kwargs)


class Bare(LlamaForCausalLM):
    """Has no place for a cache."""

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        return super().forward(input_ids=input_ids, use_cache=use_cache)


class Broken(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no such kernel\nhere")


class OwnLayer(DynamicLayer):
    """Perhaps it keeps more than a DynamicLayer; nobody here knows."""


def of_class(kind: type[LlamaForCausalLM]) -> transformers.PreTrainedModel:
    drawn = tiny("llama")
    model = kind(drawn.config)
    model.load_state_dict(drawn.state_dict())
    return model.eval()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Remembering, "state beside its cache"),
        (ByPosition, "state beside its cache"),
        (Astray, "says otherwise of tokens that go into its cache one by one"),
        (Forgetful, "does not go on with the cache that it is given"),
        (Bare, "takes no cache"),
        (Broken, "cannot be called with a cache: RuntimeError: no such kernel here"),
    ],
)
def test_a_model_whose_state_is_not_in_its_cache_is_refused(kind: type[LlamaForCausalLM], said: str) -> None:
    with pytest.raises(CacheRefused, match=said) as refused:
        hosted(of_class(kind))
    assert kind.__name__ in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (OwnLayer(), "layer 1 of the cache is a OwnLayer, and what such a layer keeps is not known"),
        (Fp8QuantizedLayer(), "layer 1 of the cache is a Fp8QuantizedLayer: its rows are quantized anew"),
        (
            LinearAttentionAndStaticFullAttentionLayer(max_cache_len=8),
            "LinearAttentionAndStaticFullAttentionLayer: its rows are written in place",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_a_layer_that_is_not_in_the_table_is_refused_by_its_class(layer: Any, said: str) -> None:
    cache = DynamicCache(config=tiny("llama").config)
    check_cache(cache)
    cache.layers[1] = layer
    with pytest.raises(CacheRefused, match=said) as refused:
        check_cache(cache)
    assert refused.value.details["layer"] == 1


def test_a_cache_that_is_no_dynamic_one_is_refused_by_its_class() -> None:
    config = tiny("llama").config
    pair = EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    for cache in (StaticCache(config=config, max_cache_len=8), pair):
        with pytest.raises(CacheRefused, match=type(cache).__name__):
            check_cache(cache)
    offloaded = DynamicCache(config=config)
    offloaded.offloading = True  # what it needs besides is a GPU
    with pytest.raises(CacheRefused, match="offloaded"):
        check_cache(offloaded)


def test_what_a_layer_keeps_beside_what_its_class_is_known_to_keep_is_refused_by_name() -> None:
    cache = DynamicCache(config=tiny("llama").config)
    cache.layers[2].ring = torch.zeros(3)
    with pytest.raises(CacheRefused, match="layer 2 of the cache, a DynamicLayer, also keeps ring"):
        check_cache(cache)
    recording = DynamicCache(config=tiny("mistral").config)
    recording.activate_past_recording()
    with pytest.raises(CacheRefused, match="records its past"):
        check_cache(recording)


def test_windows_of_two_sizes_are_refused() -> None:
    model = HostedModel(tiny("mistral"))

    def with_two() -> DynamicCache:
        cache = DynamicCache(config=tiny("mistral").config)
        cache.layers = [DynamicSlidingWindowLayer(sliding_window=size) for size in (8, 16, 16)]
        return cache

    model.empty_cache = with_two  # type: ignore[method-assign]
    with pytest.raises(CacheRefused, match=r"several sizes \(8, 16\)"):
        trial(model)


def test_a_family_with_a_cache_of_its_own_is_refused() -> None:
    config = AutoConfig.for_model("rwkv", vocab_size=300, hidden_size=32, num_hidden_layers=2)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(CacheRefused, match="RwkvForCausalLM"):
        hosted(model)


def test_what_depends_on_chance_or_on_others_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM is in training mode.*call model\.eval"):
        hosted(tiny("llama").train())
    model = tiny("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(CacheRefused, match="RoPE of type dynamic"):
        hosted(model)
    model = tiny("llama")
    model.config.is_encoder_decoder = True
    with pytest.raises(CacheRefused, match="has an encoder"):
        hosted(model)


@pytest.mark.parametrize("asked", ["quantized", "offloaded"])
def test_a_cache_that_the_generation_config_asks_for_is_not_given_up_in_silence(asked: str) -> None:
    model = tiny("llama")
    model.generation_config = SimpleNamespace(cache_implementation=asked, eos_token_id=None)
    with pytest.raises(CacheRefused, match=asked):
        hosted(model)


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        (
            {"type_k": "q8_0"},
            Unsupported,
            "type_k = q8_0 for a model of transformers: rows are kept in the dtype",
        ),
        ({"overflow": "shift"}, Unsupported, "cannot be turned"),
        ({"deterministic": True}, Unsupported, "deterministic = True"),
        ({"rollback": 3}, Unsupported, "rollback = 3"),
        ({"tp": 2}, Unsupported, "divided where it is loaded"),
        ({"dtype": "bf16"}, ConfigError, "dtype = bf16: the model was loaded for f32"),
        ({"device": "mps"}, ConfigError, "device = mps: the model was loaded for cpu"),
    ],
)
def test_settings_that_cannot_be_had_are_refused(
    settings: dict[str, object], error: type[TenutoError], said: str
) -> None:
    with pytest.raises(error, match=said):
        hosted(tiny("llama"), **settings)


def test_a_context_is_never_shifted() -> None:
    engine = hosted(tiny("llama"))
    seq = engine.create()
    engine.feed(seq, ids(10))
    with pytest.raises(EditRefused, match="cannot be turned to other positions"):
        engine.shift(seq, 0)
    assert engine.length(seq) == 10


def test_rows_are_not_made_anew_or_brought_in_from_elsewhere() -> None:
    engine = hosted(tiny("llama"))
    with pytest.raises(Unsupported, match="of another library's making"):
        engine.form("q8_0", "q8_0")
    with pytest.raises(Unsupported, match="of another library's making"):
        _ = engine.remembered


def test_nobody_else_needs_transformers_and_who_does_is_told_what_to_install() -> None:
    program = (
        "import sys, engine.runner, engine.loader, engine.shared, sessions.api, sessions.manager, cli.main\n"
        "assert 'transformers' not in sys.modules\n"
        "sys.modules['transformers'] = None\n"
        "from engine.errors import Unsupported\n"
        "try:\n"
        "    import engine.hosted.host\n"
        "except Unsupported as error:\n"
        "    assert \"pip install 'tenuto[transformers]'\" in str(error)\n"
        "else:\n"
        "    raise AssertionError('it came from nowhere')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
