"""`EngineConfig`: what a caller may choose; `resolve` turns it, once, into what the engine runs with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from engine.errors import ConfigError, DeviceMissing
from engine.state import DTYPES

Overflow = Literal["stop", "shift"]

COMPUTE_DTYPES: Mapping[str, torch.dtype] = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
}
DEVICES = ("auto", "cpu", "cuda", "mps")
CACHE_DTYPES = tuple(name for name in DTYPES if name != "i64")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Every choice, with its default. None and "auto" are settled by `resolve`.

    n_ctx: tokens a sequence may have (None: what the model was trained for). num_seqs: sequences that
    live at once. num_cells: cells of all sequences together (None: n_ctx). max_batch, max_ubatch: tokens
    of a transaction, and of a pass. type_k, type_v: dtypes of the cache. dtype: what is computed in.
    main_gpu: which of several. threads: None for torch's own number. overflow: whether a full context
    ends the reply or is shifted, keeping n_keep tokens and discarding n_discard (0: half of the rest).
    full_windows: keep window layers whole, so that they can be rewound and shifted.
    checkpoint_every: models with recurrent state keep it at least every so many tokens of a prompt, and go
    back to there; checkpoint_bytes: what all of that may take. keep_tail: tokens at the end of each sequence
    of a batch that such models compute in one pass. rollback: tokens of its last batch by which a sequence of
    such a model can be cut without a checkpoint; each costs as much memory as the state itself.
    device_state_bytes: what copies of sequences on the device may take, all together.
    deterministic: the bits of a row do not depend on which others share its batch or its pass, be they of its
    own sequence or another. Passes are then small, whatever max_ubatch is. Another number of threads can
    still move the last bits.
    tp: ranks, each a process of its own with its part of the model, that compute every pass together. They
    share the machine's threads.
    """

    n_ctx: int | None = None
    num_seqs: int = 4
    num_cells: int | None = None
    max_batch: int = 512
    max_ubatch: int = 512
    type_k: str = "bf16"
    type_v: str = "bf16"
    dtype: str = "auto"
    device: str = "auto"
    main_gpu: int | None = None
    threads: int | None = None
    overflow: Overflow = "stop"
    n_keep: int = 0
    n_discard: int = 0
    full_windows: bool = False
    checkpoint_every: int = 1024
    checkpoint_bytes: int = 2**28
    device_state_bytes: int = 2**30
    keep_tail: int = 0
    rollback: int = 0
    deterministic: bool = False
    tp: int = 1

    def __post_init__(self) -> None:
        counts = (
            "n_ctx",
            "num_seqs",
            "num_cells",
            "max_batch",
            "max_ubatch",
            "threads",
            "checkpoint_every",
            "tp",
        )
        for name in counts:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} = {value}: it must be at least 1")
        sizes = ("checkpoint_bytes", "device_state_bytes")
        for name in ("n_keep", "n_discard", *sizes, "keep_tail", "rollback"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: it cannot be negative")
        _choice("type_k", self.type_k, CACHE_DTYPES)
        _choice("type_v", self.type_v, CACHE_DTYPES)
        _choice("dtype", self.dtype, ("auto", *COMPUTE_DTYPES))
        _choice("device", self.device, DEVICES)
        _choice("overflow", self.overflow, ("stop", "shift"))

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> EngineConfig:
        """Raises ConfigError for a key that is not there, or a value of the wrong type or range."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for name, value in values.items():
            if name not in fields:
                raise ConfigError(f"unknown setting {name!r} (known: {', '.join(sorted(fields))})")
            if not _fits(value, str(fields[name].type)):
                raise ConfigError(f"{name} = {value!r}: it must be {fields[name].type}")
        return cls(**values)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Probe:
    """What the machine has. `num_threads` is what torch would use by itself."""

    num_cuda: int
    mps: bool
    fast_bf16: bool
    num_threads: int


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """An EngineConfig without open ends."""

    n_ctx: int
    num_seqs: int
    num_cells: int
    max_batch: int
    max_ubatch: int
    type_k: str
    type_v: str
    dtype: torch.dtype
    device: torch.device
    threads: int
    overflow: Overflow
    n_keep: int
    n_discard: int
    full_windows: bool
    checkpoint_every: int
    checkpoint_bytes: int
    device_state_bytes: int
    keep_tail: int
    rollback: int
    deterministic: bool
    tp: int


def probe_machine() -> Probe:
    """Looks at this machine; the only part of the configuration that is not a pure function."""
    capabilities = torch.cpu.get_capabilities()
    return Probe(
        num_cuda=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        mps=torch.backends.mps.is_available(),
        fast_bf16=bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")),
        num_threads=torch.get_num_threads(),
    )


def resolve(config: EngineConfig, n_ctx_train: int, probe: Probe) -> ResolvedConfig:
    """The choices settled for one machine and a model that was trained for `n_ctx_train` tokens.

    Raises ConfigError where they contradict each other, DeviceMissing for a device that is not there.
    """
    n_ctx = n_ctx_train if config.n_ctx is None else config.n_ctx
    if config.n_keep >= n_ctx:
        raise ConfigError(f"n_keep = {config.n_keep}: it must be less than n_ctx = {n_ctx}")
    num_cells = n_ctx if config.num_cells is None else config.num_cells
    max_ubatch = min(config.max_ubatch, config.max_batch)
    if config.keep_tail > max_ubatch:
        raise ConfigError(f"keep_tail = {config.keep_tail}: a pass has {max_ubatch} tokens at most")
    device = _device(config, probe)
    return ResolvedConfig(
        n_ctx=n_ctx,
        num_seqs=config.num_seqs,
        num_cells=num_cells,
        max_batch=config.max_batch,
        max_ubatch=max_ubatch,
        type_k=config.type_k,
        type_v=config.type_v,
        dtype=_dtype(config.dtype, device, probe),
        device=device,
        threads=max(1, probe.num_threads // config.tp) if config.threads is None else config.threads,
        overflow=config.overflow,
        n_keep=config.n_keep,
        n_discard=config.n_discard,
        full_windows=config.full_windows,
        checkpoint_every=config.checkpoint_every,
        checkpoint_bytes=config.checkpoint_bytes,
        device_state_bytes=config.device_state_bytes,
        keep_tail=config.keep_tail,
        rollback=config.rollback,
        deterministic=config.deterministic,
        tp=config.tp,
    )


def _device(config: EngineConfig, probe: Probe) -> torch.device:
    kind = config.device
    if kind == "auto":
        kind = "cuda" if probe.num_cuda else "mps" if probe.mps else "cpu"
    if kind == "mps" and not probe.mps:
        raise DeviceMissing("device mps: this machine has no Metal GPU that torch can use")
    if kind != "cuda":
        return torch.device(kind)
    if not probe.num_cuda:
        raise DeviceMissing("device cuda: torch finds no CUDA GPU on this machine")
    gpu = 0 if config.main_gpu is None else config.main_gpu
    if not 0 <= gpu < probe.num_cuda:
        raise DeviceMissing(f"main_gpu = {gpu}: this machine has {probe.num_cuda} GPU(s), counted from 0")
    if gpu + config.tp > probe.num_cuda:
        raise DeviceMissing(f"tp = {config.tp}: a GPU each, from {gpu} on, and there are {probe.num_cuda}")
    return torch.device("cuda", gpu)


def _dtype(choice: str, device: torch.device, probe: Probe) -> torch.dtype:
    if choice != "auto":
        return COMPUTE_DTYPES[choice]
    fast = device.type == "cuda" or (device.type == "cpu" and probe.fast_bf16)
    return torch.bfloat16 if fast else torch.float32


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} = {value!r}: it must be one of {', '.join(allowed)}")


def _fits(value: object, annotation: str) -> bool:
    """Whether `value` is of the annotated type; True is no 1."""
    if value is None:
        return "None" in annotation
    if isinstance(value, bool):
        return annotation == "bool"
    if isinstance(value, int):
        return annotation.startswith("int")
    return isinstance(value, str) and annotation in ("str", "Overflow")
