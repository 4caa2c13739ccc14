"""Layers that predict further tokens against their oracles, pass by pass over a memory of their own."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.batch import Batch
from engine.cache.memory import Memory, Plan, RowsSpec, View
from engine.cache.table import build_memory
from engine.config import EngineConfig, probe_machine, resolve
from engine.errors import WeightsRefused
from engine.models.base import Placement, Trunk
from engine.models.decoder import Decoder
from engine.models.loading import Loader
from engine.models.mtp import Mtp
from engine.models.table import build_model, build_mtp
from engine.slots import memory_spec
from engine.state import SeqId
from engine.weights.source import open_weights
from tests.engine.models.test_published import FOLDER, Header
from tests.engine.models.test_published import _sized as without_values
from tests.engine.weights.folders import change_config
from tests.oracles import deepseek_v3_mtp, qwen3_next_mtp
from tests.oracles.base import LENGTH, SHAPES, tokens, write
from tests.oracles.mtp import Oracle

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "deepseek_v3, depth 1": (deepseek_v3_mtp.oracle, {"num_depths": 1}),
    "deepseek_v3, depth 2": (deepseek_v3_mtp.oracle, {"num_depths": 2}),
    "deepseek_v3, depth 3, all layers dense": (
        deepseek_v3_mtp.oracle,
        {"num_depths": 3, "first_k_dense_replace": 3},
    ),
    "deepseek_v3, halves": (deepseek_v3_mtp.oracle, {"num_depths": 2, "rope_interleave": False}),
    "qwen3_next": (qwen3_next_mtp.oracle, {}),
    "qwen3_next, tied": (qwen3_next_mtp.oracle, {"tie_word_embeddings": True}),
    "qwen3_next, dense": (qwen3_next_mtp.oracle, {"num_experts": 0}),
}
CPU = Placement(torch.float32, torch.device("cpu"), 256)
SEQ = SeqId(1)


def load(folder: Path) -> tuple[Trunk, Mtp | None]:
    weights = open_weights(folder)
    model = build_model(weights, CPU)
    assert isinstance(model, Decoder)
    return model, build_mtp(weights, CPU, model)


def load_both(name: str, folder: Path) -> tuple[Oracle, Trunk, Mtp]:
    make, changes = CASES[name]
    oracle = make(**changes)
    oracle.write(folder)
    trunk, mtp = load(folder)
    assert mtp is not None
    return oracle, trunk, mtp


def memory_of(part: Trunk | Mtp) -> Memory:
    plain = {"dtype": "f32", "type_k": "f32", "type_v": "f32", "threads": 1, "device": "cpu"}
    sizes = {"n_ctx": 256, "max_batch": 64, "max_ubatch": 64, "num_seqs": 2}
    config = resolve(EngineConfig.from_mapping({**plain, **sizes}), 256, probe_machine())
    return build_memory(memory_spec(part.needs, config))


def plan(memory: Memory, start: int, ids: Sequence[int]) -> Plan:
    count = len(ids)
    positions, seqs = np.arange(start, start + count), np.full(count, SEQ)
    return memory.plan(
        Batch(np.asarray(ids, dtype=np.int64), positions, seqs, np.ones(count, dtype=np.bool_))
    )


def passes(memory: Memory, ids: Sequence[int], chunks: Sequence[int]) -> Iterator[tuple[slice, View]]:
    """Every pass of `ids` in plans of `chunks`: which positions, and the view."""
    for stop, count in zip(itertools.accumulate(chunks), chunks, strict=True):
        planned, start = plan(memory, stop - count, ids[stop - count : stop]), stop - count
        with torch.inference_mode():
            for index, ubatch in enumerate(planned.ubatches):
                yield slice(start, start + len(ubatch)), planned.apply(index)
                start += len(ubatch)
        planned.commit()


def trunk_states(trunk: Trunk, ids: Sequence[int], chunks: Sequence[int]) -> torch.Tensor:
    given, memory = torch.tensor(list(ids)), memory_of(trunk)
    out = [
        trunk.hidden(given[at], torch.arange(at.start, at.stop), view)
        for at, view in passes(memory, ids, chunks)
    ]
    return torch.cat(out)


def left_by(
    mtp: Mtp, memory: Memory, states: torch.Tensor, ids: Sequence[int], chunks: Sequence[int]
) -> list[torch.Tensor]:
    """What every depth leaves where the tokens of all depths are known."""
    given = torch.tensor(list(ids))
    out: list[list[torch.Tensor]] = [[] for _ in range(mtp.num_depths)]
    for at, view in passes(memory, ids[: sum(chunks)], chunks):
        left, positions = states[at], torch.arange(at.start, at.stop)
        for depth in range(mtp.num_depths):
            left = mtp.step(depth, left, given[positions + 1 + depth], positions, view)
            out[depth].append(left)
    return [torch.cat(each) for each in out]


def chunks_of(count: int) -> list[list[int]]:
    """The oracles' shapes, cut to `count`."""
    out = []
    for shape in SHAPES.values():
        ends = [min(end, count) for end in itertools.accumulate(shape)]
        out.append([stop - start for start, stop in itertools.pairwise([0, *ends]) if stop > start])
    return out


