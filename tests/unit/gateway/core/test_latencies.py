"""Latencies and tokens in /metrics: by model and stream, by OpenTelemetry's names, and by API key if asked for."""

from __future__ import annotations

from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from services.common.pb import engine_pb2
from services.common.security.api_keys import Scope
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import MODEL, Running, Starter
from tests.unit.gateway.fake_engine import fails, says
from tests.unit.gateway.key_file import CHAT, NO_REDIS, Keys


def measured(running: Running, name: str) -> dict[tuple[str, ...], float]:
    """Samples of a series by the values of its labels, in the order of their names."""
    text = httpx.get(f"{running.url}/metrics", trust_env=False, timeout=PATIENCE).text
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {tuple(s.labels[label] for label in sorted(s.labels)): s.value for s in samples if s.name == name}


def test_streams_and_whole_answers_are_told_apart(start: Starter) -> None:
    running = start()
    with httpx.Client(base_url=running.url, trust_env=False, timeout=PATIENCE) as http:
        for stream in (True, False, False):
            assert http.post("/v1/chat/completions", json=CHAT | {"stream": stream}).status_code == 200
    for name in ("time_to_first_token", "completion_duration"):
        found = measured(running, f"temper_gateway_{name}_seconds_count")
        assert found == {(MODEL, "true"): 1, (MODEL, "false"): 2}, name
    assert set(measured(running, "temper_gateway_inter_token_latency_seconds_count")) == {
        (MODEL, "true"),
        (MODEL, "false"),
    }


def test_opentelemetrys_names(start: Starter) -> None:
    running = start()
    running.engine.behaviour = says("hello")
    with httpx.Client(base_url=running.url, trust_env=False, timeout=PATIENCE) as http:
        http.post("/v1/chat/completions", json=CHAT | {"n": 2})
        prompt = {"model": MODEL, "prompt": "abcdefghij", "max_tokens": 20}
        http.post("/v1/completions", json=prompt)
        running.engine.behaviour = fails(engine_pb2.ERROR_CODE_INVALID_REQUEST, "no")
        assert http.post("/v1/completions", json=prompt).status_code == 400
    chat, text = (("chat", "temper", MODEL), ("text_completion", "temper", MODEL))
    assert measured(running, "gen_ai_server_time_to_first_token_seconds_count") == {chat: 2, text: 1}
    assert measured(running, "gen_ai_server_time_per_output_token_seconds_count") == {chat: 2, text: 1}
    assert measured(running, "gen_ai_server_request_duration_seconds_count") == {
        ("", *chat): 1,
        ("", *text): 1,
        ("invalid_request", *text): 1,
    }
    used = measured(running, "gen_ai_client_token_usage_sum")
    assert used[*text, "input"] == 10
    assert used[*text, "output"] == 6
    assert used[*chat, "output"] == 12


def test_tokens_by_key_if_asked_for(tmp_path: Path, start: Starter) -> None:
    keys = Keys(tmp_path / "keys.json")
    for name in ("ci", "app"):
        keys.add(name, Scope.INFERENCE)
    for asked in (True, False):
        running = start(api_keys_file=str(keys.path), redis_url=NO_REDIS, metrics_by_key=asked)
        for name in ("ci", "ci", "app"):
            body = {"model": MODEL, "prompt": "abcdefghij", "max_tokens": 20}
            httpx.post(
                f"{running.url}/v1/completions", json=body, headers=keys.bearer(name), trust_env=False, timeout=PATIENCE
            )
        found = measured(running, "temper_gateway_key_tokens_total")
        expected = {(keys.entries["ci"].id, "prompt"): 20, (keys.entries["app"].id, "prompt"): 10}
        assert {key: count for key, count in found.items() if key[1] == "prompt"} == (expected if asked else {})
