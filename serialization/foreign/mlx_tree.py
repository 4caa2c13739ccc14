"""The file of an mlx-lm prompt cache as a tree: for every cache its class, its tensors and its numbers.

Three layouts were released. In two of them nested lists are flattened into names with dots; in all, names of
tensors begin with the number of a cache, and what is said of them is text:

| layout         | written by   | metadata                                                            |
|----------------|--------------|---------------------------------------------------------------------|
| mlx-lm scalars | from 0.32 on | `0.*` the user's; `1.N` class of cache N; `2.M.0` and `2.M.1` name and |
|                |              | kind of a tensor that stands for a number, a text, or nothing       |
| mlx-lm meta    | up to 0.31   | `0.N` and `0.N.M` numbers of cache N; `1.*` the user's; `2.N` class  |
| mlx-lm pairs   | up to 0.19.0 | the user's; tensors are `N_keys` and `N_values`, cut to what is used |

A class is a name to be looked up in a table of ours, and never anything else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import Corrupt, LimitExceeded, UnknownFeature
from serialization.foreign.held import FLOATS, Floats
from serialization.foreign.tensor_file import TensorFile, quoted

SCALARS = "mlx-lm scalars"
META = "mlx-lm meta"
PAIRS = "mlx-lm pairs"

MAX_CACHES = 2**12

#: What was said of every cache of pairs.
_PAIRS_SAID = frozenset({"max_kv_size", "model", "tokenizer_config"})
_PAIR = re.compile(r"(0|[1-9]\d{0,4})_(keys|values)")
_MAX_NAME = 64
_NUMBER = re.compile(r"\d{1,15}")

#: What the state of a class is, in the order of its tensors, where numbers are among them.
_STATE: Mapping[str, tuple[str, ...]] = {
    "KVCache": ("keys", "values", "offset"),
    "ConcatenateKVCache": ("keys", "values"),
    "RotatingKVCache": ("keys", "values", "offset", "keep", "max_size", "idx"),
    "QuantizedKVCache": ("keys", "values", "offset", "group_size", "bits"),
    "ChunkedKVCache": ("keys", "values", "offset", "chunk_size", "start_position"),
    "ArraysCache": ("arrays", "left_padding", "lengths"),
}

#: Of one layer; a list in a list is not known.
_LIST = "CacheList"

#: The numbers of a class that are said apart, by how many there are: a step was dropped from them in time.
_META: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "KVCache": ((),),
    "ConcatenateKVCache": ((),),
    "RotatingKVCache": (
        ("keep", "max_size", "offset", "idx"),
        ("keep", "max_size", "step", "offset", "idx"),
    ),
    "QuantizedKVCache": (("offset", "group_size", "bits"), ("step", "offset", "group_size", "bits")),
    "ChunkedKVCache": (("chunk_size", "start_position"),),
    "ArraysCache": ((),),
    "MambaCache": ((),),
}

#: Classes of which no one sequence can be taken, and what to do.
_REFUSED: Mapping[str, str] = {
    "BatchKVCache": "it holds a batch of sequences: save what its extract(i) gives",
    "BatchRotatingKVCache": "it holds a batch of sequences: save what its extract(i) gives",
}


@dataclass(frozen=True, slots=True)
class Node:
    """One cache: tensors by their place below it, with the names of `_STATE` in the first place, and numbers
    by their names. `nodes` are the caches of a list."""

    name: str
    tensors: Mapping[str, str]
    numbers: Mapping[str, int]
    nodes: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Tree:
    """All caches of a file, what the user said of them, and the file."""

    layout: str
    nodes: tuple[Node, ...]
    said: Mapping[str, str]
    file: TensorFile

    def floats(self, name: str) -> Floats:
        """The tensor of that name. Raises UnknownFeature for a dtype that rows are not read in."""
        dtype = self.file.entries[name].dtype
        if dtype not in FLOATS:
            raise UnknownFeature(f"tensor {quoted(name)} is of {dtype}: rows are read in {', '.join(FLOATS)}")
        return Floats(FLOATS[dtype], self.file.array(name))


def layout_of(metadata: Mapping[str, str]) -> str | None:
    """Which of the layouts this metadata is of, None if it is of neither."""
    if metadata.get("2.0") == "" and _known(metadata.get("1.0")):
        return SCALARS
    if _known(metadata.get("2.0")):
        return META
    if metadata.keys() >= _PAIRS_SAID:
        return PAIRS
    return None


def read_tree(file: TensorFile) -> Tree:
    """Raises Corrupt where names and metadata do not fit together, UnknownFeature for a class of no table,
    LimitExceeded beyond the limits."""
    layout = layout_of(file.metadata)
    if layout is None:
        raise UnknownFeature("the file's metadata are not those of an mlx-lm prompt cache")
    if layout == PAIRS:
        return Tree(layout, _pairs(file), file.metadata, file)
    said = _children(file.metadata)
    names = _texts(_children(said["1" if layout == SCALARS else "2"]))
    if len(names) > MAX_CACHES:
        raise LimitExceeded(f"a file of {len(names):,} caches has more than the {MAX_CACHES:,} allowed")
    tensors = _children({name: name for name in file.entries})
    for number in tensors:
        if _NUMBER.fullmatch(number) is None or int(number) >= len(names) or number != str(int(number)):
            raise Corrupt(f"a tensor is of cache {quoted(number)}, and there are {len(names)}")
    below = [tensors.get(str(number), {}) for number in range(len(names))]
    if layout == SCALARS:
        scalars = _Scalars(file, _children(said["2"]))
        nodes = [scalars.node(name, each) for name, each in zip(names, below, strict=True)]
        return Tree(layout, tuple(nodes), said.get("0", {}), file)
    metas = _children(said.get("0", {}))
    nodes = [
        _meta_node(name, each, metas.get(str(number), {}))
        for number, (name, each) in enumerate(zip(names, below, strict=True))
    ]
    return Tree(layout, tuple(nodes), said.get("1", {}), file)


def _pairs(file: TensorFile) -> tuple[Node, ...]:
    """Caches of keys and values alone, numbered from 0 on."""
    if file.metadata["max_kv_size"] != "None":
        raise UnknownFeature("a ring of an old mlx-lm does not say which of its rows is the last")
    below: dict[int, dict[str, str]] = {}
    for name in file.entries:
        found = _PAIR.fullmatch(name)
        if found is None:
            raise Corrupt(f"tensor {quoted(name)} is of no cache")
        below.setdefault(int(found[1]), {})[found[2]] = name
    if below.keys() != set(range(len(below))):
        raise Corrupt("caches are missing between others")
    return tuple(Node("KVCache", below[number], {}) for number in range(len(below)))


def _known(name: str | None) -> bool:
    return name == _LIST or name in _STATE or name in _META or name in _REFUSED


def _checked(name: str, table: Mapping[str, object]) -> str:
    if name in _REFUSED:
        raise UnknownFeature(f"a {name} is not read: {_REFUSED[name]}")
    if name not in table:
        raise UnknownFeature(f"a cache of class {quoted(name)} is not known here")
    return name


def _children(names: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """What is below each first word of the names, by the rest of them ("" where there is none)."""
    found: dict[str, dict[str, str]] = {}
    for name, value in names.items():
        first, _, rest = name.partition(".")
        found.setdefault(first, {})[rest] = value
    return found


def _texts(children: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The texts of a list, which has nothing else."""
    texts = [children[str(at)][""] for at in range(len(children)) if children.get(str(at), {}).keys() == {""}]
    if len(texts) != len(children):
        raise Corrupt("a list in the metadata has gaps, or more than texts")
    return texts


