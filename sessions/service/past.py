"""Which stored session a conversation that comes from outside goes on from, found by what was said in it.

Behind each of its replies a conversation has a key, a chain over all that was said until there; a hint leads
from it to the session. As with the prefix index a hit is no more than a hint: what of it can be used is said
by the text itself, laid over the session's ids. Unlike there the ids are those that were really sampled, and
the past may be as short as it likes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgpack
from blake3 import blake3

from engine.errors import SessionNotFound, StateError, StoreError
from serialization.manifest import Message
from sessions.catalog import Catalog, Entry
from sessions.names import PREFIXES
from sessions.service.place import Place

_CONTEXT = "tenuto index of what was said, version 1"
#: As many replies are looked for, from the last one on.
_MOST = 256


class Past:
    """Hints of one store, for calls of one tenant with one salt. Raises nothing that the store does: a turn
    can be said without it."""

    def __init__(self, place: Place) -> None:
        engine = place.engine
        self._store = place.manager.store
        self._salt = place.salt
        template = engine.template.digest if engine.template else None
        meaning = sorted(engine.fingerprint.meaning.items())
        self._root = blake3(
            msgpack.packb([meaning, template, place.tenant, place.salt or ""]), derive_key_context=_CONTEXT
        ).digest()

    def find(self, messages: Sequence[Message]) -> Entry | None:
        """The session that knows the most of them. As many keys are looked up, in one step, whatever there is
        to be found."""
        keys = self._keys(messages)[-_MOST:]
        if not keys:
            return None
        try:
            for value in reversed(self._store.read_many(keys)):
                if value is not None and (entry := self._entry(value)) is not None:
                    return entry
        except StoreError:
            return None
        return None

    def add(self, messages: Sequence[Message], session: str) -> None:
        """`session` has said them; the last is a reply."""
        self._store.hint({self._keys(messages)[-1]: session.encode()})

    def _entry(self, value: bytes) -> Entry | None:
        try:
            entry = Catalog(self._store).session(value.decode())
        except (SessionNotFound, StateError):
            return None
        return entry if entry.manifest.salt == self._salt else None  # its salt may be another by now

    def _keys(self, messages: Sequence[Message]) -> list[str]:
        """The keys behind each reply, in order."""
        keys, chain = [], self._root
        for message in messages:
            chain = blake3(msgpack.packb([message.role, message.text.strip()]), key=chain).digest()
            if message.role == "assistant":
                keys.append(PREFIXES + chain.hex())
        return keys
