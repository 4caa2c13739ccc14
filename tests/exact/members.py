"""One architecture for every member of the cache family, each as a tiny folder that was made once."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.runner import Engine
from tests.oracles import base


@dataclass(frozen=True, slots=True)
class Member:
    """`family` is a module of `tests.oracles`; rows are tested in `dtypes`, the last of them in the gate."""

    family: str
    kind: str
    dtypes: tuple[str, ...] = ("f32", "bf16", "q8_0")


MEMBERS = {
    member.family: member
    for member in (
        Member("llama", "kv"),
        Member("gemma3", "iswa"),
        Member("deepseek_v3", "kv"),
        Member("deepseek_v32", "dsa"),
        Member("dots3_note", "dsa_iswa"),
        Member("deepseek_v4", "dsv4"),
        Member("minimax_m3", "msa"),
        Member("mamba2", "recurrent", dtypes=("f32",)),
        Member("falcon_h1", "hybrid"),
        Member("qwen3_next", "hybrid"),
        Member("kimi_linear", "hybrid"),
        Member("recurrent_gemma", "hybrid_iswa"),
        Member("qwen4_exp", "hybrid_idx"),
        Member("glm5_next", "hybrid_idx"),
    )
}

#: Every other architecture, by the same tests at fewer cuts.
OTHERS = {
    member.family: member
    for member in (
        Member("bamba", "hybrid"),
        Member("cohere2", "iswa"),
        Member("deepseek_v2", "kv"),
        Member("falcon_mamba", "recurrent"),
        Member("gemma2", "iswa"),
        Member("gemma3n", "iswa"),
        Member("gemma4", "iswa"),
        Member("glm_moe_dsa", "dsa"),
        Member("gpt_oss", "iswa"),
        Member("granitemoehybrid", "hybrid"),
        Member("jamba", "hybrid"),
        Member("lfm2", "hybrid"),
        Member("llama4", "iswa"),
        Member("longcat_flash", "kv"),
        Member("mamba", "recurrent"),
        Member("mimo_v2_flash", "iswa"),
        Member("mistral", "iswa"),
        Member("nemotron_h", "hybrid"),
        Member("olmo_hybrid", "hybrid"),
        Member("phi", "kv"),
        Member("phi3", "kv"),
        Member("qwen2", "kv"),
        Member("qwen3", "kv"),
        Member("qwen3_5", "hybrid"),
        Member("zamba2", "hybrid"),
    )
}


@functools.cache
def folder(family: str) -> Path:
    """Where the member's checkpoint lies, for as long as the tests run."""
    place = tempfile.TemporaryDirectory(prefix=f"tenuto-{family}-")
    _places.append(place)
    path = Path(place.name)
    base.write(family, path)
    return path


_places: list[tempfile.TemporaryDirectory[str]] = []


def open_member(family: str, dtype: str, **settings: Any) -> Engine:
    """A float32 engine with the rows of its cache in `dtype`."""
    return base.open_engine(folder(family), type_k=dtype, type_v=dtype, **settings)
