"""Real processes killed and frozen for real: jobs finish, nothing is published twice, inference goes on."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx
import psutil
import pytest

from benchmarks.gateway.kills import Plan, campaign
from services.common.pb import engine_pb2, engine_pb2_grpc
from tests.e2e import jobs
from tests.stack import Stack

RECLAIM_SECONDS = 4
EPOCHS = 16
"""One optimizer step each: the eight examples are one batch."""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack of its own for this file, quick to notice a dead trainer."""
    data_dir = tmp_path_factory.mktemp("faulty") / "data"
    with Stack(data_dir, env={"TEMPER_JOB_RECLAIM_SECONDS": str(RECLAIM_SECONDS)}) as stack:
        yield stack


@pytest.fixture(scope="module")
def undisturbed(faulty: Stack) -> dict[int, float]:
    """The loss curve of the job that the tests disturb, without a disturbance."""
    with httpx.Client(base_url=faulty.url, timeout=30) as client:
        job_id = jobs.submit_sft(client, "undisturbed", epochs=EPOCHS, checkpoint_every=5)
        assert jobs.wait_for_end(client, job_id)["state"] == "succeeded"
        curve = dict(jobs.losses(client, job_id))
    assert sorted(curve) == list(range(1, EPOCHS + 1))
    assert curve[EPOCHS] < 0.5 * curve[1], "the job does not learn: its curve says nothing"
    return curve


def check_outcome(client: httpx.Client, job_id: str, adapter: str, undisturbed: dict[int, float]) -> None:
    """The job succeeded, published one version, and every loss it reported is the undisturbed one."""
    end = jobs.wait_for_end(client, job_id)
    assert end["state"] == "succeeded", end
    assert end["result_adapter"] == f"{adapter}@1"
    assert jobs.versions(client, adapter) == [1]
    reported = jobs.losses(client, job_id)
    assert {step for step, _ in reported} == set(undisturbed)
    far = [(step, loss, undisturbed[step]) for step, loss in reported if abs(loss - undisturbed[step]) > 1e-3]
    assert not far, f"(step, loss, undisturbed loss): {far}"


@pytest.mark.thorough
def test_engine_killed_in_the_middle_of_a_job(faulty: Stack, undisturbed: dict[int, float]) -> None:
    with httpx.Client(base_url=faulty.url, timeout=30) as client:
        job_id = jobs.submit_sft(client, "killed", epochs=EPOCHS, checkpoint_every=5)
        jobs.wait_for_step(client, job_id, 9)
        killed = faulty.pid("engine")
        os.kill(killed, signal.SIGKILL)
        check_outcome(client, job_id, "killed", undisturbed)
        assert faulty.pid("engine") != killed
        assert jobs.job(client, job_id)["attempts"] == 2
        resumed = [step for step, _ in jobs.losses(client, job_id)]
        back = next(after for before, after in itertools.pairwise(resumed) if after <= before)
        assert back > 1, f"the job started over instead of continuing from a checkpoint: {resumed}"
        assert jobs.chat(client, faulty.served_model_name)


@pytest.mark.thorough
def test_engine_killed_in_the_middle_of_an_evaluation(faulty: Stack) -> None:
    """It goes on where it was, and its result is that of a run that nobody disturbed."""
    lines = "\n".join(json.dumps({"prompt": f"What is {n} plus 7?", "expected": n + 7}) for n in range(160))
    suite = {"name": "sums", "scorer": {"type": "exact"}, "sampling": {"max_tokens": 6}, "jsonl": lines}
    run = {"suites": ["sums"], "sampling": {"samples": 8, "temperature": 1.2}, "seed": 3}
    with httpx.Client(base_url=faulty.url, timeout=30) as client:
        assert client.post("/v1/eval/suites", json=suite).status_code == 201
        ids = [client.post("/v1/evaluations", json=run).json()["id"] for _ in range(2)]
        jobs.wait_for_step(client, ids[0], 64)
        killed = faulty.pid("engine")
        os.kill(killed, signal.SIGKILL)
        for one in ids:
            assert jobs.wait_for_end(client, one)["state"] == "succeeded"
        assert faulty.pid("engine") != killed
        assert [jobs.job(client, one)["attempts"] for one in ids] == [2, 1]
        results = [client.get(f"/v1/evaluations/{one}").json() for one in ids]
        assert results[0]["summaries"] == results[1]["summaries"]
        pages = [client.get(f"/v1/evaluations/{one}/items", params={"limit": 1000}).json() for one in ids]
        assert len(pages[0]["data"]) == pages[0]["total"] == 160
        assert pages[0]["data"] == pages[1]["data"]


@contextmanager
def chatting(stack: Stack) -> Iterator[list[float]]:
    """Chats all the time in the background; yields the seconds that each answer took. Any error fails the test."""
    seconds: list[float] = []
    failures: list[BaseException] = []
    stop = threading.Event()

    def work() -> None:
        try:
            with httpx.Client(base_url=stack.url, timeout=30) as client:
                while not stop.is_set():
                    began = time.monotonic()
                    jobs.chat(client, stack.served_model_name)
                    seconds.append(time.monotonic() - began)
                    stop.wait(0.2)  # the job that the test waits for needs the processor too
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield seconds
    finally:
        stop.set()
        thread.join()
    if failures:
        raise failures[0]


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """The process is there and does not answer."""
    os.kill(pid, signal.SIGSTOP)
    # The signal stops the threads one by one; only after this no thread can answer any more.
    threads = psutil.Process(pid).threads()
    while any(psutil.Process(thread.id).status() != psutil.STATUS_STOPPED for thread in threads):
        time.sleep(0.01)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("service", ["valkey", "s3"])
