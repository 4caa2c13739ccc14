"""Options that several commands share. Each decorator folds its options into one argument."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import click

from cli.app import App, Flags
from cli.output import Output
from cli.unlocking import Unlocking

Command = Callable[..., Any]

CACHE_TYPES = click.Choice(["f32", "f16", "bf16", "q8_0", "q5_0", "q4_0"])


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What was said about the model. `config` holds only the engine settings that were given."""

    model: str | None = None
    chat_template: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    draft: str | None = None
    draft_max: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """What was said about sampling. `given` holds only what was typed, by its name in the sampler."""

    given: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()

    def for_new(self) -> dict[str, Any]:
        """For a conversation that has no sampler yet: the defaults, a seed of its own, and what was given."""
        return {**_DEFAULTS, "seed": secrets.randbits(63), **self.given}


#: Lively but on topic, for small models too; `--temp 0` always takes the likeliest token.
_DEFAULTS: Mapping[str, Any] = {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


def _set_quiet(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        ctx.ensure_object(Flags).quiet = True


def _set_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        ctx.ensure_object(Flags).debug = True


quiet_option = click.option(
    "-q",
    "--quiet",
    is_flag=True,
    expose_value=False,
    callback=_set_quiet,
    help="Say only what was asked for.",
)
debug_option = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    callback=_set_debug,
    help="Show where an error comes from.",
)


def with_app(function: Command) -> Command:
    """Hands the command an `App` as its first argument; adds --store, --tenant, --keys, --master-key, --json,
    -q and --debug."""
    tenant = click.option(
        "--tenant",
        "of",
        envvar="TENUTO_TENANT",
        metavar="TENANT",
        help="Whose conversations, where a service has API keys.  [env: TENUTO_TENANT]",
    )
    return _with_app(function, tenant)


def with_whole_store(function: Command) -> Command:
    """As `with_app`, for what is not of one tenant, or says itself of which."""
    return _with_app(function)


def _with_app(function: Command, *options: Callable[[Command], Command]) -> Command:
    @click.option(
        "--store",
        "url",
        envvar="TENUTO_STORE",
        metavar="URL",
        help="Where conversations live: a folder, or redis://…  [env: TENUTO_STORE]",
    )
    @functools.partial(_apply, options)
    @keys_options
    @_with_output
    @functools.wraps(function)
    def command(
        out: Output, *args: Any, url: str | None, unlocking: Unlocking, of: str | None = None, **kwargs: Any
    ) -> Any:
        with App(out, url, unlocking, of) as app:
            return function(app, *args, **kwargs)

    return command


def keys_options(function: Command) -> Command:
    """Adds --keys and --master-key; the command takes them as `unlocking: Unlocking`."""

    @click.option(
        "--keys",
        metavar="FOLDER",
        envvar="TENUTO_KEYS",
        help="Where keys are, apart from every store.  [env: TENUTO_KEYS]",
    )
    @click.option(
        "--master-key",
        metavar="FILE",
        envvar="TENUTO_MASTER_KEY_FILE",
        help="Opens a sealed store, and seals a new one.  [env: TENUTO_MASTER_KEY_FILE; or the key itself in"
        " TENUTO_MASTER_KEY]",
    )
    @functools.wraps(function)
    def command(*args: Any, keys: str | None, master_key: str | None, **kwargs: Any) -> Any:
        return function(*args, unlocking=Unlocking.said(keys, master_key), **kwargs)

    return command


def with_output(function: Command) -> Command:
    """For commands without a store: hands them an `Output` as their first argument."""
    return _with_output(function)


def _with_output(function: Command) -> Command:
    @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    @quiet_option
    @debug_option
    @click.pass_obj
    @functools.wraps(function)
    def command(flags: Flags, /, *args: Any, as_json: bool, **kwargs: Any) -> Any:
        return function(Output(flags.quiet, as_json), *args, **kwargs)

    return command


#: option of the command line -> key of the engine's configuration
_ENGINE_KEYS: Mapping[str, str] = {
    "ctx": "n_ctx",
    "type_k": "type_k",
    "type_v": "type_v",
    "dtype": "dtype",
    "threads": "threads",
    "device": "device",
    "main_gpu": "main_gpu",
    "overflow": "overflow",
    "n_keep": "n_keep",
    "n_discard": "n_discard",
    "full_windows": "full_windows",
    "deterministic": "deterministic",
    "tp": "tp",
}


def engine_options(function: Command) -> Command:
    """Adds --model and the engine's settings; the command takes them as `engine: EngineOptions`."""

    @functools.wraps(function)
    def command(
        *args: Any,
        model: str | None,
        chat_template: str | None,
        draft: str | None,
        draft_max: int | None,
        **kwargs: Any,
    ) -> Any:
        said = {key: kwargs.pop(option) for option, key in _ENGINE_KEYS.items()}
        config = {key: value for key, value in said.items() if value is not None}
        options = EngineOptions(model, chat_template, config, draft, draft_max)
        return function(*args, engine=options, **kwargs)

    options = (
        click.option(
            "-m",
            "--model",
            envvar="TENUTO_MODEL",
            metavar="MODEL",
            help="A name of `tenuto models`, a .gguf file, a Hugging Face folder, or hf:OWNER/REPO[/FILE]"
            " (default: the session's own, else smollm2).  [env: TENUTO_MODEL]",
        ),
        click.option(
            "--chat-template", metavar="NAME|FILE", help="Instead of the model's own chat template."
        ),
        click.option("--ctx", type=click.IntRange(min=1), help="Tokens of context (default: the model's)."),
        click.option("--type-k", type=CACHE_TYPES, help="Cache type of K (default: bf16)."),
        click.option("--type-v", type=CACHE_TYPES, help="Cache type of V (default: bf16)."),
        click.option(
            "--dtype", type=click.Choice(["auto", "f32", "bf16", "f16"]), help="What is computed in."
        ),
        click.option("--threads", type=click.IntRange(min=1), envvar="TENUTO_THREADS", help="CPU threads."),
        click.option("--device", envvar="TENUTO_DEVICE", help="auto, cpu, cuda or mps."),
        click.option("--main-gpu", type=click.IntRange(min=0), help="Which GPU, where one is used."),
        click.option(
            "--overflow",
            type=click.Choice(["stop", "shift"]),
            help="When the context is full: stop with an error, or shift the oldest text out.",
        ),
        click.option("--n-keep", type=click.IntRange(min=0), help="Tokens at the start that a shift keeps."),
        click.option("--n-discard", type=click.IntRange(min=0), help="Tokens that a shift drops (0: half)."),
        click.option(
            "--full-windows/--small-windows",
            default=None,
            help="Keep whole caches in sliding-window layers, so that every position can be resumed.",
        ),
        click.option(
            "--deterministic/--no-deterministic",
            default=None,
            help="The same bits whatever shares a batch, so that drafts change nothing at all; reads slower.",
        ),
        click.option(
            "--tp",
            type=click.IntRange(min=1),
            help="Processes that share the model and the machine's threads (1; under torchrun as many as it"
            " starts).",
        ),
        click.option(
            "--draft",
            metavar="ngram|MODEL|mtp",
            help="What guesses the next tokens, to say the same faster: runs of tokens said before, a "
            "smaller model with the same tokenizer, or the model's own extra layers.",
        ),
        click.option(
            "--draft-max",
            type=click.IntRange(min=1),
            help="Most guesses at a time (ngram: 8, else 4).",
        ),
    )
    return _apply(options, command)


#: option of the command line -> field of the sampler
_SAMPLER_KEYS: Mapping[str, str] = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repeat_penalty",
    "seed": "seed",
}


