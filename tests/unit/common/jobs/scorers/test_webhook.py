"""Webhooks against a real HTTP server that answers well, badly, slowly or not at all."""

from __future__ import annotations

import gzip
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from pydantic import ValidationError

from services.common.errors import InvalidRequest, Unavailable
from services.common.jobs.scorers.allowed_webhooks import Webhooks
from services.common.jobs.scorers.grants import Grants
from services.common.jobs.scorers.registry import Rewards
from services.common.jobs.scorers.sample import Sample
from services.common.jobs.scorers.webhook import WebhookReward
from services.common.jobs.scorers.webhook_client import BATCH
from services.trainer.settings import TrainerSettings

SECRET = "a secret of some length"
Reply = tuple[int, dict[str, str], bytes]


@dataclass
class Seen:
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Server:
    url: str = ""
    seen: list[Seen] = field(default_factory=list)

    def webhooks(self, **changes: Any) -> Webhooks:
        return Webhooks(**{"allowed": (self.url,), "secret": SECRET, "timeout_seconds": 5.0, "attempts": 2, **changes})

    def score(self, samples: list[Sample], path: str = "/score", **changes: Any) -> list[float]:
        rewards = Rewards([WebhookReward(url=self.url + path)], Grants(self.webhooks(**changes)))
        return rewards.score(samples)


@contextmanager
def serving(answer: Callable[[Seen], Reply | None]) -> Iterator[Server]:
    """``answer`` None: the connection is closed without one."""
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            seen = Seen(self.path, {key.lower(): value for key, value in self.headers.items()}, body)
            server.seen.append(seen)
            reply = answer(seen)
            if reply is None:
                self.close_connection = True
                self.connection.close()
                return
            status, headers, content = reply
            self.send_response(status)
            for key, value in {"content-length": str(len(content)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that has had enough hangs up
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    server.url = f"http://127.0.0.1:{httpd.server_port}"
    try:
        yield server
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


def ok(rewards: Any) -> Reply:
    return 200, {}, json.dumps({"rewards": rewards}).encode()


def samples(count: int) -> list[Sample]:
    return [Sample(f"q{n}", f"answer {n}", n + 1, answer=str(n), metadata={"n": str(n)}) for n in range(count)]


def by_length(seen: Seen) -> Reply:
    return ok([sample["tokens"] for sample in json.loads(seen.body)["samples"]])


def test_samples_go_out_signed_and_rewards_come_back() -> None:
    with serving(by_length) as server:
        assert server.score(samples(3)) == [1.0, 2.0, 3.0]
    (seen,) = server.seen
    timestamp = seen.headers["x-temper-timestamp"]
    assert abs(int(timestamp) - time.time()) < 60
    wanted = hmac.new(SECRET.encode(), f"{timestamp}.".encode() + seen.body, hashlib.sha256).hexdigest()
    assert hmac.compare_digest(seen.headers["x-temper-signature"], f"sha256={wanted}")
    assert seen.path == "/score"
    assert json.loads(seen.body)["samples"][1] == {
        "prompt": "q1",
        "completion": "answer 1",
        "text": "answer 1",
        "tokens": 2,
        "truncated": False,
        "answer": "1",
        "metadata": {"n": "1"},
    }


def test_many_samples_are_several_requests() -> None:
    with serving(by_length) as server:
        assert server.score(samples(BATCH + 3)) == [float(n + 1) for n in range(BATCH + 3)]
    assert len(server.seen) == 2


def test_a_server_that_recovers_is_asked_again() -> None:
    replies = iter([(500, {}, b"busy"), None, (429, {}, b""), ok([0.5])])
    with serving(lambda _: next(replies)) as server:
        assert server.score(samples(1), attempts=4) == [0.5]
    assert len(server.seen) == 4


@pytest.mark.parametrize("reply", [(500, {}, b"no"), (503, {}, b""), None])
def test_a_server_that_does_not_recover_ends_the_attempts(reply: Reply | None) -> None:
    with serving(lambda _: reply) as server, pytest.raises(Unavailable, match="failed 2 times, the last time because"):
        server.score(samples(1))
    assert len(server.seen) == 2


def test_nobody_listens() -> None:
    with serving(by_length) as server:
        pass
    with pytest.raises(Unavailable, match="failed 2 times, the last time because ConnectError"):
        server.score(samples(1))


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (ok([1.0]), "1 rewards for 2 samples"),
        (ok([1.0, 2.0, 3.0]), "3 rewards for 2 samples"),
        (ok([1.0, float("nan")]), r"rewards\[1\] is nan"),
        (ok([float("inf"), 0]), r"rewards\[0\] is inf"),
        (ok([1.0, "2"]), r"rewards\[1\] is 2, not a number"),
        (ok([1.0, None]), r"rewards\[1\] is None"),
        (ok([True, 0]), r"rewards\[0\] is True"),
        (ok([10**400, 0]), r"rewards\[0\] is 1000"),
        (ok({"0": 1}), r"not \{\"rewards\""),
        ((200, {}, b"[1, 2]"), r"not \{\"rewards\""),
        ((200, {}, b"nonsense"), "not JSON"),
        ((200, {}, b"[" * 4000), "not JSON"),
        ((200, {}, b" " * 1_000_000), "over 4224 bytes"),
        ((200, {"content-encoding": "gzip"}, gzip.compress(b" " * 10_000_000)[:4000]), "not JSON"),
        ((204, {}, b""), "status 204"),
        ((401, {}, b"who are you"), "status 401"),
        ((302, {"location": "http://169.254.169.254/latest"}, b""), "status 302, and redirects are not followed"),
        ((307, {"location": "/score2"}, b""), "redirects are not followed"),
    ],
)
def test_a_broken_contract_is_not_asked_again(reply: Reply, says: str) -> None:
    with serving(lambda _: reply) as server, pytest.raises(Unavailable, match=says):
        server.score(samples(2))
    assert len(server.seen) == 1


