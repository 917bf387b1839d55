"""Refusals seen from outside: they carry their route, and a gateway that is full burns its error budget."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from observability.alerts.cases import GATEWAY, PLACE, fires, quiet, rising, series
from observability.alerts.serving import SERVING
from observability.rules import Case
from services.common.security.api_keys import KeyLimits, Scope
from tests.promtool import Promtool
from tests.promtool import promtool as promtool  # a fixture
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import Running, Starter
from tests.unit.gateway.key_file import CHAT, NO_REDIS, Keys

_REQUESTS = "temper_gateway_requests_total"
_GENERATING = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/score",
)


def counted(running: Running) -> dict[tuple[str, str], float]:
    """Requests by route and status, as /metrics has them."""
    text = httpx.get(f"{running.url}/metrics", trust_env=False, timeout=PATIENCE).text
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {(s.labels["route"], s.labels["status"]): s.value for s in samples if s.name == _REQUESTS}


def holds(promtool: Promtool, directory: Path, case: Case) -> bool:
    """Whether promtool finds a case of the alert of the error budget as it says."""
    (alert,) = (alert for alert in SERVING.alerts if alert.name == "TemperErrorBudgetBurnsFast")
    (directory / "rules.yaml").write_text(SERVING.render())
    tests = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [alert.test(case)]}
    (directory / "tests.yaml").write_text(yaml.safe_dump(tests))
    return promtool("test", "rules", directory / "tests.yaml").returncode == 0


def a_minute(found: dict[tuple[str, str], float]) -> dict[str, str]:
    """Series of a gateway that counts this every minute."""
    return {
        series(_REQUESTS, GATEWAY, method="POST", route=route, status=status): rising(count, minutes=90)
        for (route, status), count in found.items()
    }


def test_a_full_gateway_burns_its_budget(start: Starter, promtool: Promtool, tmp_path: Path) -> None:
    running = start(max_in_flight=1)
    reservation = running.inference.admission.reserve(1)
    try:
        for route in _GENERATING:
            assert httpx.post(f"{running.url}{route}", json=CHAT, trust_env=False, timeout=PATIENCE).status_code == 503
    finally:
        reservation.release()
    found = counted(running)
    assert {route for route, status in found if status == "503"} == set(_GENERATING)
    assert holds(promtool, tmp_path, fires(a_minute(found), "70m", PLACE, "100%"))
    assert not holds(promtool, tmp_path, quiet(a_minute(found), "70m"))


def test_bodies_that_find_no_room_have_their_route(start: Starter) -> None:
    running = start(max_body_bytes=4000, max_bodies_bytes=4000)
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 4000\r\n\r\n{")
        url, body = f"{running.url}/v1/messages", b" " * 3000
        running.wait_for(lambda: httpx.post(url, content=body, trust_env=False, timeout=PATIENCE).status_code == 503)
    assert ("/v1/messages", "503") in counted(running)


def test_refusals_of_clients_have_their_route_and_burn_nothing(
    start: Starter, promtool: Promtool, tmp_path: Path
) -> None:
    keys = Keys(tmp_path / "keys.json")
    keys.add("limited", Scope.INFERENCE, limits=KeyLimits(requests_per_minute=1))
    running = start(api_keys_file=str(keys.path), redis_url=NO_REDIS)
    with httpx.Client(base_url=running.url, trust_env=False, headers=keys.bearer("limited"), timeout=PATIENCE) as http:
        assert [http.post("/v1/chat/completions", json=CHAT).status_code for _ in range(2)] == [200, 429]
        assert http.post("/v1/adapters/greeter/attach").status_code == 403
        assert http.post("/v1/train/sft", json={}).status_code == 403
        assert http.post("/v1/nowhere/at/all").status_code in (404, 429)
    assert httpx.get(f"{running.url}/v1/train/jobs/train-1", trust_env=False, timeout=PATIENCE).status_code == 401
    found = counted(running)
    assert {
        ("/v1/chat/completions", "429"),
        ("/v1/adapters/{name}/attach", "403"),
        ("/v1/train/sft", "403"),
        ("/v1/train/jobs/{job_id}", "401"),
    } <= set(found)
    assert {route for route, _ in found if "nowhere" in route} == set()
    assert holds(promtool, tmp_path, quiet(a_minute(found), "70m"))
