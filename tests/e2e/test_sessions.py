"""Training sessions of a whole Temper: a job beside a session, an engine that dies. test_guides.py runs their guide."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.common.pb import engine_pb2, engine_pb2_grpc
from tests.e2e import jobs
from tests.stack import Stack

DATA = [{"token_ids": list(range(40, 80))}, {"token_ids": list(range(100, 120))}]


class Client:
    """One session over HTTP."""

    def __init__(self, http: httpx.Client, **settings: Any) -> None:
        self.http = http
        answer = http.post("/v1/train/sessions", json=settings)
        assert answer.status_code == 201, answer.text
        self.id = str(answer.json()["id"])
        self.seq = 0

    def send(self, call: str, **body: Any) -> str:
        self.seq += 1
        answer = self.http.post(f"/v1/train/sessions/{self.id}/{call}", json={"seq": self.seq, **body})
        assert answer.status_code == 202, answer.text
        assert answer.headers["location"] == f"/v1/train/futures/{answer.json()['id']}"
        return str(answer.json()["id"])

    def ended(self, future: str, timeout: float = 120) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            answer = self.http.get(f"/v1/train/futures/{future}", params={"wait": 10})
            if answer.status_code == 503:
                time.sleep(0.2)
                continue
            assert answer.status_code == 200, answer.text
            if answer.json()["state"] != "pending":
                return dict(answer.json())
        raise AssertionError(f"{future} did not end")

    def run(self, call: str, **body: Any) -> dict[str, Any]:
        found = self.ended(self.send(call, **body))
        assert found["state"] == "done", found
        return dict(found["result"])

    def train(self) -> float:
        forward = self.send("forward_backward", loss="cross_entropy", data=DATA)
        self.run("optim_step", learning_rate=1e-3)
        return float(self.ended(forward)["result"]["loss"])


@pytest.fixture
def http(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=120) as client:
        yield client
        for session in client.get("/v1/train/sessions").json()["data"]:
            client.delete(f"/v1/train/sessions/{session['id']}")


def test_a_published_version_serves_what_was_trained(http: httpx.Client) -> None:
    session = Client(http, lora={"rank": 8})
    losses = [session.train() for _ in range(8)]
    assert losses[-1] < 0.75 * losses[0]
    saved = session.run("save", name="sessions-served")
    assert saved["adapter"] == "sessions-served@1"
    greedy = {"prompt": [40, 41, 42], "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    answer = http.post("/v1/completions", json={"model": "sessions-served", **greedy})
    assert answer.status_code == 200, answer.text
    served = answer.json()["choices"][0]
    base = http.post("/v1/completions", json={"model": "qwen3.5", **greedy}).json()["choices"][0]
    sampled = session.run("sample", prompts=[[40, 41, 42]], max_tokens=8, temperature=0)["sequences"][0]
    assert served["token_ids"] == sampled["token_ids"] != base["token_ids"]
    # What the session samples has the log-probabilities that it trains on.
    tokens = [40, 41, 42, *sampled["token_ids"]]
    scored = session.run("forward", data=[{"token_ids": tokens}])["logprobs"][0]
    assert scored[3:] == pytest.approx(sampled["logprobs"], abs=1e-3)


def test_sampling_repeats_with_its_seed(http: httpx.Client) -> None:
    session = Client(http, lora={"rank": 8})
    ask = {"prompts": ["Once", [50, 60]], "n": 3, "max_tokens": 12, "seed": 7}
    first, second = session.run("sample", **ask), session.run("sample", **ask)
    assert first == second
    assert [one["prompt"] for one in first["sequences"]] == [0, 0, 0, 1, 1, 1]
    assert len({tuple(one["token_ids"]) for one in first["sequences"][:3]}) > 1
    assert first["prompt_token_ids"][1] == [50, 60]
    refused = http.post(
        f"/v1/train/sessions/{session.id}/sample", json={"seq": 3, "prompts": ["a"], "max_tokens": 10**6}
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompts[0]"


def test_closing_ends_what_is_being_sampled(http: httpx.Client, stack: Stack) -> None:
    session = Client(http, lora={"rank": 8})
    sampling = session.send("sample", prompts=["On and on"], n=8, max_tokens=4000, temperature=2.0)
    deadline = time.monotonic() + 30
    while http.get(f"/v1/train/futures/{sampling}").json().get("queue", {}).get("state") != "running":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert http.delete(f"/v1/train/sessions/{session.id}").status_code == 200
    found = session.ended(sampling)
    assert (found["state"], found["error"]["category"]) == ("failed", "user")
    assert "was closed before this call had ended" in found["error"]["message"]
    with stack.engine_channel() as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        while stub.GetStatus(engine_pb2.GetStatusRequest()).running:
            assert time.monotonic() < deadline, "the engine still generates"
            time.sleep(0.1)


def test_a_job_and_a_session_run_side_by_side(http: httpx.Client) -> None:
    session = Client(http, lora={"rank": 8})
    first = session.train()
    job_id = jobs.submit_sft(http, "beside-a-session", epochs=16, batch_size=4)
    jobs.wait_for_step(http, job_id, 1)
    during = 0
    slowest = 0.0
    while jobs.job(http, job_id)["state"] == "running":
        began = time.monotonic()
        last = session.train()
        slowest = max(slowest, time.monotonic() - began)
        during += 1
    ended = jobs.wait_for_end(http, job_id)
    assert ended["state"] == "succeeded", ended
    assert during >= 5, "the session got its turns while the job ran"
    assert last < first
    losses = [loss for _, loss in jobs.losses(http, job_id)]
    assert losses[-1] < 0.5 * losses[0], "and the job learned"


def test_bad_input_is_named_and_takes_no_place(http: httpx.Client) -> None:
    session = Client(http, lora={"rank": 4})
    url = f"/v1/train/sessions/{session.id}"
    ok = {"token_ids": [40, 41, 42]}
    rl = {**ok, "advantages": [0, 1, 1], "logprobs": [0, -1, -1]}
    cases: list[tuple[str, dict[str, Any], str, str]] = [
        ("forward_backward", {"loss": "gspo", "data": [ok]}, "loss", "cross_entropy"),
        ("forward_backward", {"loss": "cross_entropy", "data": []}, "data", "at least 1"),
        ("forward_backward", {"loss": "cross_entropy", "data": [rl]}, "data[0].advantages", "does not take"),
        ("forward_backward", {"loss": "ppo", "data": [rl, ok]}, "data[1].advantages", "needs"),
        (
            "forward_backward",
            {"loss": "cispo", "data": [rl], "loss_config": {"clip_low": 0.1}},
            "clip_low",
            "no setting",
        ),
        ("forward", {"data": [{**ok, "weights": [0, 1]}]}, "data[0].weights", "2 entries and token_ids 3"),
        ("forward", {"data": [{**ok, "weights": [1, 1, 1]}]}, "data[0].weights", "must be 0"),
        ("forward", {"data": [{**ok, "weights": [0, 0, 0]}]}, "data[0].weights", "nothing would be scored"),
        ("forward", {"data": [{"token_ids": [40]}]}, "data[0].token_ids", "predicts nothing"),
        ("forward", {"data": [{"token_ids": [40, -1]}]}, "data[0].token_ids[1]", "greater than or equal to 0"),
        ("forward", {"data": [{"token_ids": [40, 10**6]}]}, "data[0].token_ids", "vocabulary ends at"),
        ("forward", {"data": [{"token_ids": [40] * 5000}]}, "data[0].token_ids", "limit for training is 4096"),
        ("forward", {"data": [{"token_ids": [40, True]}]}, "data[0].token_ids[1]", "valid integer"),
        ("forward", {"data": [ok], "extra": 1}, "extra", "Unknown parameter"),
        ("optim_step", {"learning_rate": -1}, "learning_rate", "greater than or equal to 0"),
        ("save", {}, "name", "exactly one of"),
        ("save", {"name": "../x"}, "name", "adapter name"),
        ("save", {"name": "qwen3.5"}, "adapter", "name of the base model"),
        ("load", {"adapter": "a", "checkpoint": "b"}, "adapter", "exactly one of"),
    ]
    for call, body, param, message in cases:
        answer = http.post(f"{url}/{call}", json={"seq": 1, **body})
        assert answer.status_code == 400, (call, body, answer.text)
        error = answer.json()["error"]
        assert param in error["param"], (body, error)
        assert message in error["message"], (body, error)
    for text, param in (("NaN", "weights[1]"), ("Infinity", "weights[1]"), ("1e999", "weights[1]")):
        content = '{"seq": 1, "data": [{"token_ids": [40, 41], "weights": [0, ' + text + "]}]}"
        answer = http.post(f"{url}/forward", content=content, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"data[0].{param}"), answer.text
    for seq in (0, -1, "1", None):
        assert http.post(f"{url}/optim_step", json={"seq": seq}).status_code == 400
    assert http.get(url).json()["next_seq"] == 1
    assert http.get("/v1/train/sessions/nobody").status_code == 404
    assert http.get("/v1/train/futures/nobody").status_code == 404
    assert http.post("/v1/train/sessions/nobody/optim_step", json={"seq": 1}).status_code == 404
    assert http.post("/v1/train/sessions", json={"adapter": "nobody-at-all"}).status_code == 404
    assert http.post("/v1/train/sessions", json={"checkpoint": "nothing"}).status_code == 404
    assert http.post("/v1/train/sessions", json={"lora": {"rank": 64}}).status_code == 400
    assert http.post("/v1/train/sessions", json={"lora": {"target_modules": ["x"]}}).status_code == 400


def test_repeats_conflicts_and_order(http: httpx.Client) -> None:
    session = Client(http, lora={"rank": 4})
    url = f"/v1/train/sessions/{session.id}"
    body = {"seq": 2, "learning_rate": 1e-3}
    step = http.post(f"{url}/optim_step", json=body).json()
    assert (step["state"], step["queue"]) == (
        "pending",
        {"state": "waiting_for_seq", "ahead": 0, "missing_seq": 1},
    )
    assert http.post(f"{url}/optim_step", json=body).json()["id"] == step["id"]
    conflict = http.post(f"{url}/optim_step", json={**body, "learning_rate": 1e-2})
    assert (conflict.status_code, conflict.json()["error"]["param"]) == (409, "seq")
    http.post(f"{url}/forward_backward", json={"seq": 1, "loss": "cross_entropy", "data": DATA})
    assert session.ended(step["id"])["result"]["step"] == 1
    failed = session.ended(http.post(f"{url}/optim_step", json={"seq": 3}).json()["id"])
    assert (failed["state"], failed["error"]["category"]) == ("failed", "user")
    assert "no gradient" in failed["error"]["message"]


def test_too_many_sessions(http: httpx.Client) -> None:
    opened = [Client(http, lora={"rank": 2}) for _ in range(4)]
    refused = http.post("/v1/train/sessions", json={})
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    assert "4 training sessions are open" in refused.json()["error"]["message"]
    assert http.delete(f"/v1/train/sessions/{opened[0].id}").json()["deleted"]
    Client(http, lora={"rank": 2})


def test_an_engine_that_dies_takes_its_sessions_along_and_says_so(http: httpx.Client, stack: Stack) -> None:
    session = Client(http, lora={"rank": 8})
    session.train()
    session.run("save", checkpoint="before-the-end")
    done = session.send("forward", data=DATA)
    session.ended(done)
    long = [{"token_ids": [40] * 512}] * 60
    pending = [session.send("forward_backward", loss="cross_entropy", data=long) for _ in range(2)]
    os.kill(stack.pid("engine"), signal.SIGKILL)
    for future in [*pending, done]:
        found = session.ended(future)
        assert found["state"] == "failed", found
        assert (found["error"]["code"], found["error"]["category"]) == ("gone", "server")
        assert "has ended" in found["error"]["message"]
    deadline = time.monotonic() + 60
    while (answer := http.get(f"/v1/train/sessions/{session.id}")).status_code == 503:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert answer.status_code == 410
    assert "checkpoint" in answer.json()["error"]["message"]
    sent = http.post(f"/v1/train/sessions/{session.id}/optim_step", json={"seq": 9})
    assert sent.status_code == 410
    while (answer := http.post("/v1/train/sessions", json={"checkpoint": "before-the-end"})).status_code == 503:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert answer.status_code == 201, answer.text
    assert answer.json()["step"] == 1


@pytest.mark.thorough
def test_a_job_that_fits_only_alone_waits_for_the_sessions(tmp_path: Path) -> None:
    memory = {"TEMPER_TRAIN_MEMORY_BYTES": "220MiB"}
    with Stack(tmp_path / "data", env=memory) as stack, httpx.Client(base_url=stack.url, timeout=120) as http:
        sessions = [Client(http, lora={"rank": 32}) for _ in range(2)]
        body = {"adapter": "alone", "lora": {"rank": 32}, "max_tokens_per_microbatch": 512, "epochs": 1}
        job_id = jobs.submit_sft(http, **body)
        deadline = time.monotonic() + 60
        while "the job waits for memory" not in stack.log("engine"):
            assert time.monotonic() < deadline, stack.describe()
            time.sleep(0.2)
        before = sessions[0].train()
        assert sessions[0].train() < before, "sessions go on meanwhile"
        late = http.post("/v1/train/sessions", json={"lora": {"rank": 2}})
        assert late.status_code == 503
        assert "a training job waits" in late.json()["error"]["message"]
        assert jobs.job(http, job_id)["state"] == "running"
        for session in sessions:
            http.delete(f"/v1/train/sessions/{session.id}")
        assert jobs.wait_for_end(http, job_id)["state"] == "succeeded"
