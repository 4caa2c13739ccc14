"""Largest sizes of the format (docs/format.md, section 7): checked before anything is allocated."""

from __future__ import annotations

from engine.errors import LimitExceeded

MAX_BLOB_NBYTES = 2**28
MAX_RAW_NBYTES = 2**30
MAX_HEADER_NBYTES = 2**16
MAX_MANIFEST_NBYTES = 2**27
#: a packed manifest may unpack to so many times its bytes, and to MIN_PACKED_NBYTES in any case
MAX_PACKED = 16
MIN_PACKED_NBYTES = 2**16
MAX_TOKENS = 2**24
MAX_TOKEN_ID = 2**32 - 1
MAX_CHUNKS = 2**16
MAX_ENTRIES = 2**16  # checkpoints, messages, spans, canary ids, logit biases
MAX_TEXT_NBYTES = 2**24
MAX_NOTE_NBYTES = 2**20
MAX_REPLIES = 16
MAX_LOSSES = 64
MAX_PARTS = 2**14
MAX_AXES = 8
MAX_ROW_NBYTES = 2**28
MAX_WINDOW = 2**24
MAX_FINGERPRINT = 256
MAX_KEY = 64
MAX_VALUE_NBYTES = 4096
MAX_LABEL_NBYTES = 1024
MAX_FEATURES = 64
MAX_CODECS = 8
MAX_STREAMS = 16
MAX_FIELD_NBYTES = 4096
MAX_DEPTH = 8
MAX_INTEGER = 2**64 - 1


def refuse_above(what: str, value: int, limit: int) -> None:
    """Raises LimitExceeded if `value` is larger than `limit`."""
    if value > limit:
        raise LimitExceeded(f"{what}: {value:,} is more than the {limit:,} allowed", value=value, limit=limit)