def test_store_frozen_in_the_middle_of_a_job(faulty: Stack, undisturbed: dict[int, float], service: str) -> None:
    adapter = f"frozen-{service}"
    with httpx.Client(base_url=faulty.url, timeout=30) as client:
        job_id = jobs.submit_sft(client, adapter, epochs=EPOCHS, checkpoint_every=5)
        jobs.wait_for_step(client, job_id, 6)
        with chatting(faulty) as seconds:
            with frozen(faulty.pid(service)):
                began, before = time.monotonic(), len(seconds)
                path = "/v1/train/jobs" if service == "valkey" else "/v1/adapters/undisturbed/versions"
                response = client.get(path)
                assert response.status_code == 503, response.text
                assert float(response.headers["retry-after"]) > 0
                assert response.json()["error"]["code"]
                # Longer than a trainer may be silent; and while it lasts, chats are answered.
                while time.monotonic() < began + 1.5 * RECLAIM_SECONDS or len(seconds) < before + 10:
                    assert time.monotonic() < began + 60, f"{len(seconds) - before} answers without {service}"
                    time.sleep(0.05)
            check_outcome(client, job_id, adapter, undisturbed)


@pytest.mark.thorough
@pytest.mark.parametrize("service", ["valkey", "s3"])
def test_store_killed_in_the_middle_of_a_job(faulty: Stack, undisturbed: dict[int, float], service: str) -> None:
    adapter = f"killed-{service}"
    with httpx.Client(base_url=faulty.url, timeout=30) as client:
        job_id = jobs.submit_sft(client, adapter, epochs=EPOCHS, checkpoint_every=5)
        jobs.wait_for_step(client, job_id, 6)
        with chatting(faulty) as seconds:
            os.kill(faulty.pid(service), signal.SIGKILL)
            check_outcome(client, job_id, adapter, undisturbed)
        assert seconds


def test_every_process_killed_under_streams_and_jobs(faulty: Stack) -> None:
    """A part of `python -m benchmarks.gateway.kills`: each process once, in any order, then as the dice say."""
    outcome = campaign(faulty, Plan(seconds=8, every=(1.5, 4), seed=3, streams=4, jobs=2))
    assert outcome.breaches == []
    assert outcome.processes() == {"valkey", "s3", "engine", "gateway"}
    assert outcome.answers["whole"] > 0
    assert outcome.answers["cut"] + outcome.answers["unreachable"] > 0, "the kills met nobody: they say nothing"
    assert outcome.jobs["succeeded"] > 1


def status(stack: Stack) -> engine_pb2.EngineStatus:
    with stack.engine_channel() as channel:
        answer: engine_pb2.EngineStatus = engine_pb2_grpc.EngineStub(channel).GetStatus(
            engine_pb2.GetStatusRequest(), timeout=5
        )
    return answer


async def disconnect_at_random(client: httpx.AsyncClient, body: dict[str, object], seconds: float) -> None:
    """Sends a request and hangs up after the given time, wherever the request is then."""

    async def ask() -> None:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_lines():
                pass

    with suppress(TimeoutError, httpx.HTTPError):
        await asyncio.wait_for(ask(), seconds)


@pytest.mark.thorough
async def test_two_hundred_clients_that_hang_up(faulty: Stack) -> None:
    rng = random.Random(7)
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=faulty.url, timeout=60, limits=limits) as client,
        asyncio.TaskGroup() as group,
    ):
        for index in range(200):
            body = {
                "model": faulty.served_model_name,
                "prompt": f"Client {index} says: " + "word " * rng.randrange(1, 120),
                "max_tokens": 400,
                "ignore_eos": True,
                "stream": index % 2 == 0,
                "n": rng.choice([1, 1, 2]),
            }
            group.create_task(disconnect_at_random(client, body, rng.uniform(0.01, 4.0)))
    deadline = time.monotonic() + 20
    now = status(faulty)
    while (now.running or now.waiting or now.blocks_used or now.slots_used) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
        now = status(faulty)
    assert (now.running, now.waiting, now.blocks_used, now.slots_used) == (0, 0, 0, 0)
    with httpx.Client(base_url=faulty.url, timeout=60) as again:
        assert jobs.chat(again, faulty.served_model_name)


@pytest.mark.thorough
def test_termination_checkpoints_the_job_and_a_new_start_finishes_it(faulty: Stack) -> None:
    epochs = 12
    with httpx.Client(base_url=faulty.url, timeout=30) as client:
        job_id = jobs.submit_sft(client, "restarted", epochs=epochs, checkpoint_every=1000)
        jobs.wait_for_step(client, job_id, 6)
        assert faulty.stop() == 0
    faulty.start()
    with httpx.Client(base_url=faulty.url, timeout=30) as client:
        end = jobs.wait_for_end(client, job_id)
        assert end["state"] == "succeeded"
        steps = [step for step, _ in jobs.losses(client, job_id)]
        assert steps == list(range(1, epochs + 1)), "a drained job continues at the very step where it stopped"
        assert jobs.versions(client, "restarted") == [1]
