"""A tenant's keys: wrapped by a master key, seen by all processes at once, gone when they are destroyed."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from engine.errors import Corrupt, Erased, KeyFileRefused, NameRefused, SealRefused, UnknownVersion
from serialization.blobs import BlobClass
from sessions.keyring.ciphers import Ciphers
from sessions.keyring.keyset import KeyFile, Scope
from sessions.keyring.master import MasterKeys, add_master, keep_newest, make_master
from sessions.keyring.ring import Keyring
from sessions.keyring.tenants import TenantKeys
from sessions.stores.base import tenant_key
from tests.faults import flip

ROOT = Path(__file__).parents[3]
MASTER = b"m" * 32
SESSION = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
ROWS = BlobClass.ROWS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def keys_of(folder: Path, tenant: str = "default", *masters: bytes) -> TenantKeys:
    return Keyring(folder, MasterKeys(masters or [MASTER])).tenant(tenant)


def sets_of(keys: TenantKeys, *sessions: str) -> list[Ciphers]:
    found = []
    for session in sessions:
        with keys.writing(session) as ciphers:
            found.append(ciphers)
    return found


def file_of(folder: Path, tenant: str = "default") -> Path:
    return folder / "tenants" / tenant_key(tenant) / "keys"


# --- key files ------------------------------------------------------------------------------


def test_a_tenant_has_no_keys_until_they_are_made(folder: Path) -> None:
    keys = keys_of(folder)
    assert not keys.exist()
    with pytest.raises(SealRefused, match="no keys of default"):
        keys.current()
    with pytest.raises(SealRefused), keys.writing():
        pass
    assert keys.make()
    assert not keys.make()
    assert keys.exist()
    assert keys.current().set_id == keys_of(folder).current().set_id


def test_files_and_folders_are_their_owners_alone(folder: Path) -> None:
    keys = keys_of(folder)
    keys.make(Scope.SESSION)
    with keys.writing(SESSION):
        pass
    for path in (folder, *folder.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)


def test_tenants_have_keys_of_their_own(folder: Path) -> None:
    one, other = keys_of(folder, "one"), keys_of(folder, "other")
    one.make()
    other.make()
    assert one.current().blob_id(ROWS, b"same") != other.current().blob_id(ROWS, b"same")
    shutil.copy(file_of(folder, "one"), file_of(folder, "other"))
    with pytest.raises(KeyFileRefused, match="another tenant's"):
        keys_of(folder, "other").current()
    with pytest.raises(NameRefused):
        keys_of(folder, "../one")


def test_another_master_key_is_refused(folder: Path) -> None:
    keys_of(folder).make()
    with pytest.raises(SealRefused, match="another master key"):
        keys_of(folder, "default", b"x" * 32).current()
    with pytest.raises(SealRefused, match="no master key"):
        Keyring(folder, MasterKeys()).tenant("default").current()
    assert keys_of(folder, "default", b"x" * 32, MASTER).current()


def test_a_key_file_that_is_cut_off_anywhere_is_refused(folder: Path) -> None:
    keys_of(folder).make()
    whole = file_of(folder).read_bytes()
    for length in range(len(whole)):
        file_of(folder).write_bytes(whole[:length])
        with pytest.raises(KeyFileRefused):
            keys_of(folder).current()


def test_a_flipped_bit_in_a_key_file_is_refused(folder: Path) -> None:
    keys_of(folder).make()
    whole = file_of(folder).read_bytes()
    for bit in range(8 * len(whole)):
        file_of(folder).write_bytes(flip(whole, bit))
        with pytest.raises((KeyFileRefused, UnknownVersion)):
            keys_of(folder).current()


@pytest.mark.parametrize("field", ["of", "scope", "created", "set", "wrapped"])
def test_who_alters_a_key_file_and_its_digest_is_refused(folder: Path, field: str) -> None:
    keys_of(folder).make()
    file = KeyFile.decode(file_of(folder).read_bytes(), "it")
    assert file.wrapped is not None
    altered = {
        "of": KeyFile("default ", *_rest(file)),
        "scope": KeyFile(file.of, file.set_id, Scope.SESSION, *_rest(file)[2:]),
        "created": KeyFile(file.of, file.set_id, file.scope, 1.0, *_rest(file)[3:]),
        "set": KeyFile(file.of, bytes(16), *_rest(file)[1:]),
        "wrapped": KeyFile(file.of, *_rest(file)[:-1], flip(file.wrapped, 200)),
    }[field]
    file_of(folder).write_bytes(altered.encode())
    with pytest.raises(KeyFileRefused):
        keys_of(folder).current()


def _rest(file: KeyFile) -> tuple[object, ...]:
    return file.set_id, file.scope, file.created, file.erased, file.wrapper, file.wrapped


def test_secrets_are_never_shown(folder: Path) -> None:
    keys = keys_of(folder)
    keys.make()
    file = KeyFile.decode(file_of(folder).read_bytes(), "it")
    masters = MasterKeys([MASTER])
    found = masters.find(file.wrapper or b"")
    assert found is not None
    opened = file.unwrap(found)
    told = "".join(map(repr, (keys, keys.current(), file, opened, opened.data, masters, found)))
    for secret in (opened.naming, opened.data[0].secret, MASTER):
        assert repr(secret)[2:-1] not in told
        assert secret.hex() not in told


# --- sessions' own keys ---------------------------------------------------------------------


def test_each_session_has_a_set_for_itself_found_by_its_id(folder: Path) -> None:
    keys = keys_of(folder)
    keys.make(Scope.SESSION)
    one, other = sets_of(keys, SESSION, "another")
    assert len({one.set_id, other.set_id, keys.current().set_id}) == 3
    assert one.blob_id(ROWS, b"same") != other.blob_id(ROWS, b"same")
    again = keys_of(folder)
    assert again.find(one.set_id) is not None
    assert again.find(bytes(16)) is None
    with again.writing(SESSION) as found:
        assert found.blob_id(ROWS, b"same") == one.blob_id(ROWS, b"same")


def test_an_erased_session_is_gone_and_the_others_stay(folder: Path) -> None:
    keys, elsewhere = keys_of(folder), keys_of(folder)
    keys.make(Scope.SESSION)
    one, other = sets_of(keys, SESSION, "another")
    assert keys.erase_session(SESSION)
    assert elsewhere.find(one.set_id) is None
    assert elsewhere.find(other.set_id) is not None
    with pytest.raises(Erased), elsewhere.writing(SESSION):
        pass
    assert not keys.erase_session("never seen")


def test_a_damaged_key_file_of_one_session_hides_no_other(folder: Path) -> None:
    keys = keys_of(folder)
    keys.make(Scope.SESSION)
    one, other = sets_of(keys, SESSION, "another")
    path = file_of(folder).parent / "sessions" / one.set_id.hex()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Corrupt):
        keys_of(folder).find(one.set_id)
    assert keys_of(folder).find(other.set_id) is not None


# --- changes --------------------------------------------------------------------------------


def test_a_rotation_is_seen_by_every_handle_and_keeps_the_names(folder: Path) -> None:
    keys, elsewhere = keys_of(folder), keys_of(folder)
    keys.make()
    old = elsewhere.current()
    blob = old.blob_id(ROWS, b"content")
    keys.rotate()
    new = elsewhere.current()
    assert new is not old
    assert (new.set_id, new.blob_id(ROWS, b"content")) == (old.set_id, blob)
    assert new.ref_name("session/x") == old.ref_name("session/x")
    assert elsewhere.current() is new


def test_a_change_waits_for_those_who_write_and_is_not_kept_out(folder: Path) -> None:
    """However many write all the time, so that at no moment nobody does."""
    keys = keys_of(folder)
    keys.make()
    stop, inside, changed = threading.Event(), [0], []

    def write() -> None:
        while not stop.is_set():
            with keys.writing() as ciphers:
                newest = ciphers.seal_ref("a", b"")
                time.sleep(0.01)
                assert keys.current().is_newest_ref(newest)
                inside[0] += 1

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        keys.rotate()
        changed.append(inside[0])
    stop.set()
    for thread in threads:
        thread.join()
    assert inside[0] > 0
    assert len(changed) == 5


def test_master_keys_change_by_wrapping_anew_alone(folder: Path) -> None:
    for tenant in ("one", "two", "gone"):
        keys_of(folder, tenant).make()
    keys_of(folder, "gone").erase()
    before = keys_of(folder, "one").current()
    new = b"n" * 32
    assert Keyring(folder, MasterKeys([new, MASTER])).rewrap() == 2
    assert Keyring(folder, MasterKeys([new, MASTER])).rewrap() == 0
    for tenant in ("one", "two"):
        assert keys_of(folder, tenant, new).current()
        with pytest.raises(SealRefused):
            keys_of(folder, tenant).current()
    assert keys_of(folder, "one", new).current().blob_id(ROWS, b"x") == before.blob_id(ROWS, b"x")


def test_a_running_process_reads_its_master_file_again_at_need(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "master"
    make_master(path)
    with pytest.raises(KeyFileRefused, match="already"):
        make_master(path)
    running = Keyring(folder, MasterKeys.read(path)).tenant("default")
    running.make()
    set_id = running.current().set_id
    assert Keyring(folder, add_master(path)).rewrap() == 1
    assert running.current().set_id == set_id
    keep_newest(path)
    assert len(path.read_text().split()) == 1
    assert running.current().set_id == set_id
    assert Keyring(folder, MasterKeys.read(path)).tenant("default").current().set_id == set_id


def test_erasing_needs_no_master_key_and_leaves_nothing_to_unwrap(folder: Path) -> None:
    keys = keys_of(folder)
    assert not keys.erase()
    keys.make(Scope.SESSION)
    with keys.writing(SESSION) as own:
        pass
    assert Keyring(folder, MasterKeys()).tenant("default").erase()
    for act in (keys.current, lambda: keys.find(own.set_id), keys.make, keys.rotate, keys.drop_old):
        with pytest.raises(Erased):
            act()
    file = KeyFile.decode(file_of(folder).read_bytes(), "it")
    assert (file.wrapped, file.wrapper) == (None, None)
    assert file.erased is not None
    assert list((file_of(folder).parent / "sessions").iterdir()) == []
    assert keys.erase()
    assert keys.renew()
    assert keys.current().set_id != file.set_id


def test_a_damaged_key_file_can_be_erased(folder: Path) -> None:
    keys = keys_of(folder)
    keys.make()
    file_of(folder).write_bytes(b"damaged")
    assert keys.erase()
    with pytest.raises(Erased):
        keys.current()


# --- master keys ----------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "zz9zz", "ab" * 31, "ab" * 33, "ab" * 32 + " zz", "# " + "ab" * 32])
def test_what_is_no_master_key_is_refused_without_a_word_of_it(text: str) -> None:
    with pytest.raises(KeyFileRefused, match="no master key") as caught:
        MasterKeys.parse(text, "TENUTO_MASTER_KEY")
    assert not text or text not in str(caught.value)


def test_several_master_keys_may_be_given() -> None:
    one, two = "ab" * 32, "CD" * 32
    for text in (f"{one}\n{two}\n", f"{one},{two}", f"# new\n{one} # then\n\n{two}", f"{one} {two}"):
        keys = MasterKeys.parse(text, "it")
        assert keys.current.id == MasterKeys([bytes.fromhex(one)]).current.id
        assert keys.find(MasterKeys([bytes.fromhex(two)]).current.id) is not None


# --- kill -9 --------------------------------------------------------------------------------

CHANGES = """
import sys, itertools
from pathlib import Path
from sessions.keyring.master import MasterKeys
from sessions.keyring.ring import Keyring

