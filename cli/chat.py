"""`tenuto chat`: talk."""

from __future__ import annotations

import click

from cli.app import App
from cli.arguments import complete_session
from cli.options import EngineOptions, SamplingOptions, engine_options, sampling_options, with_app
from cli.talk import open_conversation, talk
from engine.errors import SessionNotFound, UsageError


@click.command()
@click.option("-c", "--continue", "latest", is_flag=True, help="Go on with the newest session.")
@click.option(
    "--session", metavar="ID|NAME", shell_complete=complete_session, help="Go on with this session."
)
@click.option("--name", help="A name for a new session.")
@click.option("--system", metavar="TEXT", help="What a new session begins with.")
@click.option("--recompute", is_flag=True, help="If stored rows cannot be used, read the session again.")
@engine_options
@sampling_options
@with_app
def chat(
    app: App,
    latest: bool,
    session: str | None,
    name: str | None,
    system: str | None,
    recompute: bool,
    engine: EngineOptions,
    sampling: SamplingOptions,
) -> None:
    """Talk with a model. Every turn is saved, so closing the terminal loses nothing.

    Inside, /help lists what else there is. Ctrl-C stops a reply and keeps what was said so far.
    """
    if latest and session is not None:
        raise UsageError("say -c or --session, not both")
    if app.out.as_json:
        raise UsageError("a chat is not one JSON document; `tenuto resume SESSION -p TEXT --json` is")
    if latest:
        for ref, damage in app.manager().unreadable().items():
            app.out.warn(f"{ref} cannot be read ({damage}); `tenuto check` tells more")
        newest = app.manager().latest()
        if newest is None:
            raise SessionNotFound("there is no session yet to go on with; `tenuto chat` starts one")
        session = newest.id
    if session is not None and (name is not None or system is not None):
        raise UsageError("--name and --system are for a new session")
    talk(app, open_conversation(app, engine, sampling, session, recompute, name, system), sampling)
