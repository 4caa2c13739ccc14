"""A model divided among processes, from the command line and under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Tenuto

SETTINGS = ("--temp", "0", "--max-tokens", "12", "--threads", "1", "--dtype", "f32")
ASK = ("run", *SETTINGS, "a question")


def test_two_processes_say_what_one_says(tenuto: Tenuto) -> None:
    """As often as one likes: each command lets its processes go."""
    alone = tenuto(*ASK)
    for _ in range(2):
        together = tenuto(*ASK, "--tp", "2")
        assert (together.code, together.out) == (0, alone.out)


def test_torchruns_first_process_has_the_conversation(tenuto: Tenuto) -> None:
    """The others follow it, and what all saved one goes on with."""
    expected = tenuto("chat", *SETTINGS, stdin="hello\n")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    done = subprocess.run(
        [*torchrun, "-m", "cli.main", "chat", *SETTINGS],
        input="hello\n",
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parent.parent.parent,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected.out
    resumed = tenuto("chat", "-c", *SETTINGS, stdin="and then?\n")
    assert resumed.code == 0
    assert resumed.out


def test_torchrun_must_have_started_as_many(tenuto: Tenuto, monkeypatch: pytest.MonkeyPatch) -> None:
    world = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    done = tenuto(*ASK, "--tp", "3")
    assert done.code == 2
    assert done.err == "tenuto: tp = 3: torchrun has started 2 ranks\n"
