"""The request log on a real Valkey and S3 server, written by a gateway in front of a scripted engine."""

from __future__ import annotations

import errno
import fcntl
import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from services.common.storage.object_store import ObjectStore
from services.learning.request_log.log import RequestFilter, RequestLog
from services.learning.request_log.parts import Parts, lines_of, part_name
from services.learning.request_log.record import LoggedRequest
from services.learning.request_log.spool import Spool
from tests.integration.logging_gateway import ALL, KEEP, Gateway, ask, everywhere, gateway, log, logged
from tests.integration.servers import RunningServer
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import MODEL, Running
from tests.unit.gateway.fake_engine import FakeEngine, says

__all__ = ["gateway", "log"]
SECRET = "ann@example.com"


def test_a_request_is_told_with_all_that_was_said(gateway: Gateway, log: RequestLog) -> None:
    running, keys = gateway(FakeEngine(behaviour=says("<think>\nhm</think>\n\nHello", per_update=3), attached="toy@3"))
    chat = ask(running, keys, user="ann", session_id="s-1", metadata={"page": "help"}, n=2, temperature=0.5)
    streamed = ask(running, keys, stream=True)
    text = ask(running, keys, "/v1/completions", prompt="once", max_tokens=4)
    response = ask(running, keys, "/v1/responses", input="hi")
    message = ask(running, keys, "/v1/messages", messages=[{"role": "user", "content": "hi"}], max_tokens=64)
    assert len(logged(log, 5)) == 5

    one = log.get(chat["id"])
    assert (one.kind, one.user, one.session, one.metadata) == ("chat", "ann", "s-1", {"page": "help"})
    assert one.messages == [{"role": "user", "content": "hi"}]
    assert one.sampling is not None
    assert (one.sampling["temperature"], one.sampling["n"]) == (0.5, 2)
    assert [choice.completion_id for choice in one.choices] == [entry["completion_id"] for entry in chat["choices"]]
    for choice, entry in zip(one.choices, chat["choices"], strict=True):
        assert choice.message is not None
        assert choice.message["content"] == entry["message"]["content"]
        assert choice.message["reasoning_content"] == entry["message"]["reasoning_content"]
        assert (choice.version, choice.finish_reason) == ("toy@3", "stop")
        assert choice.token_ids is not None
        assert choice.logprobs == [-0.25] * len(choice.token_ids)
        assert choice.tokens == len(choice.token_ids) > 0
        assert log.get(choice.completion_id).choice(choice.completion_id) == choice
    assert one.prompt_token_ids is not None
    assert one.prompt_tokens == len(one.prompt_token_ids[0]) == chat["usage"]["prompt_tokens"]
    assert one.first_token_seconds is not None
    assert 0 < one.first_token_seconds <= one.seconds

    stream_id = json.loads(streamed.splitlines()[0].removeprefix("data: "))["id"]
    assert log.get(stream_id).choices[0].message == {**(log.get(message["id"]).choices[0].message or {})}
    told = log.get(text["id"])
    assert (told.kind, told.prompt, told.choices[0].message) == (
        "text",
        "once",
        {"role": "assistant", "content": text["choices"][0]["text"]},
    )
    assert log.get(response["id"]).also == (response["id"],)
    assert log.get(response["id"]).choice(response["id"]) is not None


