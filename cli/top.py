"""`tenuto top`: a running service, or a store, watched."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from cli.app import App
from cli.options import with_app
from cli.output import duration, size
from cli.retention import duration as seconds
from cli.screen import Page, page, shown
from engine.errors import TenutoError, UsageError

if TYPE_CHECKING:
    from sessions.service.watch import Rates, Watched
    from sessions.watch import StoreMoment

#: A look takes at most this share of the time, however large a store is.
_SHARE = 0.1


@click.command()
@click.argument("service", metavar="[URL]", required=False)
@click.option(
    "--api-key",
    envvar="TENUTO_API_KEY",
    metavar="KEY",
    help="An operator's, where the service has keys; other users see an option.  [env: TENUTO_API_KEY]",
)
@click.option(
    "--interval", type=seconds, default="2s", show_default=True, metavar="AGE", help="Between two looks."
)
@click.option("--once", is_flag=True, help="Look once, print, and leave.")
@with_app
def top(app: App, service: str | None, api_key: str | None, interval: float, once: bool) -> None:
    """Watch the service at URL (http://…): turns, tokens a second, what restores had, hits, memory, queue.
    Without URL, the store: who writes to it, its sessions and bytes. Ctrl-C leaves.

    Give the address of one worker: behind a front each look would be at another. For scripts: --once --json.
    """
    if app.out.as_json and not once:
        raise UsageError("--json goes with --once: what refreshes is not one document")
    if not once and not sys.stdout.isatty():
        raise UsageError("top refreshes a terminal, and this is none: --once prints once")
    if interval <= 0:
        raise UsageError("--interval must be above 0")
    watch = _service(service, api_key) if service is not None else _store(app)
    if once:
        look = watch()
        app.out.data(look.data) if app.out.as_json else _print(app, look)
        return
    try:
        _refresh(watch, interval)
    except KeyboardInterrupt:
        return


def _service(url: str, key: str | None) -> Callable[[], Page]:
    try:
        import prometheus_client  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not there: pip install 'tenuto[serve]'") from error
    from sessions.service.watch import Watch, rates

    watch = Watch(url, key)
    last: list[Watched] = []

    def look() -> Page:
        now = watch.look()
        gained = rates(last[0], now) if last else None
        last[:] = [now]
        return _service_page(watch.url, now, gained)

    return look


def _store(app: App) -> Callable[[], Page]:
    from sessions.watch import StoreWatch

    watch = StoreWatch(app.store)
    return lambda: _store_page(app.address, app.tenant, watch.look())


def _refresh(watch: Callable[[], Page], interval: float) -> None:
    """Until Ctrl-C. What does not answer for a while is watched on: it may come back."""
    seen = False
    with shown() as show:
        while True:
            started = time.monotonic()
            try:
                show(watch(), None)
                seen = True
            except TenutoError as error:
                if not seen:
                    raise
                show(None, str(error))
            took = time.monotonic() - started
            time.sleep(max(interval, took / _SHARE) - took)


def _print(app: App, found: Page) -> None:
    app.out.text(found.title)
    for name, value in found.facts:
        app.out.text(f"{name:<18}{value}")


def _service_page(url: str, now: Watched, gained: Rates | None) -> Page:
    facts = [
        ("turns", f"{now.running:,} running, {now.waiting:,} waiting, {now.unsaved:,} not saved"),
        ("sessions", f"{now.resident:,} resting in memory"),
        ("reading", _speed(now.prefill_speed, None if gained is None else gained.prompt_tokens)),
        ("saying", _speed(now.decode_speed, None if gained is None else gained.reply_tokens)),
        (
            "prompts",
            f"{now.prompt_tokens:,} tokens, {now.restored_tokens:,} of them had: {_rate(now.hit_rate)}",
        ),
        ("replies", f"{now.reply_tokens:,} tokens"),
        ("restores", _counts(now.restores)),
        ("read again", f"{now.recomputed_tokens:,} tokens"),
        ("a restore takes", _mean(now.mean_restore)),
        ("a save takes", _mean(now.mean_save)),
        ("saved", f"{size(now.saved_bytes)}, {now.save_errors:,} turns could not be"),
        ("requests", _counts(now.requests) + ("" if gained is None else f", {gained.requests:.1f}/s")),
        ("memory", "-" if now.memory is None else size(now.memory)),
    ]
    data: dict[str, Any] = {"url": url, **asdict(now), "hit_rate": now.hit_rate}
    del data["at"]
    return page(f"{now.model} at {url}: {now.status}", facts, data)


def _store_page(address: str, tenant: str, now: StoreMoment) -> Page:
    facts = [
        ("sessions", f"{now.num_sessions:,}, {now.num_pins:,} kept turns"),
        ("saved since", "-" if now.saved is None else f"{now.saved:,} sessions"),
        ("bytes", size(now.nbytes)),
        ("being written", f"{len(now.writing):,}"),
        *((f"  {each.session[-12:]}", f"{each.holder} ({each.seconds:.0f} s)") for each in now.writing),
    ]
    data: dict[str, Any] = {"store": address, "tenant": tenant, **asdict(now)}
    del data["at"], data["saved"]
    return page(f"{address}, tenant {tenant}", facts, data)


def _speed(mean: float | None, now: float | None) -> str:
    text = "-" if mean is None else f"{mean:,.1f} tokens/s while it does"
    return text if now is None else f"{text}; {now:,.1f} tokens/s just now"


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1%}"


def _mean(taken: float | None) -> str:
    return "-" if taken is None else f"{duration(taken)} (mean)"


def _counts(counts: Any) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items())) or "-"
