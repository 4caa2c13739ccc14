"""Laws of the manifest: one spelling, every rule kept, and each way to be wrong refused by its own error."""

from __future__ import annotations

import random
import tracemalloc
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import (
    Corrupt,
    FingerprintMismatch,
    LimitExceeded,
    StateError,
    UnknownFeature,
    UnknownVersion,
)
from engine.state import Fingerprint, Pending, Provenance, Span
from serialization.manifest import Manifest, manifest_id
from serialization.refs import ChunkRef
from serialization.snapshot import write_state
from tests.serialization.manifests import manifests
from tests.serialization.spelling import NEW, OLD, map_of, record_of, written, written_as_1
from tests.serialization.states import EMPTY, CountingStore, logits_edge, manifest_of, state_of


def full() -> Manifest:
    store, state = CountingStore(), state_of(300, edge=logits_edge())
    return manifest_of(state, write_state(store, state, None, 0))


FULL = full()


def changed(**changes: object) -> bytes:
    """The bytes of a good manifest with other values in its map; ... takes a key away."""
    return written({**record_of(FULL.encode()), **changes})


def record(key: str) -> Any:
    return record_of(FULL.encode())[key]


@given(manifests())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_manifest_comes_back_and_has_one_spelling(manifest: Manifest) -> None:
    data = manifest.encode()
    found = Manifest.decode(data)
    assert found == manifest
    assert found.encode() == data


