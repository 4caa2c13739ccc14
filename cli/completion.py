"""`tenuto completion`: completion for the shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from cli.options import with_output
from cli.output import Output
from engine.errors import UsageError

_WHERE = {
    "bash": 'eval "$(tenuto completion bash)"   in ~/.bashrc',
    "zsh": 'eval "$(tenuto completion zsh)"    in ~/.zshrc',
    "fish": "tenuto completion fish > ~/.config/fish/completions/tenuto.fish",
}


@click.command()
@click.argument("shell", type=click.Choice(list(_WHERE)))
@with_output
def completion(out: Output, shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    bash: eval "$(tenuto completion bash)"   in ~/.bashrc
    zsh:  eval "$(tenuto completion zsh)"    in ~/.zshrc
    fish: tenuto completion fish > ~/.config/fish/completions/tenuto.fish
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise UsageError(f"no completion for {shell}")
    script = kind(click.get_current_context().find_root().command, {}, "tenuto", "_TENUTO_COMPLETE")
    text = script.source_template % script.source_vars()
    if out.as_json:
        out.data({"shell": shell, "script": text})
    else:
        out.text(text)
