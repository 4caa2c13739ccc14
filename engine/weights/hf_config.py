"""The `config.json` of a Hugging Face folder, in the words of `engine.weights.hparams`.

What a file does not say is what transformers takes for that family: its files leave such values out.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from engine.errors import WeightsRefused

#: model_type -> our architecture
ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "llama": "llama",
        "mistral": "llama",
        "qwen2": "qwen2",
        "qwen3": "qwen3",
        "gemma3": "gemma3",
        "gemma3_text": "gemma3",
    }
)

_GEMMA3 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "hidden_activation": "gelu_pytorch_tanh",
}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
        "mistral": {
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        "qwen2": {"max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "max_window_layers": 28},
        "qwen3": {
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "head_dim": 128,
            "max_window_layers": 28,
        },
        "gemma3": _GEMMA3,
        "gemma3_text": _GEMMA3,
    }
)
_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "num_hidden_layers": "block_count",
        "max_position_embeddings": "context_length",
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    }
)
_MAX_LAYERS = 4096
_ACTIVATIONS = {"llama": "silu", "qwen2": "silu", "qwen3": "silu", "gemma3": "gelu_pytorch_tanh"}
_SCALINGS = {
    "default": "none",
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",
    "dynamic": "dynamic",
}
_SCALING_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "factor": "factor",
        "original_max_position_embeddings": "original_context_length",
        "attention_factor": "attn_factor",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
    }
)


class HfConfig:
    """A parsed config.json, defaults filled in. Raises WeightsRefused for what makes no sense."""

    def __init__(self, tree: Mapping[str, Any], model: str) -> None:
        self.model = model
        self.model_type = str(tree.get("model_type", ""))
        self.architecture = ARCHITECTURES.get(self.model_type, self.model_type)
        inner = tree.get("text_config")
        text = {**tree, **inner} if isinstance(inner, Mapping) else tree
        given = {key: value for key, value in text.items() if value is not None or key in _MAY_BE_NULL}
        self._values: dict[str, Any] = {**_DEFAULTS.get(self.model_type, {}), **given}
        self._refuse_unknown_features()

    @property
    def ties(self) -> bool | None:
        """Whether the output matrix is the embedding; None where the file does not say."""
        value = self._values.get("tie_word_embeddings")
        return value if isinstance(value, bool) else None

    def end_ids(self) -> tuple[int, ...]:
        return token_ids(self._values.get("eos_token_id"))

    def hparams(self) -> dict[str, object]:
        """GGUF's keys, to be checked and completed by `checked_hparams`."""
        out: dict[str, object] = {
            ours: self._plain(theirs) for theirs, ours in _KEYS.items() if theirs in self._values
        }
        if "head_dim" in self._values:
            out["attention.key_length"] = out["attention.value_length"] = self._plain("head_dim")
        if self.architecture == "gemma3":
            out["attention.scale"] = self._number("query_pre_attn_scalar") ** -0.5
        self._add_window(out)
        self._add_rope(out)
        return out

    def factors(self) -> Mapping[str, list[float]]:
        """The longrope tables, by the names of their tensors."""
        rope = self._rope()
        tables: dict[str, list[float]] = {}
        for theirs, ours in (("long_factor", "long"), ("short_factor", "short")):
            if theirs in rope:
                tables[f"rope_factors_{ours}.weight"] = self._floats(theirs, rope[theirs])
        return tables

    def _refuse_unknown_features(self) -> None:
        """Each of these changes what comes out, and the engine would not know."""
        if self.model_type not in ARCHITECTURES:
            return  # refused by its name, with the list of those there are
        if "quantization_config" in self._values:
            raise self._refused("quantization_config", "a quantized checkpoint (GGUF ones are read)")
        for key in ("use_bidirectional_attention", "attn_logit_softcapping", "final_logit_softcapping"):
            if self._values.get(key):
                raise self._refused(key, self._values[key])
        wanted = _ACTIVATIONS[self.architecture]
        for key in ("hidden_act", "hidden_activation"):
            if key == "hidden_act" and self.architecture == "gemma3":
                continue  # gemma3 reads the other one alone
            if self._values.get(key, wanted) != wanted:
                raise self._refused(key, self._values[key])

    def _add_window(self, out: dict[str, object]) -> None:
        kinds = self._layer_kinds()
        if "sliding_attention" not in kinds:
            out["attention.sliding_window"] = 0
            return
        out["attention.sliding_window"] = self._plain("sliding_window")
        pattern = kinds.index("full_attention") + 1 if "full_attention" in kinds else 0
        for layer, kind in enumerate(kinds):
            windowed = not pattern or layer % pattern < pattern - 1
            if windowed != (kind == "sliding_attention"):
                raise self._refused("layer_types", "windows that do not follow a regular pattern")
        out["attention.sliding_window_pattern"] = pattern

    def _layer_kinds(self) -> list[str]:
        """ "full_attention" or "sliding_attention" for every layer."""
        num_layers = self._count("num_hidden_layers", most=_MAX_LAYERS)
        window = self._values.get("sliding_window")
        if self.architecture in ("qwen2", "qwen3") and not self._values.get("use_sliding_window"):
            window = None
        if self.model_type == "llama" or not window:
            return ["full_attention"] * num_layers
        given = self._values.get("layer_types")
        if given is not None:
            if not isinstance(given, list) or len(given) != num_layers:
                raise self._refused("layer_types", given)
            if not set(given) <= {"full_attention", "sliding_attention"}:
                raise self._refused("layer_types", sorted(map(str, set(given))))
            return list(given)
        if self.architecture == "gemma3":
            key = "_sliding_window_pattern" if "_sliding_window_pattern" in self._values else None
            pattern = self._count(key or "sliding_window_pattern")
            full = {layer for layer in range(num_layers) if (layer + 1) % pattern == 0}
        elif self.architecture in ("qwen2", "qwen3"):
            full = set(range(min(self._count("max_window_layers", 0), num_layers)))
        else:
            full = set()
        return ["full_attention" if n in full else "sliding_attention" for n in range(num_layers)]

    def _rope(self) -> Mapping[str, Any]:
        """The RoPE of layers that see everything: `rope_parameters` now, `rope_scaling` in older files."""
        both = self._values.get("rope_parameters") or self._values.get("rope_scaling") or {}
        if not isinstance(both, Mapping):
            raise self._refused("rope_parameters", both)
        rope = both.get("full_attention", both)
        if not isinstance(rope, Mapping):
            raise self._refused("rope_parameters", rope)
        return rope

    def _add_rope(self, out: dict[str, object]) -> None:
        rope = self._rope()
        out["rope.freq_base"] = self._real(rope.get("rope_theta", self._values.get("rope_theta", 1e4)))
        if self.architecture == "gemma3":
            out["rope.freq_base_swa"] = self._local_base()
        for values in (rope, self._values):
            # transformers reads this in some RoPE kinds of these families and not in others.
            if values.get("partial_rotary_factor", 1.0) not in (None, 1.0):
                raise self._refused("partial_rotary_factor", values["partial_rotary_factor"])
        kind = str(rope.get("rope_type", rope.get("type", "default")))
        if kind not in _SCALINGS:
            raise self._refused("rope_type", kind)
        out["rope.scaling.type"] = _SCALINGS[kind]
        for theirs, ours in _SCALING_KEYS.items():
            if rope.get(theirs) is not None:
                out[f"rope.scaling.{ours}"] = self._scalar(theirs, rope[theirs])
        if kind == "yarn":
            self._add_yarn(rope)
        if _SCALINGS[kind] == "longrope":
            self._add_longrope(out)

    def _add_yarn(self, rope: Mapping[str, Any]) -> None:
        for key in ("mscale", "mscale_all_dim"):
            if rope.get(key):
                raise self._refused(key, rope[key])
        if rope.get("truncate") is False:
            raise self._refused("truncate", False)

    def _add_longrope(self, out: dict[str, object]) -> None:
        """The first length stands outside of the RoPE values in some files; the factor follows from it."""
        original = self._values.get("original_max_position_embeddings")
        if original is not None:
            out["rope.scaling.original_context_length"] = self._count("original_max_position_embeddings")
            out["rope.scaling.factor"] = self._count("max_position_embeddings") / original

    def _local_base(self) -> float:
        both = self._values.get("rope_parameters")
        local = both.get("sliding_attention") if isinstance(both, Mapping) else None
        if not isinstance(local, Mapping):
            return self._number("rope_local_base_freq")
        if local.get("rope_type", "default") != "default":
            raise self._refused("rope_parameters", "scaled RoPE in windowed layers")
        return self._real(local.get("rope_theta", self._values["rope_local_base_freq"]))

    def _refused(self, key: str, value: object) -> WeightsRefused:
        shown = value if isinstance(value, str) else repr(value)[:80]
        return WeightsRefused(f"{self.model}: {key}: {shown} is not supported")

    def _scalar(self, key: str, value: object) -> int | float | str:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise self._refused(key, value)
        return value

    def _plain(self, key: str) -> int | float | str:
        return self._scalar(key, self._values.get(key))

    def _count(self, key: str, least: int = 1, most: int = 2**31 - 1) -> int:
        value = self._values.get(key)
        if type(value) is not int or not least <= value <= most:
            raise self._refused(key, value)
        return value

    def _number(self, key: str) -> float:
        return self._real(self._values.get(key))

    def _real(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e15:
            raise self._refused("a number of config.json", value)
        return float(value)

    def _floats(self, key: str, value: object) -> list[float]:
        if not isinstance(value, list) or len(value) > 8192:
            raise self._refused(key, value)
        return [self._real(item) for item in value]


#: None means "none" here, and not "whatever the family has".
_MAY_BE_NULL = frozenset({"sliding_window"})


def token_ids(value: object) -> tuple[int, ...]:
    """`eos_token_id` as files write it: a number, a list of them, or nothing."""
    listed = value if isinstance(value, list) else [value]
    return tuple(item for item in listed if type(item) is int and item >= 0)
