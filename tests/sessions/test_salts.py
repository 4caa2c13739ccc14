"""A salt is told by its digest alone, goes with its session, and is nobody's once two were asked with."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3

from serialization.archive import check_archive, write_archive
from serialization.blobs import BlobClass, blob_class
from serialization.manifest import Manifest, ManifestKind
from sessions.conversation import Conversation, Reply
from sessions.manager import SessionManager
from sessions.salts import after_turn, digest_of, of_fork, own
from sessions.stores.disk import DiskStore
from sessions.stores.index import INDEX
from tests.serialization.states import EMPTY

FORMAT = (Path(__file__).parents[2] / "docs" / "format.md").read_text("utf-8")
LONG = "a secret that is long enough to be found by those who know how it begins. " * 8
A, B = digest_of("default", "a"), digest_of("default", "b")
SHORT = Reply(max_tokens=4)


def context(of: str) -> str:
    (found,) = re.findall(rf"= BLAKE3 of {of}, derive_key with the context `(.+?)`", FORMAT)
    return str(found)


def test_a_digest_is_made_as_the_page_says() -> None:
    key = blake3(b"t", derive_key_context=context("the tenant")).digest()
    assert digest_of("t", "é") == "b3-" + blake3("é".encode(), key=key).hexdigest()
    assert own("s") == "b3-" + blake3(b"s", derive_key_context=context("the session id")).hexdigest()


def test_tenants_and_texts_have_digests_of_their_own() -> None:
    assert digest_of("t", "") is None
    found = [digest_of(tenant, salt) for tenant in ("a", "ab") for salt in ("b", "bb", "\0", "\ud800")]
    assert len({*found, own("b"), own("a")}) == 10


def test_the_law_of_a_turn() -> None:
    begun = replace(EMPTY, tokens=(1,))
    mine = own(EMPTY.session)
    assert [after_turn(EMPTY, asked) for asked in (None, A)] == [None, A]  # the first turn
    assert [after_turn(begun, asked) for asked in (None, A)] == [None, mine]
    salted = replace(begun, salt=A)
    assert [after_turn(salted, asked) for asked in (None, A, B)] == [mine, A, mine]
    rewound = replace(EMPTY, salt=A)
    assert [after_turn(rewound, asked) for asked in (None, A)] == [mine, A]
    alone = replace(begun, salt=mine)
    assert {after_turn(alone, asked) for asked in (None, A, B)} == {mine}


def test_the_law_of_a_fork() -> None:
    assert of_fork(EMPTY, "other") is None
    assert of_fork(replace(EMPTY, salt=A), "other") == A
    assert of_fork(replace(EMPTY, salt=own(EMPTY.session)), "other") == own("other")


# --- stored -----------------------------------------------------------------------------------


@pytest.fixture
def salted(manager: SessionManager) -> SessionManager:
    return manager.salted(manager.engine, A)


def said(manager: SessionManager, name: str | None = None) -> Manifest:
    chat = Conversation.new(manager, name)
    for _ in chat.say(LONG, SHORT):
        pass
    assert chat.save_error is None
    chat.close()
    return manager.manifest(chat.session.id)


def gone_on(manager: SessionManager, session: str) -> Manifest:
    chat = Conversation.open(manager, session)
    for _ in chat.say("and then?", SHORT):
        pass
    assert chat.save_error is None
    chat.close()
    return manager.manifest(session)


def hits(manager: SessionManager, tokens: tuple[int, ...]) -> dict[str | None, str]:
    """By salt the session whose past would be shared."""
    found = {
        salt: manager.salted(manager.engine, salt).known_prefix(tokens)
        for salt in (None, A, B, digest_of("other", "a"))
    }
    return {salt: hit.session for salt, hit in found.items() if hit is not None}


def test_a_session_is_found_by_its_own_salt_alone(manager: SessionManager, salted: SessionManager) -> None:
    manifest = said(salted)
    assert manifest.salt == A
    assert hits(manager, manifest.tokens) == {A: manifest.session}
    ordinary = said(manager)
    assert ordinary.salt is None
    assert hits(manager, manifest.tokens) == {A: manifest.session, None: ordinary.session}


def test_who_goes_on_with_the_same_salt_keeps_it(manager: SessionManager, salted: SessionManager) -> None:
    manifest = gone_on(salted, said(salted).session)
    assert (manifest.salt, manifest.generation) == (A, 2)
    assert hits(manager, manifest.tokens) == {A: manifest.session}


@pytest.mark.parametrize("asked", [None, B])
def test_a_session_of_two_salts_is_found_by_nobody(
    manager: SessionManager, salted: SessionManager, asked: str | None
) -> None:
    session = said(salted).session
    manifest = gone_on(manager.salted(manager.engine, asked), session)
    assert manifest.salt == own(session)
    assert hits(manager, manifest.tokens) == {}
    assert gone_on(salted, session).salt == own(session)  # for good
    assert hits(manager, manifest.tokens) == {}
    fork = manager.manifest(manager.fork(session).id)
    assert fork.salt == own(fork.session)
    assert hits(manager, manifest.tokens) == {}


def test_a_session_without_a_salt_is_nobodys_once_one_was_asked_with(
    manager: SessionManager, salted: SessionManager
) -> None:
    session = said(manager).session
    manifest = gone_on(salted, session)
    assert manifest.salt == own(session)
    assert hits(manager, manifest.tokens) == {}


def test_forks_pins_and_cuts_keep_the_salt(manager: SessionManager, salted: SessionManager) -> None:
    manifest = said(salted, "s")
    bare = manager.manifest(manager.release_rows(manager.fork("s").id).id)
    fork = manager.manifest(manager.fork("s").id)
    manager.pin("s", "p")
    loaded = manager.manifest(manager.load("p").id)
    renamed = manager.manifest(manager.rename("s", "t").id)
    rewound = manager.manifest(manager.rewind("t").id)
    assert {each.salt for each in (fork, loaded, bare, renamed, rewound)} == {A}
    assert hits(manager, manifest.tokens) == {A: loaded.session}


def test_a_rebuilt_index_has_each_under_its_own_salt(
    manager: SessionManager, salted: SessionManager, tmp_path: Path
) -> None:
    manifest = said(salted)
    manager.store.close()
    for path in (tmp_path / "store").rglob(f"{INDEX}*"):
        path.write_bytes(b"damaged" * 100)
    mended = SessionManager(DiskStore(tmp_path / "store", "default"), manager.engine, manager.policy)
    assert mended.repair().clean
    assert mended.manifest(manifest.session).salt == A
    assert hits(mended, manifest.tokens) == {A: manifest.session}


def test_a_hint_in_another_chain_is_not_believed(manager: SessionManager, salted: SessionManager) -> None:
    """As an index has that was rebuilt by a build that knew no salts."""
    manifest = said(salted)
    manager._prefixes.add(replace(manifest, salt=None), 0)
    assert hits(manager, manifest.tokens) == {A: manifest.session}


def test_an_archive_has_no_salt_and_what_is_imported_shares_nothing(
    manager: SessionManager, salted: SessionManager
) -> None:
    session = said(salted).session
    out = io.BytesIO()
    manager.export(session, out)
    out.seek(0)
    assert check_archive(out).salt is None
    manager.delete(session)
    brought = manager.manifest(salted.import_(io.BytesIO(out.getvalue())).id)
    assert brought.salt is None
    assert hits(manager, brought.tokens) == {}
    assert hits(manager, gone_on(manager, brought.session).tokens) == {}


def test_a_salt_that_an_archive_brings_is_left(manager: SessionManager, salted: SessionManager) -> None:
    manifest = said(salted)
    out = io.BytesIO()
    write_archive(out, manifest, manager.store)  # as another build might
    out.seek(0)
    assert check_archive(out).salt == A
    out.seek(0)
    assert manager.manifest(manager.import_(out).id).salt is None


def test_a_deleted_session_leaves_no_salt(manager: SessionManager, salted: SessionManager) -> None:
    manager.delete(said(salted).session)
    blobs = [info.blob for info in manager.store.list_blobs()]
    tombs = [blob for blob in blobs if blob_class(blob) is BlobClass.MANIFEST]
    newest = max((Manifest.decode(manager.store.get(blob)) for blob in tombs), key=lambda m: m.generation)
    assert (newest.kind, newest.salt) == (ManifestKind.TOMBSTONE, None)
