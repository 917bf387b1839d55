"""The rendered chart, executed: each process started with the command, environment and volumes of its manifest, over
mTLS and with API keys, probed as a kubelet probes, used, upgraded and ended. In order: each goes on from the last."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.common.pb import engine_pb2, engine_pb2_grpc
from tests.certificates import Authority
from tests.chart.node import Node, RunningPod, loopback
from tests.chart.render import render, values_file
from tests.e2e import jobs
from tests.e2e.burning import fires
from tests.e2e.test_engines import Answer, prompts, stream, until
from tests.exposure import called, readable
from tests.promtool import Promtool
from tests.promtool import promtool as promtool  # a fixture
from tests.stack import PATIENCE, ROOT, clean_environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pods need addresses of 127.0.0.0/8")

MODEL = "qwen3.5"
STORES = ("demo-temper-redis", "demo-temper-s3")
STREAMS = 32
TOKENS = 60
SMALL = {
    "TEMPER_TORCH_THREADS": 1,
    "TEMPER_MAX_NUM_SEQS": 32,
    "TEMPER_TOKEN_BUDGET": 256,
    "TEMPER_MAX_MODEL_LEN": 4096,
    "TEMPER_KV_CACHE_BYTES": "128MiB",
}
VALUES = {
    "engine": {"replicas": 2, "env": SMALL},
    "gateway": {
        "replicas": 2,
        "drainDelaySeconds": 1,
        "apiKeys": {"existingSecret": "keys"},
        "env": {"TEMPER_STATUS_INTERVAL_SECONDS": 0.2, "TEMPER_MAX_IN_FLIGHT": STREAMS},
    },
    "tls": {"enabled": True, "gatewayExistingSecret": "gateway-tls", "engineExistingSecret": "engine-tls"},
    "monitoring": {"enabled": True},
    "test": {"apiKeyExistingSecret": "test-key"},
}


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """An API key, and the file that the gateways get."""
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    made = subprocess.run(
        [
            *(sys.executable, "-m", "cli", "keys", "create", "--name", "ci", "--scopes", "inference,train,admin"),
            *("--file", str(file), "--json"),
        ],
        env=clean_environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(made.stdout)["key"], file


@pytest.fixture(scope="module")
def node(key: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """All pods of the release, ready."""
    directory = tmp_path_factory.mktemp("node")
    release = render(values_file("cpu-demo"), VALUES)
    outside = {("keys", "keys.json"): key[1].read_text(), ("test-key", "api-key"): key[0]}
    authority = Authority("temper-ca")
    for part, name in (("engine", "demo-temper-engine.ai.svc"), ("gateway", "demo-temper-gateway.ai.svc")):
        files = authority.issue(directory / f"{part}-tls", name)
        for file, path in (("tls.crt", files.cert), ("tls.key", files.key), ("ca.crt", files.ca)):
            outside[f"{part}-tls", file] = path.read_text()
    running = Node(release, directory, outside)
    try:
        # At once, as on a cluster: nothing waits for anything, and all come up.
        for component in ("gateway", "engine", "redis", "s3"):
            workload = release.workload(component)
            for index in range(workload.replicas):
                running.start(workload, index)
        for pod in running.pods.values():
            pod.wait("startup")
        for pod in running.pods.values():
            pod.wait("readiness")
        yield running
    finally:
        running.kill()


def gateway(node: Node, index: int = 0) -> RunningPod:
    return node.pods[f"demo-temper-gateway-{index}"]


def url(pod: RunningPod) -> str:
    return f"http://{pod.address}:{pod.container.ports['http']}"


def trains(node: Node, client: httpx.Client, job: str) -> RunningPod:
    """The engine that runs a job."""
    engines = client.get("/healthz").json()["engines"]
    (address,) = [engine["address"].rpartition(":")[0] for engine in engines if engine["job_id"] == job]
    (pod,) = [pod for pod in node.pods.values() if pod.address == address]
    return pod


@pytest.fixture
def client(node: Node, key: tuple[str, Path]) -> Iterator[httpx.Client]:
    with httpx.Client(
        base_url=url(gateway(node)), headers={"authorization": f"Bearer {key[0]}"}, timeout=60
    ) as connection:
        yield connection


def test_probes_answer(node: Node) -> None:
    assert len(node.pods) == 6
    for name, pod in node.pods.items():
        for kind in ("startup", "liveness", "readiness"):
            assert pod.probe(kind), (name, kind)


def test_what_prometheus_is_told_to_read_is_there(node: Node) -> None:
    engine = node.pods["demo-temper-engine-0"]
    (monitor,) = node.release.of("PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    scraped = httpx.get(
        f"http://{engine.address}:{engine.container.ports[endpoint['port']]}{endpoint['path']}", timeout=PATIENCE
    ).text
    names = {family.name for family in text_string_to_metric_families(scraped)}
    assert {"vllm:num_requests_waiting", "temper_engine_ready"} <= names
    (monitor,) = node.release.of("ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    scraped = httpx.get(url(gateway(node)) + endpoint["path"], timeout=PATIENCE).text
    assert "temper_gateway_engines" in {family.name for family in text_string_to_metric_families(scraped)}


def test_who_has_no_key_gets_nothing(node: Node) -> None:
    assert httpx.get(f"{url(gateway(node))}/v1/models", timeout=PATIENCE).status_code == 401


def test_the_stores_answer_nobody_without_their_credentials(node: Node) -> None:
    """On the address that other pods see, whatever listens there; and on the loopback of the pod, where files are."""
    s3 = node.pods["demo-temper-s3-0"]
    assert httpx.get(f"http://{s3.address}:{s3.container.ports['s3']}/", timeout=PATIENCE).status_code == 403
    ports = {
        one.laddr.port
        for one in psutil.Process(s3.process.pid).net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.laddr.ip == s3.address
    }
    assert s3.container.ports["s3"] in ports
    assert len(ports) > 1, "gRPC of S3 listens beside it"
    assert {port: found for port in ports if (found := readable(port, s3.address))} == {}
    inside = loopback(s3.address)
    assert httpx.get(f"http://{inside}:8888/buckets/temper/", timeout=PATIENCE).status_code == 401
    assert [*called(inside, 18888), *called(inside, 19333), *called(inside, 18080)] == []


def test_engines_talk_to_nobody_without_a_certificate(node: Node) -> None:
    engine = node.pods["demo-temper-engine-0"]
    address = f"{engine.address}:{engine.container.ports['grpc']}"
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError):
        engine_pb2_grpc.EngineStub(channel).GetModel(engine_pb2.GetModelRequest(), timeout=3)


def test_the_test_pod_of_helm_chats_and_trains(node: Node) -> None:
    pod = node.start(node.release.workload("test"))
    assert pod.process.wait(120) == 0, pod.log.read_text()
    told = pod.log.read_text().splitlines()
    assert told[-1] == "all of it works"
    assert any("@1 answers" in line for line in told)


async def test_a_full_gateway_burns_its_error_budget(
    node: Node, key: tuple[str, Path], promtool: Promtool, tmp_path: Path
) -> None:
    """By its own metrics and the alert as it is installed; one that had room burns nothing."""
    full, other = gateway(node, 1), gateway(node)
    refused = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings")
    headers = {"authorization": f"Bearer {key[0]}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url(full), headers=headers, timeout=60, limits=limits) as asking:
        answers = [Answer() for _ in range(STREAMS)]
        running = [
            asyncio.create_task(stream(asking, MODEL, prompt, 1000, answer))
            for prompt, answer in zip(prompts(STREAMS, 16, seed=10), answers, strict=True)
        ]
        await until(lambda: all(answer.tokens for answer in answers))
        for route in refused * 2:
            assert (await asking.post(route, json={"model": MODEL, "input": "hi"})).status_code == 503
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        scraped = {pod.name: (await asking.get(f"{url(pod)}/metrics")).text for pod in (full, other)}
    for route in refused:
        assert f'route="{route}",status="503"' in scraped[full.name]
    alert = "TemperErrorBudgetBurnsFast"
    assert fires(promtool, tmp_path, node.release, alert, scraped[full.name], full.name)
    assert 'route="/v1/models"' in scraped[other.name], "it was asked something"
    assert not fires(promtool, tmp_path, node.release, alert, scraped[other.name], other.name)


async def test_an_engine_leaves_under_streams_and_the_other_takes_its_job(
    node: Node, client: httpx.Client, key: tuple[str, Path]
) -> None:
    """SIGTERM: no stream breaks, the job goes on where it was, and what it made answers for the base model."""
    epochs = 16
    job = jobs.submit_sft(client, "moved", epochs=epochs, checkpoint_every=1000, attach=True)
    await asyncio.to_thread(jobs.wait_for_step, client, job, 3)
    leaving = await asyncio.to_thread(trains, node, client, job)
    async with httpx.AsyncClient(
        base_url=url(gateway(node)), headers=client.headers, timeout=60, limits=httpx.Limits(max_connections=None)
    ) as asking:
        answers = [Answer() for _ in range(STREAMS)]
        running = [
            asyncio.create_task(stream(asking, MODEL, prompt, TOKENS, answer))
            for prompt, answer in zip(prompts(STREAMS, 16, seed=9), answers, strict=True)
        ]
        await until(lambda: all(len(answer.tokens) >= 2 for answer in answers))
        leaving.terminate()
        await until(lambda: not leaving.probe("readiness"))
        assert leaving.process.poll() is None
        assert leaving.probe("liveness"), "a kubelet lets it finish"
        await asyncio.gather(*running)
    assert {answer.end for answer in answers} == {"done"}
    assert {len(answer.tokens) for answer in answers} == {TOKENS}
    assert await asyncio.to_thread(leaving.ended) == 0
    end = await asyncio.to_thread(jobs.wait_for_end, client, job)
    assert (end["state"], end["result_adapter"], end["attempts"]) == ("succeeded", "moved@1", 1)
    assert [step for step, _ in jobs.losses(client, job)] == list(range(1, epochs + 1))


def test_what_was_learnt_answers(client: httpx.Client) -> None:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert client.post("/v1/chat/completions", json=asked).json()["adapter"] == "moved@1"


def test_it_comes_back_and_serves_what_is_attached(node: Node, client: httpx.Client) -> None:
    (name,) = [name for name, pod in node.pods.items() if "engine" in name and pod.process.poll() is not None]
    pod = node.start(node.release.workload("engine"), int(name[-1]))
    pod.wait("startup")
    pod.wait("readiness")
    deadline = time.monotonic() + 30
    while sum(engine["ready"] for engine in client.get("/healthz").json()["engines"]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_all_ends_in_order(node: Node) -> None:
    """A gateway accepts for a while after its signal, as the manifest says, and everything ends by itself."""
    leaving = gateway(node, 1)
    leaving.terminate()
    deadline = time.monotonic() + 5
    while leaving.probe("readiness"):
        assert time.monotonic() < deadline
    assert leaving.probe("liveness")
    for name, pod in node.pods.items():
        if not name.startswith(STORES):
            pod.terminate()
    ends = {name: pod.ended() for name, pod in node.pods.items() if not name.startswith(STORES)}
    assert set(ends.values()) == {0}, ends
    for store in STORES:
        node.pods[f"{store}-0"].terminate()
        assert node.pods[f"{store}-0"].ended() == 0