def _meta_node(name: str, tensors: Mapping[str, str], said: Mapping[str, str]) -> Node:
    """A cache whose numbers are said apart. A list says the classes of its caches, and then their numbers."""
    children = _children({place: text for place, text in said.items() if place})
    if name == _LIST:
        return _meta_list(tensors, children)
    _checked(name, _META)
    texts = _texts(children)
    fields = {len(fields): fields for fields in _META[name]}.get(len(texts))
    if fields is None:
        raise UnknownFeature(f"a {name} that says {len(texts)} numbers is of no mlx-lm known here")
    numbers = {field: _number(text) for field, text in zip(fields, texts, strict=True)}
    if name in ("ArraysCache", "MambaCache"):
        return Node("ArraysCache", {f"arrays.{place}": each for place, each in tensors.items()}, numbers)
    return Node(name, {_renamed(place, ("keys", "values")): each for place, each in tensors.items()}, numbers)


def _meta_list(tensors: Mapping[str, str], said: Mapping[str, Mapping[str, str]]) -> Node:
    classes = _texts(_children(said.get("0", {})))
    if not classes:
        raise UnknownFeature(
            "a CacheList that does not say of which caches it is: make it anew with mlx-lm 0.31 or newer"
        )
    metas, below = _children(said.get("1", {})), _children(tensors)
    if not below.keys() <= {str(at) for at in range(len(classes))}:
        raise Corrupt("a CacheList has tensors of caches that it does not name")
    nodes = [
        _meta_node(_checked(each, _META), below.get(str(at), {}), metas.get(str(at), {}))
        for at, each in enumerate(classes)
    ]
    return Node(_LIST, {}, {}, tuple(nodes))


