"""Redis is killed and restarted while a turn is saved: a clear error, and the old turn or the new one."""

from __future__ import annotations

import random
import threading
import time
from contextlib import closing

import pytest

from engine.errors import StoreUnavailable
from engine.runner import Engine
from sessions.manager import SessionManager
from sessions.policy import Policy
from sessions.restore import Reason
from sessions.stores.base import StoreConfig
from sessions.stores.open import open_store
from tests.redis_server import RedisServer

POLICY = Policy(lease=30, grace=60)
CONFIG = StoreConfig(attempts=2, connect_timeout=0.5)
ROUNDS = 12


@pytest.mark.redis
@pytest.mark.timeout(240)
def test_a_save_meets_a_killed_server(engine: Engine) -> None:
    chance = random.Random(1)
    failed = 0
    with RedisServer(durable=True) as server, closing(open_store(server.url, config=CONFIG)) as store:
        manager = SessionManager(store, engine, POLICY)
        seq = engine.create()
        engine.feed(seq, engine.tokenizer.encode("before " * 60))
        session = manager.create()
        saved = manager.save(session, seq, ())
        stored = engine.length(seq)
        for _ in range(ROUNDS):
            engine.feed(seq, engine.tokenizer.encode("and then " * 12))
            killer = threading.Timer(chance.uniform(0, saved.seconds * 1.2), server.kill)
            killer.start()
            try:
                manager.save(session, seq, ())
            except StoreUnavailable as error:
                failed += 1
                assert "\n" not in str(error)  # noqa: PT017 - the error may or may not come
            killer.join()
            server.start()
            _until_up(manager)
            with closing(open_store(server.url)) as other:
                now = SessionManager(other, engine, POLICY)
                assert now.manifest(session.id).length in (stored, engine.length(seq))
                assert now.check().clean
                manager.save(session, seq, ())
                stored = engine.length(seq)
                assert now.manifest(session.id).length == stored
        session.close()
        again = manager.open(session.id)
        _, result = manager.resume(again)
        again.close()
        assert (result.reason, result.restored) == (Reason.EXACT, stored)
    assert failed >= 3, "the server was never killed in time: the test shows nothing"


def _until_up(manager: SessionManager) -> None:
    for _ in range(100):
        try:
            manager.store.now()
            return
        except StoreUnavailable:
            time.sleep(0.1)
    raise AssertionError("the server did not come back")
