"""A gateway without keys on loopback: what web pages of other sites, and other names of this machine, get."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from services.common.security.api_keys import Scope
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import MODEL, Running, Starter
from tests.unit.gateway.key_file import CHAT, NO_REDIS, Keys, error_of

FOREIGN = (
    "evil.example",
    "evil.example:8420",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "8.8.8.8",
    "[2606::1]",
)
OWN = (
    "localhost",
    "localhost:8420",
    "LOCALHOST",
    "127.0.0.1",
    "[::1]:8420",
    "temper.localhost",
    "box.local",
    "gateway",
    "host.docker.internal",
    "192.168.1.5:8420",
)
CHANGES = (
    ("POST", "/v1/adapters/greeter/attach"),
    ("POST", "/v1/adapters/greeter/detach"),
    ("POST", "/v1/adapters/greeter/rollback"),
    ("DELETE", "/v1/adapters/greeter"),
    ("POST", "/v1/adapters"),
    ("POST", "/v1/files"),
    ("POST", "/v1/train/sft"),
    ("POST", "/v1/train/jobs/train-1/cancel"),
    ("POST", "/v1/sessions/a/save"),
    ("PUT", "/v1/sessions/a/import"),
    ("POST", "/v1/chat/completions"),
)


@pytest.mark.parametrize("host", FOREIGN)
def test_foreign_names_are_refused_everywhere(http: httpx.Client, host: str) -> None:
    for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/v1/train/jobs"), *CHANGES):
        answer = http.request(method, path, headers={"host": host})
        assert error_of(answer, 403)["code"] == "foreign_page", (method, path)
        assert "TEMPER_ALLOWED_HOSTS" in answer.json()["error"]["message"]


@pytest.mark.parametrize("host", OWN)
def test_names_of_this_machine_are_served(http: httpx.Client, host: str) -> None:
    assert http.get("/v1/models", headers={"host": host}).status_code == 200
    assert http.post("/v1/chat/completions", json=CHAT, headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "page",
    [
        {"origin": "http://evil.example", "sec-fetch-site": "cross-site"},
        {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
    ids=str,
)
def test_foreign_pages_change_nothing(running: Running, http: httpx.Client, page: dict[str, str]) -> None:
    for method, path in CHANGES:
        answer = http.request(method, path, headers={**page, "content-type": "text/plain"})
        assert error_of(answer, 403)["code"] == "foreign_page", (method, path)
    assert not running.store.objects
    assert not running.engine.requests
    assert http.get("/v1/models", headers=page).status_code == 200, (
        "what a page may not read, the browser keeps from it"
    )


def test_its_own_pages_and_listed_origins_may(start: Starter) -> None:
    running = start(cors_allow_origins="https://chat.example.com", allowed_hosts="temper.example.com")
    own = running.url
    with httpx.Client(base_url=running.url, trust_env=False, timeout=PATIENCE) as http:
        for page in ({"origin": own, "sec-fetch-site": "same-origin"}, {"origin": "https://chat.example.com"}):
            assert http.post("/v1/chat/completions", json=CHAT, headers=page).status_code == 200
        assert http.get("/v1/models", headers={"host": "temper.example.com"}).status_code == 200
        error_of(http.get("/v1/models", headers={"host": "evil.example"}), 403)


def test_where_keys_are_they_decide(tmp_path: Path, start: Starter) -> None:
    keys = Keys(tmp_path / "keys.json")
    keys.add("me", Scope.INFERENCE)
    running = start(api_keys_file=str(keys.path), redis_url=NO_REDIS)
    page = {"host": "temper.example.com", "origin": "http://evil.example", "sec-fetch-site": "cross-site"}
    with httpx.Client(base_url=running.url, trust_env=False, timeout=PATIENCE) as http:
        error_of(http.post("/v1/chat/completions", json=CHAT, headers=page), 401)
        answer = http.post("/v1/chat/completions", json=CHAT, headers={**page, **keys.bearer("me")})
        assert answer.status_code == 200
        assert answer.json()["model"] == MODEL
