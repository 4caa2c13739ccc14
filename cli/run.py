"""`tenuto run`: one prompt, one answer, nothing kept."""

from __future__ import annotations

import sys
import time

import click

from cli.choosing import best_of_data, check_best_of, told_best_of
from cli.drafting import drafting_data
from cli.loading import load
from cli.options import EngineOptions, SamplingOptions, engine_options, sampling_options, with_output
from cli.output import Output
from cli.reply import show
from engine.errors import UsageError


@click.command()
@click.argument("prompt", required=False, metavar="[PROMPT|-]")
@click.option("--system", metavar="TEXT", help="What the conversation begins with.")
@click.option("--raw", is_flag=True, help="Complete the text as it stands, without a chat template.")
@click.option(
    "--best-of",
    type=click.IntRange(min=1),
    metavar="N",
    help="Sample N replies, and give the one whose tokens the model finds likeliest.",
)
@engine_options
@sampling_options
@with_output
def run(
    out: Output,
    prompt: str | None,
    system: str | None,
    raw: bool,
    best_of: int | None,
    engine: EngineOptions,
    sampling: SamplingOptions,
) -> None:
    """Answer PROMPT (from stdin without one, or for `-`) and leave. Nothing is stored.

    A model with a chat template answers as in a chat, unless --raw; a base model completes the text.
    """
    if prompt is None and sys.stdin.isatty():
        raise UsageError("nothing to answer: give a prompt, or pipe one in")
    if best_of is not None:
        check_best_of(engine, sampling)
    text = sys.stdin.read() if prompt in (None, "-") else prompt
    assert text is not None
    _answer(out, text, system, raw, best_of, engine, sampling)


def _answer(
    out: Output,
    text: str,
    system: str | None,
    raw: bool,
    count: int | None,
    options: EngineOptions,
    sampling: SamplingOptions,
) -> None:
    from engine.best_of import best_of
    from engine.state import SamplerParams

    engine = load(options, None, out)
    seq = engine.create(SamplerParams(**sampling.for_new()))
    template = None if raw else engine.template
    if template is None:
        if system is not None:
            raise UsageError("--system needs a chat template, and this completes text")
        ids = engine.tokenizer.with_bos(engine.tokenizer.encode(text))
    else:
        messages = [{"role": "user", "content": text}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        ids = engine.tokenizer.encode_pieces(template.render(messages))
    started = time.perf_counter()
    engine.feed(seq, ids)
    read = time.perf_counter() - started
    found = None if count is None else best_of(engine, seq, count, sampling.max_tokens, sampling.stop)
    if found is None:
        pieces = engine.generate(seq, sampling.max_tokens, sampling.stop)
    else:
        pieces = iter(found.best.pieces)
    reply = show(pieces, out)
    if found is not None and not out.as_json:
        out.note(told_best_of(found))
    if out.as_json:
        out.data(
            {
                "model": engine.model_name,
                "text": reply.text,
                "finish": reply.finish,
                "prompt_tokens": len(ids),
                "tokens": reply.num_tokens,
                "prompt_seconds": read,
                "seconds": time.perf_counter() - started,
                "drafting": drafting_data(engine),
                "best_of": None if found is None else best_of_data(found),
            }
        )
