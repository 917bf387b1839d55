"""Four real engine processes behind a real gateway: who gets what, and what is left when one of them goes."""

from __future__ import annotations

import asyncio
import json
import math
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import grpc
import httpx
import msgspec
import pytest
import zmq

from cli.local.ports import claim_ports
from tests.e2e.adapters_for_tests import Reference
from tests.e2e.cluster import Cluster
from tests.e2e.endpoint_picker import DESTINATION, Load, Picker, tokens_of
from tests.stack import PATIENCE, Stack

ENGINES = 4
TIE = 1e-3
"""Two tokens whose logits differ by less than this may swap between batch shapes."""


@pytest.fixture(scope="module")
def kv_events() -> Iterator[tuple[zmq.Socket[bytes], str]]:
    """A router's socket to which engines connect, and its address."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    events = context.socket(zmq.SUB)
    port = events.bind_to_random_port("tcp://127.0.0.1")
    events.subscribe(b"kv@")
    yield events, f"tcp://127.0.0.1:{port}"
    context.destroy(linger=0)


@pytest.fixture(scope="module")
def cluster(
    stack: Stack, tmp_path_factory: pytest.TempPathFactory, kv_events: tuple[zmq.Socket[bytes], str]
) -> Iterator[Cluster]:
    engine = {
        "TEMPER_KV_EVENTS": kv_events[1],
        "TEMPER_MAX_NUM_SEQS": "16",
        "TEMPER_TOKEN_BUDGET": "256",
        "TEMPER_MAX_MODEL_LEN": "1024",
        "TEMPER_KV_CACHE_BYTES": "128MiB",
        "TEMPER_DRAIN_SECONDS": "120",
    }
    gateway = {"TEMPER_STATUS_INTERVAL_SECONDS": "0.2", "TEMPER_REQUEST_TIMEOUT_SECONDS": "60"}
    directory = tmp_path_factory.mktemp("cluster")
    with Cluster(stack, directory, ENGINES, engine_env=engine, gateway_env=gateway) as running:
        yield running


@dataclass
class Answer:
    """What came back for one stream."""

    tokens: list[int] = field(default_factory=list)
    end: str = "nothing"
    """"done", the code of the error event, or "broken" when it ended without either."""
    usage: dict[str, object] = field(default_factory=dict)
    status: int = 0


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Different from their first token on."""
    rng = random.Random(seed)
    return [[rng.randrange(20, 1800) for _ in range(length)] for _ in range(count)]


