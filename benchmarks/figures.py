"""One figure is one line of JSON: what was measured, on what, in which unit, and the machine beside it."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


def tell(name: str, **values: object) -> None:
    """Print one figure. Floats are rounded to four digits."""
    line = {"figure": name} | {
        key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in values.items()
    }
    print(json.dumps(line), flush=True)


def machine() -> None:
    tell(
        "machine",
        processor=_processor(),
        cores=os.cpu_count(),
        capability=torch.backends.cpu.get_cpu_capability(),
        torch=torch.__version__,
        python=platform.python_version(),
        load=os.getloadavg()[0],
    )


def seconds(work: Callable[[], object], times: int = 3) -> float:
    """The median wall time of `work`."""
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def english() -> str:
    """The project's own prose and code, about 40,000 tokens."""
    files = [ROOT / "LICENSE", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "engine").glob("*.py"))]
    return "\n\n".join(path.read_text(encoding="utf-8") for path in files)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown")
