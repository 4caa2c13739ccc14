"""What is known of requests afterwards: their ids, one line each, and counters. Never what was said."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.sessions.service.conftest import MakeBackend
from tests.sessions.service.fake import FakeBackend
from tests.sessions.service.serving import Served, served

SAID = {"messages": [{"role": "user", "content": "a very secret word"}]}


def counted(at: Served) -> dict[tuple[str, ...], float]:
    text = at.client.get("/metrics").text
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_request_keeps_its_id_or_is_given_one() -> None:
    with served(FakeBackend()) as at:
        assert at.client.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
        for bad in ("", "a b", "x" * 129, 'a"b'):
            given = at.client.get("/health", headers={"x-request-id": bad}).headers["x-request-id"]
            assert given != bad
            assert len(given) == 26
        lines = at.logged(5)
        assert lines[0]["request_id"] == "abc-1"
        assert len({line["request_id"] for line in lines}) == 5


def test_a_line_tells_what_a_request_was_and_nothing_that_was_said() -> None:
    with served(FakeBackend()) as at:
        session = at.client.post("/v1/sessions", json={"title": "secret title"}).json()["id"]
        at.client.post(f"/v1/sessions/{session}/messages", json=SAID)
        line = at.logged(2)[-1]
        assert line["route"] == "/v1/sessions/{session}/messages"
        assert line["session"] == session
        assert (line["status"], line["reason"], line["saved"]) == (200, "exact", True)
        assert (line["restored_tokens"], line["recomputed_tokens"], line["reply_tokens"]) == (0, 0, 3)
        assert line["ms"] > 0
        assert "default" not in line["tenant"]
        at.client.get("/nowhere/secret?secret=1")
        at.client.post("/v1/sessions", json={"secret": 1})
        at.logged(4)
        assert "secret" not in at.log.getvalue()
        assert "two" not in at.log.getvalue()


def test_the_counters_count() -> None:
    with served(FakeBackend()) as at:
        session = at.client.post("/v1/sessions").json()["id"]
        for _ in range(2):
            at.client.post(f"/v1/sessions/{session}/messages", json=SAID)
        at.client.get("/nowhere")
        at.client.request("BREW", "/nowhere")
        at.logged(5)
        now = counted(at)
        assert now["tenuto_restores_total", "exact"] == 2
        assert now["tenuto_restored_tokens_total",] == 4
        assert now["tenuto_reply_tokens_total",] == 6
        assert now["tenuto_save_seconds_count",] == 2
        assert now["tenuto_http_requests_total", "POST", "/v1/sessions/{session}/messages", "200"] == 2
        assert now["tenuto_http_requests_total", "GET", "none", "404"] == 1
        assert now["tenuto_http_requests_total", "other", "none", "404"] == 1
        assert now["tenuto_turns_running",] == 0


def test_no_more_of_prompts_was_had_than_there_was(make_backend: MakeBackend) -> None:
    with served(make_backend()) as at:
        session = at.client.post("/v1/sessions").json()["id"]
        path = f"/v1/sessions/{session}"
        short = {"max_tokens": 24}
        answers = [
            at.client.post(f"{path}/{verb}", json={**body, **short}).json()
            for verb, body in (("messages", SAID), ("regenerate", {}), ("edit", {"content": "b"}))
        ]
        at.client.post(f"{path}/rewind")
        now = counted(at)
        had = [answer["restored"]["restored_tokens"] for answer in answers]
        assert all(there <= answer["prompt_tokens"] for there, answer in zip(had, answers, strict=True))
        assert now["tenuto_restores_total", "edited"] == 1
        assert now["tenuto_restored_tokens_total",] == sum(had)  # a rewind is no prompt that had something


def test_health_is_503_once_it_is_being_ended() -> None:
    backend = FakeBackend()
    with served(backend) as at:
        assert at.client.get("/health").status_code == 200
        backend.draining = True
        answer = at.client.get("/health")
        assert (answer.status_code, answer.json()) == (503, {"status": "draining"})


def test_batches_are_counted_with_their_tokens(make_backend: MakeBackend) -> None:
    with served(make_backend()) as at:
        session = at.client.post("/v1/sessions").json()["id"]
        before = counted(at)
        answer = at.client.post(f"/v1/sessions/{session}/messages", json={**SAID, "max_tokens": 5}).json()
        after = counted(at)
        assert before["tenuto_batches_total",] == 0
        assert after["tenuto_batches_total",] >= answer["reply"]["tokens"]
        assert after["tenuto_batch_tokens_total",] >= answer["prompt_tokens"]
        assert after["tenuto_prefill_speed",] > 0
