"""Writes a store and an archive as the code of any commit does: run it from the folder of a checkout of that
commit.

    PYTHONPATH=. python PATH/TO/tests/golden/stores.py COMMIT

It makes COMMIT.zip in the folder `stores` beside it, unless that is there: what an old build wrote is never
written again. What is stored is told by `TALKS`; a build that drafts stores a draft with the last of them,
and one that seals makes a second store, sealed, with its keys.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.loader import load_engine
from sessions.conversation import Conversation, Reply
from sessions.manager import SessionManager
from sessions.policy import Policy
from sessions.stores.disk import DiskStore

HERE = Path(__file__).parent
#: (name of the session, model, what is said)
TALKS = (
    ("tea", "llama", ("Tell me of the old lighthouse keeper, please. " * 4, "And then?")),
    ("window", "gemma3", ("What did the sea say to the shore? " * 3, "Go on.")),
    ("draft", "llama", ("Once more, slowly. " * 3, "Yes.")),
)
SETTINGS = {"n_ctx": 1024, "num_cells": 2048, "num_seqs": 4, "threads": 1, "dtype": "f32"}
MASTER = b"the master key of golden stores."
POLICY = Policy(lease=5, grace=10)


def model(name: str) -> Path:
    return HERE / "models" / f"{name}.gguf"


def engine_of(name: str, drafts: bool = False) -> Any:
    engine = load_engine(model(name), EngineConfig.from_mapping(SETTINGS))
    if drafts:
        try:
            from engine.speculative.model_drafter import ModelDrafter
        except ImportError:
            print("a build before drafts")
            return engine
        drafter = load_engine(model(name), EngineConfig.from_mapping(SETTINGS))
        engine.speculate(ModelDrafter(drafter, engine), 3)
    return engine


def fill(store: Any, archive: Path | None) -> None:
    for name, of, texts in TALKS:
        manager = SessionManager(store, engine_of(of, drafts=name == "draft"), POLICY)
        chat = Conversation.new(manager, name, system="You are brief.")
        for text in texts:
            for _ in chat.say(text, Reply(max_tokens=6)):
                pass
            if chat.save_error is not None:
                raise chat.save_error
        if name == "tea":
            chat.pin("kept")
            chat.fork("branch")
            if archive is not None:
                with archive.open("wb") as file:
                    chat.export(file)
        chat.close()
    gone = Conversation.new(manager, "gone")
    for _ in gone.say("Forget this.", Reply(max_tokens=2)):
        pass
    gone.close()
    manager.delete("gone")
    store.close()


def sealed_store(folder: Path) -> Any:
    from sessions.keyring.master import MasterKeys
    from sessions.keyring.ring import Keyring
    from sessions.stores.open import open_store

    return open_store(str(folder / "sealed"), keyring=Keyring(folder / "keys", MasterKeys([MASTER])))


def main(commit: str) -> None:
    target = HERE / "stores" / f"{commit}.zip"
    if target.exists():
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fill(DiskStore(folder / "clear"), folder / "tea.tenuto")
        try:
            sealed = sealed_store(folder)
        except ImportError:
            print("a build before sealed stores")
        else:
            fill(sealed, None)
        shutil.make_archive(str(target.with_suffix("")), "zip", folder)


if __name__ == "__main__":
    main(sys.argv[1])