def _number(text: str) -> int:
    if _NUMBER.fullmatch(text) is None:
        raise Corrupt(f"{quoted(text)} is said where a number belongs")
    return int(text)


def _renamed(place: str, fields: tuple[str, ...]) -> str:
    """`1.2` as `values.2`, if `values` is the second of the fields."""
    number, dot, rest = place.partition(".")
    if _NUMBER.fullmatch(number) is None or int(number) >= len(fields):
        raise Corrupt(f"a cache has a tensor at {quoted(place)}, where none of its class has any")
    return fields[int(number)] + dot + rest


class _Scalars:
    """Of a file in which tensors stand for numbers, texts and nothing: which do."""

    def __init__(self, file: TensorFile, said: Mapping[str, Mapping[str, str]]) -> None:
        """`said` are pairs of a tensor's name and what it stands for; the first of them is empty."""
        self._file = file
        self._kinds: dict[str, str] = {}
        for number, pair in said.items():
            if number == "0":
                continue
            name, kind = pair.get("0", ""), pair.get("1")
            if kind not in ("scalar", "string", "none") or name not in file.entries:
                raise Corrupt(f"tensor {quoted(name)} stands for something unknown, or is not there")
            self._kinds[name] = kind

    def node(self, name: str, tensors: Mapping[str, str]) -> Node:
        """The cache of these tensors."""
        if name == _LIST:
            return self._list(_children(tensors))
        _checked(name, _STATE)
        left: dict[str, str] = {}
        numbers: dict[str, int] = {}
        for place, tensor in tensors.items():
            renamed = _renamed(place, _STATE[name])
            kind = self._kinds.get(tensor)
            if kind == "scalar":
                numbers[renamed] = self._integer(tensor)
            elif kind is None:
                left[renamed] = tensor
            elif kind == "string":
                raise Corrupt(f"a {name} has a text among its tensors")
        return Node(name, left, numbers)

    def _list(self, pairs: Mapping[str, Mapping[str, str]]) -> Node:
        """A list of pairs: a cache, and the name of its class."""
        nodes = []
        for at in range(len(pairs)):
            pair = _children(pairs.get(str(at), {}))
            if pair.keys() - {"0", "1"} or pair.get("1", {}).keys() != {""}:
                raise Corrupt("a CacheList has a cache without a class, or more than caches")
            name = _checked(self._text(pair["1"][""]), _STATE)
            nodes.append(self.node(name, pair.get("0", {})))
        return Node(_LIST, {}, {}, tuple(nodes))

    def _integer(self, tensor: str) -> int:
        entry = self._file.entries[tensor]
        if entry.shape != () or entry.dtype not in ("I32", "I64", "U32", "U64"):
            raise Corrupt(f"tensor {quoted(tensor)} stands for a number, and is none")
        value = int(self._file.array(tensor))
        if value < 0:
            raise Corrupt(f"tensor {quoted(tensor)} stands for a number below 0")
        return value

    def _text(self, tensor: str) -> str:
        entry = self._file.entries[tensor]
        good = self._kinds.get(tensor) == "string" and entry.dtype in ("I32", "I64", "U32")
        if not good or len(entry.shape) != 1 or entry.shape[0] > _MAX_NAME:
            raise Corrupt(f"tensor {quoted(tensor)} stands for the name of a class, and is none")
        codes = self._file.array(tensor).tolist()
        if not all(32 <= code < 127 for code in codes):
            raise Corrupt(f"tensor {quoted(tensor)} stands for the name of a class, and is none")
        return "".join(map(chr, codes))
