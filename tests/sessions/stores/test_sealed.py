"""A sealed store keeps every law of stores, over each of them, and nobody reads it without its keys."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import (
    BlobMissing,
    Corrupt,
    Erased,
    IndexDamaged,
    LimitExceeded,
    SealRefused,
    StoreUnavailable,
    UnknownVersion,
)
from serialization.blobs import CHECKSUM_NBYTES, BlobClass, BlobId, Store, blob_id, checksum
from serialization.sealed import BLOB_ROOM, read_blob
from sessions.keyring.ciphers import Ciphers
from sessions.keyring.keyset import DataKey, KeySet, Scope
from sessions.keyring.master import MasterKeys
from sessions.keyring.ring import Keyring
from sessions.rotate import rotate_and_drop
from sessions.stores.base import SEAL_NBYTES, StoreConfig, seal, tenant_key
from sessions.stores.memory import MemoryStore
from sessions.stores.sealed import MARKER, roomier
from sessions.stores.sealing import sealed_store
from sessions.stores.tiered import CacheTier, TieredStore
from tests.faults import FaultyStore, flip
from tests.redis_server import RedisServer
from tests.sessions.sealing import ring
from tests.sessions.stores.benches import SMALL, Bench, DiskBench, MemoryBench, RedisBench, SealedBench
from tests.sessions.stores.contract import StoreContract
from tests.sessions.stores.test_tiered import TieredBench

ROWS = BlobClass.ROWS


class SealedContract(StoreContract):
    """Where a law speaks of the stored bytes themselves, here is what is true of sealed ones."""

    def test_stored_bytes_are_exactly_those_put(self, store: Store, bench: Bench) -> None:
        stored = bench.raw_blob(store.put(ROWS, b"nobody sees them"))
        assert stored.startswith(b"tenutoS")
        assert b"nobody" not in stored
        assert len(stored) == 16 + bench.room

    def test_size_limit_holds_in_both_directions(self, store: Store, bench: Bench) -> None:
        assert len(store.get(store.put(ROWS, bytes(100_000)))) == 100_000
        with pytest.raises(LimitExceeded):
            store.put(ROWS, bytes(100_001))
        blob = store.put(ROWS, b"grows")
        bench.write_blob(blob, bytes(100_001 + bench.room))
        with pytest.raises(LimitExceeded):
            store.get(blob)


class TestOverMemory(SealedContract):
    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[Bench]:
        bench = SealedBench(MemoryBench(), tmp_path / "keys")
        yield bench
        bench.close()


class TestOverMemoryWithKeysOfSessions(SealedContract):
    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[Bench]:
        bench = SealedBench(MemoryBench(), tmp_path / "keys", Scope.SESSION)
        yield bench
        bench.close()


class TestOverDisk(SealedContract):
    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[Bench]:
        bench = SealedBench(DiskBench(tmp_path / "store"), tmp_path / "keys")
        yield bench
        bench.close()


class TestOverTiers(SealedContract):
    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[Bench]:
        bench = SealedBench(TieredBench(tmp_path / "store"), tmp_path / "keys")
        yield bench
        bench.close()


@pytest.mark.redis
class TestOverRedis(SealedContract):
    @pytest.fixture
    def bench(self, redis_server: RedisServer, tmp_path: Path) -> Iterator[Bench]:
        bench = SealedBench(RedisBench(redis_server), tmp_path / "keys")
        yield bench
        bench.close()


# --- who alters what lies beneath, digests and all ------------------------------------------


@pytest.fixture
def beneath() -> MemoryBench:
    return MemoryBench()


@pytest.fixture
def bench(beneath: MemoryBench, tmp_path: Path) -> SealedBench:
    return SealedBench(beneath, tmp_path / "keys")


def forged(blob: BlobId, stored: bytes, at: int, value: bytes) -> bytes:
    """What is stored as `blob` with other bytes at one place, and the digest made to fit."""
    body = stored[:at] + value + stored[at + len(value) : -CHECKSUM_NBYTES]
    return body + checksum(blob, body)


def test_a_bit_altered_anywhere_is_refused_though_the_digest_fits(bench: SealedBench) -> None:
    store = bench.open()
    blob = store.put(ROWS, b"content")
    stored = bench.raw_blob(blob)
    for at in range(len(stored) - CHECKSUM_NBYTES):
        for bit in (0, 7):
            bench.write_blob(blob, forged(blob, stored, at, bytes([stored[at] ^ 1 << bit])))
            with pytest.raises((Corrupt, UnknownVersion)):
                store.get(blob)
    bench.write_blob(blob, forged(blob, stored, 0, stored[:1]))
    assert store.get(blob) == b"content"


@pytest.mark.parametrize("length", range(0, 100, 7))
def test_a_blob_cut_off_is_refused_though_the_digest_fits(bench: SealedBench, length: int) -> None:
    store = bench.open()
    blob = store.put(ROWS, b"content")
    body = bench.raw_blob(blob)[: min(length, BLOB_ROOM + 6 - CHECKSUM_NBYTES)]
    bench.write_blob(blob, body + checksum(blob, body))
    with pytest.raises(Corrupt):
        store.get(blob)


@pytest.mark.parametrize(("cls", "content"), [(ROWS, b"another"), (BlobClass.POINT, b"content")])
def test_swapped_blobs_are_refused_though_the_digests_fit(
    bench: SealedBench, cls: BlobClass, content: bytes
) -> None:
    """Of the same class, and of the same content."""
    store = bench.open()
    one, other = store.put(ROWS, b"content"), store.put(cls, content)
    stored = {blob: bench.raw_blob(blob) for blob in (one, other)}
    for blob, instead in ((one, other), (other, one)):
        body = stored[instead][:-CHECKSUM_NBYTES]
        bench.write_blob(blob, body + checksum(blob, body))
        with pytest.raises(Corrupt, match="not what was sealed"):
            store.get(blob)


def test_a_blob_of_another_tenant_is_refused(bench: SealedBench, beneath: MemoryBench) -> None:
    ours, theirs = bench.open(), bench.open("other")
    blob = theirs.put(ROWS, b"theirs")
    assert blob != ours.put(ROWS, b"theirs")
    (stored, _) = beneath.backings[tenant_key("other")].blobs[blob]
    beneath.write_blob(blob, stored)
    with pytest.raises(Corrupt, match="keys that are not here"):
        ours.get(blob)


def test_another_key_under_the_same_name_and_number_opens_nothing() -> None:
    keys = KeySet.new(Scope.TENANT, 1.0)
    other = replace(keys, data=(DataKey(1, 1.0, b"another" + bytes(25)),))
    right, wrong = Ciphers(keys, "default"), Ciphers(other, "default")
    blob = right.blob_id(ROWS, b"content")
    found = read_blob(blob, right.seal_blob(blob, b"content"))
    with pytest.raises(Corrupt):
        wrong.open_blob(blob, found)
    with pytest.raises(IndexDamaged):
        wrong.open_ref(right.ref_name("session/a"), right.seal_ref("session/a", b"1"))
    theirs = Ciphers(keys, "other")  # the right key, for another tenant
    with pytest.raises(Corrupt):
        theirs.open_blob(blob, found)


def test_put_heals_what_was_forged(bench: SealedBench) -> None:
    store = bench.open()
    blob = store.put(ROWS, b"content")
    stored = bench.raw_blob(blob)
    bench.write_blob(blob, forged(blob, stored, 45, bytes([stored[45] ^ 1])))
    assert store.put(ROWS, b"content") == blob
    assert store.get(blob) == b"content"


def test_a_second_put_leaves_what_is_there(bench: SealedBench) -> None:
    store = bench.open()
    blob = store.put(ROWS, b"content")
    stored = bench.raw_blob(blob)
    store.put(ROWS, b"content")
    assert bench.raw_blob(blob) == stored


def test_equal_content_is_sealed_unlike_each_time(bench: SealedBench) -> None:
    store = bench.open()
    seen = set()
    for _ in range(20):
        blob = store.put(ROWS, bytes(64))
        seen.add(bench.raw_blob(blob)[28:-CHECKSUM_NBYTES])
        bench.remove_blob(blob)
    assert len({each[:12] for each in seen}) == len({each[12:] for each in seen}) == 20


def test_refs_swapped_or_altered_are_refused_though_the_digests_fit(bench: SealedBench) -> None:
    store = bench.open()
    store.swap("session/a", None, b"1")
    store.swap("session/b", None, b"2")
    names = {name: bench.ciphers.ref_name(name) for name in ("session/a", "session/b")}
    value = {name: bench.raw_ref(name)[SEAL_NBYTES:] for name in names}
    altered = [value["session/b"], b"", b"\x01", value["session/a"][:-1]]
    altered += [flip(value["session/a"], 8 * at) for at in range(len(value["session/a"]))]
    for other in altered:
        bench.write_ref("session/a", seal(names["session/a"], other))  # which needs no key
        for act in (
            lambda: store.read("session/a"),
            lambda: list(store.list_refs("session/")),
            lambda: store.swap("session/a", b"1", b"3"),
        ):
            with pytest.raises(IndexDamaged):
                act()
        assert [names["session/a"] in line for line in store.check_index()] == [True]
        assert store.read("session/b") == b"2"


def test_the_names_of_refs_tell_nothing_and_list_by_their_first_word(bench: SealedBench) -> None:
    store = bench.open()
    for name in ("session/a", "session/b", "name/a", "alone"):
        store.swap(name, None, b"x")
    stored = [name for name in bench.beneath.held.refs if name != MARKER]
    assert all(re.fullmatch(r"[0-9a-f]{32}/-?[0-9a-f]{40}", name) for name in stored)
    starts = [name[:32] for name in stored]
    assert sorted(map(starts.count, set(starts))) == [1, 1, 2]
    assert sorted(name for name, _ in store.list_refs("session/")) == ["session/a", "session/b"]
    assert [name for name, _ in store.list_refs("session/b")] == ["session/b"]
    assert [name for name, _ in store.list_refs("a")] == ["alone"]


def test_the_name_of_a_session_tells_the_second_that_it_was_begun_in_and_no_more(bench: SealedBench) -> None:
    store = bench.open()
    ids = ["01ARZ3NDEKTSV4RRFFQ69G5FAV", "01ARZ3NDZZTSV4RRFFQ69G5FAV", "01ARZ3NEEKTSV4RRFFQ69G5FAV"]
    for session in ids:
        store.swap(f"session/{session}", None, b"x")
    store.swap(f"lease/{ids[0]}", None, b"x")
    stored = sorted(name.partition("/")[2] for name in bench.beneath.held.refs if name != MARKER)
    shown = [name[:-40] for name in stored if "-" in name]
    assert shown == ["01ARZ3ND-", "01ARZ3ND-", "01ARZ3NE-"]
    assert sum(re.fullmatch(r"[0-9a-f]{40}", name) is not None for name in stored) == 1


@pytest.mark.parametrize("page", [1, 2, 128])
def test_a_page_of_sessions_opens_no_more_than_their_seconds(
    bench: SealedBench, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sessions.stores.sealed._PAGE", page)
    store = bench.open()
    rests = [f"01ARZ3{second}{rest:02d}SV4RRFFQ69G5FAV" for second in ("AA", "BB", "CC") for rest in range(5)]
    ids = sorted(f"{each[:8]}EK{each[8:]}"[:26].ljust(26, "0") for each in rests)
    for session in ids:
        store.swap(f"session/{session}", None, session.encode())
    store.swap("session/odd", None, b"odd")
    names = [*(f"session/{session}" for session in ids), "session/odd"]
    opened: list[str] = []
    real = Ciphers.open_ref

    def counted(self: Ciphers, stored_name: str, value: bytes) -> tuple[str, bytes] | None:
        opened.append(stored_name)
        return real(self, stored_name, value)

    monkeypatch.setattr(Ciphers, "open_ref", counted)
    for before in (None, names[12], names[7], "session/01ARZ3BB", "session/", "zz", "a"):
        for most in (0, 1, 4, 40):
            expected = [name for name in reversed(names) if before is None or name < before][:most]
            assert [name for name, _ in store.last_refs("session/", before, most)] == expected
    for prefix in ("session/01ARZ3BB", "session/01ARZ3BBEK03", "session/o", "session/01"):
        expected = [name for name in names if name.startswith(prefix)]
        assert sorted(name for name, _ in store.list_refs(prefix)) == expected
        assert [name for name, _ in store.last_refs(prefix, None, 40)] == expected[::-1]
    opened.clear()
    store.last_refs("session/", names[12], 2)
    assert len(opened) <= 1 + 5 + page
    opened.clear()
    list(store.list_refs("session/01ARZ3BB"))
    assert len(opened) <= 1 + 5


def test_a_list_goes_on_though_keys_change_while_it_is_read(bench: SealedBench) -> None:
    store = bench.open()
    names = [f"session/01ARZ3NDEKTSV4RRFFQ69G5F{number:02d}" for number in range(4)]
    for name in names:
        store.swap(name, None, b"x")
    listing = store.list_refs("session/")
    first = next(listing)[0]
    bench.keys.rotate()
    assert store.reseal_refs() == 4
    bench.keys.drop_old()
    assert sorted([first, *(name for name, _ in listing)]) == names


def test_a_blob_in_the_clear_among_sealed_ones_is_told_and_never_read(
    bench: SealedBench, beneath: MemoryBench
) -> None:
    store = bench.open()
    clear = blob_id(ROWS, b"planted")
    beneath.write_blob(clear, b"planted")
    with pytest.raises(BlobMissing):
        store.get(clear)
    assert store.has([clear]) == (False,)
    assert list(store.list_blobs()) == []
    assert ["in the clear" in line for line in store.check_index()] == [True]


# --- keys that change while it is used ------------------------------------------------------


def test_what_an_old_key_sealed_is_read_until_that_key_is_dropped(bench: SealedBench) -> None:
    store = bench.open()
    blob = store.put(ROWS, b"content")
    store.swap("session/a", None, b"1")
    bench.keys.rotate()
    assert (store.get(blob), store.read("session/a")) == (b"content", b"1")
    assert store.swap("session/a", b"1", b"2", guard=("session/a", b"1"))
    young = store.put(ROWS, b"young")
    bench.keys.drop_old()
    assert (store.get(young), store.read("session/a")) == (b"young", b"2")
    with pytest.raises(Corrupt, match="keys that are not here"):
        store.get(blob)


def test_put_seals_anew_what_an_old_key_sealed(bench: SealedBench) -> None:
    store = bench.open()
    blob = store.put(ROWS, b"content")
    bench.keys.rotate()
    store.put(ROWS, b"content")
    bench.keys.drop_old()
    assert store.get(blob) == b"content"


def test_sessions_with_keys_of_their_own_share_nothing(beneath: MemoryBench, tmp_path: Path) -> None:
    bench = SealedBench(beneath, tmp_path / "keys", Scope.SESSION)
    store = bench.open()
    one, other = store.scoped("one"), store.scoped("other")
    blobs = [each.put(ROWS, b"the same rows") for each in (one, other)]
    assert len(set(blobs)) == 2
    assert [store.get(blob) for blob in blobs] == [b"the same rows"] * 2
    assert one.scoped("one") is one
    bench.keys.erase_session("one")
    with pytest.raises(Corrupt):
        store.get(blobs[0])
    with pytest.raises(Erased):
        one.put(ROWS, b"more")
    assert store.get(blobs[1]) == b"the same rows"


def test_where_sessions_have_keys_nothing_is_put_without_one(beneath: MemoryBench, tmp_path: Path) -> None:
    bench = SealedBench(beneath, tmp_path / "keys", Scope.SESSION)
    inner = beneath.make("default", SMALL)
    with pytest.raises(SealRefused, match="for one"):
        sealed_store(inner, bench.keyring, "default", SMALL).put(ROWS, b"whose?")


@pytest.mark.parametrize("nth", range(8))
@pytest.mark.parametrize("fault", ["r", "R"])
def test_after_any_fault_beneath_a_ref_is_the_old_one_or_the_new(
    tmp_path: Path, nth: int, fault: str
) -> None:
    """And what was acknowledged stays."""
    config = StoreConfig()
    keyring = Keyring(tmp_path / "keys", MasterKeys([b"m" * 32]))
    inner = FaultyStore(MemoryStore(config=roomier(config)))
    store = sealed_store(inner, keyring, "default", config)
    old = store.put(ROWS, b"old")
    store.swap("session/a", None, old.encode())
    inner.num_calls, inner.plan = 0, "." * nth + fault
    with contextlib.suppress(StoreUnavailable):
        new = store.put(ROWS, b"new")
        store.swap("session/a", old.encode(), new.encode(), guard=("session/a", old.encode()))
    inner.plan = ""
    value = store.read("session/a")
    assert value is not None
    assert store.get(BlobId(value.decode())) in (b"old", b"new")
    assert store.get(old) == b"old"
    assert store.check_index() == ()


def test_an_erased_tenant_can_do_nothing(bench: SealedBench) -> None:
    store = bench.open()
    blob = store.put(ROWS, b"content")
    store.swap("s", None, b"1")
    bench.keyring.tenant("default").erase()
    for act in (
        lambda: store.get(blob),
        lambda: store.put(ROWS, b"more"),
        lambda: store.read("s"),
        lambda: store.swap("s", b"1", b"2"),
        lambda: store.hint({"h": b"x"}),
        lambda: list(store.list_refs("")),
    ):
        with pytest.raises(Erased):
            act()


def test_quick_copies_by_keys_that_were_dropped_since_are_read_anew(tmp_path: Path) -> None:
    """The keys were rotated by a process that does not see the quick tiers of this one."""
    keyring, last = ring(tmp_path), MemoryStore(config=roomier(StoreConfig()))
    tiers = [CacheTier(MemoryStore(config=roomier(StoreConfig())), 1 << 20) for _ in range(2)]
    store = sealed_store(TieredStore(tiers, last), keyring, "default", StoreConfig())
    blobs = [store.put(BlobClass.ROWS, bytes([number]) * 1000) for number in range(3)]
    rotated = rotate_and_drop(
        sealed_store(last, keyring, "default", StoreConfig()), keyring.tenant("default")
    )
    assert (rotated.num_blobs, rotated.problems) == (3, ())
    for number, blob in enumerate(blobs):
        assert store.get(blob) == bytes([number]) * 1000
        assert {tier.get(blob) for tier in tiers} == {last.get(blob)}, "and the copies are those by now"