@given(st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_whatever_is_accepted_is_what_would_be_written(data: st.DataObject) -> None:
    """Mutations inside the map, so that canonical but strange manifests are reached."""
    values = record_of(FULL.encode())
    key = data.draw(st.sampled_from(sorted(values)))
    values[key] = data.draw(mutated(values[key]))
    encoded = written(values)
    try:
        found = Manifest.decode(encoded)
    except StateError:
        return
    assert found.encode() == encoded


def mutated(value: Any) -> st.SearchStrategy[Any]:
    """Values like this one, one place of it another."""
    others: st.SearchStrategy[Any] = (
        st.none()
        | st.booleans()
        | st.integers(-2, 2**64 - 1)
        | st.floats(allow_nan=False)
        | st.text(max_size=5)
        | st.binary(max_size=5)
        | st.just([])
        | st.just({})
    )
    if isinstance(value, list) and value:
        places = st.integers(0, len(value) - 1)
        inside = places.flatmap(
            lambda at: mutated(value[at]).map(lambda new: [*value[:at], new, *value[at + 1 :]])
        )
        return inside | places.map(lambda at: value[:at] + value[at + 1 :]) | others
    if isinstance(value, dict) and value:
        keys = st.sampled_from(sorted(value))
        return keys.flatmap(lambda key: mutated(value[key]).map(lambda new: {**value, key: new})) | others
    return others


@given(st.binary(max_size=400))
def test_noise_is_refused(data: bytes) -> None:
    for start in (b"", OLD, NEW, NEW + len(data).to_bytes(4, "little")):
        with pytest.raises(StateError):
            Manifest.decode(start + data)


def test_any_changed_bit_gives_another_name_and_no_other_error() -> None:
    for data in (EMPTY.encode(), written_as_1(record_of(EMPTY.encode()))):
        for at in range(len(data)):
            for bit in range(8):
                other = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
                assert manifest_id(other) != manifest_id(data)
                with suppress(StateError):
                    assert map_of(Manifest.decode(other).encode()) == map_of(other)


def test_a_manifest_that_is_cut_or_goes_on_is_refused() -> None:
    for data in (FULL.encode(), written_as_1(record_of(FULL.encode()))):
        for end in range(len(data)):
            with pytest.raises(StateError):
                Manifest.decode(data[:end])
        with pytest.raises(Corrupt):
            Manifest.decode(data + b"\0")


def test_random_damage_never_raises_but_state_errors() -> None:
    noise = random.Random(3)
    data = FULL.encode()
    for _ in range(1000):
        damaged = bytearray(data)
        for _ in range(noise.randrange(1, 4)):
            damaged[noise.randrange(len(data))] = noise.randrange(256)
        with suppress(StateError):
            Manifest.decode(bytes(damaged))


ROWS = "rows-b3-" + "0" * 64
POINT = "point-b3-" + "0" * 64
SALT = "b3-" + "a" * 64
BROUGHT = {"drift": 0.5, "loss": 0.0, "proven": "rows", "source": "a file"}
LOSS = ["kv.k.00", 0, "bf16", "q8_0", 0.5, 0.25]
REPLY = [b"k" * 16, b"r" * 16, 3, 0, "eos"]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"features": ["time-travel"]}, UnknownFeature),
        ({"features": ["time-travel"], "tokens": 0}, UnknownFeature),
        ({"extra": {}}, Corrupt),
        ({"note": "x"}, Corrupt),
        ({"features": ["note"]}, Corrupt),
        ({"chunk_tokens": 64}, Corrupt),
        ({"features": ["chunk_tokens"]}, Corrupt),
        ({"features": ["chunk_tokens"], "chunk_tokens": 256}, Corrupt),
        ({"features": ["chunk_tokens"], "chunk_tokens": 100}, Corrupt),
        ({"features": ["chunk_tokens"], "chunk_tokens": 0}, Corrupt),
        (
            {"features": ["chunk_tokens"], "chunk_tokens": 512, "chunks": [[0, 300, []], [256, 300, []]]},
            Corrupt,
        ),
        ({"features": ["chunk_tokens"], "chunk_tokens": 64, "chunks": [[0, 128, []]]}, Corrupt),
        ({"features": ["reencoded"]}, Corrupt),
        ({"features": ["reencoded"], "reencoded": []}, Corrupt),
        ({"features": ["reencoded"], "reencoded": [[0, []]]}, Corrupt),
        ({"features": ["reencoded"], "reencoded": [[-1, [LOSS]]]}, Corrupt),
        ({"features": ["reencoded"], "reencoded": [[0, [LOSS]]] * 65}, LimitExceeded),
        ({"features": ["reencoded"], "reencoded": [[0, [[*LOSS[:4], -0.5, 0.5]]]]}, Corrupt),
        ({"features": ["reencoded"], "reencoded": [[0, [[*LOSS[:4], 0.0, 0.5]]]]}, Corrupt),
        ({"features": ["reencoded"], "reencoded": [[0, [[*LOSS[:4], 0.5, 0.0]]]]}, Corrupt),
        ({"features": ["reencoded"], "reencoded": [[0, [[*LOSS[:4], float("inf"), 0.5]]]]}, Corrupt),
        ({"features": ["reencoded"], "reencoded": [[0, [[*LOSS[:3], "q9_9", 0.5, 0.5]]]]}, UnknownFeature),
        ({"features": ["reencoded"], "reencoded": [[0, [LOSS[:5]]]]}, Corrupt),
        ({"features": ["note"], "note": None}, Corrupt),
        ({"features": ["note"], "note": "x" * (2**20 + 1)}, LimitExceeded),
        ({"features": ["note", "draft"], "note": "x"}, Corrupt),
        ({"salt": SALT}, Corrupt),
        ({"features": ["salt"]}, Corrupt),
        ({"features": ["salt"], "salt": None}, Corrupt),
        ({"features": ["salt"], "salt": ""}, Corrupt),
        ({"features": ["salt"], "salt": "the salt itself"}, Corrupt),
        ({"features": ["salt"], "salt": SALT + "0"}, Corrupt),
        ({"features": ["salt"], "salt": SALT.upper()}, Corrupt),
        ({"features": ["salt"], "salt": "x" * 1025}, LimitExceeded),
        ({"features": ["salt", "note"], "note": "x", "salt": SALT}, Corrupt),
        ({"brought": BROUGHT}, Corrupt),
        ({"features": ["brought"]}, Corrupt),
        ({"features": ["brought"], "brought": None}, Corrupt),
        ({"features": ["brought"], "brought": {**BROUGHT, "more": 1}}, Corrupt),
        ({"features": ["brought"], "brought": {**BROUGHT, "proven": "perhaps"}}, UnknownFeature),
        ({"features": ["brought"], "brought": {**BROUGHT, "proven": "reread"}}, Corrupt),
        ({"features": ["brought"], "brought": {**BROUGHT, "drift": None}}, Corrupt),
        ({"features": ["brought"], "brought": {**BROUGHT, "drift": -0.5}}, Corrupt),
        ({"features": ["brought"], "brought": {**BROUGHT, "loss": -0.5}}, Corrupt),
        ({"features": ["brought"], "brought": {**BROUGHT, "loss": 0}}, Corrupt),
        ({"features": ["brought"], "brought": {**BROUGHT, "source": "x" * 1025}}, LimitExceeded),
        ({"replies": [REPLY]}, Corrupt),
        ({"features": ["replies"]}, Corrupt),
        ({"features": ["replies"], "replies": []}, Corrupt),
        ({"features": ["replies"], "replies": [REPLY[:4]]}, Corrupt),
        ({"features": ["replies"], "replies": [[b"k", *REPLY[1:]]]}, Corrupt),
        ({"features": ["replies"], "replies": [["k" * 16, *REPLY[1:]]]}, Corrupt),
        ({"features": ["replies"], "replies": [[b"k" * 17, *REPLY[1:]]]}, LimitExceeded),
        ({"features": ["replies"], "replies": [REPLY, REPLY]}, Corrupt),
        ({"features": ["replies"], "replies": [[*REPLY[:3], 2**16, "eos"]]}, Corrupt),
        ({"features": ["replies"], "replies": [REPLY] * 17}, LimitExceeded),
        ({"title": ...}, Corrupt),
        ({"title": 3}, Corrupt),
        ({"title": "x" * 1025}, LimitExceeded),
        ({"session": "01ARZ3NDEKTSV4RRFFQ69G5FA"}, Corrupt),
        ({"session": "../../etc/passwd"}, Corrupt),
        ({"session": "81ARZ3NDEKTSV4RRFFQ69G5FAV"}, Corrupt),
        ({"tenant": ".."}, Corrupt),
        ({"tenant": "a/b"}, Corrupt),
        ({"tenant": ""}, Corrupt),
        ({"kind": "wish"}, UnknownFeature),
        ({"kind": "pin"}, Corrupt),
        ({"pin": "x"}, Corrupt),
        ({"generation": -1}, Corrupt),
        ({"generation": True}, Corrupt),
        ({"parent": "x"}, Corrupt),
        ({"parent": ROWS}, Corrupt),
        ({"parent": "manifest-sha256-" + "0" * 64}, UnknownFeature),
        ({"forked_from": ["x", "y", 1]}, Corrupt),
        ({"created": 1}, Corrupt),
        ({"created": -1.0}, Corrupt),
        ({"created": float("inf")}, Corrupt),
        ({"fingerprint": {"making": {}}}, Corrupt),
        ({"fingerprint": {"making": {}, "meaning": {"x": []}}}, Corrupt),
        ({"fingerprint": {"making": {}, "meaning": {str(at): at for at in range(257)}}}, LimitExceeded),
        ({"tokens": b""}, Corrupt),
        ({"tokens": b"\x05"}, Corrupt),
        ({"tokens": b"\x02\x00"}, Corrupt),
        ({"tokens": b"\x04" + bytes(1200)}, Corrupt),  # wider than the ids need
        ({"tokens": b"\x02" + bytes(598)}, Corrupt),  # spans and chunks cover one more
        ({"messages": [["user", "hello", 5, 4]]}, Corrupt),
        ({"messages": [["user", "hello", 0, 5], ["user", "hello", 4, 9]]}, Corrupt),
        ({"messages": [["user", "hello", 0, 301]]}, Corrupt),
        ({"messages": [["user", None, 0, 1]]}, Corrupt),
        ({"messages": [["user", "x" * (2**24 + 1), 0, 1]]}, LimitExceeded),
        ({"spans": []}, Corrupt),
        ({"spans": [[0, 200, "computed"], [200, 300, "computed"]]}, Corrupt),
        ({"spans": [[0, 200, "computed"], [201, 300, "shifted"]]}, Corrupt),
        ({"spans": [[0, 300, "dreamt"]]}, UnknownFeature),
        ({"chunks": []}, Corrupt),
        ({"chunks": [[0, 256, []]]}, Corrupt),
        ({"chunks": [[0, 256, []], [256, 299, []]]}, Corrupt),
        ({"chunks": [[0, 256, []], [256, 513, []]]}, Corrupt),
        ({"chunks": [[0, 256, []], [256, 512, []], [512, 768, []]]}, Corrupt),
        ({"chunks": [[1, 256, []], [256, 300, []]]}, Corrupt),
        ({"chunks": [[0, 200, []], [200, 300, []]]}, Corrupt),
        ({"chunks": [[0, 256, []], [0, 256, []], [256, 300, []]]}, Corrupt),
        ({"chunks": [[0, 256, [["token", POINT, 0, 1, 1]]], [256, 300, []]]}, Corrupt),
        ({"chunks": [[0, 256, [["token", ROWS, 1, 1, 1]]], [256, 300, []]]}, Corrupt),
        ({"chunks": [[0, 256, [["window", ROWS, 256, 1, 1]]], [256, 300, []]]}, Corrupt),
        ({"chunks": [[0, 256, [["token", ROWS, 0, 1, 2**40]]], [256, 300, []]]}, LimitExceeded),
        ({"chunks": [[0, 256, [["token", "../x", 0, 1, 1]]], [256, 300, []]]}, Corrupt),
        ({"chunks": [[0, 256, [["mood", ROWS, 0, 1, 1]]], [256, 300, []]]}, UnknownFeature),
        ({"chunks": [[0, 256, [["token", ROWS, 0, 1, 1]] * 2], [256, 300, []]]}, Corrupt),
        ({"checkpoints": [[300, None]]}, Corrupt),
        ({"checkpoints": [[301, [POINT, 1, 1]]]}, Corrupt),
        ({"checkpoints": [[300, [POINT, 1, 1]], [300, [POINT, 1, 1]]]}, Corrupt),
        ({"checkpoints": [[300, [ROWS, 1, 1]]]}, Corrupt),
        ({"edge": None}, Corrupt),
        ({"edge": -1}, Corrupt),
        ({"edge": 2**32}, LimitExceeded),
        ({"edge": [ROWS, 4, 4]}, Corrupt),
        ({"sampler": {}}, Corrupt),
        ({"canary": {"ids": [1], "logits": [], "position": 3}}, Corrupt),
        ({"canary": {"ids": [], "logits": [], "position": 301}}, Corrupt),
        ({"canary": {"ids": [1], "logits": [float("inf")], "position": 3}}, Corrupt),
    ],
)
def test_each_wrong_value_is_refused_by_its_own_error(
    changes: dict[str, object], error: type[StateError]
) -> None:
    with pytest.raises(error) as caught:
        Manifest.decode(changed(**changes))
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("part", "error"),
    [
        (["k", "token", 0, "f64", [4], 1, None], UnknownFeature),
        (["k", "wave", 0, "f32", [4], 1, None], UnknownFeature),
        (["k", "token", 0, "f32", [4], 2, None], Corrupt),
        (["k", "token", 0, "f32", [4], 1, 3], Corrupt),
        (["k", "window", 0, "f32", [4], 1, None], Corrupt),
        (["k", "token", 0, "q8_0", [33], 1, None], Corrupt),
        (["k", "token", 0, "f32", [], 1, None], Corrupt),
        (["k", "token", 0, "f32", [2**20, 2**20], 1, None], LimitExceeded),
        (["k", "block", 0, "f32", [4], 0, None], Corrupt),
    ],
)
def test_each_wrong_part_is_refused_by_its_own_error(part: list[object], error: type[StateError]) -> None:
    with pytest.raises(error) as caught:
        Manifest.decode(written({**record_of(EMPTY.encode()), "layout": [part]}))
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", -1.0), ("temperature", 1), ("top_p", 0.0), ("logit_bias", [[1]]), ("seed", 1.0)],
)
def test_a_sampler_out_of_range_is_refused(key: str, value: object) -> None:
    with pytest.raises(Corrupt):
        Manifest.decode(changed(sampler={**record("sampler"), key: value}))


