"""/pause, /resume and /is_paused: trainers hold engines, for a limited time."""

from __future__ import annotations

from pathlib import Path

import httpx

from services.common.security.api_keys import Scope
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import Running, Starter
from tests.unit.gateway.fake_engine import FakeEngine, says
from tests.unit.gateway.key_file import NO_REDIS, Keys


def test_all_engines_pause_and_go_on(start: Starter) -> None:
    engines = [FakeEngine(says("Hello")), FakeEngine(says("Hello"))]
    running: Running = start(*engines, pause_seconds=7.0)
    with httpx.Client(base_url=running.url, timeout=PATIENCE, verify=False) as http:
        assert http.get("/is_paused").json() == {"is_paused": False}
        assert http.post("/pause", params={"mode": "keep"}).json() == {"status": "paused"}
        assert [engine.paused for engine in engines] == [7.0, 7.0]
        assert http.get("/is_paused").json() == {"is_paused": True}
        for _ in range(2):
            assert http.post("/resume").json() == {"status": "resumed"}
        assert [engine.paused for engine in engines] == [0.0, 0.0]
        for refused in ({}, {"mode": "abort"}, {"mode": "wait"}):
            answer = http.post("/pause", params=refused)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == "mode"
        assert http.get("/is_paused").json() == {"is_paused": False}


def test_only_admins_pause(start: Starter, tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.json")
    keys.add("ann", Scope.INFERENCE)
    keys.add("admin", Scope.ADMIN)
    running: Running = start(FakeEngine(says("Hello")), api_keys_file=str(keys.path), redis_url=NO_REDIS)
    with httpx.Client(base_url=running.url, timeout=PATIENCE, verify=False) as http:
        for path in ("/pause?mode=keep", "/resume"):
            assert http.post(path).status_code == 401
            assert http.post(path, headers=keys.bearer("ann")).status_code == 403
            assert http.post(path, headers=keys.bearer("admin")).status_code == 200