@pytest.mark.parametrize("name", CASES)
def test_every_depth_guesses_what_its_oracle_does(name: str, tmp_path: Path) -> None:
    """At every position, however the tokens are cut."""
    oracle, trunk, mtp = load_both(name, tmp_path)
    ids = tokens()
    theirs = oracle.depths(ids)
    assert mtp.num_depths == len(theirs) == oracle.num_depths
    for chunks in chunks_of(LENGTH - mtp.num_depths):
        states = trunk_states(trunk, ids, [*chunks, mtp.num_depths])
        ours = left_by(mtp, memory_of(mtp), states, ids, chunks)
        for depth, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            expected = oracle.head(their[: len(our)])
            assert expected.std() > 0.1, "logits that hardly differ would test nothing"
            difference = float((mtp.logits(our) - expected).abs().max())
            assert difference <= 1e-4, f"depth {depth}, {chunks}: {difference:.2g}"


@pytest.mark.parametrize("name", ["deepseek_v3, depth 2", "qwen3_next"])
def test_logits_of_hidden_states_are_those_of_a_pass(name: str, tmp_path: Path) -> None:
    """Bit for bit: the norm is row by row."""
    _, trunk, _ = load_both(name, tmp_path)
    ids = tokens()
    given, wanted = torch.tensor(ids), torch.tensor([3, 39])
    forward, memory = [], memory_of(trunk)
    for at, view in passes(memory, ids, [40, 24]):
        positions, rows = torch.arange(at.start, at.stop), wanted[wanted < at.stop - at.start]
        forward.append(trunk.forward(given[at], positions, view, rows))
    states = trunk_states(trunk, ids, [40, 24])
    with torch.inference_mode():
        assert torch.equal(forward[0], trunk.logits_of(states[wanted]))
        assert torch.equal(forward[1], trunk.logits_of(states[[43]]))


