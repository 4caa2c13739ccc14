"""A rank that is lost is said, soon; nobody is left behind, and what was saved is whole."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError, RankLost, WeightsRefused
from engine.loader import load_engine
from engine.parallel.followers import TCPStore
from engine.parallel.group import DistGroup, loopback
from engine.parallel.share import Share
from engine.parallel.world import LOOPBACK, World
from engine.runner import Engine
from engine.state import SeqId
from tests.tiny import write_tiny

#: Seconds. An idle machine takes a fraction of one; a busy one must not fail for being busy.
SOON = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture
def open_ranks(model: Path) -> Iterator[Callable[..., Engine]]:
    opened: list[Engine] = []

    def make(size: int, **settings: Any) -> Engine:
        config = {"n_ctx": 4096, "num_seqs": 2, "threads": 1, "dtype": "f32", "tp": size, **settings}
        opened.append(load_engine(model, EngineConfig.from_mapping(config)))
        return opened[-1]

    yield make
    for engine in opened:
        engine.end()


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    stat = Path(f"/proc/{pid}/stat")  # a zombie, whose parent is gone with it
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def all_gone(those: list[int]) -> bool:
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline:
        if all(map(gone, those)):
            return True
        time.sleep(0.05)
    return False


def decode_until_lost(engine: Engine) -> RankLost:
    seq = engine.create()
    engine.feed(seq, [1, 2, 3])
    with pytest.raises(RankLost) as lost:
        decode_forever(engine, seq)
    return lost.value


def decode_forever(engine: Engine, seq: SeqId) -> None:
    deadline = time.monotonic() + 3 * SOON
    while time.monotonic() < deadline:
        engine.decode([seq])
        engine.rewind(seq, 3)


def test_a_rank_that_is_killed_is_named_soon(open_ranks: Callable[..., Engine]) -> None:
    engine = open_ranks(3)
    others = engine.rank_pids
    threading.Timer(0.5, os.kill, (others[2], signal.SIGKILL)).start()
    error = decode_until_lost(engine)
    assert str(error) == "the model is no longer whole: rank 2 ended (SIGKILL)"
    assert error.exit_code == 27
    assert all_gone(list(others.values()))
    # It stays so; and what needs no one else is still done.
    seq = engine.create()
    with pytest.raises(RankLost, match="rank 2 ended"):
        engine.feed(seq, [1])
    engine.close(seq)


def test_a_rank_that_hangs_is_lost_when_patience_ends(
    open_ranks: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient = partial(DistGroup, patience=timedelta(seconds=1))
    monkeypatch.setattr("engine.parallel.lead.DistGroup", impatient)
    engine = open_ranks(2)
    others = engine.rank_pids
    threading.Timer(0.2, os.kill, (others[1], signal.SIGSTOP)).start()
    assert "does not answer" in str(decode_until_lost(engine))
    assert all_gone(list(others.values()))


THINKS = """
import sys
import time
import torch.distributed as dist
from engine.parallel.group import DistGroup, loopback
from engine.parallel.share import Share
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False)
with loopback():
    group = DistGroup(Share(0, 2), store)
time.sleep(3)
group.tell(b"short")
group.tell(bytes(5000))
group.meet()
"""


def test_between_passes_ranks_wait_longer_than_a_pass_may_take() -> None:
    """A user may think for hours. This process is a rank that has little patience, and listens."""
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        store = TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
        )
    process = subprocess.Popen([sys.executable, "-c", THINKS, str(port)])
    with process, loopback():
        group = DistGroup(Share(1, 2), store, patience=timedelta(seconds=1))
        try:
            assert group.hear() == b"short"
            assert group.hear() == bytes(5000), "words may be longer than a frame"
            group.meet()
        finally:
            group.close("it is over")


HANGS = """
import os
import signal
import sys
from tests.engine.parallel.test_lost import joined
group = joined(1, int(sys.argv[1]))
assert group.hear() == b"first"
os.kill(os.getpid(), signal.SIGSTOP)
"""

TELLS = """
import sys
from engine.errors import RankLost
from tests.engine.parallel.test_lost import joined
group = joined(0, int(sys.argv[1]))
group.tell(b"first")
try:
    for _ in range(1000):
        group.tell(bytes(5000))
