"""`python -m tests.serialization.foreign.fuzz`: every reader for ten minutes, a line of JSON for each.

An input that breaks a law ends the run with status 1, and is written to the folder of `--findings`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

import torch
from blake3 import blake3

from tests.serialization.foreign.fuzz.running import Figures, Finding, run
from tests.serialization.foreign.fuzz.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz")
    parser.add_argument("--seconds", type=float, default=600.0, help="for each reader")
    parser.add_argument("--reader", action="append", choices=list(TARGETS), help="this one alone")
    parser.add_argument("--seed", type=int, default=None, help="the same inputs again")
    parser.add_argument("--findings", type=Path, default=Path("findings"))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for name in chosen.reader or TARGETS:
        seed = random.SystemRandom().randrange(2**32) if chosen.seed is None else chosen.seed
        end = time.monotonic() + chosen.seconds

        def more(figures: Figures, end: float = end) -> bool:
            return time.monotonic() < end

        try:
            figures = run(TARGETS[name], random.Random(seed), more)
        except Finding as finding:
            chosen.findings.mkdir(parents=True, exist_ok=True)
            path = chosen.findings / f"{name}-{blake3(finding.data).hexdigest()[:16]}"
            path.write_bytes(finding.data)
            print(f"{finding}; seed {seed}; the input is in {path}", file=sys.stderr)
            raise
        print(
            json.dumps({"reader": name, "seed": seed, "seconds": chosen.seconds, **figures.as_json()}),
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
