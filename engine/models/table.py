"""Which file builds which architecture. Adding a family is a file and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.errors import UnknownArchitecture
from engine.models.bamba import Bamba
from engine.models.base import DEFAULT_CONTEXT, Model, Placement, WeightSource, read_hparams
from engine.models.cohere2 import Cohere2
from engine.models.decoder import Decoder, Ends
from engine.models.deepseek_v2 import DeepSeekV2
from engine.models.deepseek_v3 import DeepSeekV3
from engine.models.deepseek_v3_mtp import load_latent_mtp
from engine.models.deepseek_v4 import DeepSeekV4
from engine.models.deepseek_v32 import DeepSeekV32
from engine.models.dots3_note import Dots3Note
from engine.models.falcon_h1 import FalconH1
from engine.models.falcon_mamba import FalconMamba
from engine.models.fields import Fields
from engine.models.gemma2 import Gemma2
from engine.models.gemma3 import Gemma3
from engine.models.gemma3n import Gemma3n
from engine.models.gemma4 import Gemma4
from engine.models.glm5_next import Glm5Next
from engine.models.glm_moe_dsa import GlmMoeDsa
from engine.models.gpt_oss import GptOss
from engine.models.granitemoehybrid import GraniteMoeHybrid
from engine.models.jamba import Jamba
from engine.models.kimi_linear import KimiLinear
from engine.models.lfm2 import Lfm2
from engine.models.llama import Llama
from engine.models.llama4 import Llama4
from engine.models.longcat_flash import LongcatFlash
from engine.models.mamba import Mamba
from engine.models.mamba2 import Mamba2
from engine.models.mimo_v2_flash import MimoV2Flash
from engine.models.minimax_m3 import MiniMaxM3
from engine.models.mtp import Mtp
from engine.models.nemotron_h import NemotronH
from engine.models.olmo_hybrid import OlmoHybrid
from engine.models.phi import Phi
from engine.models.phi3 import Phi3
from engine.models.qwen3_5 import Qwen35
from engine.models.qwen3_next import Qwen3Next
from engine.models.qwen3_next_mtp import load_delta_mtp
from engine.models.qwen4_exp import Qwen4Exp
from engine.models.recurrent_gemma import RecurrentGemma
from engine.models.zamba2 import Zamba2

Build = Callable[[WeightSource, Placement], Model]

#: families whose tensors and numbers go by GGUF's names
GGUF_NAMED: Mapping[str, Build] = {
    "gemma3": Gemma3,
    "llama": Llama,
    "mistral": Llama,
    "qwen2": Llama,
    "qwen3": Llama,
}
#: families that are read from a Hugging Face folder as it is, by model_type
HUB_NAMED: Mapping[str, Build] = {
    "bamba": Bamba,
    "cohere2": Cohere2,
    "deepseek_v2": DeepSeekV2,
    "deepseek_v3": DeepSeekV3,
    "deepseek_v32": DeepSeekV32,
    "deepseek_v4": DeepSeekV4,
    "dots3_note": Dots3Note,
    "dots3_note_text": Dots3Note,
    "falcon_h1": FalconH1,
    "falcon_mamba": FalconMamba,
    "gemma2": Gemma2,
    "gemma3n_text": Gemma3n,
    "gemma4_text": Gemma4,
    "glm5_next_text": Glm5Next,
    "glm_moe_dsa": GlmMoeDsa,
    "gpt_oss": GptOss,
    "granitemoehybrid": GraniteMoeHybrid,
    "jamba": Jamba,
    "kimi_linear": KimiLinear,
    "lfm2": Lfm2,
    "llama4_text": Llama4,
    "longcat_flash": LongcatFlash,
    "mamba": Mamba,
    "mamba2": Mamba2,
    "mimo_v2_flash": MimoV2Flash,
    "minimax_m3_vl": MiniMaxM3,
    "minimax_m3_vl_text": MiniMaxM3,
    "nemotron_h": NemotronH,
    "olmo_hybrid": OlmoHybrid,
    "phi": Phi,
    "phi3": Phi3,
    "qwen3_5_text": Qwen35,
    "qwen3_next": Qwen3Next,
    "qwen4_exp_text": Qwen4Exp,
    "recurrent_gemma": RecurrentGemma,
    "zamba2": Zamba2,
}
MODELS: Mapping[str, Build] = {**GGUF_NAMED, **HUB_NAMED}

LoadMtp = Callable[[WeightSource, Placement, Ends], Mtp | None]

#: families of `Decoder`s whose files can have layers that predict further tokens
MTP: Mapping[str, LoadMtp] = {"deepseek_v3": load_latent_mtp, "qwen3_next": load_delta_mtp}


def check_architecture(name: str) -> None:
    """Raises UnknownArchitecture, which names it and lists those there are."""
    if not name:
        raise UnknownArchitecture(
            "the configuration does not say its model_type, so its architecture is unknown"
        )
    if name not in MODELS:
        known = ", ".join(sorted(MODELS))
        raise UnknownArchitecture(f"architecture {name!r} is not supported (supported: {known})")


def context_length(weights: WeightSource) -> int:
    """Tokens that the model was trained for. Raises UnknownArchitecture, WeightsRefused."""
    check_architecture(weights.architecture)
    if weights.architecture in HUB_NAMED:
        fields = Fields(weights)
        return fields.count("max_position_embeddings", fields.count("model_max_length", DEFAULT_CONTEXT))
    return read_hparams(weights).n_ctx_train


def build_model(weights: WeightSource, placement: Placement) -> Model:
    """Raises UnknownArchitecture, WeightsRefused."""
    check_architecture(weights.architecture)
    return MODELS[weights.architecture](weights, placement)


def build_mtp(weights: WeightSource, placement: Placement, model: Model) -> Mtp | None:
    """The layers that predict further tokens for `model`, which the same weights built; None where there are
    none. Raises WeightsRefused."""
    load = MTP.get(weights.architecture)
    if load is None or not isinstance(model, Decoder):
        return None
    return load(weights, placement, model.ends)
