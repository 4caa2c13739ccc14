"""A conversation whose model is lost in the middle of a reply is as it was saved, and goes on without."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import pytest

from engine.errors import RankLost
from sessions.conversation import Conversation, Reply
from sessions.manager import SessionManager
from sessions.restore import Reason
from sessions.stores.disk import DiskStore
from tests.sessions.conftest import MakeEngine

SHORT = Reply(max_tokens=12)


def test_saved_by_two_ranks_lost_and_resumed_by_one(make_engine: MakeEngine, store: DiskStore) -> None:
    engine = make_engine(tp=2)
    (other,) = engine.rank_pids.values()
    chat = Conversation.new(SessionManager(store, engine))
    for _ in chat.say("hello", SHORT):
        pass
    saved = tuple(chat.ids)
    threading.Timer(0.1, os.kill, (other, signal.SIGKILL)).start()
    with pytest.raises(RankLost):
        list(chat.say("tell me all", Reply(max_tokens=1900)))
    with contextlib.suppress(RankLost):
        chat.close()

    alone = Conversation.open(SessionManager(store, make_engine()), chat.session.id)
    assert tuple(alone.ids) == saved
    assert alone.restored is not None
    assert (alone.restored.reason, alone.restored.recomputed) == (Reason.COMPATIBLE, 0)
    assert "".join(piece.text for piece in alone.say("go on", SHORT))
