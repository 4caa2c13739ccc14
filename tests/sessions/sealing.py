"""Sealed stores for tests of sessions, and a look at every byte that a store left anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgpack

from sessions.conversation import Conversation, Reply
from sessions.keyring.keyset import Scope
from sessions.keyring.master import MasterKeys
from sessions.keyring.ring import Keyring
from sessions.manager import SessionManager
from sessions.policy import Policy
from tests.serialization.spelling import map_of

MASTER = bytes(range(100, 132))
SHORT = Reply(max_tokens=12)
#: Rows as they are, so that they can be looked for; short leases for short tests.
POLICY = Policy(lease=5, grace=10, codec="raw")

NAME, TITLE_START, PIN = "aardvark-plans", "zebra crossing", "kept-for-later"


def ring(folder: Path, scope: Scope = Scope.TENANT) -> Keyring:
    return Keyring(folder, MasterKeys([MASTER]), scope)


def talk(manager: SessionManager, name: str | None = NAME) -> str:
    """A conversation of three turns with a name and a pin, and a fork of it. Returns its id."""
    chat = Conversation.new(manager, name, system="You are a quokka in a library.")
    for text in (f"{TITLE_START} is where we begin " * 20, "and what then?", "a marmalade sandwich, please"):
        for _ in chat.say(text, SHORT):
            pass
        assert chat.save_error is None
    if name is not None:
        chat.pin(PIN)
    chat.fork()
    session = chat.session.id
    chat.close()
    return session


def told(manager: SessionManager, session: str) -> Mapping[str, bytes]:
    """What nobody may find: bytes of everything that the conversation is made of."""
    manifest = manager.manifest(session)
    rows = [bytes(manager.store.get(ref.blob)) for ref in manifest.blobs()]
    secrets = {
        f"rows {number} at {at}": data[at : at + 24]
        for number, data in enumerate(rows)
        for at in _places(data)
    }
    for width in (2, 4):
        for at in (0, 40, len(manifest.tokens) - 8):
            ids = manifest.tokens[at : at + 8]
            secrets[f"tokens of {width} bytes at {at}"] = b"".join(i.to_bytes(width, "little") for i in ids)
            secrets[f"tokens of {width} bytes, big first, at {at}"] = b"".join(i.to_bytes(width) for i in ids)
            secrets[f"tokens in msgpack at {at}"] = b"".join(msgpack.packb(i) for i in ids)
            secrets[f"tokens as varints at {at}"] = b"".join(map(_varint, ids))
            secrets[f"tokens as text at {at}"] = ", ".join(map(str, ids)).encode()
    for number, message in enumerate(manifest.messages):
        text = message.text.encode()
        if len(text) >= 8:
            secrets[f"message {number}"] = text[:16]
            secrets[f"the end of message {number}"] = text[-8:]
    return {
        **secrets,
        "title": manifest.title.encode()[:12],
        "name": NAME.encode(),
        "pin": PIN.encode(),
        "session": session.encode(),
        "model": manifest.model.encode(),
        "frame": b"tenutoB",
        "manifest": b"tenutoM",
    }


def _varint(number: int) -> bytes:
    """Seven bits a byte, the last ones first."""
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + _varint(rest) if rest else bytes([low])


def _places(data: bytes) -> tuple[int, ...]:
    """Some places in a blob where its bytes are not all alike."""
    starts = (8, 200, len(data) // 2, len(data) - 24)
    return tuple(at for at in starts if len(set(data[at : at + 24])) > 12)


def key_bytes(keyring: Keyring, folder: Path) -> Mapping[str, bytes]:
    """Every secret, as bytes and as text."""
    found = {"master": MASTER}
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "api-keys":
            found[f"what {path.name} says"] = path.read_bytes()[-16:]
    keys = keyring.tenant("default")
    file = keys._known(keys._file)
    opened = file.unwrap(keys._tenant_wrapper(file))
    found |= {"naming": opened.naming, **{f"data {key.number}": key.secret for key in opened.data}}
    return {**found, **{f"{name} in hex": secret.hex().encode() for name, secret in found.items()}}


def files(root: Path) -> Iterator[bytes]:
    """Every file's path and content."""
    for path in sorted(root.rglob("*")):
        yield str(path.relative_to(root)).encode()
        if path.is_file():
            yield from _legible(path.read_bytes())


def _legible(data: bytes) -> Iterator[bytes]:
    """What anybody can read of it: a manifest that is packed, but in the clear, also unpacked."""
    yield data
    if data.startswith(b"tenutoM"):
        yield map_of(data)


def redis_values(client: Any) -> Iterator[bytes]:
    """Every key and value of a Redis server."""
    for key in client.scan_iter("*"):
        yield key
        match client.type(key):
            case b"string":
                yield from _legible(client.get(key))
            case b"hash":
                for name, value in client.hgetall(key).items():
                    yield name
                    yield value
            case b"zset":
                yield from client.zrange(key, 0, -1)
            case other:
                raise AssertionError(f"a {other!r} that nobody looked into")


def found_in(pieces: Iterator[bytes], secrets: Mapping[str, bytes]) -> set[str]:
    """The names of the secrets that are in any of the pieces."""
    return {name for piece in pieces for name, secret in secrets.items() if secret in piece}
