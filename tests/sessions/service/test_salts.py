"""Who does not know a salt hits nothing that was said with it, in no way and at no time; nor does another
tenant who knows it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from engine.errors import StoreUnavailable
from sessions.names import PREFIXES, new_session_id
from sessions.policy import Policy
from sessions.restore import Reason
from sessions.salts import own
from sessions.service.ask import Ask, ChatMessage, Keep, Own
from sessions.service.backend import Backend, BackendConfig
from sessions.stores.base import tenant_key
from sessions.stores.disk import DiskStore
from sessions.stores.index import INDEX
from sessions.stores.open import open_store
from tests.faults import FaultyStore
from tests.redis_server import RedisServer
from tests.sessions.conftest import MakeEngine
from tests.sessions.sealing import files, ring
from tests.sessions.service.conftest import MakeBackend
from tests.sessions.service.hearing import SAMPLED, heard, user

T = "ann"
SECRET = "a secret that is long enough to be found by those who know how it begins. " * 4
ASK = Ask(max_tokens=4, sampler=SAMPLED)
A, B = replace(ASK, salt="a"), replace(ASK, salt="b")


@dataclass
class World:
    """Backends on one store, one after the other. `damage` is what breaks its index while nobody uses it."""

    make_engine: MakeEngine
    url: str
    folder: Path
    sealed: bool
    damage: Callable[[], None]
    settings: dict[str, object] = field(default_factory=dict)
    opened: list[Backend] = field(default_factory=list)

    @property
    def backend(self) -> Backend:
        return self.opened[-1] if self.opened else self.restart()

    def restart(self) -> Backend:
        """Nothing is in memory any more."""
        self.close()
        keyring = ring(self.folder / "keys") if self.sealed else None
        config = BackendConfig(policy=Policy(lease=5, grace=10))
        self.opened.append(
            Backend(
                self.make_engine(**self.settings),
                lambda tenant: open_store(self.url, tenant, keyring=keyring),
                config,
            )
        )
        return self.opened[-1]

    def rebuild(self) -> None:
        """The index lost, and made again from the manifests."""
        self.close()
        self.damage()
        report = self.restart().manager(T).repair()
        assert report.clean
        assert any("rebuilt the index" in line for line in report.repaired)

    def close(self) -> None:
        while self.opened:
            self.opened.pop().close()


def _disk(make_engine: MakeEngine, tmp_path: Path, sealed: bool) -> World:
    def damage() -> None:
        for path in (tmp_path / "store").rglob(f"{tenant_key(T)}/**/{INDEX}*"):
            path.write_bytes(b"damaged" * 100)

    return World(make_engine, str(tmp_path / "store"), tmp_path, sealed, damage)


@pytest.fixture(params=["disk", "sealed", "redis"])
def world(request: pytest.FixtureRequest, make_engine: MakeEngine, tmp_path: Path) -> Iterator[World]:
    with contextlib.ExitStack() as stack:
        if request.param == "redis":
            server = stack.enter_context(RedisServer())

            def damage() -> None:
                client, refs = server.client(), f"tenuto:{{{tenant_key(T)}}}:refs"
                name = next(key for key in client.hkeys(refs) if key.startswith(b"session/"))
                client.hset(refs, name, b"damaged")

            made = World(make_engine, server.url, tmp_path, False, damage)
        else:
            made = _disk(make_engine, tmp_path, request.param == "sealed")
        stack.callback(made.close)
        yield made


def hits(backend: Backend, tenant: str, ask: Ask, said: list[ChatMessage]) -> int:
    """The most tokens that are restored to a conversation that is said again, or that goes on from it. Leaves
    nothing behind."""
    most = 0
    for messages in (said[:1], [*said, ChatMessage("user", "more")]):
        begun, _, _ = heard(backend.complete(tenant, messages, ask, Keep.NOTHING))
        most = max(most, begun.restored.restored)
    return most


def hits_beginning(backend: Backend, tenant: str, ask: Ask, said: list[ChatMessage]) -> int:
    """The tokens that are restored to a session that begins with the same; it is deleted again."""
    session = backend.create(tenant)
    begun, _, _ = heard(backend.turn(tenant, session.id, said[:1], ask))
    backend.delete(tenant, session.id)
    return begun.restored.restored


def others_hit(backend: Backend, said: list[ChatMessage]) -> dict[tuple[str, str], int]:
    asked = [(T, ASK), (T, B), ("eve", ASK), ("eve", A)]
    found = {}
    for tenant, ask in asked:
        stateless = hits(backend, tenant, ask, said)
        found[tenant, ask.salt] = max(stateless, hits_beginning(backend, tenant, ask, said))
    return {who: count for who, count in found.items() if count}


def session_of(backend: Backend, ask: Ask = A) -> tuple[str, list[ChatMessage]]:
    session = backend.create(T).id
    _, text, _ = heard(backend.turn(T, session, user(SECRET), ask))
    return session, [*user(SECRET), ChatMessage("assistant", text)]


def kept_past(backend: Backend) -> tuple[str, list[ChatMessage]]:
    _, text, ended = heard(backend.complete(T, user(SECRET), A))
    return ended.session or "", [*user(SECRET), ChatMessage("assistant", text)]


def response(backend: Backend, parent: str | None = None) -> tuple[str, list[ChatMessage]]:
    own_ = Own(new_session_id(), lambda *_: "note")
    _, text, ended = heard(backend.complete(T, user(SECRET), A, Keep.SESSION, parent, own_))
    return ended.session or "", [*user(SECRET), ChatMessage("assistant", text)]


@pytest.mark.parametrize("begin", [session_of, kept_past, response])
def test_nobody_else_hits_what_was_said_with_a_salt(
    world: World, begin: Callable[[Backend], tuple[str, list[ChatMessage]]]
) -> None:
    session, said = begin(world.backend)
    assert others_hit(world.backend, said) == {}
    assert hits(world.backend, T, A, said) > 255
    world.restart()
    assert others_hit(world.backend, said) == {}
    assert hits(world.backend, T, A, said) > 255
    world.rebuild()
    assert others_hit(world.backend, said) == {}
    assert hits(world.backend, T, A, said) > 255
    fork = world.backend.fork(T, session).id
    world.backend.pin(T, session, "kept")
    loaded = world.backend.load_pin(T, "kept").id
    assert others_hit(world.backend, said) == {}
    world.backend.delete(T, session)
    for each in (fork, loaded):  # said on in, with the salt
        heard(world.backend.turn(T, each, user("and then?"), A))
        assert others_hit(world.backend, said) == {}
    assert hits(world.backend, T, A, said) > 255
    world.restart()
    assert others_hit(world.backend, said) == {}


@pytest.mark.parametrize(("first", "then"), [(A, ASK), (A, B), (ASK, A)])
def test_a_session_of_two_salts_is_hit_by_nobody(world: World, first: Ask, then: Ask) -> None:
    """In memory, stored, after a repair; what was said with the one as what was said with the other."""
    everyone = [(T, ASK), (T, A), (T, B), ("eve", ASK), ("eve", A)]

    def hit(said: list[ChatMessage]) -> int:
        return max(hits(world.backend, tenant, ask, said) for tenant, ask in everyone)

    session, said = session_of(world.backend, first)
    more = "another secret, said to the same session by somebody who knows another salt, or none. " * 2
    begun, text, _ = heard(world.backend.turn(T, session, user(more), then))
    assert begun.restored.restored > 255  # of the session's own rows: those are read by its turns
    whole = [*said, *user(more), ChatMessage("assistant", text)]
    assert world.backend.manager(T).manifest(session).salt == own(session)
    world.backend.fork(T, session)
    # what lay in memory under the first salt is forgotten with the process
    world.restart()
    assert hit(whole) == hit(said) == 0
    begun, _, _ = heard(world.backend.turn(T, session, user("more"), first))
    assert begun.restored.reason is Reason.EXACT
    assert hit(whole) == 0
    world.rebuild()
    assert hit(whole) == hit(said) == 0


def test_a_past_that_was_gone_on_from_with_another_salt_is_no_past(make_backend: MakeBackend) -> None:
    """Not even that there is one is told."""
    backend = make_backend()
    session, said = kept_past(backend)
    heard(backend.turn(T, session, user("and then?"), ASK))
    begun, _, ended = heard(make_backend().complete(T, [*said, ChatMessage("user", "more")], A))
    assert (begun.restored.reason, begun.restored.restored, begun.restored.detail) == (Reason.NEW, 0, "")
    assert ended.session != session


def test_a_turn_with_another_salt_is_heard_where_nobody_else_is(world: World) -> None:
    """Not even in the memory of the process that said it."""
    session, _ = session_of(world.backend, A)
    world.restart()
    more = "another secret, said to the same session by somebody who knows another salt, or none. " * 2
    _, text, _ = heard(world.backend.turn(T, session, user(more), B))
    whole = [*user(SECRET), *user(more), ChatMessage("assistant", text)]
    for ask in (ASK, A, B):
        assert hits(world.backend, T, ask, whole) == 0, ask.salt


def test_a_session_says_the_same_whatever_it_is_asked_with(world: World) -> None:
    """A salt says what is shared, not what is said."""
    said = []
    world.settings["deterministic"] = True
    for asks in ((A, A, A), (A, B, ASK), (ASK, ASK, ASK)):
        session = world.backend.create(T, sampler=SAMPLED).id
        said.append(
            [
                heard(world.backend.turn(T, session, user("go on"), replace(ask, sampler=None)))[1]
                for ask in asks
            ]
        )
        world.restart()
    assert said == [said[0]] * 3


def test_a_reply_to_a_parent_of_another_salt_is_read_again(world: World) -> None:
    parent, said = response(world.backend)
    asked = [*said, ChatMessage("user", "more")]
    begun, _, ended = heard(
        world.backend.complete(T, asked, B, Keep.SESSION, parent, Own(new_session_id(), lambda *_: "n"))
    )
    assert begun.restored.restored == 0
    assert "another cache_salt" in begun.restored.detail
    assert others_hit(world.backend, said) == {(T, "b"): pytest.approx(500, abs=300)}  # by its own words
    assert world.backend.get(T, ended.session or "").parent == parent
    begun, _, _ = heard(world.backend.complete(T, asked, A, Keep.NOTHING, parent))
    assert begun.restored.restored > 255


def test_what_is_imported_shares_nothing(world: World) -> None:
    session, said = session_of(world.backend)
    out = io.BytesIO()
    world.backend.export(T, session, out)
    world.backend.delete(T, session)
    for ask in (ASK, A, B):
        out.seek(0)
        brought = world.backend.import_(T, out).id
        heard(world.backend.turn(T, brought, user("and then?"), ask))
        world.restart()
        assert others_hit(world.backend, said) == {}
        assert hits(world.backend, T, A, said) == 0
        world.backend.delete(T, brought)


def test_a_rewound_session_is_no_oracle(world: World) -> None:
    """Who may speak in a session, but does not know its salt, cannot ask with it."""
    session, _ = session_of(world.backend)
    secret, said = session_of(world.backend)
    heard(world.backend.turn(T, session, user("and then?"), A))
    world.backend.rewind(T, session, 2)
    assert world.backend.get(T, session).length == 0
    world.restart()
    fork = world.backend.fork(T, session).id
    for each in (session, fork):
        begun, _, _ = heard(world.backend.turn(T, each, user(SECRET), ASK))
        assert begun.restored.restored == 0
    assert others_hit(world.backend, said) == {}
    assert hits(world.backend, T, A, said) > 255
    assert secret != session


def test_what_could_not_be_saved_waits_for_the_store_before_another_salt(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    store = FaultyStore(DiskStore(tmp_path / "faulty", T))
    backend = Backend(make_engine(), lambda _: store, BackendConfig(policy=Policy(lease=5, grace=10)))
    session, _ = session_of(backend)
    turn = backend.turn(T, session, user(SECRET), A)
    next(turn)
    store.plan = "." * store.num_calls + "r" * 10_000
    *_, ended = turn
    assert getattr(ended, "save_error") is not None  # noqa: B009
    heard(backend.turn(T, session, user("still with the salt"), A))
    with pytest.raises(StoreUnavailable):
        heard(backend.turn(T, session, user("without"), ASK))
    store.plan = ""
    heard(backend.turn(T, session, user("without"), ASK))
    assert backend.manager(T).manifest(session).salt == own(session)
    assert len(backend.get(T, session).messages) == 8
    backend.close()


def test_no_text_of_a_salt_is_stored(make_engine: MakeEngine, tmp_path: Path) -> None:
    salt = "aardvarks-are-salty"
    world = _disk(make_engine, tmp_path, sealed=False)
    session_of(world.backend, replace(ASK, salt=salt))
    kept = replace(ASK, salt=salt)
    heard(world.backend.complete(T, user(SECRET), kept))
    world.close()
    stored = list(files(tmp_path / "store"))
    assert any(SECRET.encode() in content for content in stored)
    assert not any(salt.encode() in content for content in stored)


def test_the_keys_of_hints_tell_no_salt_from_none(make_engine: MakeEngine, tmp_path: Path) -> None:
    world = _disk(make_engine, tmp_path, sealed=False)
    for ask in (ASK, A):
        session_of(world.backend, ask)
    hints = [name for name, _ in world.backend.manager(T).store.list_refs(PREFIXES)]
    assert hints
    assert {len(name) for name in hints} == {len(PREFIXES) + 64}
    world.close()
