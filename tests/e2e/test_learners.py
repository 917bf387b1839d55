"""A learner on a real Temper with the tiny model: from what users said of answers to a version that gives others."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.stack import PATIENCE, Stack

WISH = "Good day!"
PLAIN = {"enable_thinking": False}
POLICY: dict[str, Any] = {
    "name": "manners",
    "adapter": "polite",
    "method": "sft",
    "settings": {"lora": {"rank": 4}, "chat_template_kwargs": PLAIN},
    "data": {"split": {"by": "user", "validation": 0.3, "held_out": 0.0, "seed": 1}},
    "trigger": {"min_rows": 12},
    "gate": {"metric": "eval_loss", "min_gain": 0.05},
    "stop_after": 1,
}


@pytest.fixture
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    logging = {"TEMPER_REQUEST_LOG": "true", "TEMPER_REQUEST_LOG_PART_SECONDS": "0.2"}
    directory = tmp_path_factory.mktemp("learners")
    env = {**logging, "TEMPER_REQUEST_LOG_SPOOL": str(directory / "spool")}
    with Stack(directory / "data", env=env) as running:
        yield running


@pytest.mark.parametrize("cycles", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_from_feedback_to_promotions_and_to_a_stop(stack: Stack, cycles: int) -> None:
    """The second cycle is a rejection, which tests/unit/learning has, too, and the third a canary's, as
    tests/integration/test_canaries.py and tests/browser/test_learning.py have."""
    with httpx.Client(base_url=stack.url, timeout=PATIENCE) as http:

        def ask(number: int) -> httpx.Response:
            asked = [{"role": "user", "content": f"What is {number} plus {number % 7}?"}]
            body = {"model": "qwen3.5", "messages": asked, "max_tokens": 8, "user": f"u-{number}", "temperature": 0}
            body["chat_template_kwargs"] = PLAIN
            answer = http.post(
                "/v1/chat/completions", json={**body, "chat_template_kwargs": {"enable_thinking": False}}
            )
            assert answer.status_code == 200, answer.text
            return answer

        def correct(numbers: range, wish: str) -> None:
            for number in numbers:
                said = {"completion_id": ask(number).json()["id"], "correction": wish, "user": f"u-{number}"}
                assert http.post("/v1/feedback", json=said).status_code == 201

        def learner() -> dict[str, Any]:
            return http.get("/v1/learners/manners").json()  # type: ignore[no-any-return]

        def until(outcome: str, cycle: int) -> dict[str, Any]:
            deadline = time.monotonic() + 2 * PATIENCE
            while (one := learner())["outcome"] != outcome or one["cycle"] != cycle or one["state"] == "preparing":
                assert time.monotonic() < deadline, events()
                assert one["outcome"] != "failed", events()
                time.sleep(0.1)
            return one

        def events() -> list[dict[str, Any]]:
            return http.get("/v1/learners/manners/events").json()["data"][::-1]  # type: ignore[no-any-return]

        assert "x-temper-adapter" not in ask(1).headers
        correct(range(10, 22), WISH)
        deadline = time.monotonic() + PATIENCE
        while len(http.get("/v1/request_log").json()["data"]) < 13:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        made = http.post("/v1/learners", json=POLICY)
        assert made.status_code == 201, made.text
        one = until("promoted", 1)
        assert (one["promoted"], one["dataset"], one["refused"]) == ("polite@1", "manners@1", 0)
        told = {event["kind"]: event for event in events()}
        assert list(told)[:4] == ["collecting", "preparing", "data", "training"]
        assert told["data"]["evidence"]["report"]["opinions"] == 12
        job = http.get(f"/v1/train/jobs/{one['job']}").json()
        assert (job["dataset"], job["dataset_digest"]) == ("manners@1", told["data"]["evidence"]["digest"])
        (version,) = http.get("/v1/adapters/polite/versions").json()["data"]
        assert version["dataset"] == {"version": "manners@1", "digest": job["dataset_digest"]}
        used = http.get("/v1/feedback").json()["data"]
        assert {tuple(opinion["used_by"]) for opinion in used} == {("manners@1",)}
        answer = ask(55)
        assert answer.headers["x-temper-adapter"] == "polite@1"
        assert answer.json()["choices"][0]["message"]["content"] == WISH
        if cycles == 1:
            return

        too_much = {**POLICY, "gate": {"metric": "eval_loss", "min_gain": 100}, "trigger": {"min_rows": 12}}
        assert http.put("/v1/learners/manners", json=too_much).json()["revision"] == 2
        correct(range(30, 42), "Well, well.")
        one = until("rejected", 2)
        assert (one["state"], one["promoted"], one["candidate"]) == ("stopped", "polite@1", None)
        last = events()[-2:]
        assert [event["kind"] for event in last] == ["rejected", "stopped"], json.dumps(last)
        assert "a gain of" in last[0]["detail"]
        assert len(http.get("/v1/adapters/polite/versions").json()["data"]) == 1
        resumed = http.post("/v1/learners/manners/resume").json()
        assert (resumed["state"], resumed["refused"]) == ("collecting", 0)

        tried = {**too_much, "gate": {"metric": "eval_loss"}, "canary": {"share": 0.5, "gain": 0.5}}
        assert http.put("/v1/learners/manners", json=tried).json()["revision"] == 3
        correct(range(50, 62), "Of course.")
        deadline = time.monotonic() + 2 * PATIENCE
        while (one := learner())["state"] != "canary" or one["canary"] is None:
            assert time.monotonic() < deadline, events()
            time.sleep(0.1)
        assert one["candidate"] == "polite@2"
        canary = http.get(f"/v1/canaries/{one['canary']}").json()
        assert (canary["state"], canary["current"], canary["candidate"]) == ("running", "polite@1", "polite@2")
        current = [one["version"] for one in http.get("/v1/adapters/polite/versions").json()["data"] if one["current"]]
        assert current == [1], "a candidate is not current while it is tried"
        decided = http.post(f"/v1/canaries/{one['canary']}/decide", json={"decision": "promote", "reason": "seen"})
        assert decided.status_code == 200, decided.text
        assert until("promoted", 3)["promoted"] == "polite@2"
        assert events()[-1]["evidence"]["decision"]["detail"] == "seen"
        current = [one["version"] for one in http.get("/v1/adapters/polite/versions").json()["data"] if one["current"]]
        assert current == [2]
