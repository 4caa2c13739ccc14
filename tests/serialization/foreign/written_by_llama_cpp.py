"""Run by a Python that has llama-cpp-python: writes states in every setting that changes their bytes.

Alone on purpose: nothing of this repository is imported, so that another environment can run it. It takes a
model, a folder, and whether to have every type of rows (`every`) or one (`one`). It prints a line of JSON for
each file: its name, and of every sequence that it has how many tokens were fed and how many of them were
forgotten again.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp

TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q5_0": 6, "q8_0": 8, "bf16": 30}
#: types of K and V, and whether flash attention is on
EVERY = [
    ("f16", "f16", 1),
    ("f16", "f16", 0),
    ("q8_0", "f16", 0),
    ("q8_0", "q8_0", 1),
    ("q5_0", "q4_0", 1),
    ("bf16", "bf16", 1),
    ("f32", "f32", 1),
]
IDS = [(7919 * i + 13) % 250 for i in range(40)]


class Context:
    """Three sequences at most; `fed` is how many tokens each was given."""

    def __init__(self, model: Any, folder: Path, tag: str, k: str, v: str, flash: int, unified: bool) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = 1536, 3, unified
        params.n_threads = params.n_threads_batch = 1
        params.type_k, params.type_v, params.flash_attn_type = TYPES[k], TYPES[v], flash
        self.context = llama_cpp.llama_init_from_model(model, params)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.folder, self.tag = folder, tag
        self.fed: dict[int, list[int]] = {}

    def feed(self, sequence: int, ids: list[int]) -> None:
        at = self.fed.get(sequence, [0, 0])[0]
        batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, at + i, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, int(i == len(ids) - 1)
        if llama_cpp.llama_decode(self.context, batch):
            raise SystemExit("decoding failed")
        llama_cpp.llama_batch_free(batch)
        self.fed[sequence] = [at + len(ids), self.fed.get(sequence, [0, 0])[1]]

    def copy(self, source: int, to: int) -> None:
        llama_cpp.llama_memory_seq_cp(self.memory, source, to, -1, -1)
        self.fed[to] = list(self.fed[source])

    def forget(self, sequence: int, start: int, stop: int) -> None:
        if llama_cpp.llama_memory_seq_rm(self.memory, sequence, start, stop):
            self.fed[sequence][1] += stop - start

    def save(self, what: str) -> None:
        """The context and each of its sequences, as files and from memory."""
        ids = (llama_cpp.llama_token * len(IDS))(*IDS)
        path = self._path(f"{what}-session", self.fed)
        llama_cpp.llama_state_save_file(self.context, path, ids, len(IDS))
        nbytes = llama_cpp.llama_state_get_size(self.context)
        buffer = (ctypes.c_uint8 * nbytes)()
        written = llama_cpp.llama_state_get_data(self.context, buffer, nbytes)
        Path(self._path(f"{what}-context", self.fed).decode()).write_bytes(bytes(buffer)[:written])
        for sequence, fed in self.fed.items():
            path = self._path(f"{what}-sequence-{sequence}", {sequence: fed})
            llama_cpp.llama_state_seq_save_file(self.context, path, sequence, ids, len(IDS))
            nbytes = llama_cpp.llama_state_seq_get_size(self.context, sequence)
            buffer = (ctypes.c_uint8 * nbytes)()
            written = llama_cpp.llama_state_seq_get_data(self.context, buffer, nbytes, sequence)
            path = self._path(f"{what}-state-{sequence}", {sequence: fed})
            Path(path.decode()).write_bytes(bytes(buffer)[:written])

    def _path(self, what: str, fed: dict[int, list[int]]) -> bytes:
        name = f"{self.tag}-{what}.bin"
        print(json.dumps({"name": name, "fed": fed}))
        return str(self.folder / name).encode()


def main(path: str, out: str, types: str) -> None:
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    for k, v, flash in EVERY if types == "every" else EVERY[:2]:
        for unified in (True, False):
            tag = f"{k}-{v}-{'flash' if flash else 'plain'}-{'one' if unified else 'three'}"
            context = Context(model, Path(out), tag, k, v, flash, unified)
            context.feed(0, IDS)
            context.save("one")
            context.feed(2, IDS[:11])
            context.copy(0, 1)
            context.feed(1, IDS[:5])
            context.feed(0, IDS[:3])
            context.save("three")
            context.forget(0, 20, 25)
            context.feed(0, IDS[:7])
            context.save("hole")
            llama_cpp.llama_free(context.context)


if __name__ == "__main__":
    main(*sys.argv[1:])
