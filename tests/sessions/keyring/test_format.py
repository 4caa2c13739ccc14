"""Sections 11 and 12 of docs/format.md are executed: their examples are read, and written again."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from serialization import sealed
from serialization.blobs import BlobClass, BlobId, verify_blob
from serialization.canonical import unpack
from sessions.keyring import ciphers, master
from sessions.keyring.ciphers import Ciphers
from sessions.keyring.keyset import DataKey, KeyFile, KeySet, Scope
from sessions.keyring.master import WrappingKey
from sessions.keys import ApiKeys
from tests.serialization.test_format import PAGE, dumped, fenced, table

NONCE = bytes(range(0xC0, 0xCC))
KEYS = KeySet(
    bytes(range(0xA0, 0xB0)), Scope.TENANT, bytes(range(32)), (DataKey(1, 1.5, bytes(range(32, 64))),)
)
WRAPPER = WrappingKey.of(bytes(range(64, 96)))
REF, VALUE = "session/01ARZ3NDEKTSV4RRFFQ69G5FAV", b"manifest-k3-" + b"0" * 64


@pytest.fixture
def one_nonce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "urandom", lambda nbytes: NONCE[:nbytes])


def test_the_example_of_a_sealed_blob_is_what_the_code_reads_and_writes(one_nonce: None) -> None:
    keys, blob = Ciphers(KEYS, "default"), BlobId(fenced("text sealed-id").strip())
    verify_blob(blob, dumped("hex sealed"))
    assert keys.open_blob(blob, sealed.read_blob(blob, dumped("hex sealed"))) == dumped("hex chunk")
    assert keys.blob_id(BlobClass.ROWS, dumped("hex chunk")) == blob
    assert keys.seal_blob(blob, dumped("hex chunk")) == dumped("hex sealed")


def test_the_example_of_a_sealed_ref_is_what_the_code_reads_and_writes(one_nonce: None) -> None:
    keys, name = Ciphers(KEYS, "default"), fenced("text sealed-ref-name").strip()
    assert keys.ref_name(REF) == name
    assert name.startswith(keys.ref_start("session"))
    assert keys.open_ref(name, dumped("hex sealed-ref")) == (REF, VALUE)
    assert keys.seal_ref(REF, VALUE) == dumped("hex sealed-ref")


def test_the_example_of_a_key_file_is_what_the_code_reads_and_writes(one_nonce: None) -> None:
    file = KeyFile.decode(dumped("hex key-file"), "the example")
    assert (file.of, file.created, file.erased) == ("default", 1.5, None)
    assert file.unwrap(WRAPPER) == KEYS
    assert KeyFile.wrap("default", KEYS, 1.5, WRAPPER).encode() == dumped("hex key-file")


def test_the_keys_of_a_key_file_are_those_in_the_table() -> None:
    rows = table("| key | value |\n|---|---|\n| `created` | seconds since 1970, real |\n| `erased`")
    documented = {name for key in rows for name in re.findall(r"`(\w+)`", key)}
    assert documented == set(unpack(dumped("hex key-file")[40:], "test"))


def test_the_offsets_are_those_in_the_tables() -> None:
    rows = table("### 11.1")
    sizes = [int(cells[0]) for cells in rows.values() if cells[0].isdigit()]
    assert sum(sizes) == sealed.BLOB_ROOM
    starts = [int(at) for at in rows if at.isdigit()]
    assert [at + size for at, size in zip(starts[:-1], sizes, strict=False)] == starts[1:]
    assert len(dumped("hex sealed")) == len(dumped("hex chunk")) + sealed.BLOB_ROOM
    assert len(dumped("hex sealed-ref")) == 33 + 2 + len(REF) + len(VALUE) + 16


def test_every_context_is_one_in_the_table() -> None:
    begin = PAGE.index("| derived from |")
    documented = re.findall(r"\| `(tenuto [^`]+)` \|", PAGE[begin : PAGE.index("### 11.1")])
    used = [
        value
        for module in (ciphers, master)
        for value in vars(module).values()
        if isinstance(value, str) and value.endswith(", version 1")
    ]
    assert sorted(documented) == sorted(used)
    assert len(set(used)) == 8


def test_api_keys_have_the_frame_of_key_files(tmp_path: Path) -> None:
    ApiKeys(tmp_path).create("acme")
    data = (tmp_path / "api-keys").read_bytes()
    assert data[:8] == b"tenutoK\x01"
    (key,) = unpack(data[40:], "test")["api_keys"]
    assert set(key) == {"created", "digest", "id", "tenant"}