@pytest.mark.parametrize("name", ["deepseek_v3, depth 2", "qwen3_next"])
def test_keys_are_turned_as_of_the_position_of_the_token(name: str, tmp_path: Path) -> None:
    """Distances alone decide what is guessed, so that it would not show there."""
    oracle, _, mtp = load_both(name, tmp_path)
    ids, count = tokens(), 20
    given, states, memory = torch.tensor(ids), oracle.hidden(ids), memory_of(mtp)
    depths = zip([states, *oracle.depths(ids)], left_by(mtp, memory, states, ids, [count]), strict=False)
    ((rows,), _), parts = memory.snapshot(SEQ), [spec.name for spec in memory.layout]
    keys = [part for part in mtp.needs.parts if isinstance(part, RowsSpec) and part.turned is not None]
    for depth, (before, _) in enumerate(depths):
        at = torch.arange(1 + depth, 1 + depth + count)
        theirs = oracle.keys(depth, before[:count], given[at], at)
        need, index = keys[depth], depth if len(parts) == len(keys) else 2 * depth
        stored = rows.parts[index].view(torch.float32).view(count, need.heads, need.size)
        assert need.turned is not None
        start = need.turned.start
        ours = stored[..., start : start + need.turned.rotary.n_rot]
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_a_depth_has_rows_of_its_own_behind_those_of_the_model(tmp_path: Path) -> None:
    oracle, trunk, mtp = load_both("deepseek_v3, depth 2", tmp_path)
    first = oracle.trunk.config.num_hidden_layers
    assert [part.layer for part in mtp.needs.parts] == [first, first + 1]
    assert mtp.needs.kind == "kv"
    assert {part.layer for part in trunk.needs.parts} == set(range(first))


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_a_file_without_such_layers_has_none(family: str, tmp_path: Path) -> None:
    """Though the configuration that transformers writes counts one."""
    write(family, tmp_path)
    _, mtp = load(tmp_path)
    assert mtp is None


def test_layers_that_the_configuration_does_not_count_are_not_read(tmp_path: Path) -> None:
    load_both("deepseek_v3, depth 2", tmp_path)
    change_config(tmp_path, num_nextn_predict_layers=1)
    _, mtp = load(tmp_path)
    assert mtp is not None
    assert mtp.num_depths == 1


def test_the_librarys_word_for_their_number_will_do(tmp_path: Path) -> None:
    load_both("deepseek_v3, depth 2", tmp_path)
    change_config(tmp_path, num_nextn_predict_layers=..., num_mtp_layers=2)
    _, mtp = load(tmp_path)
    assert mtp is not None
    assert mtp.num_depths == 2


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("deepseek_v3, depth 2", "model.layers.3.enorm.weight"),
        ("deepseek_v3, depth 2", "model.layers.4.eh_proj.weight"),
        ("deepseek_v3, depth 2", "model.layers.4.shared_head.norm.weight"),
        ("deepseek_v3, depth 2", "model.layers.4.self_attn.o_proj.weight"),
        ("qwen3_next", "mtp.fc.weight"),
        ("qwen3_next", "mtp.norm.weight"),
        ("qwen3_next", "mtp.layers.0.self_attn.q_proj.weight"),
    ],
)
def test_one_that_is_not_whole_is_refused_by_name(name: str, tensor: str, tmp_path: Path) -> None:
    load_both(name, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors[tensor]
    save_file(tensors, path)
    with pytest.raises(WeightsRefused, match=tensor.replace(".", r"\.")):
        load(tmp_path)


def test_more_of_them_than_are_known_are_refused(tmp_path: Path) -> None:
    load_both("qwen3_next", tmp_path)
    change_config(tmp_path, num_nextn_predict_layers=2)
    with pytest.raises(WeightsRefused, match="num_nextn_predict_layers"):
        load(tmp_path)


#: values in the tensors of published files that predict further tokens: with the models' own, and DeepSeek's
#: copies of embedding and output matrix, they are the 684.5 and the 81.3 billion that these files have
PUBLISHED = {"deepseek-v3": 11_610_068_224, "qwen3-next-80b": 1_650_471_424}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_tensors_that_are_read_are_all_of_the_published(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loader, "_checked", without_values)
    header = Header(json.loads((FOLDER / f"{name}.json").read_text()))
    place = Placement(torch.bfloat16, torch.device("meta"), 4096)
    model = build_model(header, place)
    header.read.clear()
    mtp = build_mtp(header, place, model)
    assert mtp is not None
    assert mtp.num_depths == 1
    assert sum(map(math.prod, header.read.values())) == PUBLISHED[name]
