"""`tenuto diff`: where two conversations part ways, and what they share."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from cli.app import App
from cli.layout import layout_line
from cli.options import with_app
from cli.output import counted, moment, shorten, size
from cli.sides import manifest_of

if TYPE_CHECKING:
    from engine.state import Span
    from serialization.manifest import Manifest, Message
    from sessions.diff import Difference, FieldDifference


@click.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@with_app
def diff(app: App, a: str, b: str) -> None:
    """Compare two stored turns: A and B are each a session (its newest turn), SESSION@TURN, pin:NAME, or an
    archive's file.

    Tells where token ids and messages part ways, which fields of the fingerprint and which parts of the
    layout differ, how rows came to be, and which bytes both share. It needs no model, reads no row of a
    store, and ends with code 0 whether they differ or not; with --json `same_conversation` says it.
    """
    from sessions.diff import diff as compare

    one, other = manifest_of(app, a), manifest_of(app, b)
    found = compare(one, other)
    if app.out.as_json:
        app.out.data(_as_data(one, other, found))
        return
    _tell_sides(app, one, other)
    _tell_words(app, found)
    _tell_making(app, found)
    _tell_rows(app, found)


def _as_data(a: Manifest, b: Manifest, found: Difference) -> dict[str, Any]:
    data = asdict(found)
    sides = {
        side: {
            "session": each.session,
            "name": each.name,
            "pin": each.pin,
            "turn": each.generation,
            "saved": each.updated,
            "model": each.model,
            "tokens": each.length,
            "messages": len(each.messages),
            "forked_from": None if each.forked_from is None else asdict(each.forked_from),
            "nbytes": sum(ref.nbytes for ref in each.blobs()),
        }
        for side, each in (("a", a), ("b", b))
    }
    return {"same_conversation": found.same_conversation, **sides, **data}


def _tell_sides(app: App, a: Manifest, b: Manifest) -> None:
    rows = [
        ["session", a.session, b.session],
        ["name", a.name or "-", b.name or "-"],
        ["kept as", a.pin or "-", b.pin or "-"],
        ["turn", str(a.generation), str(b.generation)],
        ["saved", moment(a.updated), moment(b.updated)],
        ["tokens", f"{a.length:,}", f"{b.length:,}"],
        ["messages", f"{len(a.messages):,}", f"{len(b.messages):,}"],
    ]
    app.out.table(["", "A", "B"], rows)
    app.out.text()


def _tell_words(app: App, found: Difference) -> None:
    tokens, messages = found.tokens, found.messages
    follows = f"{_token(tokens.a_next)} in A, {_token(tokens.b_next)} in B"
    if tokens.a_next == tokens.b_next:
        follows = f"{_token(tokens.a_next)} in both"
    app.out.text(f"tokens: the first {tokens.common:,} are the same, then {follows}")
    app.out.text(f"  behind them {tokens.a_more:,} more in A, {tokens.b_more:,} in B")
    app.out.text(f"messages: {messages.common:,} are the same")
    for side, rest in (("A", messages.a), ("B", messages.b)):
        if rest:
            app.out.text(f"  {side} has {counted(len(rest), 'other')}, first {_message(rest[0])}")


def _token(token: int | None) -> str:
    return "the end" if token is None else f"id {token}"


def _message(message: Message) -> str:
    return f"[{message.role}] {shorten(message.text, 60)}"


def _tell_making(app: App, found: Difference) -> None:
    for half, fields in (
        ("meaning", found.meaning),
        ("making", found.making),
        ("sampler", found.sampler),
        ("about", found.about),
    ):
        app.out.text(f"{half}: the same" if not fields else f"{half}:")
        for field in fields:
            app.out.text(f"  {_field(field)}")
    if found.layout_a or found.layout_b:
        app.out.text("layout:")
        for side, layout in (("A", found.layout_a), ("B", found.layout_b)):
            app.out.text(f"  only in {side}: {layout_line(layout) or '-'}")
    else:
        app.out.text("layout: the same")


def _field(field: FieldDifference) -> str:
    return f"{field.field}: {_value(field.a)} in A, {_value(field.b)} in B"


def _value(value: object) -> str:
    return "nothing" if value is None else shorten(str(value), 80)


def _tell_rows(app: App, found: Difference) -> None:
    app.out.text(f"rows in A: {_spans(found.spans_a)}; checkpoints: {_positions(found.checkpoints_a)}")
    app.out.text(f"rows in B: {_spans(found.spans_b)}; checkpoints: {_positions(found.checkpoints_b)}")
    if found.bytes is None:
        app.out.text("bytes: one is sealed and the other is not, so that equal rows have two names")
        return
    app.out.text(
        f"bytes: {size(found.bytes.shared)} in both (rows of the first {found.rows_shared:,} tokens),"
        f" {size(found.bytes.own_a)} in A alone, {size(found.bytes.own_b)} in B alone"
    )


def _spans(spans: tuple[Span, ...]) -> str:
    return ", ".join(f"[{s.start:,}, {s.stop:,}) {s.provenance}" for s in spans) or "-"


def _positions(positions: tuple[int, ...]) -> str:
    return ", ".join(f"{each:,}" for each in positions) or "-"