def test_over_http_by_key(gateway: Gateway, log: RequestLog) -> None:
    running, keys = gateway()
    mine, others = ask(running, keys, user="ann"), ask(running, keys, key="other", user="ann")
    ask(running, keys, key="quiet")
    logged(log, 2)

    def call(method: str, path: str, key: str = "app") -> httpx.Response:
        return httpx.request(method, running.url + path, headers=keys.bearer(key), timeout=PATIENCE)

    assert [one["id"] for one in call("GET", "/v1/request_log").json()["data"]] == [mine["id"]]
    everybody = call("GET", "/v1/request_log?limit=1", "admin").json()
    assert (everybody["has_more"], everybody["data"][0]["id"]) == (True, others["id"])
    page = call("GET", f"/v1/request_log?after={others['id']}&user=ann", "admin").json()
    assert [one["id"] for one in page["data"]] == [mine["id"]]
    assert call("GET", f"/v1/request_log?until={time.time() - 3600}", "admin").json()["data"] == []
    path = f"/v1/request_log/{mine['id']}"
    assert call("GET", path).json()["choices"][0]["message"]["content"] == "Hello, world"
    assert call("GET", path, "other").status_code == call("DELETE", path, "other").status_code == 404
    assert call("DELETE", "/v1/request_log").status_code == 400
    assert call("DELETE", "/v1/request_log?user=ann").json()["deleted"] == 1
    assert call("GET", path).status_code == 404
    theirs = f"/v1/request_log/{others['id']}"
    assert call("DELETE", theirs, "other").json()["deleted"] is True
    assert call("DELETE", theirs, "admin").status_code == 404


def test_what_is_erased_is_nowhere(
    gateway: Gateway, log: RequestLog, raw: redis.Redis, store: ObjectStore, tmp_path: Path
) -> None:
    """Also what a gateway still has to write when its user is erased."""
    running, keys = gateway()
    for number in range(3):
        ask(running, keys, user=SECRET, session_id=f"s-{number}", messages=[{"role": "user", "content": "zebra-1"}])
    kept = ask(running, keys, user="bob", messages=[{"role": "user", "content": "kept"}])
    logged(log, 4)
    ask(running, keys, user=SECRET, messages=[{"role": "user", "content": "zebra-2"}])
    assert log.erase_user(SECRET, None) >= 3
    running.stop()  # what waits is written
    running.wait_for(lambda: not list((tmp_path / "spool").glob("*.part")))
    found = everywhere(raw, store, tmp_path / "spool")
    assert b"zebra" not in found
    assert SECRET.encode() not in found
    assert log.get(kept["id"]).messages == [{"role": "user", "content": "kept"}]
    again, keys = gateway()
    back = ask(again, keys, user=SECRET)
    assert log.newest(RequestFilter(None, SECRET), limit=9) == []
    logged(log, 1, RequestFilter(None, SECRET))
    assert log.get(back["id"]).user == SECRET, "who comes back is logged again"


