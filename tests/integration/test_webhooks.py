"""Webhooks with a real Valkey and real HTTP servers that fail, hang, redirect and answer."""

from __future__ import annotations

import asyncio
import http.server
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest
import redis

from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import CONFIG, WEIGHTS, AdapterRegistry
from services.common.jobs import JobState
from services.common.jobs.fine_tuning import FineTuning
from services.common.queue.job_queue import JobQueue
from services.common.security.destinations import may_call
from services.common.settings import CommonSettings
from services.common.storage.outbox import OUTBOX
from services.gateway.api.operations.webhook_sender import WebhookSender
from services.gateway.core.file_store import StoreThreads
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.core.webhook_store import Delivery, WebhookStore
from services.gateway.settings import GatewaySettings
from services.learning.canaries.store import CanaryStore
from services.learning.learners.record import NewEvent
from services.learning.learners.store import LearnerStore, NewLearner
from tests.integration.jobs import Consumers, must_claim, sft
from tests.integration.proxies import Noting, serving
from tests.integration.test_canary_store import PROMOTE, ROLL_BACK, fence_of, new
from tests.integration.test_learner_store import BEGUN, policy
from tests.stack import PATIENCE

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


class Receiver(Noting):
    """Server whose paths behave: /ok, /gone, /moved, /hangs, /busy for ages, and /fails, which fails twice."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.got: list[tuple[str, Mapping[str, str], bytes]] = []


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, Receiver)
        body = self.rfile.read(int(self.headers["content-length"]))
        server.got.append((self.path, {name.lower(): value for name, value in self.headers.items()}, body))
        tries = sum(path == self.path for path, _, _ in server.got)
        if self.path == "/hangs":
            time.sleep(1.6)
        status = {"/gone": 410, "/busy": 503, "/moved": 302, "/fails": 500 if tries <= 2 else 204}.get(self.path, 200)
        self.send_response(status)
        if self.path == "/busy":
            self.send_header("retry-after", "9" * 12)
        if status == 302:
            self.send_header("location", "/ok")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    with serving(server):
        yield server


@dataclass
class Office:
    """Senders on one Valkey, each as of a gateway of its own."""

    common: CommonSettings
    receiver: Receiver
    registry: AdapterRegistry
    threads: StoreThreads
    senders: list[WebhookSender] = field(default_factory=list)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.receiver.server_address[1]}{path}"

    def sender(self, *paths: str, **more: Any) -> WebhookSender:
        values = {
            "webhook_urls": ",".join(self.url(path) for path in paths),
            "webhook_secret": SECRET,
            "webhook_private": True,
            "webhook_timeout_seconds": 0.8,
            "webhook_retry_seconds": 0.05,
            "webhook_attempts": 3,
        }
        settings = GatewaySettings.model_validate({**self.common.model_dump(), **values, **more})
        self.senders.append(
            WebhookSender(settings, WebhookStore(settings), GatewayMetrics(), self.registry, self.threads)
        )
        return self.senders[-1]

    async def until(self, holds: Callable[[list[Delivery]], bool], *senders: WebhookSender) -> list[Delivery]:
        deadline = time.monotonic() + PATIENCE
        while True:
            for sender in senders:
                await sender.once()
            found = await senders[0].store.list(limit=100)
            if holds(found):
                return found
            assert time.monotonic() < deadline, found
            await asyncio.sleep(0.02)


@pytest.fixture
async def office(settings: CommonSettings, receiver: Receiver, registry: AdapterRegistry) -> AsyncIterator[Office]:
    threads = StoreThreads()
    office = Office(settings, receiver, registry, threads)
    yield office
    threads.close()
    for sender in office.senders:
        await sender.stop()
        await sender.store.aclose()


def all_ended(found: list[Delivery]) -> bool:
    return bool(found) and all(one.state != "pending" for one in found)


async def test_ends_of_jobs_are_told_in_openais_form(
    queue: JobQueue, consumers: Consumers, office: Office, receiver: Receiver
) -> None:
    sender = office.sender("/ok", webhook_allow=office.url("/own"))
    tuning = FineTuning(model="m", training_file="file-1", seed=1, method={"type": "supervised", "supervised": {}})
    job = await queue.submit(sft("tuned", webhook=office.url("/own/x")), fine_tuning=tuning)
    await queue.submit(sft("elsewhere", webhook="http://127.0.0.1:9/not-allowed"))
    plain = await queue.submit(sft("plain"))
    consumer = consumers("a")
    consumer.succeed(must_claim(consumer), "tuned@1")
    consumer.fail(must_claim(consumer), "broken")
    await queue.cancel(plain.id)
    found = await office.until(all_ended, sender)
    assert {(one.type, one.url, one.state) for one in found} == {
        ("fine_tuning.job.succeeded", office.url("/ok"), "delivered"),
        ("fine_tuning.job.succeeded", office.url("/own/x"), "delivered"),
        ("job.failed", office.url("/ok"), "delivered"),
        ("job.cancelled", office.url("/ok"), "delivered"),
    }
    client = openai.OpenAI(api_key="none", webhook_secret=SECRET)
    events = {}
    for path, headers, body in receiver.got:
        event = client.webhooks.unwrap(body, headers)
        assert headers["webhook-id"] == event.id
        events[path, event.type] = json.loads(body)["data"]
    assert events["/own/x", "fine_tuning.job.succeeded"] == events["/ok", "fine_tuning.job.succeeded"]
    assert events["/ok", "fine_tuning.job.succeeded"] == {
        "id": job.id.replace("job-", "ftjob-"),
        "job": job.id,
        "kind": "sft",
        "state": "succeeded",
        "adapter": "tuned",
        "result_adapter": "tuned@1",
    }
    failed: Any = events["/ok", "job.failed"]  # type: ignore[index]
    assert (failed["state"], failed["reason"]) == ("failed", "broken")
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(receiver.got[0][2] + b" ", receiver.got[0][1])


async def test_promotions_are_told(office: Office, settings: CommonSettings, raw: redis.Redis) -> None:
    canaries, learners = CanaryStore(settings), LearnerStore(settings)
    good, bad = await canaries.begin(new("good")), await canaries.begin(new("bad", attached=False))
    fence = await fence_of(canaries)
    await canaries.finish(await canaries.decide(good, PROMOTE, fence=fence), fence=fence)
    await canaries.decide(bad, ROLL_BACK)
    learner = await learners.create(NewLearner(policy("l")), BEGUN)
    said = NewEvent(kind="promoted", detail="better", cycle=1, evidence={"candidate": "toy@3"})
    await learners.write(learner, BEGUN, [said])
    told = outbox(raw)
    assert [kind for kind, _ in told] == ["canary.promoted", "canary.rolled_back", "learner.promoted"]
    assert told[0][1] == {"id": good.id, "adapter": "good", "candidate": "good@2", "state": "promoted"}
    assert (told[2][1]["learner"], told[2][1]["candidate"]) == ("l", "toy@3")
    await canaries.aclose()
    await learners.aclose()


def outbox(raw: redis.Redis) -> list[tuple[str, dict[str, Any]]]:
    entries: Any = raw.xrange(OUTBOX)
    return [(entry["type"], json.loads(entry["data"])) for _, entry in entries]


def publish(registry: AdapterRegistry, weights: str) -> AdapterVersion:
    return registry.publish("toy", {WEIGHTS: weights.encode(), CONFIG: b'{"r": 4}'}, base_digest="d").ref


async def news(sender: WebhookSender) -> list[tuple[str, dict[str, Any]]]:
    """Events of which deliveries were made, oldest first."""
    found = sorted(await sender.store.list(limit=100), key=lambda delivery: delivery.event)
    return [(one.type, json.loads(one.body)["data"]) for one in found]


async def test_moves_of_adapters_are_told_once_also_where_their_maker_dies(
    office: Office, registry: AdapterRegistry, raw: redis.Redis
) -> None:
    one, other = office.sender("/ok"), office.sender("/ok")
    versions = [publish(registry, f"{number}") for number in range(3)]
    registry.attach(versions[2])
    registry.attach(versions[2])  # moves nothing
    await one.store.tell(registry.changes({}, "toy")[0])
    assert outbox(raw) == [("adapter.attached", {"adapter": "toy@3", "before": None, "model": registry.model})]
    registry.rollback("toy")
    registry.detach("toy")
    # Whoever did that is dead; each gateway looks at the pointers, and one does at a time.
    await asyncio.gather(one.once(), other.once())
    raw.delete("temper:webhooks:sweep")
    await asyncio.gather(one.once(), other.once(), other.store.tell(registry.changes({})[0]))
    registry.set_current(versions[0], by="canary-1")  # which tells of itself
    raw.delete("temper:webhooks:sweep")
    await one.once()
    told = await news(one)
    assert [(kind, data) for kind, data in told if kind != "adapter.rolled_back"] == [
        ("adapter.attached", {"adapter": "toy@3", "before": None, "model": registry.model}),
        ("adapter.attached", {"adapter": "toy@2", "before": "toy@3", "model": registry.model}),
        ("adapter.detached", {"adapter": None, "before": "toy@2", "model": registry.model}),
    ]
    assert [data for kind, data in told if kind == "adapter.rolled_back"] == [
        {"adapter": "toy", "from": "toy@3", "to": "toy@2"}
    ]


async def test_what_moved_before_anybody_told_of_it_is_no_news(
    office: Office, registry: AdapterRegistry, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, ago = office.sender("/ok"), time.time() - 7200
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: ago)
        registry.attach(publish(registry, "1"))
    await sender.once()
    assert await news(sender) == []
    registry.detach("toy")
    raw.delete("temper:webhooks:sweep")
    await sender.once()
    assert [kind for kind, _ in await news(sender)] == ["adapter.detached"]


async def test_what_fails_is_tried_again_and_given_up(queue: JobQueue, office: Office, receiver: Receiver) -> None:
    sender = office.sender("/fails", "/moved", "/hangs", "/gone")
    await queue.cancel((await queue.submit(sft())).id)
    found = {one.url.rpartition("/")[2]: one for one in await office.until(all_ended, sender)}
    assert {name: (one.state, one.attempts) for name, one in found.items()} == {
        "fails": ("delivered", 3),
        "moved": ("failed", 3),
        "hangs": ("failed", 3),
        "gone": ("failed", 1),
    }
    assert [attempt.status for attempt in found["fails"].log] == [500, 500, 204]
    assert "redirects are not followed" in str(found["moved"].log[0].error)
    assert "no answer within" in str(found["hangs"].log[0].error)
    ids = {headers["webhook-id"] for _, headers, _ in receiver.got}
    assert ids == {found["fails"].event}, "every attempt is the same event, so that receivers can tell"
    assert "/ok" not in [path for path, _, _ in receiver.got]
    again = await sender.store.resend(found["gone"].id)
    assert again.state == "pending"
    ended = {one.id: one for one in await office.until(all_ended, sender)}[again.id]
    assert [attempt.status for attempt in ended.log] == [410, 410]
    assert (await sender.store.list(limit=1, state="delivered"))[0].id == found["fails"].id
    assert [one.id for one in await sender.store.list(limit=9, after=(await sender.store.list(limit=1))[0].id)]


async def test_a_receiver_is_waited_for_six_hours_at_most(queue: JobQueue, office: Office) -> None:
    sender = office.sender("/busy")
    await queue.cancel((await queue.submit(sft())).id)
    (found,) = await office.until(lambda found: bool(found) and bool(found[0].log), sender)
    assert (found.state, found.log[0].status) == ("pending", 503)
    assert found.next_at is not None
    assert 0 < found.next_at - found.log[0].at <= 6 * 3600 + PATIENCE


async def test_gateways_share_the_work_and_one_that_dies_loses_nothing(
    queue: JobQueue, office: Office, receiver: Receiver, raw: redis.Redis
) -> None:
    one, other = office.sender("/ok"), office.sender("/ok")
    for number in range(12):
        await queue.cancel((await queue.submit(sft(f"a{number}"))).id)
    await asyncio.gather(one.once(), other.once())
    await office.until(lambda found: len(found) == 12 and all_ended(found), one, other)
    sent = [headers["webhook-id"] for _, headers, _ in receiver.got]
    assert len(sent) == len(set(sent)) == 12, "once each"
    job = await queue.submit(sft("late"))
    await queue.cancel(job.id)
    for event in await one.store.events(10):
        await one.store.make(event, [office.url("/ok")])
        assert not await other.store.make(event, [office.url("/ok")])
    (claimed,) = await one.store.claim(10, 30.0)  # and dies
    assert await other.store.claim(10, 30.0) == []
    raw.zadd("temper:webhooks:due", {claimed.id: time.time() - 1})  # its claim has run out
    await office.until(all_ended, other)
    assert len(receiver.got) == 13
    assert (await queue.get(job.id)).state is JobState.CANCELLED


async def test_private_addresses_and_names_that_change_lead_nowhere(
    queue: JobQueue, office: Office, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = receiver.server_address[1]
    looked_up: list[str] = []

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        looked_up.append(host)
        # A second look-up of the same name would lead elsewhere.
        return [(2, 1, 6, "", ("127.0.0.1" if looked_up.count(host) == 1 else "10.255.255.1", port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    guarded = office.sender(webhook_private=False, webhook_attempts=1, webhook_urls=f"http://inside.example:{port}/ok")
    await queue.cancel((await queue.submit(sft())).id)
    (refused,) = await office.until(all_ended, guarded)
    assert "which is not public" in str(refused.log[0].error)
    assert receiver.got == []
    trusting = office.sender(webhook_urls=f"http://named.example:{port}/ok")
    await queue.cancel((await queue.submit(sft("again"))).id)
    await office.until(lambda found: len(found) == 2 and all_ended(found), trusting)
    ((_, headers, _),) = receiver.got
    assert headers["host"] == f"named.example:{port}"
    assert looked_up.count("named.example") == 1, "the connection is made to the address that was checked"


@pytest.mark.parametrize(
    ("address", "public", "private"),
    [
        ("93.184.215.14", True, True),
        ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True, True),
        ("127.0.0.1", False, True),
        ("10.1.2.3", False, True),
        ("100.64.0.1", False, True),
        ("::1", False, True),
        ("fd00::1", False, True),
        ("::ffff:10.0.0.1", False, True),
        ("64:ff9b::a00:1", False, True),
        ("2002:a00:1::", False, True),
        ("169.254.169.254", False, False),
        ("::ffff:169.254.169.254", False, False),
        ("fe80::1", False, False),
        ("0.0.0.0", False, False),
        ("224.0.0.1", False, False),
    ],
)
def test_addresses(address: str, public: bool, private: bool) -> None:
    assert (may_call(address, private=False), may_call(address, private=True)) == (public, private)
