"""A session as a file of another system."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

from engine.errors import Corrupt, FingerprintMismatch, Unsupported, UsageError
from engine.fingerprint import is_of_rows
from engine.state import PartKind, Pending, parts_of
from engine.verbs import Verbs
from serialization.blobs import Store
from serialization.foreign.containers import Form, write_container
from serialization.foreign.conversion import Conversion
from serialization.foreign.files import Container
from serialization.foreign.foreign_state import Rotation
from serialization.foreign.grammar import BY_NAME
from serialization.foreign.outward import Wanted, to_foreign
from serialization.manifest import Manifest
from serialization.snapshot import read_state
from serialization.values import is_quantized
from sessions.migrate.geometry import family_of, geometry_of, source_of
from sessions.reduce import has_rows

#: Which llama.cpp reads what is written here.
VERSIONS = "llama.cpp from 26 August 2026 up to 0.5.x"


@dataclass(frozen=True, slots=True)
class Format:
    """`form` is how the file holds the state; `read_by` says for people what reads it."""

    form: Form
    read_by: str


#: what can be written, by the word for it
FORMATS: Mapping[str, Format] = {
    "llama": Format(Form(Container.SEQUENCE_FILE, BY_NAME["3"]), f"llama_state_seq_load_file of {VERSIONS}"),
    "llama-slot": Format(
        Form(Container.SEQUENCE_FILE, BY_NAME["3"], packed=True), f"llama-server's slots, of {VERSIONS}"
    ),
    "llama-session": Format(
        Form(Container.SESSION_FILE, BY_NAME["10"]), f"llama_state_load_file of {VERSIONS}"
    ),
    "llama-blob": Format(
        Form(Container.SEQUENCE_STATE, BY_NAME["3"]), f"llama_state_seq_set_data of {VERSIONS}"
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
    """Write the session of `manifest`, whose blobs are in `store`, for the llama.cpp that has the model of
    `engine`, which is asked for the model's shape alone.

    Raises UsageError for a format that there is not, FingerprintMismatch where it is another model's
    session, Unsupported for what llama.cpp cannot hold, NoCheckpoint, and what reading raises; some bytes
    may be written then.
    """
    if format not in FORMATS:
        raise UsageError(f"format {format!r}: there are {', '.join(FORMATS)}")
    shape, kind = shape or Shape(), FORMATS[format]
    wanted = check_exportable(engine, manifest, shape)
    geometry = geometry_of(engine)
    state = read_state(store, manifest)
    try:
        foreign, conversion = to_foreign(
            "tenuto", source_of(engine, manifest), geometry, state.rows, state.tokens, wanted
        )
    except Corrupt as error:
        raise Unsupported(
            f"{geometry.architecture} in llama.cpp has rows that the session lacks: {error}"
        ) from error
    if not conversion.loss < 1:
        raise Unsupported(f"the session has values that {wanted.type_k} and {wanted.type_v} cannot say")
    nbytes = 0
    for piece in write_container(foreign, geometry, kind.form):
        out.write(piece)
        nbytes += len(piece)
    pending = manifest.edge.token if isinstance(manifest.edge, Pending) else None
    return Exported(nbytes, kind.read_by, _settings(wanted), pending, conversion)


def check_exportable(engine: Verbs, manifest: Manifest, shape: Shape) -> Wanted:
    """How the session's rows are to be written. Raises FingerprintMismatch, Unsupported."""
    _refuse_other_model(engine, manifest)
    family = family_of(engine)
    if not family.written:
        raise Unsupported(f"{family.name}: no llama.cpp was ever seen to go on from such a state of ours")
    if not has_rows(manifest):
        raise Unsupported(f"session {manifest.session} has no stored rows (text and ids alone)")
    if parts_of(manifest.layout, PartKind.POINT) or parts_of(manifest.layout, PartKind.BLOCK):
        raise Unsupported("recurrent state and block rows are not written for llama.cpp")
    types = {spec.name[: len("kv.k")]: spec.dtype for spec in manifest.layout}
    wanted = Wanted(
        shape.type_k or _type(types["kv.k"]),
        shape.type_v or _type(types["kv.v"]),
        rotation=shape.rotation,
        transposed=not shape.flash_attention,
    )
    if wanted.transposed and is_quantized(wanted.type_v):
        raise Unsupported(f"llama.cpp has {wanted.type_v} values with flash attention alone")
    return wanted


def _type(dtype: str) -> str:
    """llama.cpp's own choice for rows that are plain numbers."""
    return dtype if is_quantized(dtype) else "f16"


def _settings(wanted: Wanted) -> str:
    flash = "off" if wanted.transposed else "on"
    return f"-ctk {wanted.type_k} -ctv {wanted.type_v} -fa {flash}"


def _refuse_other_model(engine: Verbs, manifest: Manifest) -> None:
    """Rows of another dtype are the model's all the same."""
    for field, theirs, mine in manifest.fingerprint.differing(engine.fingerprint):
        if not is_of_rows(field):
            raise FingerprintMismatch(
                f"session {manifest.session} was made with {field} = {theirs}, this model has {mine}",
                field=field,
            )
