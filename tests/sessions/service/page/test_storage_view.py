"""The storage view shows what the service tells, and takes nothing."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Route, expect

from sessions.policy import Policy
from sessions.service.backend import BackendConfig
from tests.sessions.service.conftest import MakeBackend
from tests.sessions.service.page.conftest import OpenTab
from tests.sessions.service.page.tab import Tab
from tests.sessions.service.serving import Served, served


def test_every_byte_is_shown_by_its_purpose(tab: Tab, at: Served) -> None:
    tab.go().say("one").say("two")
    tab.page.locator("#storage").click()
    told = at.client.get("/v1/storage").json()
    rows = tab.page.locator(".storage tr")
    for name, field in (("Rows", "rows_bytes"), ("Superseded", "superseded_bytes"), ("Index", "index_bytes")):
        number, unit = rows.filter(has_text=re.compile(f"^{name}")).locator(".amount").inner_text().split()
        shown = float(number) * {"B": 1, "kB": 1e3, "MB": 1e6}[unit]
        assert shown == pytest.approx(told[field], rel=0.06)
    pieces = tab.page.locator(".bar.wide > *")
    expect(pieces).to_have_count(4)


def test_kept_turns_are_named(open_tab: OpenTab, make_backend: MakeBackend) -> None:
    backend = make_backend()
    with served(backend) as at:
        tab = open_tab(at).go().say("one")
        backend.pin("default", tab.session, "first-words")
        tab.page.locator("#storage").click()
        expect(tab.page.locator(".names")).to_have_text("first-words")


def test_a_dry_run_of_gc_tells_what_would_go_and_deletes_nothing(
    open_tab: OpenTab, make_backend: MakeBackend
) -> None:
    policy = Policy(lease=5, grace=10, session_ttl=0.05)
    with served(make_backend(BackendConfig(policy=policy))) as at:
        tab = open_tab(at).go().say("old")
        session = tab.session
        tab.page.locator("#storage").click()
        plan = tab.page.locator(".plan")
        tab.page.locator("#dry-run").click()
        expect(plan).to_contain_text("Conversations that would be deleted: 1")
        expect(plan).to_contain_text("It would free")
        plan.get_by_role("link", name="old").click()
        expect(tab.asked).to_have_text(["old"])
        assert tab.session == session


def test_parts_that_a_service_tells_of_are_shown_and_others_are_not(tab: Tab) -> None:
    def told(route: Route) -> None:
        answer = route.fetch()
        told = {
            "tiers": [
                {"kind": "memory", "nbytes": 1500, "budget_bytes": 2_000_000},
                {"kind": "disk", "nbytes": 2_500_000, "budget_bytes": None},
            ],
            "ages": [
                {"below_seconds": 3600, "num_blobs": 1, "nbytes": 10},
                {"below_seconds": None, "num_blobs": 2, "nbytes": 0},
            ],
            "rows_ttl_seconds": 86400 * 7,
            "session_ttl_seconds": None,
            "unheard_of": [1, 2, 3],
        }
        route.fulfill(json={**answer.json(), **told})

    tab.go("#/storage")
    expect(tab.page.get_by_text("By purpose")).to_be_visible()
    tab.page.route("**/v1/storage", told)
    tab.button("Look again").click()
    for title, rows in (
        ("By tier", ["memory1.5 kBof at most 2.0 MB", "disk2.5 MB"]),
        ("By age", ["less than 1 hour10 B1 blob", "older0 B2 blobs"]),
    ):
        expect(tab.page.locator("section", has=tab.page.get_by_text(title)).locator("tr")).to_have_text(rows)
    expect(tab.page.get_by_text("Rows are kept 7 days")).to_be_visible()
    expect(tab.page.get_by_text("Conversations are kept")).to_have_count(0)
    expect(tab.page.get_by_text("unheard")).to_have_count(0)
