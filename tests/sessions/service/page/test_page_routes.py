"""The page's files: what is shipped, under a policy that lets nothing else run, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from sessions.service.page_routes import FILES
from tests.sessions.service.fake import FakeBackend
from tests.sessions.service.serving import Served, served


@pytest.fixture(scope="module")
def at() -> Iterator[Served]:
    with served(FakeBackend()) as running:
        yield running


def test_the_page_and_its_files_are_there_for_everyone(at: Served) -> None:
    page = at.client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    named = re.findall(r'(?:src|href)="/page/([^"]+)"', page.text)
    assert named
    assert set(named) <= set(FILES)
    for name in FILES:
        assert at.client.get(f"/page/{name}").status_code == 200


@pytest.mark.parametrize("path", ["/", "/page/main.js", "/page/base.css", "/page/icon.svg"])
def test_every_file_comes_under_the_policy(at: Served, path: str) -> None:
    headers = at.client.get(path).headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy.pop("default-src") == "'none'"
    assert policy.pop("frame-ancestors") == policy.pop("base-uri") == policy.pop("form-action") == "'none'"
    assert set(policy.values()) == {"'self'", "'script'", "'none'"}
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("name", FILES)
def test_no_file_has_what_the_policy_forbids_or_asks_elsewhere(name: str) -> None:
    text = FILES[name].content.decode()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text)
    assert not re.search(r"<script(?! type=\"module\" src=)|<style|\sstyle=|\son[a-z]+=\"", text)
    assert set(re.findall(r"https?://[^\"\s]+", text)) <= {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize(
    "path",
    [
        "/page/",
        "/page/nothing.js",
        "/page/../app.py",
        "/page/..%2fapp.py",
        "/page/%00",
        "/page/page_routes.py",
    ],
)
def test_no_name_is_a_path(at: Served, path: str) -> None:
    answer = at.client.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_such_route")


def test_what_a_browser_has_is_not_sent_again(at: Served) -> None:
    first = at.client.get("/page/main.js")
    again = at.client.get("/page/main.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
