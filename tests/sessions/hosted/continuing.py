"""A program of someone's own that goes on with sessions of hosted models: `continuing.py FOLDER STORE...`

It loads the models anew, resumes in each store one session for each, and prints, as JSON, what a resume says
and a digest of the logits that follow.
"""

from __future__ import annotations

import hashlib
import json
import sys

import torch

from engine.hosted.host import host
from engine.runner import Engine
from engine.state import SeqId
from sessions.manager import SessionManager
from sessions.stores.open import open_store
from tests.engine.hosted.models import ids, said, tiny

#: by family, kinds of part that are all there is, and beside others
FAMILIES = ("gemma3", "mistral", "bamba", "mamba2")
LINE = ids(330)


def engine_of(family: str) -> Engine:
    return host(tiny(family))


def digest(engine: Engine, seq: SeqId) -> str:
    found = said(engine, seq, ids(7, seed=5))
    return hashlib.sha256(found.numpy().tobytes()).hexdigest()


def resumed(address: str, family: str) -> list[object]:
    store = open_store(address)
    manager = SessionManager(store, engine_of(family))
    session = manager.open(family)
    seq, result = manager.resume(session)
    found = digest(manager.engine, seq)
    session.close()
    store.close()
    return [result.reason, result.restored, result.recomputed, found]


if __name__ == "__main__":
    torch.set_num_threads(1)
    answer = {
        f"{family} {number}": resumed(at, family)
        for family in FAMILIES
        for number, at in enumerate(sys.argv[1:])
    }
    print(json.dumps(answer))
