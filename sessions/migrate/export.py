"""A session as a file of another system."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

from engine.errors import Corrupt, FingerprintMismatch, Unsupported, UsageError
from engine.fingerprint import is_of_rows
from engine.state import PartKind, Pending, parts_of
from engine.verbs import Verbs
from serialization.blobs import Store
from serialization.foreign.containers import Form, write_container
from serialization.foreign.conversion import Conversion
from serialization.foreign.cursor import Bytes
from serialization.foreign.files import Container
from serialization.foreign.foreign_state import ForeignState, Rotation, Tensor, ValueOrder
from serialization.foreign.geometry import Geometry
from serialization.foreign.grammar import BY_NAME
from serialization.foreign.outward import Wanted, to_foreign
from serialization.foreign.target import place_of
from serialization.foreign.torch_dump import write_torch_dump
from serialization.manifest import Manifest
from serialization.snapshot import read_state
from serialization.values import is_quantized
from sessions.migrate.geometry import family_of, geometry_of, own_geometry_of, source_of
from sessions.reduce import has_rows

#: Which llama.cpp reads what is written here.
VERSIONS = "llama.cpp from 26 August 2026 up to 0.5.x"


Write = Callable[[ForeignState, Geometry], Iterator[Bytes]]


@dataclass(frozen=True, slots=True)
class Format:
    """`read_by` says for people what reads it; `order` is that of the values of its rows."""

    write: Write
    read_by: str
    order: ValueOrder = ValueOrder.GGML


def _llama(container: Container, layout: str, packed: bool = False) -> Write:
    form = Form(container, BY_NAME[layout], packed=packed)
    return lambda state, geometry: write_container(state, geometry, form)


#: what can be written, by the word for it
FORMATS: Mapping[str, Format] = {
    "llama": Format(_llama(Container.SEQUENCE_FILE, "3"), f"llama_state_seq_load_file of {VERSIONS}"),
    "llama-slot": Format(
        _llama(Container.SEQUENCE_FILE, "3", packed=True), f"llama-server's slots, of {VERSIONS}"
    ),
    "llama-session": Format(_llama(Container.SESSION_FILE, "10"), f"llama_state_load_file of {VERSIONS}"),
    "llama-blob": Format(_llama(Container.SEQUENCE_STATE, "3"), f"llama_state_seq_set_data of {VERSIONS}"),
    "transformers": Format(
        lambda state, geometry: write_torch_dump(state, geometry, geometry.architecture),
        "the function load_cache of docs/foreign.md, with any version of transformers that has DynamicCache",
        ValueOrder.OURS,
    ),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """How the reader's context is set up. `type_k` and `type_v` are its cache's dtypes (None: f16 for plain
    rows, the session's own for quantized ones). `flash_attention`: without it values lie a channel at a
    time. `rotation`: whether it rotates quantized rows, as llama.cpp does unless it is told not to."""

    type_k: str | None = None
    type_v: str | None = None
    flash_attention: bool = True
    rotation: Rotation = Rotation.ROTATED


@dataclass(frozen=True, slots=True)
class Exported:
    """`settings` are the reader's that the file needs. `pending` is the token that follows, which the reader
    has to decode first; None where it has to choose one, and decodes the last token of the file again for
    that."""

    nbytes: int
    read_by: str
    settings: str
    pending: int | None
    conversion: Conversion


def export_foreign(
    engine: Verbs, store: Store, manifest: Manifest, out: BinaryIO, format: str, shape: Shape | None = None
) -> Exported:
    """Write the session of `manifest`, whose blobs are in `store`, for who has the model of `engine` in
    another system. The engine is asked for the model's shape alone.

    Raises UsageError for a format that there is not, FingerprintMismatch where it is another model's
    session, Unsupported for what the other system cannot hold, NoCheckpoint, and what reading raises; some
    bytes may be written then.
    """
    wanted = wanted_rows(engine, manifest, format, shape or Shape())
    kind = FORMATS[format]
    geometry = geometry_of(engine) if kind.order is ValueOrder.GGML else own_geometry_of(engine)
    state = read_state(store, manifest)
    try:
        foreign, conversion = to_foreign(
            "tenuto", source_of(engine, manifest), geometry, state.rows, state.tokens, wanted
        )
    except Corrupt as error:
        raise Unsupported(f"the other system has rows that the session lacks: {error}") from error
    if not conversion.loss < 1:
        raise Unsupported(f"the session has values that {wanted.type_k} and {wanted.type_v} cannot say")
    nbytes = 0
    for piece in kind.write(foreign, geometry):
        out.write(piece)
        nbytes += len(piece)
    pending = manifest.edge.token if isinstance(manifest.edge, Pending) else None
    return Exported(nbytes, kind.read_by, _settings(wanted), pending, conversion)


def wanted_rows(engine: Verbs, manifest: Manifest, format: str, shape: Shape) -> Wanted:
    """How the session's rows would be written. Raises as `export_foreign`, as far as it can be told without
    the rows."""
    if format not in FORMATS:
        raise UsageError(f"format {format!r}: there are {', '.join(FORMATS)}")
    _refuse_other_model(engine, manifest)
    order = FORMATS[format].order
    if order is ValueOrder.GGML and not (family := family_of(engine)).written:
        raise Unsupported(f"{family.name}: no llama.cpp was ever seen to go on from such a state of ours")
    if not has_rows(manifest):
        raise Unsupported(f"session {manifest.session} has no stored rows (text and ids alone)")
    if parts_of(manifest.layout, PartKind.POINT) or parts_of(manifest.layout, PartKind.BLOCK):
        raise Unsupported("recurrent state and block rows are not written for other systems")
    types = {place_of(spec).tensor: spec.dtype for spec in manifest.layout}
    type_k = shape.type_k or _type(types[Tensor.KEYS], order)
    type_v = shape.type_v or _type(types.get(Tensor.VALUES, type_k), order)
    transposed = order is ValueOrder.GGML and not shape.flash_attention
    if transposed and is_quantized(type_v):
        raise Unsupported(f"llama.cpp has {type_v} values with flash attention alone")
    return Wanted(type_k, type_v, order, shape.rotation, transposed)


def _type(dtype: str, order: ValueOrder) -> str:
    """What the other system would choose: f16 for plain numbers in llama.cpp, and none that are quantized in
    transformers."""
    if order is ValueOrder.GGML:
        return dtype if is_quantized(dtype) else "f16"
    return "bf16" if is_quantized(dtype) else dtype


def _settings(wanted: Wanted) -> str:
    if wanted.order is ValueOrder.OURS:
        return f"rows of {wanted.type_k} and {wanted.type_v}"
    return f"-ctk {wanted.type_k} -ctv {wanted.type_v} -fa {'off' if wanted.transposed else 'on'}"


def _refuse_other_model(engine: Verbs, manifest: Manifest) -> None:
    """Rows of another dtype are the model's all the same."""
    for field, theirs, mine in manifest.fingerprint.differing(engine.fingerprint):
        if not is_of_rows(field):
            raise FingerprintMismatch(
                f"session {manifest.session} was made with {field} = {theirs}, this model has {mine}",
                field=field,
            )
