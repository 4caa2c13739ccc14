"""`tenuto resume`: go on where a session stopped."""

from __future__ import annotations

import click

from cli.app import App
from cli.arguments import session_argument
from cli.options import EngineOptions, SamplingOptions, engine_options, sampling_options, with_app
from cli.talk import answer_once, open_conversation, talk
from engine.errors import UsageError


@click.command()
@session_argument
@click.option("-p", "--prompt", metavar="TEXT", help="Say TEXT, print the reply, and leave.")
@click.option("--recompute", is_flag=True, help="If stored rows cannot be used, read the session again.")
@engine_options
@sampling_options
@with_app
def resume(
    app: App,
    session: str,
    prompt: str | None,
    recompute: bool,
    engine: EngineOptions,
    sampling: SamplingOptions,
) -> None:
    """Open the chat where SESSION stopped, without reading its past again.

    One line tells how many tokens were restored, how many computed again, and why.
    """
    if app.out.as_json and prompt is None:
        raise UsageError("--json goes with --prompt: a chat is not one document")
    chat = open_conversation(app, engine, sampling, session, recompute)
    if prompt is None:
        talk(app, chat, sampling)
    else:
        answer_once(app, chat, sampling, prompt)