def sampling_options(function: Command) -> Command:
    """Adds the sampler's settings; the command takes them as `sampling: SamplingOptions`."""

    @functools.wraps(function)
    def command(*args: Any, max_tokens: int | None, stop: tuple[str, ...], **kwargs: Any) -> Any:
        said = {key: kwargs.pop(option) for option, key in _SAMPLER_KEYS.items()}
        given = {key: value for key, value in said.items() if value is not None}
        return function(*args, sampling=SamplingOptions(given, max_tokens, stop), **kwargs)

    options = (
        click.option("--temp", type=float, help="Temperature; 0 always takes the likeliest token (0.7)."),
        click.option("--top-k", type=int, help="Choose among the k likeliest tokens; 0: all (40)."),
        click.option("--top-p", type=float, help="Choose within this share of probability (0.95)."),
        click.option("--min-p", type=float, help="Least probability, as a share of the likeliest's (0.05)."),
        click.option("--repeat-penalty", type=float, help="Divide the logits of recent tokens by this (1)."),
        click.option("--seed", type=click.IntRange(min=0, max=2**64 - 1), help="Same seed, same words."),
        click.option("--max-tokens", type=click.IntRange(min=1), help="Longest reply, in tokens."),
        click.option("--stop", multiple=True, metavar="TEXT", help="End a reply here; may be repeated."),
    )
    return _apply(options, command)


def _apply(options: tuple[Callable[[Command], Command], ...], command: Command) -> Command:
    for option in reversed(options):
        command = option(command)
    return command