async def stream(client: httpx.AsyncClient, model: str, prompt: list[int], max_tokens: int, answer: Answer) -> Answer:
    """A greedy stream; ``answer`` is filled while it runs."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    async with client.stream("POST", "/v1/completions", json=body) as response:
        answer.status = response.status_code
        answer.end = "broken"
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                answer.end = "done"
            elif line.startswith("data: "):
                assert answer.end == "broken", "nothing follows [DONE] or an error"
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    answer.end = chunk["error"]["code"]
                else:
                    answer.tokens += chunk["choices"][0]["token_ids"]
    return answer


async def complete(client: httpx.AsyncClient, model: str, prompt: list[int], **fields: object) -> dict[str, object]:
    """Usage of a completion of one token."""
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    usage: dict[str, object] = response.json()["usage"]
    return usage


def http(cluster: Cluster) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=cluster.url, timeout=60, limits=limits, verify=False)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while True:
            if condition():
                return
            # Nobody but the streams themselves could tell.
            await asyncio.sleep(0.005)


def cached(usage: dict[str, object]) -> int:
    details = usage["prompt_tokens_details"]
    assert isinstance(details, dict)
    return int(details["cached_tokens"])


async def ask_all(cluster: Cluster, asked: Sequence[list[int]]) -> list[dict[str, object]]:
    """All at once: no engine computes before the gateway has chosen one for each, however slow the machine is."""
    living = [address for address in cluster.addresses if cluster.processes[address].poll() is None]
    async with http(cluster) as client:
        for address in living:
            cluster.signal(address, signal.SIGSTOP)
        try:
            answers = asyncio.gather(*(complete(client, cluster.model, prompt) for prompt in asked))
            await until(lambda: sum(engine["load"] for engine in cluster.health().values()) >= len(asked))
        finally:
            for address in living:
                cluster.signal(address, signal.SIGCONT)
        return list(await answers)


async def test_different_prompts_spread_and_equal_ones_meet(cluster: Cluster) -> None:
    before = {address: cluster.status(address).blocks_cached for address in cluster.addresses}
    asked = prompts(24, 192, seed=1)
    assert not any(map(cached, await ask_all(cluster, asked)))
    cluster.wait_for(lambda: not any(cluster.status(a).blocks_used for a in cluster.addresses), "ended requests")
    grown = [cluster.status(address).blocks_cached - before[address] for address in cluster.addresses]
    each = sum(grown) / len(asked)
    assert each >= 8, "a prompt of 192 tokens leaves blocks in the cache"
    # No engine may be given one more when it has a quarter more than its share.
    bound = math.ceil(1.25 * (len(asked) + 1) / ENGINES)
    assert all(0 < blocks <= bound * each + 1 for blocks in grown), grown
    async with http(cluster) as client:
        for prompt in asked:
            assert cached(await complete(client, cluster.model, prompt)) >= 128, "it goes where it was"


async def test_a_router_learns_from_kv_events_where_a_prompt_is(
    cluster: Cluster, kv_events: tuple[zmq.Socket[bytes], str]
) -> None:
    """In vLLM's format: see tests/unit/engine/observability/test_kv_events.py."""
    events, _ = kv_events
    async with http(cluster) as client:
        for seed in range(77, 100):  # what is published before a subscription is there is lost
            events.poll(500)
            (prompt,) = prompts(1, 200, seed)
            assert not cached(await complete(client, cluster.model, prompt))
            if events.poll(2000):
                break
    stored: list[int] = []
    snapshots: list[list[int]] = []
    while len(stored) < 192 or not snapshots:
        assert events.poll(60_000), (stored, snapshots)
        topic, _, payload = events.recv_multipart()
        assert topic.decode().endswith(f"@{cluster.model}")
        for tag, *fields in msgspec.msgpack.decode(payload)[1]:
            if tag != "BlockStored":
                continue
            _, parent, tokens, size, _, _, adapter, _, group, _ = fields
            assert (size, adapter) == (16, None)
            if group == 0 and ((stored and parent is not None) or tokens[:16] == prompt[:16]):
                stored += tokens
            elif group == 1 and stored:
                snapshots.append(tokens)
    assert stored == prompt[:192], "each block once: it is on one engine"
    assert any(tail == prompt[192 : 192 + len(tail)] for tail in snapshots)


@pytest.mark.thorough
async def test_an_endpoint_picker_sends_a_prompt_to_the_pod_that_has_its_beginning(
    cluster: Cluster, kv_events: tuple[zmq.Socket[bytes], str]
) -> None:
    """Two pods of an InferencePool: an engine each, with a gateway that serves it alone."""
    events, _ = kv_events
    engines = cluster.addresses[:2]
    claims = claim_ports(2)
    gateways = {f"127.0.0.1:{claim.number}": engine for claim, engine in zip(claims, engines, strict=True)}
    pods = {engine: endpoint for endpoint, engine in gateways.items()}
    for endpoint, engine in gateways.items():
        cluster.start_gateway(endpoint, int(endpoint.rpartition(":")[2]), {"TEMPER_ENGINES": engine})
    picker = Picker(pods, 16, cluster.model)

    def listen() -> None:
        while events.poll(0):
            topic, _, payload = events.recv_multipart()
            if topic.split(b"@")[1].decode() in pods:
                picker.take(topic, payload)

    async with httpx.AsyncClient(timeout=60, verify=False) as client:

        async def proxied(path: str, body: dict[str, object]) -> tuple[str, int, dict[str, object]]:
            """A proxy asks the picker, sets its header and goes where that names; endpoint, blocks, usage."""
            scrapes = {pod: await client.get(f"http://{endpoint}/metrics") for pod, endpoint in pods.items()}
            loads = {pod: Load.of(scrape.raise_for_status().text) for pod, scrape in scrapes.items()}
            assert {load.block_size for load in loads.values()} == {16}
            base = f"http://{next(iter(gateways))}"
            async with httpx.AsyncClient(base_url=base, verify=False, timeout=PATIENCE) as renderer:
                tokens = await tokens_of(renderer, path, body, cluster.model)
            endpoint, blocks = picker.pick(str(body["model"]), tokens, loads)
            answer = await client.post(f"http://{endpoint}{path}", json=body, headers={DESTINATION: endpoint})
            return endpoint, blocks, answer.raise_for_status().json()["usage"]

        for endpoint in gateways:
            await ready(client, endpoint)
        listen()
        where: dict[int, str] = {}
        for number, prompt in enumerate(prompts(2, 192, seed=500)):
            # What the picker does not know goes to the least load; here each goes to another pod.
            endpoint = list(gateways)[number]
            body = {"model": cluster.model, "prompt": prompt, "max_tokens": 1}
            (await client.post(f"http://{endpoint}/v1/completions", json=body)).raise_for_status()
            where[number] = endpoint
        turns = [{"role": "user", "content": "Say it again, please, word by word. " * 12}]
        chat = {"model": cluster.model, "messages": turns, "max_tokens": 1}
        chats = list(gateways)[1]
        (await client.post(f"http://{chats}/v1/chat/completions", json=chat)).raise_for_status()
        asked = {"model": cluster.model, "messages": turns, "max_tokens": 4}
        for number, prompt in enumerate(prompts(2, 192, seed=500)):
            body = {"model": cluster.model, "prompt": [*prompt, 21, 22], "max_tokens": 1}
            await settled(listen, lambda tokens=body["prompt"]: picker.matched(cluster.model, tokens) >= 12)
            endpoint, blocks, usage = await proxied("/v1/completions", body)
            assert (endpoint, blocks) == (where[number], 12)
            assert cached(usage) >= 128, "and the pod has it"
        endpoint, blocks, usage = await proxied("/v1/chat/completions", asked)
        assert endpoint == chats
        assert blocks > 0
        assert cached(usage) > 0
    for claim in claims:
        claim.release()