def test_another_version_magic_or_letter_is_refused() -> None:
    data = EMPTY.encode()
    for version in (0, 9, 255):
        with pytest.raises(UnknownVersion, match=f"version {version} .* reads 1 to 2"):
            Manifest.decode(data[:7] + bytes([version]) + b"anything")
    for other in (b"", b"tenuto", b"x" + data[1:], data[:6] + b"A" + data[7:]):
        with pytest.raises(Corrupt):
            Manifest.decode(other)


def test_a_manifest_that_no_reader_would_take_is_not_written() -> None:
    for wrong in (
        replace(EMPTY, session="x"),
        replace(EMPTY, title="\ud800"),
        replace(EMPTY, tokens=(1,)),
        replace(EMPTY, generation=2**64),
        replace(EMPTY, created=float("nan")),
        replace(FULL, tokens=(*FULL.tokens[:-1], -1)),
        replace(FULL, tokens=(*FULL.tokens[:-1], 2**32)),
        replace(FULL, edge=None),
    ):
        with pytest.raises(StateError):
            wrong.encode()


def test_promised_lengths_allocate_nothing() -> None:
    tracemalloc.start()
    for promise in (
        b"\xdf\xff\xff\xff\xff",
        b"\x81\xa6tokens\xc6\x08\x00\x00\x00",
        b"\xdd\x00\xff\xff\xff" * 9,
    ):
        with pytest.raises(StateError):
            Manifest.decode(OLD + promise + bytes(1000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


def test_the_field_that_differs_is_named() -> None:
    FULL.refuse_other(FULL.fingerprint, FULL.layout)
    other = Fingerprint({**FULL.fingerprint.meaning, "rope": 5e5}, {"torch": "9"})
    with pytest.raises(FingerprintMismatch, match="rope") as caught:
        FULL.refuse_other(other, FULL.layout)
    assert caught.value.details["field"] == "rope"
    FULL.refuse_other(Fingerprint(FULL.fingerprint.meaning, {"torch": "9"}), FULL.layout)


def test_a_pending_id_may_belong_to_the_last_message() -> None:
    data = changed(edge=7, messages=[["assistant", "bye", 290, 301]])
    assert Manifest.decode(data).edge == Pending(7)


def test_every_blob_is_named_once() -> None:
    twice = replace(FULL, checkpoints=(replace(FULL.checkpoints[0], position=0), *FULL.checkpoints))
    blobs = [ref.blob for ref in twice.blobs()]
    assert len(blobs) == len(set(blobs)) == len(list(FULL.blobs()))


def of_chunks(*bounds: tuple[int, int], num_tokens: int = 300) -> Manifest:
    return replace(
        EMPTY,
        tokens=tuple(range(num_tokens)),
        spans=(Span(0, num_tokens, Provenance.COMPUTED),),
        chunks=tuple(ChunkRef(start, stop, ()) for start, stop in bounds),
        edge=Pending(1),
    )


@pytest.mark.parametrize(
    "bounds",
    [
        [(0, 256), (256, 300)],
        [(0, 256), (256, 300), (300, 310)],
        [(0, 256), (256, 257), (257, 258), (258, 512)],
    ],
    ids=str,
)
def test_a_chunk_that_is_not_full_may_be_in_pieces(bounds: list[tuple[int, int]]) -> None:
    manifest = of_chunks(*bounds, num_tokens=301 if len(bounds) > 2 else 300)
    assert manifest.features == (("pieces",) if len(bounds) > 2 else ())
    assert Manifest.decode(manifest.encode()) == manifest


@pytest.mark.parametrize(
    ("bounds", "told"),
    [
        ([(0, 100), (100, 256), (256, 300)], "a short one before the last run"),
        ([(0, 100), (256, 300)], "a short one before the last run"),
        ([(0, 256), (260, 300)], "a gap"),
        ([(0, 256), (256, 280), (280, 513)], "not inside of an aligned run"),
        ([(0, 100), (100, 300)], "not inside of an aligned run"),
        ([(0, 256), (256, 280), (280, 280), (280, 300)], "not inside of an aligned run"),
        ([(0, 256), (256, 290), (280, 300)], "an overlap"),
        ([(0, 256), (256, 290)], "they cover 290 tokens of 300"),
    ],
    ids=str,
)
def test_pieces_of_any_other_kind_are_refused(bounds: list[tuple[int, int]], told: str) -> None:
    with pytest.raises(Corrupt, match=told):
        of_chunks(*bounds).encode()


def test_pieces_and_their_feature_come_together() -> None:
    for bounds in ([(0, 256), (256, 300)], [(0, 256), (256, 280), (280, 300)]):
        record = record_of(of_chunks(*bounds).encode())
        swapped = {**record, "features": [] if record["features"] else ["pieces"]}
        with pytest.raises(Corrupt, match="pieces of chunks without their feature"):
            Manifest.decode(written(swapped))
