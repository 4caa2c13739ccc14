"""Settings are refused by name where they make no sense, and settled once, by a pure function."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from engine.config import EngineConfig, Probe, probe_machine, resolve
from engine.errors import ConfigError, DeviceMissing

N_CTX_TRAIN = 4096
BARE = Probe(num_cuda=0, mps=False, fast_bf16=False, num_threads=3)
FAST = dataclasses.replace(BARE, fast_bf16=True)
GPUS = dataclasses.replace(BARE, num_cuda=2)
METAL = dataclasses.replace(BARE, mps=True)


def test_a_mapping_makes_the_same_config_as_its_words() -> None:
    made = EngineConfig.from_mapping({"n_ctx": 128, "type_k": "q8_0", "overflow": "shift", "n_keep": 4})
    assert made == EngineConfig(n_ctx=128, type_k="q8_0", overflow="shift", n_keep=4)
    assert EngineConfig.from_mapping({}) == EngineConfig()
    assert EngineConfig.from_mapping({"n_ctx": None}) == EngineConfig()


def test_an_unknown_key_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'n_ctz' \(known: .*n_ctx"):
        EngineConfig.from_mapping({"n_ctz": 1})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_ctx", "128"),
        ("n_ctx", 1.5),
        ("n_ctx", True),
        ("num_seqs", None),
        ("type_k", 8),
        ("full_windows", 1),
        ("deterministic", 1),
        ("overflow", None),
        ("n_ctx", 0),
        ("num_seqs", 0),
        ("num_cells", -1),
        ("max_batch", 0),
        ("max_ubatch", 0),
        ("threads", 0),
        ("n_keep", -1),
        ("n_discard", -1),
        ("type_k", "i64"),
        ("type_v", "q3_k"),
        ("dtype", "int8"),
        ("device", "tpu"),
        ("overflow", "wrap"),
    ],
)
def test_a_value_of_another_type_or_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineConfig.from_mapping({name: value})


def test_open_ends_are_settled() -> None:
    settled = resolve(EngineConfig(), N_CTX_TRAIN, BARE)
    assert settled.n_ctx == settled.num_cells == 4096
    assert settled.threads == 3
    assert (settled.device, settled.dtype) == (torch.device("cpu"), torch.float32)
    chosen = resolve(EngineConfig(n_ctx=100, num_cells=700, threads=1), N_CTX_TRAIN, BARE)
    assert (chosen.n_ctx, chosen.num_cells, chosen.threads) == (100, 700, 1)


@pytest.mark.parametrize(
    ("config", "probe", "device", "dtype"),
    [
        ({}, FAST, "cpu", "bfloat16"),
        ({}, GPUS, "cuda:0", "bfloat16"),
        ({}, METAL, "mps", "float32"),
        ({"device": "cpu"}, GPUS, "cpu", "float32"),
        ({"main_gpu": 1}, GPUS, "cuda:1", "bfloat16"),
        ({"dtype": "f32"}, GPUS, "cuda:0", "float32"),
        ({"dtype": "f16"}, BARE, "cpu", "float16"),
        ({"dtype": "bf16"}, BARE, "cpu", "bfloat16"),
    ],
    ids=str,
)
def test_auto_is_what_the_machine_does_well(
    config: dict[str, Any], probe: Probe, device: str, dtype: str
) -> None:
    settled = resolve(EngineConfig(**config), N_CTX_TRAIN, probe)
    assert str(settled.device) == device
    assert settled.dtype is getattr(torch, dtype)


@pytest.mark.parametrize("main_gpu", [-1, 2, 99])
def test_main_gpu_is_checked_only_where_a_gpu_will_be_used(main_gpu: int) -> None:
    with pytest.raises(DeviceMissing, match=r"main_gpu.*2 GPU"):
        resolve(EngineConfig(main_gpu=main_gpu), N_CTX_TRAIN, GPUS)
    for probe in (BARE, METAL):
        resolve(EngineConfig(main_gpu=main_gpu), N_CTX_TRAIN, probe)
    resolve(EngineConfig(main_gpu=main_gpu, device="cpu"), N_CTX_TRAIN, GPUS)


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_a_device_that_is_not_there_is_refused_by_name(device: str) -> None:
    with pytest.raises(DeviceMissing, match=device):
        resolve(EngineConfig(device=device), N_CTX_TRAIN, BARE)


def test_a_pass_is_never_larger_than_its_batch() -> None:
    settled = resolve(EngineConfig(max_batch=64, max_ubatch=512), N_CTX_TRAIN, BARE)
    assert (settled.max_batch, settled.max_ubatch) == (64, 64)


def test_a_tail_that_is_longer_than_a_pass_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"keep_tail = 65.*64 tokens"):
        resolve(EngineConfig(max_batch=64, keep_tail=65), N_CTX_TRAIN, BARE)
    resolve(EngineConfig(max_batch=64, keep_tail=64), N_CTX_TRAIN, BARE)


def test_keeping_the_whole_context_leaves_no_room_to_shift() -> None:
    with pytest.raises(ConfigError, match="n_keep"):
        resolve(EngineConfig(n_ctx=64, n_keep=64), N_CTX_TRAIN, BARE)
    resolve(EngineConfig(n_ctx=64, n_keep=63), N_CTX_TRAIN, BARE)


def test_a_config_cannot_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().n_ctx = 5  # type: ignore[misc]


def test_this_machine_has_a_cpu() -> None:
    assert probe_machine().num_threads >= 1
