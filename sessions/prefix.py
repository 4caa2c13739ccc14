"""The prefix index: which stored session has already read these tokens.

A border, every 256 tokens, is keyed by a chain of (fingerprint, tenant, salt, all tokens before it), so that
equal keys mean equal pasts under equal models. The index only says where to look: a hit is believed after
salt and token ids of the manifest compared equal, and only rows that this build computed are shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgpack
import numpy as np
from blake3 import blake3

from engine.errors import SessionNotFound, StateError
from engine.state import Fingerprint, Provenance
from serialization.blobs import Store
from serialization.manifest import Manifest
from serialization.resume import common_prefix, last_resumable
from sessions.catalog import Catalog
from sessions.names import PREFIXES

#: Every so many tokens there is a key, whatever the chunks of a session are.
BORDER = 256
_CONTEXT = "tenuto prefix index, version 1"


@dataclass(frozen=True, slots=True)
class Hit:
    """The first `length` rows of a stored session belong to these tokens."""

    session: str
    manifest: Manifest
    length: int


class PrefixIndex:
    """Keys of borders in refs. It holds hints alone: losing it costs reading, never truth.

    A session is entered under the salt that its manifest has; who looks finds what has the `salt` that it
    asks with (see `salts`). Keys are made of the tokens and of what is asked, and all are looked up in one
    step: a miss takes as long whatever others have stored.
    """

    def __init__(self, store: Store, tenant: str, salt: str | None = None) -> None:
        self._store = store
        self._tenant = tenant
        self._salt = salt

    def add(self, manifest: Manifest, known: int) -> None:
        """Enter the borders of computed rows of `manifest` beyond the first `known` tokens."""
        stop = computed_prefix(manifest)
        names = self._names(manifest.fingerprint, manifest.salt, manifest.tokens[:stop])
        value = manifest.session.encode()
        self._store.hint({name: value for name in names[known // BORDER :]})

    def find(self, fingerprint: Fingerprint, tokens: Sequence[int]) -> Hit | None:
        """The longest believed prefix of `tokens`, up to the first border at least, or None."""
        names = self._names(fingerprint, self._salt, tokens)
        values = self._store.read_many(names) if names else ()
        best: Hit | None = None
        seen: set[bytes] = set()
        for value in reversed(values):
            if value is None or value in seen:
                continue
            seen.add(value)
            hit = self._believe(value.decode(), fingerprint, tokens)
            if hit and (best is None or hit.length > best.length):
                best = hit
            if len(seen) == 4:  # the longest keys name the best candidates
                break
        return best

    def _believe(self, session: str, fingerprint: Fingerprint, tokens: Sequence[int]) -> Hit | None:
        try:
            manifest = Catalog(self._store).session(session).manifest
        except (SessionNotFound, StateError):
            return None  # only a hint; `check` is where damage is told
        if manifest.salt != self._salt:
            return None  # it is another one by now
        if manifest.fingerprint != fingerprint:
            return None  # also where only the making differs: a piece of a state has no canary
        length = min(common_prefix(manifest.tokens, tokens), computed_prefix(manifest))
        length = last_resumable(manifest, length)
        return Hit(session, manifest, length) if length >= BORDER else None

    def _names(self, fingerprint: Fingerprint, salt: str | None, tokens: Sequence[int]) -> list[str]:
        ids = np.asarray(tokens, dtype="<i4")
        whose = [self._tenant] if salt is None else [self._tenant, salt]
        key = blake3(
            msgpack.packb([sorted(fingerprint.meaning.items()), *whose]), derive_key_context=_CONTEXT
        ).digest()
        names = []
        for start in range(0, len(ids) - BORDER + 1, BORDER):
            key = blake3(ids[start : start + BORDER].tobytes(), key=key).digest()
            names.append(PREFIXES + key.hex())
        return names


def computed_prefix(manifest: Manifest) -> int:
    """How many leading tokens have rows that were computed, not shifted, edited or imported."""
    stop = 0
    for span in manifest.spans:
        if span.provenance is not Provenance.COMPUTED or span.start != stop:
            break
        stop = span.stop
    return stop