def test_rules_leave_out_and_replace(gateway: Gateway, log: RequestLog, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text("leave_out = ['metadata.name', 'tools']\n[patterns]\nemail = '[\\w.]+@[\\w.]+'\n")
    running, keys = gateway(FakeEngine(behaviour=says(f"write to {SECRET} now")), request_log_rules=rules)
    said = ask(running, keys, metadata={"name": "Ann", "page": SECRET}, messages=[{"role": "user", "content": "hi"}])
    logged(log, 1)
    one = log.get(said["id"])
    assert (one.metadata, one.redacted) == ({"page": "[email]"}, ("email",))
    assert one.choices[0].message == {"role": "assistant", "content": "write to [email] now"}
    assert (one.choices[0].token_ids, one.choices[0].logprobs, one.prompt_token_ids) == (None, None, None)


def test_sessions_are_logged_whole_or_not_at_all(gateway: Gateway, log: RequestLog, tmp_path: Path) -> None:
    running, keys = gateway(request_log_share=0.5)
    for session in range(12):
        for _ in range(2):
            ask(running, keys, session_id=f"s-{session}")
    running.stop()
    running.wait_for(lambda: not list((tmp_path / "spool").glob("*.part")))
    sessions = [one.session for one in log.newest(ALL, limit=100)]
    assert 0 < len(set(sessions)) < 12
    assert all(sessions.count(one) == 2 for one in sessions)


def test_no_store_and_no_room_are_nobodys_trouble(
    gateway: Gateway, log: RequestLog, s3: RunningServer, tmp_path: Path
) -> None:
    """Requests are answered while the object store is away; what the spool has is written when it is back."""
    running, keys = gateway(request_log_spool_bytes=2**20)
    s3.stop(signal.SIGKILL)
    try:
        before = [ask(running, keys) for _ in range(3)]
        spool = tmp_path / "spool"
        running.wait_for(lambda: counted(running, "temper_gateway_logged_requests_total") == len(before))
        with (spool / "19700101-other.part").open("wb") as others:
            fcntl.flock(others, fcntl.LOCK_EX)  # another gateway writes it
            others.write(b"x" * 2**20)
            others.flush()
            dropped = 'temper_gateway_dropped_log_requests_total{reason="spool"}'
            running.wait_for(lambda: counted(running, dropped) > 0 or not ask(running, keys))
    finally:
        s3.start()
    running.wait_for(lambda: {one.id for one in log.newest(ALL, limit=1000)} >= {one["id"] for one in before})


def test_a_gateway_that_was_out_of_handles_logs_on(
    gateway: Gateway, log: RequestLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of the log's threads ends with what it could not do for a while."""
    starved = {"complete": 3, "next": 3}

    def of(name: str) -> Any:
        real = getattr(Spool, name)

        def call(spool: Spool, **options: float) -> Any:
            if starved[name]:
                starved[name] -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return real(spool, **options)

        return call

    for name in starved:
        monkeypatch.setattr(Spool, name, of(name))
    running, keys = gateway()
    running.wait_for(lambda: not any(starved.values()))
    asked = ask(running, keys)
    assert [one.id for one in logged(log, 1)] == [asked["id"]]


def test_what_waits_in_a_spool_is_known_to_everybody(
    gateway: Gateway, log: RequestLog, s3: RunningServer, tmp_path: Path
) -> None:
    """Nobody takes a request for one that was not logged while a gateway has it, or may come back with it."""
    running, keys = gateway()
    began = time.time()
    s3.stop(signal.SIGKILL)
    try:
        asked = ask(running, keys)
        running.wait_for(lambda: began < log.known_until(time.time()) < time.time() - 1)
        waits = log.known_until(time.time())
    finally:
        s3.start()
    (logged_request,) = logged(log, 1)
    assert (logged_request.id, round(waits, 2)) == (asked["id"], round(logged_request.at, 2))
    running.wait_for(lambda: log.known_until(9e9) == 9e9)

    index = log._index
    left = part_name(began - 50)  # by a gateway that was killed, on another machine
    index.waits(left, began)
    index.wait_still([part_name(began - 99)], began)  # somebody else has handed it on meanwhile
    learner = {"name": "l", "adapter": "a", "method": "sft", "attach": False}
    trainer = keys.bearer("trainer")
    made = httpx.post(running.url + "/v1/learners", json=learner, headers=trainer, timeout=PATIENCE)
    assert made.status_code == 201, made.text

    def until() -> float:
        plan = httpx.get(running.url + "/v1/learners/l/plan", headers=trainer, timeout=PATIENCE)
        assert plan.status_code == 200, plan.text
        return float(plan.json()["data"]["filter"]["said_until"])

    assert until() == pytest.approx(began - 50, abs=0.01)
    index.waits_no_longer(left)
    assert until() > began - 10
    index.waits(left, began - 3600)
    assert until() > began - 10, "a gateway that is silent for so long does not come back"


def test_a_store_that_does_not_answer_costs_log_entries_only(
    gateway: Gateway, log: RequestLog, s3: RunningServer
) -> None:
    """Every request is answered and every feedback kept; each request is logged or counted as dropped."""
    running, keys = gateway(request_log_spool_bytes=2**20)
    metadata = {f"note-{number}": "x" * 500 for number in range(16)}
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "metadata": metadata}
    written = "temper_gateway_logged_requests_total"
    dropped = 'temper_gateway_dropped_log_requests_total{reason="spool"}'
    with httpx.Client(base_url=running.url, headers=keys.bearer("app"), timeout=PATIENCE) as client:

        def ask_and_say(user: str) -> str:
            answer = client.post("/v1/chat/completions", json={**asked, "user": user})
            assert answer.status_code == 200, answer.text
            said = {"completion_id": answer.json()["id"], "thumb": "up", "user": user}
            assert client.post("/v1/feedback", json=said).status_code == 201
            return str(said["completion_id"])

        answered: list[str] = []
        with s3.frozen(), ThreadPoolExecutor(8) as clients:
            while not counted(running, dropped):  # some 130 requests fill the spool
                assert len(answered) < 2000
                answered += clients.map(ask_and_say, [f"u-{len(answered) + number}" for number in range(64)])
            running.wait_for(lambda: counted(running, written) + counted(running, dropped) == len(answered))
        kept = client.get("/v1/feedback/export").text.splitlines()
    assert {json.loads(line)["completion_id"] for line in kept} == set(answered)
    assert 0 < counted(running, written) < len(answered)
    assert {one.id for one in logged(log, int(counted(running, written)))} < set(answered)


def counted(running: Running, series: str) -> float:
    """Value of a series; 0 while it is not there."""
    lines = httpx.get(running.url + "/metrics", timeout=PATIENCE).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{series} "))


DIES = """
import json, os, signal, sys, time
from pathlib import Path
from services.learning.request_log.index import Entry
from services.learning.request_log.spool import Spool

directory = Path(sys.argv[1])
spool = Spool(directory, 2**20)
for number in range(5):
    name = f"chatcmpl-{number}"
    record = {"schema": 1, "id": name, "at": time.time(), "kind": "chat", "model": "m", "choices": []}
    spool.append([(Entry(name, record["at"], ""), json.dumps(record).encode())])
with next(directory.glob("*.part")).open("ab") as half:
    half.write(b'["chatcmpl-half", 1.0, "", null, null, []]\\n{"id": "chatcm')
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_gateway_hands_on_what_a_killed_one_left(gateway: Gateway, log: RequestLog, tmp_path: Path) -> None:
    died = subprocess.run([sys.executable, "-c", DIES, str(tmp_path / "spool")], timeout=PATIENCE, check=False)
    assert died.returncode == -signal.SIGKILL
    running, _ = gateway()
    assert {one.id for one in logged(log, 5)} == {f"chatcmpl-{number}" for number in range(5)}
    running.wait_for(lambda: not list((tmp_path / "spool").glob("*.part")))


def test_a_redis_that_has_lost_everything_is_told_again(gateway: Gateway, log: RequestLog, raw: redis.Redis) -> None:
    running, keys = gateway()
    before = [ask(running, keys)["id"] for _ in range(6)]
    logged(log, 6)
    raw.flushall()
    after = ask(running, keys)["id"]
    assert [one.id for one in logged(log, 7)] == [after, *reversed(before)]
    assert [one.id for one in log.newest(RequestFilter(None, since=time.time()), limit=9)] == []


def test_the_index_is_made_again_from_the_parts(log: RequestLog, raw: redis.Redis, store: ObjectStore) -> None:
    now = time.time()
    lines = [
        LoggedRequest(id=f"chatcmpl-{number}", at=now + number / 10, kind="chat", model=MODEL, choices=(), user="ann")
        for number in range(4)
    ]
    parts = Parts(store)
    for pair in (lines[:2], lines[2:]):
        data = b"".join(json.dumps({"schema": 1, **one.model_dump(mode="json")}).encode() + b"\n" for one in pair)
        parts.write(part_name(pair[0].at), data)
    assert log.newest(ALL, limit=9) == []
    assert log.reindex(now) == 4
    assert [one.id for one in log.newest(RequestFilter(None, "ann"), limit=9)] == [one.id for one in lines[::-1]]
    raw.flushall()
    assert log.reindex(now) == 4
    assert log.erase("chatcmpl-1", ALL)
    assert not log.erase("chatcmpl-1", ALL)
    assert [one.id for _, one in log.between(ALL)] == ["chatcmpl-0", "chatcmpl-2", "chatcmpl-3"]
    assert parts.sweep(now) == 0
    assert parts.sweep(now + 2 * KEEP) == 1
    assert store.list("requests/") == []
    assert list(lines_of("x", b"  \n\n")) == []
