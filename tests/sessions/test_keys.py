"""An API key opens its tenant's door, is stored nowhere, and no other text opens any."""

from __future__ import annotations

import re
import string
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import KeyFileRefused, KeyRefused, NameRefused
from sessions.keys import API_KEYS, ApiKeys
from tests.faults import flip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "keys"


@pytest.fixture
def api(folder: Path) -> ApiKeys:
    return ApiKeys(folder)


def test_a_key_is_its_tenants(api: ApiKeys) -> None:
    one, text = api.create("one")
    other, another = api.create("other")
    assert (api.find(text), api.find(another)) == (one, other)
    assert (one.tenant, other.tenant) == ("one", "other")
    assert list(api.list()) == [one, other]


def test_a_key_is_256_random_bits_and_says_its_id(api: ApiKeys) -> None:
    made = [api.create("one") for _ in range(20)]
    for key, text in made:
        assert re.fullmatch(r"tnt_[a-z2-7]{13}_[a-z2-7]{52}", text)
        assert text.split("_")[1] == key.id
    secrets = [text.split("_")[2] for _, text in made]
    assert len(set(secrets)) == len({key.id for key, _ in made}) == 20
    assert len({secret[at] for secret in secrets for at in range(52)}) == 32


def test_the_secret_is_stored_nowhere(api: ApiKeys, folder: Path) -> None:
    key, text = api.create("one")
    secret = text.split("_")[2]
    stored = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    shown = repr((api, key, api.list()))
    for at in range(0, 52 - 8, 4):
        assert secret[at : at + 8].encode() not in stored
        assert secret[at : at + 8] not in shown
    assert (folder / API_KEYS).stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_text_that_differs_anywhere_opens_nothing(api: ApiKeys) -> None:
    _, text = api.create("one")
    for at in range(len(text)):
        for letter in ("a", "b", "_", "A", "\0", "ä"):
            if letter != text[at]:
                with pytest.raises(KeyRefused):
                    api.find(text[:at] + letter + text[at + 1 :])
    for other in ("", text[:-1], text + "a", text.upper(), f" {text}", f"{text}\n", "tnt_", "x" * 10_000_000):
        with pytest.raises(KeyRefused):
            api.find(other)


def test_two_halves_of_different_keys_open_nothing(api: ApiKeys) -> None:
    (_, one), (_, other) = api.create("one"), api.create("other")
    with pytest.raises(KeyRefused):
        api.find("_".join((*one.split("_")[:2], other.split("_")[2])))


@given(st.text(string.printable + "é\ud800", max_size=100))
def test_no_text_at_all_is_more_than_refused(text: str) -> None:
    for shaped in (text, f"tnt_{text}", f"tnt_{'a' * 13}_{'b' * 52}"):
        with pytest.raises(KeyRefused, match="not known here, or was revoked"):
            ApiKeys(Path("/nowhere-at-all")).find(shaped)


def test_a_refusal_does_not_tell_why(api: ApiKeys) -> None:
    key, text = api.create("one")
    gone, gone_text = api.create("one")
    api.revoke(gone.id)
    told = set()
    for wrong in (text[:-1] + ("a" if text[-1] != "a" else "b"), gone_text, "nonsense", ""):
        with pytest.raises(KeyRefused) as caught:
            api.find(wrong)
        told.add(str(caught.value))
        assert caught.value.details == {}
    assert len(told) == 1
    assert api.find(text) == key


def test_the_digest_is_compared_also_where_there_is_no_such_key(
    api: ApiKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it takes as long: counted, since times on a busy machine tell nothing."""
    import hmac

    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or real(a, b))
    _, text = api.create("one")
    api.find(text)
    for wrong in (f"tnt_{'a' * 13}_{'b' * 52}", "nonsense", text[:-1] + "aa"):
        with pytest.raises(KeyRefused):
            api.find(wrong)
    assert compared == [(32, 32)] * 4


def test_a_revoked_key_is_refused_at_once_in_every_process(api: ApiKeys, folder: Path) -> None:
    running = ApiKeys(folder)
    key, text = api.create("one")
    assert running.find(text) == key
    assert api.revoke(key.id) == key
    with pytest.raises(KeyRefused):
        running.find(text)
    with pytest.raises(KeyRefused, match="no API key of the id"):
        api.revoke(key.id)
    again, new = api.create("one")
    assert running.find(new) == again


def test_all_keys_of_a_tenant_go_together(api: ApiKeys) -> None:
    texts = [api.create("one")[1] for _ in range(3)]
    kept, text = api.create("other")
    assert api.revoke_all("one") == 3
    assert api.revoke_all("one") == 0
    for each in texts:
        with pytest.raises(KeyRefused):
            api.find(each)
    assert api.find(text) == kept


def test_without_a_folder_there_are_no_keys_and_none_is_made(folder: Path, api: ApiKeys) -> None:
    assert list(api.list()) == []
    with pytest.raises(KeyRefused):
        api.find("x")
    assert not folder.exists()


@pytest.mark.parametrize("tenant", ["", "..", "a/b", "a b", "x" * 129])
def test_a_tenant_that_may_not_be_one_gets_no_key(api: ApiKeys, tenant: str) -> None:
    with pytest.raises(NameRefused):
        api.create(tenant)
    assert list(api.list()) == []


def test_a_damaged_file_is_refused_and_not_overwritten(api: ApiKeys, folder: Path) -> None:
    _, text = api.create("one")
    path = folder / API_KEYS
    whole = path.read_bytes()
    for damaged in [whole[:length] for length in range(len(whole))] + [
        flip(whole, bit) for bit in range(0, 8 * len(whole), 5) if bit // 8 != 7
    ]:
        path.write_bytes(damaged)
        for act in (lambda: ApiKeys(folder).find(text), lambda: ApiKeys(folder).create("one")):
            with pytest.raises(KeyFileRefused):
                act()
        assert path.read_bytes() == damaged
    path.write_bytes(whole)
    path.chmod(0o640)
    with pytest.raises(KeyFileRefused, match="chmod 600"):
        ApiKeys(folder).find(text)


def test_keys_made_at_the_same_time_are_all_there(folder: Path) -> None:
    texts: list[str] = []

    def make() -> None:
        for _ in range(5):
            texts.append(ApiKeys(folder).create("one")[1])

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    api = ApiKeys(folder)
    assert len({api.find(text).id for text in texts}) == 20