except RankLost as lost:
    print(lost, flush=True)
"""


def joined(rank: int, port: int) -> DistGroup:
    """The group of a process that has little patience."""
    with loopback():
        store = TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False)
        return DistGroup(Share(rank, 2), store, patience=timedelta(seconds=1))


def test_a_rank_that_does_not_listen_any_more_is_lost_as_well() -> None:
    """It hung between two passes, so that nobody waits for its part, and it does not take what it is told."""
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        store = TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
        )
    hangs = subprocess.Popen([sys.executable, "-c", HANGS, str(port)])
    tells = subprocess.Popen([sys.executable, "-c", TELLS, str(port)], stdout=subprocess.PIPE, text=True)
    try:
        assert "a rank does not answer" in tells.communicate(timeout=3 * SOON)[0]
    finally:
        for process in (hangs, tells):
            process.kill()
            process.wait()
    del store


RANK_0 = """
import sys
from engine.config import EngineConfig
from engine.loader import load_engine
config = EngineConfig(n_ctx=4096, num_seqs=2, threads=1, dtype="f32", tp=3)
engine = load_engine(sys.argv[1], config)
print(*engine.rank_pids.values(), flush=True)
seq = engine.create()
engine.feed(seq, [1, 2, 3])
if sys.argv[2] == "idle":
    print("idle", flush=True)
    sys.stdin.read()
print("decoding", flush=True)
while True:
    engine.decode([seq])
    engine.rewind(seq, 3)
"""


@pytest.mark.parametrize("state", ["decoding", pytest.param("idle", marks=pytest.mark.slow)])
def test_no_rank_outlives_rank_0(state: str, model: Path) -> None:
    """However it ends: nobody is there any more to tell the others."""
    process = subprocess.Popen(
        [sys.executable, "-c", RANK_0, str(model), state],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        others = [int(pid) for pid in process.stdout.readline().split()]
        assert process.stdout.readline().strip() == state
        assert len(others) == 2
        assert not any(map(gone, others))
        process.kill()
    assert all_gone(others)


WRONG = {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.mark.parametrize("change", [{}, {"RANK": "one"}, {"RANK": "1", "MASTER_PORT": ""}])
def test_variables_that_make_no_sense_are_refused(change: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        World.of({**WRONG, **change})


def test_other_variables_say_nothing() -> None:
    assert World.of({}) is None
    assert World.of({"RANK": "1"}) is None
    assert World.of({**WRONG, "RANK": "1"}) == World(1, 2, "localhost", 1, 1)


def test_torchrun_and_tp_must_agree(model: Path) -> None:
    world = World(0, 3, "localhost", 1, 0)
    with pytest.raises(ConfigError, match="torchrun has started 3 ranks"):
        load_engine(model, EngineConfig(tp=2, threads=1), world=world)


def test_two_divided_models_in_a_process_are_refused(open_ranks: Callable[..., Engine]) -> None:
    first = open_ranks(2)
    with pytest.raises(ConfigError, match="end it first"):
        open_ranks(2)
    seq = first.create()
    first.feed(seq, [1, 2, 3])
    first.end()
    with pytest.raises(RankLost, match="let go"):
        first.feed(seq, [4])
    second = open_ranks(2)
    second.feed(second.create(), [1, 2, 3])


def test_a_model_that_nobody_refers_to_leaves_no_process(model: Path) -> None:
    engine = load_engine(model, EngineConfig(tp=2, threads=1))
    others = list(engine.rank_pids.values())
    del engine
    gc.collect()
    assert all_gone(others)
    load_engine(model, EngineConfig(tp=2, threads=1)).end()


def test_a_model_that_cannot_be_read_leaves_no_process(model: Path, tmp_path: Path) -> None:
    """It is told once, by rank 0."""
    broken = tmp_path / "broken.gguf"
    data = model.read_bytes()
    broken.write_bytes(data[: len(data) // 2])
    with pytest.raises(WeightsRefused):
        load_engine(broken, EngineConfig(tp=2, threads=1))
    with pytest.raises(ConfigError):  # found out when all ranks have read their part
        load_engine(model, EngineConfig(tp=2, threads=1, type_k="f16", type_v="i64"))
