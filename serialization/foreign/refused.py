"""Files that are never opened: told by their first bytes, with what to do instead.

Pickled files run what they say when they are loaded, so nothing of them is read but the bytes that tell them.
Why the state in a pickled `LlamaState` is not looked for without loading it is written in docs/foreign.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

#: So many bytes of a file tell it.
FIRST_NBYTES = 4096

_TORCH = "save it from the process that made it, with save_cache of docs/foreign.md"
_LLAMA = (
    "load it in a process that trusts it, and write it there by llama_cpp.llama_state_seq_save_file"
    " (the lines are in docs/foreign.md)"
)
_ANY = "write what it holds as a file that docs/foreign.md names, in a process that trusts it"


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a file is, as in "this is …", and what to do instead."""

    what: str
    instead: str

    def __str__(self) -> str:
        return f"this is {self.what}: {self.instead}"


#: The magic number that `torch.save` wrote before it wrote zip files, as its first pickle.
_OLD_TORCH = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."

#: How pickles of protocols 0 and 1 may begin: a container, a global name, or a string.
_OLD_PICKLE = re.compile(
    rb"\((?:lp\d+|dp\d+|ip?\w+[\w.]*)\s|c[A-Za-z_][\w.]*\n[A-Za-z_]\w*\n|[\]}]q.|ccopy_reg\n"
)

_ZIP = b"PK\x03\x04"
_ZIP_NAME_AT = 30
_ZIP_NAME_NBYTES = slice(26, 28)

_COMPRESSED = (b"\x1f\x8b", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd", b"BZh")

_SQLITE = b"SQLite format 3\x00"
#: Of a folder of the `diskcache` package, which keeps pickles.
DISKCACHE_INDEX = "cache.db"


def _is_pickle(first: bytes) -> bool:
    return (first[:1] == b"\x80" and first[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")) or bool(
        _OLD_PICKLE.match(first)
    )


def _zip_name(first: bytes) -> bytes:
    """The name of the first file in a zip file."""
    length = int.from_bytes(first[_ZIP_NAME_NBYTES], "little")
    return first[_ZIP_NAME_AT : _ZIP_NAME_AT + length]


#: What is asked of a file's first bytes, in this order.
_FILES: tuple[tuple[Callable[[bytes], bool], Refusal], ...] = (
    (
        lambda first: _is_pickle(first) and b"llama_cpp" in first and b"LlamaState" in first,
        Refusal("a pickled state of llama-cpp-python, which is never loaded here", _LLAMA),
    ),
    (
        lambda first: (
            first.startswith(_OLD_TORCH)
            or (first.startswith(_ZIP) and _zip_name(first).endswith(b"data.pkl"))
        ),
        Refusal("a pickle of torch.save, which is never loaded here", _TORCH),
    ),
    (_is_pickle, Refusal("a pickle, which is never loaded here", _ANY)),
    (
        lambda first: first.startswith(_SQLITE),
        Refusal(
            "an SQLite database, as a LlamaDiskCache keeps beside its pickles, which are never loaded here",
            _LLAMA,
        ),
    ),
    (
        lambda first: first.startswith(_ZIP),
        Refusal("a zip file", "unpack it, and name the file in it"),
    ),
    (
        lambda first: first.startswith(_COMPRESSED),
        Refusal("a compressed file", "unpack it first"),
    ),
    (
        lambda first: first.startswith(b"GGUF"),
        Refusal("a model, and no state", "name the state, and the model beside it"),
    ),
)


def refused_file(first: bytes) -> Refusal | None:
    """Why a file that begins so is not opened; None if nothing speaks against it."""
    return next((refusal for fits, refusal in _FILES if fits(first)), None)


def refused_folder(first_of_index: bytes | None) -> Refusal:
    """Why a folder is not read. `first_of_index`: the first bytes of its `cache.db`, None if it has none."""
    if first_of_index is not None and first_of_index.startswith(_SQLITE):
        return Refusal("a LlamaDiskCache, a folder of pickles, which are never loaded here", _LLAMA)
    return Refusal("a folder, and no file", "name a file in it")
