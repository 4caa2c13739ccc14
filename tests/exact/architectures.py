"""The README's table of architectures, made from the models: `python -m tests.exact.architectures`."""

from __future__ import annotations

import json
from pathlib import Path

from engine.models.table import GGUF_NAMED
from engine.state import PartKind, parts_of
from tests.exact.members import MEMBERS, OTHERS, Member, folder, open_member

PAGE = Path(__file__).parent.parent.parent / "README.md"
BEGIN = "<!-- architectures: made by `make docs` -->\n"
END = "<!-- end of architectures -->\n"
HEAD = (
    "| architecture | `model_type` | cache | weights | rewind | shift | fork | exact resume tested |\n"
    "|---|---|---|---|---|---|---|---|\n"
)


def render() -> str:
    """The page as it should be."""
    page = PAGE.read_text("utf-8")
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    members = sorted({**MEMBERS, **OTHERS}.values(), key=lambda member: member.family)
    return before + BEGIN + HEAD + "".join(_line(member) for member in members) + END + after


def _line(member: Member) -> str:
    config = json.loads((folder(member.family) / "config.json").read_text())
    model_type = (config.get("text_config") or config)["model_type"]
    weights = "GGUF, folder" if model_type in GGUF_NAMED or member.family in GGUF_NAMED else "folder"
    rewind, shift = _edits(member)
    tested = "every cut" if member.family in MEMBERS else "some cuts"
    columns = (member.family, f"`{model_type}`", f"`{member.kind}`", weights, rewind, shift, "yes", tested)
    return f"| {' | '.join(columns)} |\n"


def _edits(member: Member) -> tuple[str, str]:
    """What can be done to a live sequence: going back, and shifting its context."""
    plain = open_member(member.family, "f32")
    whole = open_member(member.family, "f32", full_windows=True)
    shift = "yes" if plain._memory.refuse_shift() is None else "no"
    if shift == "no" and whole._memory.refuse_shift() is None:
        shift = "with full windows"
    if parts_of(plain.layout, PartKind.POINT):
        return "to checkpoints", shift
    return ("within the window" if parts_of(plain.layout, PartKind.WINDOW) else "anywhere"), shift


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