async def ready(client: httpx.AsyncClient, endpoint: str) -> None:
    """Waits until a gateway answers."""
    async with asyncio.timeout(60):
        while True:
            with suppress(httpx.TransportError):
                if (await client.get(f"http://{endpoint}/readyz")).status_code == 200:
                    return
            await asyncio.sleep(0.05)


async def settled(listen: Callable[[], None], holds: Callable[[], bool]) -> None:
    """Takes events until this holds."""
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.02)
            listen()


async def test_a_session_stays_with_its_engine(cluster: Cluster) -> None:
    engines: dict[int, set[object]] = {number: set() for number in range(8)}
    async with http(cluster) as client:
        for turn in range(3):
            for number, prompt in enumerate(prompts(len(engines), 70, seed=100 + turn)):
                usage = await complete(client, cluster.model, prompt, session_id=f"session-{number}")
                session = usage["session"]
                assert isinstance(session, dict)
                assert session["id"] == f"session-{number}"
                engines[number].add(session["engine"])
    assert all(len(seen) == 1 for seen in engines.values()), engines
    assert len({engine for seen in engines.values() for engine in seen}) > 1
    known = {health["id"] for health in cluster.health().values()}
    assert {engine for seen in engines.values() for engine in seen} <= known


async def test_an_adapter_is_loaded_where_it_is(cluster: Cluster, stack: Stack) -> None:
    files = Reference(stack.model).randomize(5, scale=0.02)
    upload = {"adapter_model.safetensors": files.weights, "adapter_config.json": files.config}
    async with http(cluster) as client:
        answer = await client.post("/v1/adapters", data={"name": "resident"}, files=upload)
        assert answer.status_code == 201, answer.text
        try:
            await complete(client, cluster.model, [5, 6, 7], adapter="resident")
            await asyncio.gather(
                *(complete(client, cluster.model, prompt, adapter="resident") for prompt in prompts(4, 40, seed=2))
            )
            holders = [a for a in cluster.addresses if "resident@1" in cluster.status(a).loaded_adapters]
            assert len(holders) == 1
        finally:
            await client.delete("/v1/adapters/resident")


async def test_clients_that_hang_up_leave_nothing(cluster: Cluster) -> None:
    rng = random.Random(3)

    async def hang_up(client: httpx.AsyncClient, number: int) -> None:
        body = {
            "model": cluster.model,
            "prompt": prompts(1, rng.choice([8, 600]), seed=1000 + number)[0],
            "max_tokens": 300,
            "ignore_eos": True,
            "stream": number % 2 == 0,
            "n": rng.choice([1, 2]),
        }
        try:
            async with asyncio.timeout(rng.uniform(0.02, 1.5)):
                await client.post("/v1/completions", json=body)
        except (TimeoutError, httpx.HTTPError):
            return

    async with http(cluster) as client:
        # More than the engines have seats: some are queued there when their clients leave.
        await asyncio.gather(*(hang_up(client, number) for number in range(96)))

    def idle() -> bool:
        found = [cluster.status(address) for address in cluster.addresses]
        return not any(s.running or s.waiting or s.blocks_used or s.slots_used for s in found)

    cluster.wait_for(idle, "engines with nothing left", seconds=10)
    cluster.wait_for(lambda: not any(e["load"] for e in cluster.health().values()), "books of the gateway", seconds=5)


