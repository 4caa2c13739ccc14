"""Run by a Python that has llama-cpp-python: does what a list of steps says, in one context, and tells what
came.

Alone on purpose: nothing of this repository is imported, so that another environment can run it. It reads
one JSON object from stdin: `model`, `n_ctx`, `type_k`, `type_v` (ggml's numbers), `flash_attn`, and `steps`:

["feed", ids]         decode them ["load", path]        a sequence file into the sequence ["set", path]
a sequence state from memory, likewise ["session", path]     a session file, likewise ["again"]
decode the last token once more ["top", n]            say the n largest logits: {"ids", "logits"} ["greedy",
n]         say the next n likeliest tokens, and by how much they are so: {"ids", "gaps"} ["save", path]
a sequence file ["blob", path]        a sequence state from memory ["clear"]             forget the sequence

and writes a JSON array of what was said.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import llama_cpp
import numpy as np


class Context:
    def __init__(self, said: dict[str, Any]) -> None:
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        model = llama_cpp.llama_model_load_from_file(said["model"].encode(), params)
        if not model:
            raise SystemExit("the model was not loaded")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = said["n_ctx"]
        settings.n_batch = settings.n_ubatch = 512
        settings.n_threads = settings.n_threads_batch = 1
        settings.type_k, settings.type_v = said["type_k"], said["type_v"]
        settings.flash_attn_type = 1 if said["flash_attn"] else 0
        settings.swa_full = False
        self.context = llama_cpp.llama_init_from_model(model, settings)
        if not self.context:
            raise SystemExit("no context could be made")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.tokens: list[int] = []

    def feed(self, ids: list[int]) -> None:
        for start in range(0, len(ids), 512):
            part = ids[start : start + 512]
            array = (ctypes.c_int32 * len(part))(*part)
            result = llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(array, len(part)))
            if result:
                raise SystemExit(f"decoding gave {result}")
        self.tokens += ids

    def logits(self) -> Any:
        pointer = llama_cpp.llama_get_logits_ith(self.context, -1)
        return np.ctypeslib.as_array(pointer, (self.vocab,)).copy()

    def load(self, path: str) -> None:
        self._loaded(llama_cpp.llama_state_seq_load_file, path, 0)

    def session(self, path: str) -> None:
        self._loaded(llama_cpp.llama_state_load_file, path)

    def _loaded(self, load: Any, path: str, *sequence: int) -> None:
        ids, count = (ctypes.c_int32 * 4096)(), ctypes.c_size_t()
        if not load(self.context, path.encode(), *sequence, ids, 4096, ctypes.byref(count)):
            raise SystemExit(f"{path} was not loaded")
        self.tokens = list(ids[: count.value])

    def set(self, path: str) -> None:
        with open(path, "rb") as file:
            data = file.read()
        array = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        if llama_cpp.llama_state_seq_set_data(self.context, array, len(data), 0) != len(data):
            raise SystemExit(f"{path} was not loaded whole")
        self.tokens = [0] * (llama_cpp.llama_memory_seq_pos_max(self.memory, 0) + 1)

    def again(self) -> None:
        last = self.tokens.pop()
        llama_cpp.llama_memory_seq_rm(self.memory, 0, len(self.tokens), -1)
        self.feed([last])

    def top(self, count: int) -> dict[str, list[float]]:
        logits = self.logits()
        best = np.argsort(-logits)[:count]
        return {"ids": best.tolist(), "logits": logits[best].tolist()}

    def greedy(self, count: int) -> dict[str, list[float]]:
        ids, gaps = [], []
        for _ in range(count):
            first, second = self.top(2)["logits"]
            ids.append(int(self.logits().argmax()))
            gaps.append(first - second)
            self.feed(ids[-1:])
        return {"ids": ids, "gaps": gaps}

    def save(self, path: str) -> None:
        array = (ctypes.c_int32 * len(self.tokens))(*self.tokens)
        saved = llama_cpp.llama_state_seq_save_file
        if not saved(self.context, path.encode(), 0, array, len(self.tokens)):
            raise SystemExit(f"{path} was not saved")

    def blob(self, path: str) -> None:
        size = llama_cpp.llama_state_seq_get_size(self.context, 0)
        array = (ctypes.c_uint8 * size)()
        if llama_cpp.llama_state_seq_get_data(self.context, array, size, 0) != size:
            raise SystemExit("the state was not got")
        with open(path, "wb") as file:
            file.write(bytes(array))

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(self.memory, True)
        self.tokens = []


def main() -> None:
    said = json.load(sys.stdin)
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    context = Context(said)
    told = []
    for name, *arguments in said["steps"]:
        result = getattr(context, name)(*arguments)
        if result is not None:
            told.append(result)
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main()