folder, verb = Path(sys.argv[1]), sys.argv[2]
masters = [b"m" * 32, b"n" * 32]
print("begun", flush=True)
for turn in itertools.count(1):
    keys = Keyring(folder, MasterKeys(masters)).tenant("default")
    if verb == "rotate":
        keys.rotate()
        keys.drop_old()
    elif verb == "rewrap":
        masters.reverse()
        Keyring(folder, MasterKeys(masters)).rewrap()
    else:
        keys.erase()
        keys.renew()
"""


@pytest.mark.parametrize("verb", ["rotate", "rewrap", "erase"])
def test_kill_9_leaves_the_old_key_file_or_the_new_one(folder: Path, verb: str) -> None:
    moments = random.Random(5)
    both = (b"m" * 32, b"n" * 32)
    keys_of(folder).make()
    set_id = keys_of(folder).current().set_id
    for _ in range(8):
        command = [sys.executable, "-c", CHANGES, str(folder), verb]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as changing:
            assert changing.stdout is not None
            changing.stdout.readline()
            time.sleep(moments.uniform(0.0, 0.03))
            changing.kill()
        keys = keys_of(folder, "default", *both)
        try:
            found = keys.current().set_id
        except Erased:
            assert verb == "erase"
            keys.renew()
            continue
        assert verb == "erase" or found == set_id
    keys.erase()
    assert [path.name for path in file_of(folder).parent.iterdir() if path.is_file()] == ["keys"]