async def test_an_engine_killed_under_sixty_four_streams(cluster: Cluster, stack: Stack) -> None:
    asked, length = prompts(64, 80, seed=4), 48
    async with http(cluster) as client:
        undisturbed = await asyncio.gather(
            *(stream(client, cluster.model, prompt, length, Answer()) for prompt in asked)
        )
        assert all(answer.end == "done" and len(answer.tokens) == length for answer in undisturbed)
        answers = [Answer() for _ in asked]
        began = time.monotonic()
        running = [
            asyncio.create_task(stream(client, cluster.model, prompt, length, answer))
            for prompt, answer in zip(asked, answers, strict=True)
        ]
        await until(lambda: all(len(answer.tokens) >= 4 for answer in answers))
        alive = [(a.end, len(a.tokens)) for a in answers]
        assert any(end == "broken" and tokens < length for end, tokens in alive), "too late to kill anything"
        loads = {address: engine["load"] for address, engine in cluster.health().items()}
        victim = max(loads, key=lambda address: loads[address])
        cluster.signal(victim, signal.SIGKILL)
        await asyncio.gather(*running)
        assert time.monotonic() - began < 60, "within the deadline"
        ends = Counter(answer.end for answer in answers)
        assert set(ends) == {"done", "unavailable"}, ends
        assert 0 < ends["unavailable"] <= math.ceil(1.25 * (len(asked) + 1) / ENGINES), ends
        reference: Reference | None = None
        for prompt, answer, expected in zip(asked, answers, undisturbed, strict=True):
            if answer.end == "done":
                assert len(answer.tokens) == length
            if answer.tokens != expected.tokens[: len(answer.tokens)]:
                reference = reference or Reference(stack.model)
                assert reference.greedy_gap(prompt, answer.tokens) < TIE
        # New ones go on, also those whose prompts the dead engine had.
        again = await asyncio.gather(*(stream(client, cluster.model, p, 4, Answer()) for p in asked[:32]))
        assert {answer.end for answer in again} == {"done"}
        assert not cluster.health()[victim]["ready"]
    cluster.restart(victim)


@pytest.mark.thorough
async def test_a_draining_engine_finishes_and_gets_nothing_new(cluster: Cluster) -> None:
    length = 120
    async with http(cluster) as client:
        answers = [Answer() for _ in range(32)]
        running = [
            asyncio.create_task(stream(client, cluster.model, prompt, length, answer))
            for prompt, answer in zip(prompts(len(answers), 20, seed=6), answers, strict=True)
        ]
        await until(lambda: all(len(answer.tokens) >= 2 for answer in answers))
        # The one that was killed before may still be starting.
        ready = [address for address, engine in cluster.health().items() if engine["ready"]]
        leaving = max(ready, key=lambda address: cluster.status(address).running)
        had = cluster.status(leaving).running
        assert had > 0
        cluster.signal(leaving, signal.SIGTERM)
        news = [asyncio.create_task(complete(client, cluster.model, prompt)) for prompt in prompts(16, 192, seed=7)]
        seen = [had]
        while cluster.processes[leaving].poll() is None:
            try:
                status = await asyncio.to_thread(cluster.status, leaving, timeout=2.0)
            except grpc.RpcError:
                break
            if status.draining:
                seen.append(status.running + status.waiting)
            await asyncio.sleep(0.02)
        await asyncio.gather(*running, *news)
        assert all(answer.end == "done" and len(answer.tokens) == length for answer in answers)
        assert seen == sorted(seen, reverse=True), f"requests there while it drained: {seen}"
        assert await asyncio.to_thread(cluster.processes[leaving].wait, 30) == 0
        await asyncio.gather(*(complete(client, cluster.model, prompt) for prompt in prompts(8, 30, seed=8)))


@pytest.mark.thorough
async def test_an_engine_that_comes_back_gets_its_share(cluster: Cluster) -> None:
    if cluster.restarted is None:
        cluster.signal(cluster.addresses[0], signal.SIGKILL)
        cluster.restart(cluster.addresses[0])
    back = cluster.restarted
    assert back is not None
    cluster.wait_for(lambda: cluster.health()[back]["ready"], "the restarted engine")
    await ask_all(cluster, prompts(24, 192, seed=5))
    assert cluster.status(back).blocks_cached > 0
