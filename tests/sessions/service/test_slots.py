"""What llama-server's clients expect: slots, props and words, in its shapes."""

from __future__ import annotations

import httpx
import pytest

from tests.sessions.service.serving import Served
from tests.sessions.service.test_sessions_routes import begin, say


def test_a_slot_is_saved_erased_and_restored_under_a_files_name(at: Served) -> None:
    session = begin(at)
    say(at, session, "one")
    slots = at.client.get("/slots").json()
    assert [slot["id"] for slot in slots] == list(range(8))
    (held,) = [slot for slot in slots if slot["session"] == session]
    assert held["n_past"] > 0
    assert held["is_processing"] is False
    at_slot = f"/slots/{held['id']}"
    saved = at.client.post(f"{at_slot}?action=save", json={"filename": "talk.bin"}).json()
    assert saved["n_saved"] == held["n_past"]
    assert saved["n_written"] > 0
    assert saved["timings"]["save_ms"] > 0
    say(at, session, "two")
    erased = at.client.post(f"{at_slot}?action=erase").json()
    assert erased == {"id_slot": held["id"], "n_erased": erased["n_erased"]}
    assert erased["n_erased"] > saved["n_saved"]
    assert at.client.get("/slots").json()[held["id"]]["session"] is None
    restored = at.client.post(f"{at_slot}?action=restore", json={"filename": "talk.bin"}).json()
    assert restored["n_restored"] == saved["n_saved"]
    assert restored["n_read"] > 0
    assert restored["timings"]["restore_ms"] > 0
    again = at.client.get("/slots").json()[held["id"]]["session"]
    assert again not in (None, session)
    assert at.client.get(f"/v1/sessions/{again}").json()["turns"] == 1
    assert say(at, again, "three").headers["x-tenuto-recomputed-tokens"] == "0"


def test_a_file_of_the_same_name_is_written_over(at: Served) -> None:
    session = begin(at)
    saved = []
    for text in ("one", "two"):
        say(at, session, text)
        answer = at.client.post("/slots/0?action=save", json={"filename": "talk"})
        saved.append(answer.json()["n_saved"])
    assert saved[0] < saved[1]
    restored = at.client.post("/slots/1?action=restore", json={"filename": "talk"}).json()
    assert restored["n_restored"] == saved[1]


@pytest.mark.parametrize(
    "name",
    ["..", "../x", "/etc/x", "a/b", "a\\b", "a\x00b", "", ".hidden", "~", "%2e", "x" * 65, "x" * 10**6],
    ids=lambda name: f"{len(name)} {name[:20]!r}",
)
@pytest.mark.parametrize("action", ["save", "restore"])
def test_a_file_name_is_never_a_path(at: Served, name: str, action: str) -> None:
    session = begin(at)
    say(at, session)
    answer = at.client.post(f"/slots/0?action={action}", json={"filename": name})
    assert answer.status_code in (400, 404), answer.text
    if action == "save":
        assert answer.json()["error"]["code"] == "name_refused"


def test_what_is_not_there_is_404(at: Served) -> None:
    assert at.client.post("/slots/0?action=restore", json={"filename": "nothing"}).status_code == 404
    assert at.client.post("/slots/0?action=save", json={"filename": "nothing"}).status_code == 404
    assert at.client.post("/slots/0?action=erase").json() == {"id_slot": 0, "n_erased": 0}


def test_slots_are_those_that_were_talked_in_last(at: Served) -> None:
    made = [begin(at) for _ in range(10)]
    for session in made:
        say(at, session, max_tokens=1)
    held = {slot["session"] for slot in at.client.get("/slots").json()}
    assert held == set(made[2:])


def test_a_client_may_ask_whether_a_slot_is_free(at: Served) -> None:
    assert at.client.get("/slots?fail_on_no_slot=1").status_code == 200


def test_props_tell_what_runs(at: Served) -> None:
    props = at.client.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 2048
    assert props["total_slots"] == 8
    assert "im_start" in props["chat_template"]
    assert props["modalities"] == {"vision": False, "audio": False}


def test_words_become_ids_and_come_back(at: Served) -> None:
    text = "the thé 🎈<|im_end|>"
    ids = at.client.post("/tokenize", json={"content": text}).json()["tokens"]
    assert ids[-1] == 259
    assert at.client.post("/detokenize", json={"tokens": ids[:-1]}).json()["content"] == text[:-10]
    plain = at.client.post("/tokenize", json={"content": text, "parse_special": False}).json()["tokens"]
    assert 259 not in plain
    pieces = at.client.post("/tokenize", json={"content": "thé", "with_pieces": True}).json()["tokens"]
    assert [piece["piece"] for piece in pieces] == ["th", [0xC3], [0xA9]]
    assert at.client.post("/detokenize", json={"tokens": [10**6]}).status_code == 400
    assert at.client.post("/tokenize", json={"content": ""}).json()["tokens"] == []


def test_a_chat_completion_is_said_in_the_slot_that_was_asked_for(at: Served) -> None:
    def chat(slot: int, *said: str) -> httpx.Response:
        messages = [
            {"role": "user" if at % 2 == 0 else "assistant", "content": text} for at, text in enumerate(said)
        ]
        return at.client.post(
            "/v1/chat/completions", json={"messages": messages, "max_tokens": 4, "id_slot": slot}
        )

    reply = chat(5, "one").json()["choices"][0]["message"]["content"]
    held = at.client.get("/slots").json()
    assert [slot["id"] for slot in held if slot["session"]] == [5]
    saved = at.client.post("/slots/5?action=save", json={"filename": "talk"}).json()
    assert saved["n_saved"] > 0
    restored = at.client.post("/slots/2?action=restore", json={"filename": "talk"}).json()
    assert restored["n_restored"] == saved["n_saved"]
    again = chat(2, "one", reply, "two")
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= saved["n_saved"] - 1
    assert chat(-1, "three").status_code == 200
    refused = chat(8, "four")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "id_slot")
