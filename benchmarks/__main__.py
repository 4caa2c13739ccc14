"""`make bench`: every figure of docs/benchmarks.md, one JSON line each.

python -m benchmarks [smollm2] [gemma3-270m]
python -m benchmarks members [architecture...]
python -m benchmarks drafting
python -m benchmarks deterministic
python -m benchmarks sealing
python -m benchmarks manifests
python -m benchmarks parallel
python -m benchmarks copies
python -m benchmarks service
python -m benchmarks scale
"""

from __future__ import annotations

import sys

import platformdirs

from benchmarks import (
    copies,
    deterministic,
    drafting,
    manifests,
    members,
    parallel,
    resume,
    scale,
    sealing,
    service,
    speed,
)
from benchmarks.figures import english, machine
from engine.config import EngineConfig
from engine.loader import load_engine
from engine.weights.catalog import CATALOG
from engine.weights.fetch import fetch


def main() -> None:
    machine()
    if sys.argv[1:2] == ["members"]:
        members.run(sys.argv[2:])
        return
    one_model = {
        "drafting": drafting.run,
        "deterministic": deterministic.run,
        "sealing": sealing.run,
        "manifests": manifests.run,
        "parallel": parallel.run,
        "service": service.run,
    }
    for word, figures in one_model.items():
        if sys.argv[1:] == [word]:
            figures("smollm2", fetch("smollm2", platformdirs.user_cache_path("tenuto") / "models"))
            return
    if sys.argv[1:] == ["scale"]:
        scale.run()
        return
    if sys.argv[1:] == ["copies"]:
        copies.run("gemma3-270m", fetch("gemma3-270m", platformdirs.user_cache_path("tenuto") / "models"))
        return
    for name in sys.argv[1:] or CATALOG:
        path = fetch(name, platformdirs.user_cache_path("tenuto") / "models")
        engine = load_engine(path, EngineConfig(n_ctx=8192, num_cells=3 * 8192, num_seqs=2))
        text = engine.tokenizer.encode(english())
        resume.run(name, engine, text)
        speed.peak_memory(name)
        speed.run(name, engine, path, text)
    if not sys.argv[1:]:
        path = fetch("smollm2", platformdirs.user_cache_path("tenuto") / "models")
        drafting.run("smollm2", path)
        deterministic.run("smollm2", path)
        sealing.run("smollm2", path)
        parallel.run("smollm2", path)
        service.run("smollm2", path)
        scale.run()
        copies.run("gemma3-270m", fetch("gemma3-270m", platformdirs.user_cache_path("tenuto") / "models"))
        members.run([])


if __name__ == "__main__":
    main()
