"""`temper train watch` and `wait`: following a job."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from cli.http.client import _parse_events
from tests.unit.cli.runner import JOB, routes, state, temper
from tests.unit.cli.server import Reply, Seen, serving, sse


def progress(step: int, loss: float) -> dict[str, Any]:
    return {"kind": "progress", "data": {"step": step, "total_steps": 2, "loss": loss}}


def test_watch_goes_on_where_a_broken_stream_ended() -> None:
    first = sse(("1-0", "state", state("running")), ("2-0", "progress", progress(1, 0.9)))
    second = sse(("3-0", "progress", progress(2, 0.5)), ("4-0", "state", state("succeeded")))

    def events(seen: Seen) -> Reply:
        return second if seen.headers.get("last-event-id") == "2-0" else first

    running = iter([{**JOB, "state": "running"}, JOB])
    answer = routes(GET_v1_train_jobs_job1_events=events, GET_v1_train_jobs_job1=lambda _: Reply(next(running)))
    with serving(answer) as (url, _):
        result = temper("train", "watch", "job-1", "--json", url=url)
    assert result.exit_code == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["id"] for line in lines] == ["1-0", "2-0", "3-0", "4-0", "job-1"]
    assert lines[1]["data"]["loss"] == 0.9


def test_watch_shows_steps_and_exits_1_when_the_job_fails() -> None:
    failed = {**JOB, "state": "failed", "reason": "the loss is not finite"}
    events = sse(("1-0", "progress", progress(1, 0.9)), ("2-0", "state", state("failed")))
    answer = routes(GET_v1_train_jobs_job1_events=events, GET_v1_train_jobs_job1=Reply(failed))
    with serving(answer) as (url, _):
        result = temper("train", "watch", "job-1", url=url)
    assert result.exit_code == 1
    assert "step 1/2" in result.stderr
    assert "loss 0.9" in result.stderr
    assert "failed: the loss is not finite" in result.stderr
    with serving(answer) as (url, _):
        result = temper("train", "watch", "job-1", "--json", url=url)
    *_, last = [json.loads(line) for line in result.stdout.splitlines()]
    assert (last["error"]["message"], last["error"]["job"]["state"]) == ("the loss is not finite", "failed")


def test_what_a_job_has_learnt_is_said_at_its_end() -> None:
    learnt = {
        **JOB,
        "parent": "polite@0",
        "settings": {"learning_rate": 0.002, "steps": 30, "epochs": 30},
        "metrics": {"loss": 7.2, "loss_before": 9.16, "loss_after": 7.27},
        "notes": ["goes on from polite@0", "hardly learnt: give more epochs"],
    }
    note = {"message": "hardly learnt: give more epochs", "note": True}
    events = sse(
        ("1-0", "state", state("queued")),
        ("2-0", "log", {"kind": "log", "data": note}),
        ("3-0", "log", {"kind": "log", "data": {"message": "resumed after step 3"}}),
        ("4-0", "state", state("succeeded")),
    )
    answer = routes(GET_v1_train_jobs_job1_events=events, GET_v1_train_jobs_job1=Reply(learnt))
    with serving(answer) as (url, _):
        watched = temper("train", "watch", "job-1", url=url)
        status = temper("train", "status", "job-1", url=url)
    assert watched.exit_code == 0, watched.stderr
    assert watched.stdout == "job-1 succeeded: polite@1 (loss on its examples 9.16 → 7.27)\n"
    told = watched.stderr.splitlines()
    assert told[-2:] == ["note: goes on from polite@0", "note: hardly learnt: give more epochs"]
    assert told[:-2] == ["state queued", "log resumed after step 3", "state succeeded"]
    for line in ("settings  learning_rate 0.002  steps 30  epochs 30", "from      polite@0", "note      hardly learnt"):
        assert line in status.stdout


def test_wait_times_out_with_4() -> None:
    answer = routes(
        GET_v1_train_jobs_job1_events=sse(("1-0", "progress", progress(1, 0.9))),
        GET_v1_train_jobs_job1=Reply({**JOB, "state": "running"}),
    )
    with serving(answer) as (url, _):
        assert temper("train", "watch", "job-1", "--timeout", "0", url=url).exit_code == 4


def test_wait_times_out_with_4_although_nothing_happens() -> None:
    over = threading.Event()

    def silent(_: Seen) -> Reply:
        over.wait(20)
        return sse()

    answer = routes(GET_v1_train_jobs_job1_events=silent, GET_v1_train_jobs_job1=Reply({**JOB, "state": "queued"}))
    with serving(answer) as (url, _):
        started = time.monotonic()
        result = temper("train", "watch", "job-1", "--timeout", "0.3", url=url)
        over.set()
    assert result.exit_code == 4
    assert time.monotonic() - started < 15


def test_a_sign_of_life_is_no_event_but_is_noticed() -> None:
    lines = iter([": keep-alive", "", "data: 1", "", ":", ""])
    seen: list[str] = []
    events = [event.data for event in _parse_events(lines, lambda: seen.append("alive"))]
    assert events == ["1"]
    assert seen == ["alive", "alive"]
