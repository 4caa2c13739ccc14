"""Opening a conversation and answering in it, once or until the user leaves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cli.app import App
from cli.lines import Lines
from cli.options import EngineOptions, SamplingOptions
from cli.repl import Repl
from cli.reply import Interrupts, leaving_on_hangup, show, tell_ending
from cli.restored import restored_data, tell_restored, tell_reused

if TYPE_CHECKING:
    from engine.runner import Engine
    from engine.state import SamplerParams
    from sessions.conversation import Conversation
    from sessions.manager import SessionManager


@dataclass(frozen=True, slots=True)
class Opened:
    """A conversation with what it stands on."""

    conversation: Conversation
    manager: SessionManager
    engine: Engine
    sampler: SamplerParams


def open_conversation(
    app: App,
    options: EngineOptions,
    sampling: SamplingOptions,
    session: str | None = None,
    recompute: bool = False,
    name: str | None = None,
    system: str | None = None,
) -> Opened:
    """The stored `session`, or a new one. Raises LeaseHeld, StateError, NoChatTemplate, …"""
    from engine.state import SamplerParams
    from sessions.conversation import Conversation
    from sessions.restore import Fallback

    engine = app.engine(options, session)
    manager = app.manager(engine)
    if session is None:
        sampler = SamplerParams(**sampling.for_new())
        return Opened(Conversation.new(manager, name, sampler, system), manager, engine, sampler)
    sampler = replace(manager.manifest(session).sampler, **sampling.given)
    fallback = Fallback.RECOMPUTE if recompute else Fallback.REFUSE
    return Opened(Conversation.open(manager, session, fallback, sampler), manager, engine, sampler)


def talk(app: App, opened: Opened, sampling: SamplingOptions) -> None:
    """Chat until the user leaves."""
    repl = Repl(
        app.out, opened.manager, opened.engine, opened.conversation, opened.sampler, sampling, Lines()
    )
    try:
        with leaving_on_hangup():
            repl.run()
    finally:
        repl.conversation.close()


def answer_once(app: App, opened: Opened, sampling: SamplingOptions, prompt: str) -> None:
    """Say `prompt`, print the reply. Raises what kept the turn from being saved."""
    try:
        with leaving_on_hangup():
            _answer(app, opened, sampling, prompt)
    except KeyboardInterrupt:  # see Repl: leave at once, but not without what was said
        if opened.conversation.save_error is not None:
            opened.conversation.save()
        raise
    finally:
        opened.conversation.close()


def _answer(app: App, opened: Opened, sampling: SamplingOptions, prompt: str) -> None:
    from sessions.conversation import Reply

    chat = opened.conversation
    if chat.restored is not None and not app.out.as_json:
        tell_restored(app.out, chat.restored)
    with Interrupts() as interrupts:
        ask = Reply(sampling.max_tokens, sampling.stop, interrupts.asked)
        reply = show(chat.say(prompt, ask), app.out)
    if not app.out.as_json:
        tell_ending(app.out, reply.finish, opened.engine)
        tell_reused(app.out, chat.reused)
    if app.out.as_json:
        app.out.data(
            {
                "session": chat.session.id,
                "reply": reply.text,
                "finish": reply.finish,
                "length": len(chat.ids),
                "restored": restored_data(chat.restored) if chat.restored else None,
                "reused": restored_data(chat.reused) if chat.reused else None,
                "saved": chat.save_error is None,
            }
        )
    interrupts.leave_if_asked()
    if chat.save_error is not None:
        raise chat.save_error
