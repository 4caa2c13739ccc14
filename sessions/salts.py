"""Salts: which sessions of a tenant share what was read of their equal pasts.

A salt comes with a call, and is a secret of those who give it: what is stored of it is a keyed digest. A
session has the salt of its first turn. Where a turn is asked with another one, or with none, the session is
its own from then on: what is said in it is for neither of those who know the one salt and those who know the
other to find, so that nobody does.
"""

from __future__ import annotations

from blake3 import blake3

from serialization.manifest import SALT_PREFIX, Manifest

_GIVEN = "tenuto cache salt, version 1"
_OWN = "tenuto session that shares with no other, version 1"


def digest_of(tenant: str, salt: str) -> str | None:
    """What stands for the `salt` of a call in this tenant's manifests; None for the empty one, which is
    everybody's who gives none."""
    if not salt:
        return None
    key = blake3(tenant.encode(), derive_key_context=_GIVEN).digest()
    return SALT_PREFIX + blake3(salt.encode("utf-8", "surrogatepass"), key=key).hexdigest()


def own(session: str) -> str:
    """What nobody can give: the salt of a session that shares with no other."""
    return SALT_PREFIX + blake3(session.encode(), derive_key_context=_OWN).hexdigest()


def after_turn(stored: Manifest, asked: str | None) -> str | None:
    """The salt of a session as `stored`, once a turn was asked with `asked`."""
    begins = not stored.tokens and stored.salt is None
    return asked if begins or stored.salt == asked else own(stored.session)


def of_fork(past: Manifest, session: str) -> str | None:
    """The salt that `session` begins with, which has the past of another one."""
    return own(session) if past.salt == own(past.session) else past.salt
