"""Memory, disk and Redis, in the clear and sealed, agree on every operation, errors included, whatever came
before."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from engine.errors import TenutoError
from serialization.blobs import BlobClass, BlobId, BlobInfo, Bytes, Store, blob_id
from serialization.buffers import NEW, Buffers
from serialization.sealed import BLOB_ROOM
from sessions.keyring.master import MasterKeys
from sessions.keyring.ring import Keyring
from sessions.rotate import reseal
from sessions.stores.base import StoreConfig
from sessions.stores.disk import DiskStore
from sessions.stores.memory import MemoryStore
from sessions.stores.redis import RedisStore
from sessions.stores.sealed import roomier
from sessions.stores.sealing import sealed_store
from tests.redis_server import RedisServer

CONTENTS = (b"", b"one", b"two" * 50, b"x" * 2001)
BLOBS = [blob_id(cls, data) for cls in BlobClass for data in CONTENTS]
BAD_BLOBS = [BlobId("rows-b3-nothing"), BlobId("rows-md5-" + "0" * 32)]

contents = st.sampled_from(CONTENTS)
classes = st.sampled_from(list(BlobClass))
blobs = st.sampled_from(BLOBS + BAD_BLOBS)
names = st.sampled_from(["a", "a/b", "a.b", "b/c/d", "B", "a//b", "../a", ""])
values = st.sampled_from([b"", b"1", b"2", bytes(range(256))])
maybe = st.none() | values


class Plainly:
    """A sealed store as one in the clear would answer: blobs by their plain names, with their own sizes."""

    def __init__(self, inner: Store, keyring: Keyring, config: StoreConfig) -> None:
        self.store = sealed_store(inner, keyring, "default", config)
        ciphers = keyring.tenant("default").current()
        self._names = {
            blob_id(cls, data): ciphers.blob_id(cls, data) for cls in BlobClass for data in CONTENTS
        }
        self._plain = {name: plain for plain, name in self._names.items()}

    def __repr__(self) -> str:
        return repr(self.store)

    def __getattr__(self, verb: str) -> Any:
        return getattr(self.store, verb)

    def put(self, cls: BlobClass, data: bytes) -> BlobId:
        return self._plain[self.store.put(cls, data)]

    def get(self, blob: BlobId, buffers: Buffers = NEW) -> Bytes:
        return self.store.get(self._names.get(blob, blob), buffers)

    def has(self, blobs: list[BlobId]) -> tuple[bool, ...]:
        return self.store.has([self._names.get(blob, blob) for blob in blobs])

    def refresh(self, blobs: list[BlobId]) -> None:
        self.store.refresh([self._names.get(blob, blob) for blob in blobs])

    def delete_blob(self, blob: BlobId, older_than: float) -> bool:
        return self.store.delete_blob(self._names.get(blob, blob), older_than)

    def list_blobs(self) -> Iterator[BlobInfo]:
        for info in self.store.list_blobs():
            yield BlobInfo(self._plain[info.blob], info.nbytes - BLOB_ROOM, info.age)


class Agreement(RuleBasedStateMachine):
    """Each rule acts on all stores; their answers, or the classes of their errors, must be equal."""

    server: RedisServer

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        client = self.server.client()
        client.flushall()
        client.close()
        config = StoreConfig(max_blob=2000)
        more, folder = roomier(config), Path(self.folder.name)
        self.keyring = Keyring(folder / "keys", MasterKeys([b"m" * 32]))
        beneath: list[Store] = [
            MemoryStore(config=more),
            DiskStore(folder / "sealed", config=more),
            RedisStore(self.server.url.removesuffix("/0") + "/1", config=more),
        ]
        self.stores: list[Any] = [
            MemoryStore(config=config),
            DiskStore(folder / "store", config=config),
            RedisStore(self.server.url, config=config),
            *(Plainly(inner, self.keyring, config) for inner in beneath),
        ]

    def teardown(self) -> None:
        for store in self.stores:
            store.close()
        self.folder.cleanup()

    def agree(self, act: Callable[[Any], Any]) -> None:
        answers = [outcome(act, store) for store in self.stores]
        assert answers[1:] == answers[:-1], dict(zip(map(repr, self.stores), answers, strict=True))

    @rule(cls=classes, data=contents)
    def put(self, cls: BlobClass, data: bytes) -> None:
        self.agree(lambda store: store.put(cls, data))

    @rule(blob=blobs)
    def get(self, blob: BlobId) -> None:
        self.agree(lambda store: store.get(blob))

    @rule(asked=st.lists(blobs, max_size=4))
    def has(self, asked: list[BlobId]) -> None:
        self.agree(lambda store: store.has(asked))

    @rule(asked=st.lists(blobs, max_size=4))
    def refresh(self, asked: list[BlobId]) -> None:
        self.agree(lambda store: store.refresh(asked))
        self.agree(lambda store: [tier.budget for tier in store.tiers()])

    @rule(blob=blobs, older_than=st.sampled_from([0.0, 1e9]))
    def delete(self, blob: BlobId, older_than: float) -> None:
        self.agree(lambda store: store.delete_blob(blob, older_than))

    @rule()
    def list_blobs(self) -> None:
        self.agree(lambda store: sorted((info.blob, info.nbytes) for info in store.list_blobs()))

    @rule(asked=st.lists(names, max_size=4))
    def read(self, asked: list[str]) -> None:
        self.agree(lambda store: store.read_many(asked))

    @rule(name=names, old=maybe, new=maybe, guard=st.none() | st.tuples(names, values))
    def swap(self, name: str, old: bytes | None, new: bytes | None, guard: tuple[str, bytes] | None) -> None:
        self.agree(lambda store: store.swap(name, old, new, guard))

    @rule(name=names, new=maybe)
    def swap_from_what_is_there(self, name: str, new: bytes | None) -> None:
        self.agree(lambda store: store.swap(name, store.read(name), new))

    @rule(refs=st.dictionaries(names, values, max_size=3))
    def hint(self, refs: dict[str, bytes]) -> None:
        self.agree(lambda store: store.hint(refs))

    @rule(prefix=st.sampled_from(["", "a", "a/", "b/c", "Z", "*", "a b"]))
    def list_refs(self, prefix: str) -> None:
        self.agree(lambda store: sorted(store.list_refs(prefix)))
        self.agree(lambda store: store.last_refs(prefix, None, 3))

    @rule(refs=st.dictionaries(names, values, max_size=3))
    def rebuild(self, refs: dict[str, bytes]) -> None:
        self.agree(lambda store: store.rebuild(refs))

    @rule()
    def rotate(self) -> None:
        """Changes nothing that a store says."""
        keys = self.keyring.tenant("default")
        keys.rotate()
        for sealed in self.stores[3:]:
            assert reseal(sealed.store).problems == ()
        keys.drop_old()

    @rule()
    def check(self) -> None:
        self.agree(lambda store: (store.check_index(), list(store.list_stray()), store.sweep(0)))


def outcome(act: Callable[[Any], Any], store: Any) -> Any:
    try:
        return act(store)
    except TenutoError as error:
        return type(error)


@pytest.mark.redis
def test_all_stores_agree(redis_server: RedisServer) -> None:
    Agreement.server = redis_server
    run_state_machine_as_test(Agreement, settings=settings(max_examples=30, stateful_step_count=40))
