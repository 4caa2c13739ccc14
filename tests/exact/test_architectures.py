"""The README says of every architecture what is true of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from engine.errors import EditRefused
from engine.models.table import GGUF_NAMED, MODELS
from tests.exact.architectures import PAGE, render
from tests.exact.members import MEMBERS, OTHERS, folder, open_member
from tests.oracles import base

ALL = {**MEMBERS, **OTHERS}


def test_the_table_of_architectures_is_up_to_date() -> None:
    assert PAGE.read_text("utf-8") == render(), "`make docs` makes it anew"


def test_every_architecture_that_can_be_loaded_is_in_it() -> None:
    names = {name.removesuffix("_text").removesuffix("_vl") for name in MODELS}
    assert names == {"gemma3" if family == "gemma3" else family for family in ALL}


@pytest.mark.parametrize("family", list(ALL))
def test_an_architecture_has_the_kind_of_memory_that_is_said_of_it(family: str) -> None:
    assert open_member(family, "f32")._model.needs.kind == ALL[family].kind


@pytest.mark.parametrize("family", list(ALL))
def test_the_edits_are_those_that_are_said(family: str) -> None:
    engine = open_member(family, "f32")
    seq = engine.create()
    engine.feed(seq, base.tokens(2, 60))
    fork = engine.fork(seq)
    assert engine.tokens(fork) == engine.tokens(seq)
    if engine.can_resume_at(seq, 31):
        engine.rewind(seq, 31)
    else:
        with pytest.raises(EditRefused):
            engine.rewind(seq, 31)
        assert engine.length(seq) == 60
    if engine._memory.refuse_shift() is None:
        assert engine.shift(fork, 4, 10) == 10
    else:
        with pytest.raises(EditRefused):
            engine.shift(fork, 4, 10)
        assert engine.length(fork) == 60


@pytest.mark.parametrize("family", [family for family in ALL if family not in GGUF_NAMED])
def test_the_whole_configuration_is_part_of_what_rows_mean(family: str, tmp_path: Path) -> None:
    shutil.copytree(folder(family), tmp_path, dirs_exist_ok=True)
    tree = json.loads((tmp_path / "config.json").read_text())
    same, other = dict(tree, use_cache=False, transformers_version="0"), dict(tree, a_field_of_tomorrow=1)
    mine = open_member(family, "f32").fingerprint
    (tmp_path / "config.json").write_text(json.dumps(same))
    assert list(base.open_engine(tmp_path).fingerprint.differing(mine)) == []
    (tmp_path / "config.json").write_text(json.dumps(other))
    assert [field for field, _, _ in base.open_engine(tmp_path).fingerprint.differing(mine)] == ["config"]
