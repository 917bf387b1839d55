"""Gateways and engines replaced under load: two real engines that train, behind real gateways, all over mTLS."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
import pytest

from cli.local.ports import claim_ports
from services.common.shutdown import CLOSE_SECONDS
from tests.certificates import Authority, environment
from tests.e2e import jobs
from tests.e2e.balancer import POLL_SECONDS, Balancer
from tests.e2e.cluster import Cluster
from tests.e2e.test_engines import Answer, complete, http, prompts, stream, until
from tests.stack import PATIENCE, Stack

DRAIN_DELAY = 3 * POLL_SECONDS
GRACE = 20
STREAMS = 32
TOKENS = 60


@pytest.fixture(scope="module")
def cluster(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("lifecycle")
    authority = Authority("temper-ca")
    # A database and a bucket of their own: the jobs here are not for the other engine on these stores.
    redis_url = stack.settings.redis_url.get_secret_value().removesuffix("/0") + "/1"
    stores = {"TEMPER_REDIS_URL": redis_url, "TEMPER_S3_BUCKET": "lifecycle"}
    engine = {
        **stores,
        **environment(authority.issue(directory / "engine", "engine.temper.svc")),
        "TEMPER_TRAINER": "true",
        "TEMPER_MAX_NUM_SEQS": "32",
        "TEMPER_TOKEN_BUDGET": "256",
        "TEMPER_MAX_MODEL_LEN": "4096",
        "TEMPER_KV_CACHE_BYTES": "128MiB",
        "TEMPER_DRAIN_SECONDS": str(GRACE),
    }
    gateway = {
        **stores,
        **environment(authority.issue(directory / "gateway", "gateway.temper.svc")),
        "TEMPER_GRPC_TLS_SERVER_NAME": "engine.temper.svc",
        "TEMPER_STATUS_INTERVAL_SECONDS": "0.2",
        "TEMPER_DRAIN_DELAY_SECONDS": str(DRAIN_DELAY),
        "TEMPER_SHUTDOWN_GRACE_SECONDS": str(GRACE),
    }
    with Cluster(stack, directory, 2, engine_env=engine, gateway_env=gateway) as running:
        yield running


@dataclass
class Load:
    """Clients that go on until they are told to stop. Whatever is not a whole answer is a failure."""

    model: str
    failures: list[str] = field(default_factory=list)
    answered: int = 0
    streamed: int = 0
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(self, url: str, number: int) -> None:
        """Short completions, one after the other over a connection that is kept."""
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            for turn in itertools.count():
                if self.stop.is_set():
                    return
                body = {"model": self.model, "prompt": f"{number} {turn}", "max_tokens": 2, "temperature": 0}
                try:
                    response = await client.post("/v1/completions", json=body)
                    if response.status_code != 200:
                        self.failures.append(response.text)
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))
                self.answered += 1
                await asyncio.sleep(0.1)  # the engines need the processors too

    async def listen(self, url: str, number: int) -> None:
        """Streams, one after the other over a connection that is kept."""
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            for turn in itertools.count():
                if self.stop.is_set():
                    return
                try:
                    answer = await stream(client, self.model, [20 + number, 30 + turn % 900], TOKENS, Answer())
                    if answer.end != "done" or len(answer.tokens) != TOKENS:
                        self.failures.append(f"{answer.end} after {len(answer.tokens)} tokens ({answer.status})")
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))
                self.streamed += 1
                await asyncio.sleep(0.1)


@pytest.mark.parametrize("gateways", [1, pytest.param(2, marks=pytest.mark.thorough)])
async def test_gateways_are_replaced_without_a_failed_request(cluster: Cluster, gateways: int) -> None:
    """One after the other."""
    claims = claim_ports(2 * gateways)
    old, new = [claim.number for claim in claims[:gateways]], [claim.number for claim in claims[gateways:]]
    processes = {port: cluster.start_gateway(f"gateway-{port}", port) for port in old}
    load = Load(cluster.model)
    async with Balancer([*old, *new]) as balancer:
        await balancer.until_ready(*old)
        clients = [asyncio.create_task(load.ask(balancer.url, number)) for number in range(2)]
        clients += [asyncio.create_task(load.listen(balancer.url, number)) for number in range(2)]
        serving = list(old)
        for leaving, coming in zip(old, new, strict=True):
            processes[coming] = cluster.start_gateway(f"gateway-{coming}", coming)
            await balancer.until_ready(*serving, coming)
            seen = load.streamed
            await until(lambda seen=seen: load.streamed > seen + 2)  # type: ignore[misc]
            processes[leaving].send_signal(signal.SIGTERM)
            began = time.monotonic()
            assert await asyncio.to_thread(processes[leaving].wait, DRAIN_DELAY + GRACE + CLOSE_SECONDS) == 0
            assert time.monotonic() - began >= DRAIN_DELAY, "it accepts until the balancer has heard of it"
            serving = [port for port in serving if port != leaving] + [coming]
            await balancer.until_ready(*serving)
        load.stop.set()
        await asyncio.gather(*clients)
    for port in new:
        processes[port].send_signal(signal.SIGTERM)
    for claim in claims:
        claim.release()
    assert load.failures == []
    assert load.answered > 10 * gateways
    assert load.streamed > 4 * gateways


@pytest.mark.thorough
async def test_what_outlasts_the_grace_ends_with_an_error_event(cluster: Cluster) -> None:
    (claim,) = claim_ports(1)
    env = {"TEMPER_SHUTDOWN_GRACE_SECONDS": "1", "TEMPER_DRAIN_DELAY_SECONDS": "0"}
    process = cluster.start_gateway("gateway-short", claim.number, env)
    url = f"http://127.0.0.1:{claim.number}"
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        await asyncio.to_thread(cluster.wait_for, lambda: _ready(url), "the gateway")
        answer = Answer()
        streaming = asyncio.create_task(stream(client, cluster.model, [5, 6], 4000, answer))
        body = {"model": cluster.model, "prompt": [7, 8], "max_tokens": 4000, "ignore_eos": True}
        whole = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(lambda: len(answer.tokens) > 4)
        process.send_signal(signal.SIGTERM)
        await streaming
        assert answer.end == "unavailable"
        refused = await whole
        assert refused.status_code == 503
        assert "TEMPER_SHUTDOWN_GRACE_SECONDS" in refused.json()["error"]["message"]
    assert await asyncio.to_thread(process.wait, 1 + CLOSE_SECONDS) == 0
    claim.release()


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", verify=False, timeout=PATIENCE).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.thorough
async def test_an_engine_leaves_under_streams_and_another_takes_its_job(cluster: Cluster) -> None:
    epochs = 16
    with httpx.Client(base_url=cluster.url, timeout=30) as client:
        job_id = jobs.submit_sft(client, "moved", epochs=epochs, checkpoint_every=1000)
        await asyncio.to_thread(jobs.wait_for_step, client, job_id, 5)
        (leaving,) = (address for address, engine in cluster.health().items() if engine["job_id"] == job_id)
        async with http(cluster) as asking:
            answers = [Answer() for _ in range(STREAMS)]
            running = [
                asyncio.create_task(stream(asking, cluster.model, prompt, 40, answer))
                for prompt, answer in zip(prompts(STREAMS, 16, seed=9), answers, strict=True)
            ]
            await until(lambda: all(len(answer.tokens) >= 2 for answer in answers))
            # The gateway asks for it every now and then.
            await until(lambda: cluster.health()[leaving]["running"] > 0)
            process = cluster.processes[leaving]
            cluster.signal(leaving, signal.SIGTERM)
            news = [asyncio.create_task(complete(asking, cluster.model, p)) for p in prompts(8, 24, seed=10)]
            await asyncio.gather(*running, *news)
        assert {answer.end for answer in answers} == {"done"}
        assert {len(answer.tokens) for answer in answers} == {40}
        assert await asyncio.to_thread(process.wait, GRACE + CLOSE_SECONDS) == 0
        end = await asyncio.to_thread(jobs.wait_for_end, client, job_id)
        assert (end["state"], end["result_adapter"], end["attempts"]) == ("succeeded", "moved@1", 1)
        steps = [step for step, _ in jobs.losses(client, job_id)]
        assert steps == list(range(1, epochs + 1)), "it goes on at the very step where it was handed back"