def test_a_slow_server_is_given_up() -> None:
    release = threading.Event()

    def stall(_: Seen) -> Reply:
        release.wait(120)
        return ok([1.0])

    with serving(stall) as server:
        with pytest.raises(Unavailable, match="ReadTimeout"):
            server.score(samples(1), timeout_seconds=0.2)  # while it still stalls
        release.set()


def test_a_job_that_is_cancelled_asks_no_more() -> None:
    class Cancelled(Exception):
        pass

    asked = 0

    def interrupt() -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            raise Cancelled

    with serving(lambda _: (500, {}, b"")) as server:
        rewards = Rewards([WebhookReward(url=server.url)], Grants(server.webhooks(attempts=50)))
        with pytest.raises(Cancelled):
            rewards.score(samples(1), interrupt)
    assert len(server.seen) == 1


@pytest.mark.parametrize(
    ("allowed", "url", "fine"),
    [
        ("https://scores.example/", "https://scores.example/v1", True),
        ("https://scores.example", "https://SCORES.example:443/v1", True),
        ("scores.example", "https://scores.example/v1", True),
        ("scores.example", "http://scores.example/v1", False),
        ("http://scores.example", "http://scores.example/v1", True),
        ("http://scores.example", "https://scores.example/v1", False),
        ("https://scores.example/v1", "https://scores.example/v1", True),
        ("https://scores.example/v1", "https://scores.example/v1/math?strict=1", True),
        ("https://scores.example/v1", "https://scores.example/v12", False),
        ("https://scores.example/v1/", "https://scores.example/v2", False),
        ("https://scores.example", "https://scores.example.evil/v1", False),
        ("https://scores.example", "https://scores.example:8443/v1", False),
        ("https://scores.example:8443", "https://scores.example:8443/v1", True),
        ("https://a.example, https://b.example/x", "https://b.example/x/y", True),
        ("", "https://scores.example/v1", False),
        ("https://scores.example", "http://127.0.0.1/", False),
    ],
)
def test_only_listed_places_are_asked(allowed: str, url: str, fine: bool) -> None:
    settings = TrainerSettings(reward_webhooks=allowed)
    webhooks = Webhooks(allowed=settings.webhook_prefixes, secret=SECRET)
    if fine:
        Rewards([WebhookReward(url=url)], Grants(webhooks))
        return
    with pytest.raises(InvalidRequest, match=r"generate.reward\[0\].url: .* is not covered by TEMPER_REWARD_WEBHOOKS"):
        Rewards([WebhookReward(url=url)], Grants(webhooks))


def test_there_is_no_webhook_without_a_secret() -> None:
    with pytest.raises(InvalidRequest, match="no TEMPER_REWARD_WEBHOOK_SECRET"):
        Rewards([WebhookReward(url="https://a.example/")], Grants(Webhooks(allowed=("https://a.example",))))
    with pytest.raises(ValidationError, match="at least 16"):
        TrainerSettings(reward_webhook_secret="short")


def test_a_list_that_means_nothing_stops_the_start() -> None:
    with pytest.raises(ValidationError, match=r"'https://user@host'.*user, password"):
        TrainerSettings(reward_webhooks="https://a.example, https://user@host")


def test_the_environment_sends_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy of the environment would see every sample."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with serving(by_length) as server:
        assert server.score(samples(1)) == [1.0]
