"""The laws of every store. A test class per store inherits them and supplies its bench."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from engine.errors import (
    BlobMissing,
    Corrupt,
    IndexDamaged,
    LimitExceeded,
    NameRefused,
    StoreError,
    UnknownFeature,
)
from serialization.blobs import BlobClass, BlobId, Store, blob_id
from tests.faults import flip
from tests.sessions.stores.benches import Bench

ROWS, POINT, MANIFEST = BlobClass.ROWS, BlobClass.POINT, BlobClass.MANIFEST
BAD_NAMES = (
    "",
    "/",
    "a//b",
    "a/",
    "/a",
    "..",
    "a/../b",
    "a/.",
    "a b",
    "ä",
    "a\n",
    "a\0",
    "x" * 129,
    "a/" * 300 + "a",
)


class StoreContract:
    @pytest.fixture
    def bench(self, request: Any) -> Iterator[Bench]:
        raise AssertionError("each store's test class supplies its bench")

    @pytest.fixture
    def store(self, bench: Bench) -> Store:
        return bench.open()

    # --- blobs --------------------------------------------------------------------------------

    @pytest.mark.parametrize("cls", list(BlobClass))
    @pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 300])
    def test_what_was_put_comes_back(self, store: Store, bench: Bench, cls: BlobClass, data: bytes) -> None:
        blob = store.put(cls, data)
        assert blob == bench.name(cls, data)
        assert store.get(blob) == data

    def test_any_kind_of_bytes_may_be_put(self, store: Store, bench: Bench) -> None:
        assert (
            store.put(ROWS, bytearray(b"abcd"))
            == store.put(ROWS, memoryview(b"xabcdx")[1:5])
            == bench.name(ROWS, b"abcd")
        )
        assert store.get(bench.name(ROWS, b"abcd")) == b"abcd"

    def test_absent_blob_is_missing(self, store: Store, bench: Bench) -> None:
        for name in (bench.name(ROWS, b"never put"), blob_id(ROWS, b"never put")):
            with pytest.raises(BlobMissing):
                store.get(name)

    def test_the_class_is_part_of_the_name(self, store: Store, bench: Bench) -> None:
        store.put(ROWS, b"same")
        assert store.has([bench.name(ROWS, b"same"), bench.name(POINT, b"same")]) == (True, False)

    def test_a_blob_may_be_put_under_the_name_that_it_has(self, store: Store, bench: Bench) -> None:
        blob = bench.name(ROWS, b"named before")
        store.put_as(blob, b"named before")
        assert store.get(blob) == b"named before"
        bench.age(blob, 1000)
        store.put_as(blob, b"named before")
        assert [(info.blob, info.age < 100) for info in store.list_blobs()] == [(blob, True)]
        with pytest.raises(Corrupt):
            store.put_as(BlobId("rows-b3-nothing"), b"x")
        with pytest.raises(LimitExceeded):
            store.put_as(bench.name(ROWS, bytes(100_001)), bytes(100_001))

    def test_stored_bytes_are_exactly_those_put(self, store: Store, bench: Bench) -> None:
        assert bench.raw_blob(store.put(ROWS, b"as they are")) == b"as they are"

    @pytest.mark.parametrize("cls", [ROWS, MANIFEST])
    def test_second_put_is_one_blob_with_a_new_age(self, store: Store, bench: Bench, cls: BlobClass) -> None:
        blob = store.put(cls, b"twice")
        bench.age(blob, 1000)
        assert [info.age > 900 for info in store.list_blobs()] == [True]
        assert store.put(cls, b"twice") == blob
        assert [(info.blob, info.age < 100) for info in store.list_blobs()] == [(blob, True)]
        assert not store.delete_blob(blob, 500)

    @pytest.mark.parametrize("bit", [0, 4 * 8 + 3, 9 * 8 + 7])
    def test_a_flipped_bit_is_never_returned(self, store: Store, bench: Bench, bit: int) -> None:
        blob = store.put(ROWS, b"0123456789")
        bench.write_blob(blob, flip(b"0123456789", bit))
        with pytest.raises(Corrupt):
            store.get(blob)

    @pytest.mark.parametrize("damaged", [b"", b"012345678", b"01234567890"])
    def test_other_lengths_are_never_returned(self, store: Store, bench: Bench, damaged: bytes) -> None:
        blob = store.put(ROWS, b"0123456789")
        bench.write_blob(blob, damaged)
        with pytest.raises(Corrupt):
            store.get(blob)

    @pytest.mark.parametrize("damaged", [b"", b"0123456780", b"01234567890"])
    def test_put_heals_a_damaged_blob(self, store: Store, bench: Bench, damaged: bytes) -> None:
        blob = store.put(ROWS, b"0123456789")
        bench.write_blob(blob, damaged)
        store.put(ROWS, b"0123456789")
        assert store.get(blob) == b"0123456789"

    def test_put_of_a_blob_that_vanished_writes_it_again(self, store: Store, bench: Bench) -> None:
        blob = store.put(ROWS, b"here")
        bench.remove_blob(blob)
        with pytest.raises(BlobMissing):
            store.get(blob)
        assert store.put(ROWS, b"here") == blob
        assert store.get(blob) == b"here"

    def test_size_limit_holds_in_both_directions(self, store: Store, bench: Bench) -> None:
        assert len(store.get(store.put(ROWS, bytes(100_000)))) == 100_000
        with pytest.raises(LimitExceeded):
            store.put(ROWS, bytes(100_001))
        blob = store.put(ROWS, b"grows")
        bench.write_blob(blob, bytes(100_001))
        with pytest.raises(LimitExceeded):
            store.get(blob)

    def test_has_answers_in_order(self, store: Store, bench: Bench) -> None:
        one, two = store.put(ROWS, b"1"), bench.name(ROWS, b"2")
        assert store.has([two, one, two, one]) == (False, True, False, True)
        assert store.has([]) == ()

    def test_listing_names_each_blob_once_with_its_size(self, store: Store, bench: Bench) -> None:
        put = {store.put(cls, bytes(size)): size + bench.room for cls in BlobClass for size in (0, 1, 700)}
        found = list(store.list_blobs())
        assert {info.blob: info.nbytes for info in found} == put
        assert len(found) == len(put)
        assert all(0 <= info.age < 60 for info in found)

    def test_only_old_blobs_are_deleted(self, store: Store, bench: Bench) -> None:
        blob = store.put(ROWS, b"old one day")
        assert not store.delete_blob(blob, 60)
        assert store.has([blob]) == (True,)
        bench.age(blob, 61)
        assert store.delete_blob(blob, 60)
        assert store.has([blob]) == (False,)
        assert not store.delete_blob(blob, 0)
        assert list(store.list_blobs()) == []

    @pytest.mark.parametrize(
        "name", ["", "../../etc/passwd", "rows-b3-../../x", "rows-b3-" + "A" * 64, "rows-b3-" + "0" * 31]
    )
    def test_a_name_that_is_no_blob_id_is_refused(self, store: Store, name: str) -> None:
        bad = BlobId(name)
        for act in (store.get, lambda blob: store.has([blob]), lambda blob: store.delete_blob(blob, 0)):
            with pytest.raises(Corrupt):
                act(bad)

    def test_another_digest_is_refused_by_name(self, store: Store) -> None:
        with pytest.raises(UnknownFeature):
            store.get(BlobId("rows-sha256-" + "0" * 64))

    # --- refs ---------------------------------------------------------------------------------

    def test_absent_ref_is_none(self, store: Store) -> None:
        assert store.read("nobody") is None
        assert store.read_many([]) == ()

    def test_swap_moves_only_from_the_old_value(self, store: Store) -> None:
        assert store.swap("s/1", None, b"one")
        assert not store.swap("s/1", None, b"two")
        assert not store.swap("s/1", b"other", b"two")
        assert store.read("s/1") == b"one"
        assert store.swap("s/1", b"one", b"two")
        assert not store.swap("s/1", b"one", None)
        assert store.swap("s/1", b"two", None)
        assert store.read("s/1") is None
        assert not store.swap("s/1", b"two", b"three")

    def test_empty_value_is_not_absence(self, store: Store) -> None:
        assert store.swap("s", None, b"")
        assert store.read("s") == b""
        assert not store.swap("s", None, b"x")
        assert store.swap("s", b"", b"x")

    def test_swap_of_nothing_to_nothing_compares(self, store: Store) -> None:
        assert store.swap("s", None, None)
        assert store.swap("s", None, b"x")
        assert not store.swap("s", None, None)

    def test_swap_to_the_same_value_holds(self, store: Store) -> None:
        assert store.swap("s", None, b"x")
        assert store.swap("s", b"x", b"x")
        assert store.read("s") == b"x"

    def test_guard_must_hold_in_the_same_step(self, store: Store) -> None:
        assert not store.swap("s", None, b"1", guard=("lease", b"me"))
        assert store.swap("lease", None, b"me")
        assert store.swap("s", None, b"1", guard=("lease", b"me"))
        assert not store.swap("s", b"1", b"2", guard=("lease", b"you"))
        assert not store.swap("s", b"0", b"2", guard=("lease", b"me"))
        assert store.swap("s", b"1", b"2", guard=("s", b"1"))
        assert store.read_many(["s", "lease"]) == (b"2", b"me")

    def test_values_are_bytes_of_any_kind(self, store: Store) -> None:
        value = bytes(range(256)) * 256
        assert store.swap("big", None, value)
        assert store.read("big") == value
        for old, new, guard in (
            (None, value + b"x", None),
            (value + b"x", None, None),
            (None, b"", ("g", value + b"x")),
        ):
            with pytest.raises(LimitExceeded):
                store.swap("other", old, new, guard)
        assert store.read("other") is None

    @pytest.mark.parametrize("name", BAD_NAMES)
    def test_bad_names_are_refused_everywhere(self, store: Store, name: str) -> None:
        for act in (
            lambda: store.read(name),
            lambda: store.read_many(["a", name]),
            lambda: store.swap(name, None, b"x"),
            lambda: store.swap("a", None, b"x", guard=(name, b"x")),
            lambda: store.hint({"a": b"x", name: b"x"}),
            lambda: store.rebuild({"a": b"x", name: b"x"}),
        ):
            with pytest.raises(NameRefused):
                act()
        assert list(store.list_refs("")) == []

    def test_longest_names_are_taken(self, store: Store) -> None:
        name = "/".join(["x" * 127] * 4)
        assert store.swap(name, None, b"v")
        assert list(store.list_refs(name)) == [(name, b"v")]

    def test_listing_is_by_prefix_and_each_once(self, store: Store) -> None:
        names = ["b", "a/2", "a/10", "a", "a.b", "a-b", "A", "a/1/x", "ab"]
        for name in names:
            store.swap(name, None, name.encode())
        for prefix in ("", "a", "a/", "a/1", "b", "zz", "a."):
            with_prefix = [(name, name.encode()) for name in sorted(names) if name.startswith(prefix)]
            assert sorted(store.list_refs(prefix)) == with_prefix
        for prefix in ("*", "a%", "ä", "a b"):
            with pytest.raises(NameRefused):
                list(store.list_refs(prefix))

    def test_the_last_are_listed_back_to_the_first(self, store: Store) -> None:
        names = ["s/b", "s/a", "s/d", "s/c", "r/x", "t"]
        for name in names:
            store.swap(name, None, name.encode())
        for before in (None, "s/d", "s/c5", "s/a", "zz", "a"):
            for most in (0, 1, 3, 9):
                expected = [
                    (name, name.encode())
                    for name in sorted(names, reverse=True)
                    if name.startswith("s/") and (before is None or name < before)
                ][:most]
                assert list(store.last_refs("s/", before, most)) == expected
        assert [name for name, _ in store.last_refs("", None, 2)] == ["t", "s/d"]
        with pytest.raises(NameRefused):
            store.last_refs("*", None, 1)

    def test_a_list_longer_than_a_page_is_whole(self, store: Store) -> None:
        refs = {f"n/{number:04d}": b"%d" % number for number in range(1201)}
        store.hint(refs)
        listed = list(store.list_refs("n/"))
        assert dict(listed) == refs
        assert len(listed) == len(refs)
        assert [name for name, _ in store.last_refs("n/", None, 700)] == sorted(refs, reverse=True)[:700]

    def test_what_stays_is_listed_though_others_come_and_go_meanwhile(self, store: Store) -> None:
        refs = {f"n/{number:04d}": b"x" for number in range(1201)}
        store.hint(refs)
        listed = []
        for number, (name, _) in enumerate(store.list_refs("n/")):
            listed.append(name)
            store.swap(name, b"x", None if number % 2 else b"y")
            if number % 100 == 0:
                store.swap(f"m/{number}", None, b"x")
        assert sorted(set(listed)) == sorted(refs)
        assert len(listed) == len(refs)

    def test_many_are_read_in_the_order_asked(self, store: Store) -> None:
        store.swap("a", None, b"1")
        store.swap("b", None, b"2")
        assert store.read_many(["b", "none", "a", "b"]) == (b"2", None, b"1", b"2")

    def test_hints_are_set_without_comparing(self, store: Store) -> None:
        store.swap("h/1", None, b"old")
        store.hint({"h/1": b"new", "h/2": b"too"})
        store.hint({})
        assert sorted(store.list_refs("h/")) == [("h/1", b"new"), ("h/2", b"too")]
        assert [name for name, _ in store.last_refs("h/", None, 9)] == ["h/2", "h/1"]
        assert store.swap("h/1", b"new", None)

    # --- damage -------------------------------------------------------------------------------

    @pytest.mark.parametrize("byte", [0, 31, 32, 34])
    def test_a_damaged_ref_is_found_and_never_returned(self, store: Store, bench: Bench, byte: int) -> None:
        store.swap("good", None, b"fine")
        store.swap("bad", None, b"val")
        kept = store.put(MANIFEST, b"blobs are still there")
        bench.write_ref("bad", flip(bench.raw_ref("bad"), byte * 8))
        for act in (
            lambda: store.read("bad"),
            lambda: store.read_many(["good", "bad"]),
            lambda: list(store.list_refs("")),
            lambda: store.swap("bad", b"val", b"new"),
            lambda: store.swap("good", b"fine", b"new", guard=("bad", b"val")),
        ):
            with pytest.raises(IndexDamaged):
                act()
        problems = store.check_index()
        assert len(problems) == 1
        assert bench.told("bad") in problems[0]
        assert "\n" not in problems[0]
        assert store.read("good") == b"fine"
        assert store.get(kept) == b"blobs are still there"
        assert [info.blob for info in store.list_blobs()] == [kept]
        store.rebuild({"good": b"fine", "bad": b"val"})
        assert store.check_index() == ()
        assert store.read("bad") == b"val"

    def test_a_value_moved_to_another_name_is_found(self, store: Store, bench: Bench) -> None:
        store.swap("a", None, b"1")
        store.swap("b", None, b"2")
        bench.write_ref("b", bench.raw_ref("a"))
        with pytest.raises(IndexDamaged):
            store.read("b")

    def test_rebuild_replaces_all_refs_of_this_tenant_alone(self, store: Store, bench: Bench) -> None:
        other = bench.open("other")
        other.swap("theirs", None, b"x")
        store.swap("gone", None, b"x")
        store.swap("stays", None, b"old")
        store.rebuild({"stays": b"new", "back": b"y"})
        assert sorted(store.list_refs("")) == [("back", b"y"), ("stays", b"new")]
        assert [name for name, _ in store.last_refs("", None, 9)] == ["stays", "back"]
        assert list(other.list_refs("")) == [("theirs", b"x")]
        assert store.swap("stays", b"new", b"newer")
        store.rebuild({})
        assert list(store.list_refs("")) == []

    # --- all together -------------------------------------------------------------------------

    def test_sound_index_has_no_problems(self, store: Store) -> None:
        store.swap("a", None, b"1")
        assert store.check_index() == ()

    def test_tenants_never_meet(self, store: Store, bench: Bench) -> None:
        other = bench.open("other")
        blob = store.put(ROWS, b"mine")
        store.swap("s", None, b"mine")
        assert other.read("s") is None
        assert other.has([blob]) == (False,)
        assert list(other.list_blobs()) == []
        assert not other.delete_blob(blob, 0)
        with pytest.raises(BlobMissing):
            other.get(blob)

    @pytest.mark.parametrize("tenant", ["", ".", "..", "a/b", "a b", "ä", "x" * 129])
    def test_bad_tenants_are_refused(self, bench: Bench, tenant: str) -> None:
        with pytest.raises(NameRefused):
            bench.open(tenant)

    def test_two_handles_see_one_content(self, store: Store, bench: Bench) -> None:
        other = bench.open()
        blob = store.put(ROWS, b"shared")
        assert other.get(blob) == b"shared"
        assert other.swap("s", None, b"1")
        assert store.swap("s", b"1", b"2")
        assert other.read("s") == b"2"
        other.rebuild({"s": b"3"})
        assert store.read("s") == b"3"
        assert store.swap("s", b"3", b"4")
        assert other.read("s") == b"4"

    def test_usage_counts_blobs_and_refs(self, store: Store) -> None:
        empty = store.usage()
        blob = store.put(ROWS, bytes(5000))
        assert store.usage() >= empty + 5000
        store.put(ROWS, bytes(5000))
        assert store.usage() < empty + 10_000
        store.delete_blob(blob, 0)
        assert store.usage() < empty + 5000

    def test_usage_counts_refs_that_were_set_aside(self, store: Store) -> None:
        empty = store.usage()
        for number in range(10):
            store.swap(f"s{number}", None, bytes(50_000))
        store.rebuild({})
        assert store.usage() >= empty + 400_000  # a folder's log may have been there before

    def test_the_last_tier_is_the_one_that_usage_tells_of(self, store: Store) -> None:
        store.put(ROWS, bytes(5000))
        *quick, last = store.tiers()
        assert (last.nbytes, last.budget) == (store.usage(), None)
        assert all(tier.budget is not None and 0 < tier.nbytes <= tier.budget for tier in quick)
        assert {tier.kind for tier in (*quick, last)} <= {"memory", "disk", "redis"}

    def test_to_refresh_blobs_changes_nothing_that_is_told(self, store: Store, bench: Bench) -> None:
        blob, gone = store.put(ROWS, b"used"), bench.name(ROWS, b"gone")
        bench.age(blob, 1000)
        store.refresh([blob, gone])
        store.refresh([])
        assert [(info.blob, info.age > 900) for info in store.list_blobs()] == [(blob, True)]
        assert store.has([blob, gone]) == (True, False)
        with pytest.raises(Corrupt):
            store.refresh([BlobId("rows-b3-nothing")])

    def test_clock_is_of_this_time(self, store: Store) -> None:
        assert abs(store.now() - time.time()) < 30

    def test_nothing_is_stray_after_whole_writes(self, store: Store, bench: Bench) -> None:
        store.put(ROWS, b"whole")
        store.swap("s", None, b"1")
        assert list(store.list_stray()) == []
        assert store.sweep(0) == 0
        assert store.has([bench.name(ROWS, b"whole")]) == (True,)

    def test_no_update_is_lost_between_threads(self, bench: Bench) -> None:
        num_threads, num_swaps = 4, 25
        stores = [bench.open() for _ in range(2)]
        stores[0].swap("count", None, b"0")

        def count(store: Store) -> None:
            done = 0
            while done < num_swaps:
                value = store.read("count")
                assert value is not None
                done += store.swap("count", value, b"%d" % (int(value) + 1))

        threads = [threading.Thread(target=count, args=(stores[i % 2],)) for i in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert stores[0].read("count") == b"%d" % (num_threads * num_swaps)

    def test_a_delete_never_wins_over_a_put(self, bench: Bench) -> None:
        """Each putter ages its own blob, so that a delete may come; once its put returned, none may."""
        stop, latest = time.monotonic() + 1.0, time.monotonic() + 60.0
        blobs = [bench.name(ROWS, b"raced %d" % number) for number in range(2)]
        failures: list[BaseException] = []
        num_deleted = [0]

        def racing() -> bool:
            """For a second, or on a busy machine until there was a race at all."""
            now = time.monotonic()
            return now < stop or (not num_deleted[0] and not failures and now < latest)

        def put(number: int, store: Store) -> None:
            try:
                while racing():
                    bench.age(store.put(ROWS, b"raced %d" % number), 1000)
                    assert store.get(store.put(ROWS, b"raced %d" % number)) == b"raced %d" % number
            except (AssertionError, StoreError, BlobMissing) as error:
                failures.append(error)

        def delete(store: Store) -> None:
            try:
                while racing():
                    num_deleted[0] += sum(store.delete_blob(blob, 500) for blob in blobs)
            except StoreError as error:
                failures.append(error)

        threads = [threading.Thread(target=put, args=(number, bench.open())) for number in range(2)]
        threads += [threading.Thread(target=delete, args=(bench.open(),)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert num_deleted[0] > 0

    def test_a_wiped_store_is_empty_and_works(self, store: Store, bench: Bench) -> None:
        other = bench.open("other")
        theirs = other.put(ROWS, b"theirs")
        other.swap("s", None, b"theirs")
        empty = store.usage()
        blob = store.put(ROWS, bytes(90_000))
        store.put(MANIFEST, b"young")
        store.swap("s", None, b"1")
        store.hint({"h": b"2"})
        store.rebuild({"s": b"2"})
        store.wipe()
        assert list(store.list_blobs()) == list(store.list_refs("")) == list(store.list_stray()) == []
        assert (store.read("s"), store.has([blob]), store.check_index()) == (None, (False,), ())
        assert store.usage() < empty + 90_000
        with pytest.raises(BlobMissing):
            store.get(blob)
        assert store.swap("s", None, b"anew")
        assert store.get(store.put(ROWS, b"anew")) == b"anew"
        assert (other.get(theirs), other.read("s")) == (b"theirs", b"theirs")

    def test_what_is_put_for_a_session_is_read_by_all(self, store: Store) -> None:
        own = store.scoped("01ARZ3NDEKTSV4RRFFQ69G5FAV")
        blob = own.put(ROWS, b"a session's")
        assert store.get(blob) == own.get(blob) == b"a session's"
        assert own.swap("s", None, b"1")
        assert store.read("s") == b"1"

    def test_closing_twice_is_fine(self, bench: Bench) -> None:
        store = bench.open("closed-twice")
        store.close()
        store.close()
