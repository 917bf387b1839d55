"""Traces of a whole Temper, as a collector receives them over OTLP."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cli.local.ports import claim_ports
from tests.e2e import jobs
from tests.otlp import Collector, Received, tree
from tests.stack import PATIENCE, ROOT, Stack, clean_environment

SERVER, CLIENT, CONSUMER, INTERNAL = 2, 3, 5, 1
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CHAT = {"model": "qwen3.5", "messages": [{"role": "user", "content": "What is 3 + 4?"}], "max_tokens": 6}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(scope="module")
def traced(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    (metrics,) = claim_ports(1)
    env = {
        "TEMPER_METRICS_PORT": str(metrics.number),
        "TEMPER_OTLP_ENDPOINT": collector.endpoint,
        "TEMPER_OTLP_HEADERS": "x-token=secret",
        "TEMPER_LOG_FORMAT": "json",
        "TEMPER_MAX_NUM_SEQS": "8",
        "TEMPER_TOKEN_BUDGET": "128",
        "TEMPER_KV_CACHE_BYTES": "64MiB",
    }
    with Stack(tmp_path_factory.mktemp("traced") / "data", env=env) as running:
        yield running


@pytest.fixture
def client(traced: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=traced.url, timeout=60) as connection:
        yield connection


def names(spans: list[Received], parent: str) -> list[str]:
    return [span.name for span in sorted(spans, key=lambda one: (one.begins, one.ends)) if span.parent == parent]


def no_orphans(spans: list[Received], *, outside: str = "") -> None:
    known = {span.id for span in spans} | {"", outside}
    assert [span.name for span in spans if span.parent not in known] == []
    by_id = {span.id: span for span in spans}
    for span in spans:
        assert span.begins <= span.ends, span
        if span.parent in by_id:
            slack = 2_000_000  # two clocks of two processes
            assert by_id[span.parent].begins - slack <= span.begins, (span, by_id[span.parent])


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat(client: httpx.Client, collector: Collector, stream: bool) -> None:
    before = len(collector.named("chat qwen3.5"))
    answer = client.post("/v1/chat/completions", json={**CHAT, "stream": stream, "temperature": 0.5, "stop": ["@@"]})
    assert answer.status_code == 200
    inference = collector.wait_for("chat qwen3.5", count=before + 1)[-1]
    deadline = time.monotonic() + 20
    while len(spans := collector.of(inference.trace)) < 6:
        assert time.monotonic() < deadline, tree(spans)
        time.sleep(0.1)
    print(tree(spans))
    no_orphans(spans)
    (root,) = [span for span in spans if not span.parent]
    assert (root.name, root.kind, root.service) == ("POST /v1/chat/completions", SERVER, "temper-gateway")
    assert root.attributes["http.route"] == "/v1/chat/completions"
    assert root.attributes["http.response.status_code"] == 200
    assert names(spans, root.id) == ["chat qwen3.5"]
    assert inference.kind == CLIENT
    assert names(spans, inference.id) == ["generate"]
    (engine,) = [span for span in spans if span.name == "generate"]
    assert (engine.kind, engine.service) == (SERVER, "temper-engine")
    assert names(spans, engine.id) == ["queue", "prefill", "decode"]
    told = inference.attributes
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.provider.name"] == "temper"
    assert told["gen_ai.request.model"] == "qwen3.5"
    assert told["gen_ai.request.temperature"] == 0.5
    assert told["gen_ai.request.max_tokens"] == 6
    assert told["gen_ai.request.stop_sequences"] == ["@@"]
    assert told["gen_ai.usage.output_tokens"] == engine.attributes["gen_ai.usage.output_tokens"] > 0
    assert told["gen_ai.usage.input_tokens"] == engine.attributes["gen_ai.usage.input_tokens"] > 4
    assert told["gen_ai.response.finish_reasons"] in (["stop"], ["length"])
    assert told["gen_ai.response.id"].startswith("chatcmpl-")


def test_a_callers_trace_goes_on(client: httpx.Client, collector: Collector) -> None:
    trace, span = CALLER[3:35], CALLER[36:52]
    headers = {"traceparent": CALLER, "tracestate": "shop=1"}
    assert client.post("/v1/completions", json=_completion(), headers=headers).status_code == 200
    (inference,) = collector.wait_for("text_completion qwen3.5")
    assert inference.trace == trace
    deadline = time.monotonic() + 20
    while len(spans := collector.of(trace)) < 6:
        assert time.monotonic() < deadline, tree(spans)
        time.sleep(0.1)
    no_orphans(spans, outside=span)
    assert names(spans, span) == ["POST /v1/completions"]


def test_who_does_not_want_to_be_traced_is_not(client: httpx.Client, collector: Collector) -> None:
    quiet = CALLER.replace("0af7", "beef")[:-2] + "00"
    assert client.post("/v1/completions", json=_completion(), headers={"traceparent": quiet}).status_code == 200
    broken = {"traceparent": "00-" + "0" * 32 + "-b7ad6b7169203331-01"}
    assert client.post("/v1/completions", json=_completion(), headers=broken).status_code == 200
    collector.wait_for("text_completion qwen3.5", count=2)
    assert collector.of(quiet[3:35]) == []
    assert collector.of("0" * 32) == []


def test_errors_say_what_they_are(client: httpx.Client, collector: Collector) -> None:
    refused = client.post("/v1/completions", json={**_completion(), "model": "qwen3.5@9"})
    assert refused.status_code == 404
    spans = collector.wait_for("POST /v1/completions", count=3)
    (found,) = [span for span in spans if span.attributes["http.response.status_code"] == 404]
    assert not found.failed, "a wrong request is no fault of the server"


def test_a_job(client: httpx.Client, collector: Collector) -> None:
    job = jobs.submit_sft(client, "traced", epochs=3, checkpoint_every=2)
    assert jobs.wait_for_end(client, job)["state"] == "succeeded"
    (root,) = collector.wait_for("job sft")
    spans = collector.of(root.trace)
    print(tree(spans))
    no_orphans(spans)
    assert (root.kind, root.service, root.parent) == (CONSUMER, "temper-engine", "")
    children = names(spans, root.id)
    assert children == ["prepare", *["step"] * (len(children) - 3), "publish", "serve"]
    assert children.count("step") >= 3
    assert "checkpoint" in root.events
    assert root.attributes["temper.job.id"] == job
    assert root.attributes["temper.job.outcome"] == "succeeded"
    # It is a trace of its own, and says which request it comes from.
    (submitted,) = collector.wait_for("POST /v1/train/sft")
    assert submitted.trace != root.trace
    assert root.links == ((submitted.trace, submitted.id),)


def test_calls_between_gateway_and_engine(client: httpx.Client, collector: Collector) -> None:
    assert client.post("/v1/adapters/traced/attach").status_code == 200
    assert client.post("/v1/adapters/traced/detach").status_code == 200
    synced = collector.wait_for("temper.v1.Adapters/Sync", count=2)[0]
    # The gateway sends its spans when it likes, not when the engine does.
    collector.wait_for("POST /v1/adapters/{name}/detach")
    spans = collector.of(synced.trace)
    no_orphans(spans)
    (root,) = [span for span in spans if not span.parent]
    assert synced.parent == root.id
    assert synced.service == "temper-engine"


def test_logs_have_the_trace(traced: Stack, collector: Collector) -> None:
    (chat, *_) = collector.named("POST /v1/chat/completions")
    lines = [json.loads(line) for line in traced.log("gateway").splitlines() if line.startswith("{")]
    assert [line["path"] for line in lines if line.get("trace_id") == chat.trace] == ["/v1/chat/completions"]
    (job,) = collector.named("job sft")
    lines = [json.loads(line) for line in traced.log("engine").splitlines() if line.startswith("{")]
    told = [line["event"] for line in lines if line.get("trace_id") == job.trace]
    assert {"job.claimed", "job.done"} <= set(told)


def test_exemplars_lead_to_traces(traced: Stack, client: httpx.Client, collector: Collector) -> None:
    accept = {"accept": "application/openmetrics-text"}
    told = client.get("/metrics", headers=accept).text
    for name in ("time_to_first_token", "inter_token_latency", "completion_duration", "request_duration"):
        found = set(re.findall(rf'^temper_gateway_{name}_seconds_bucket.* # {{trace_id="([0-9a-f]+)"}}', told, re.M))
        assert found, name
        assert found <= {span.trace for span in collector.spans}
    scraped = httpx.get(
        f"http://127.0.0.1:{traced.env['TEMPER_METRICS_PORT']}/metrics", headers=accept, timeout=PATIENCE
    ).text
    for name in ("queue", "time_to_first_token", "time_per_output_token"):
        assert re.search(rf'^temper_engine_{name}_seconds_bucket.* # {{trace_id="[0-9a-f]+"}}', scraped, re.M), name


def test_the_collector_is_told_who_sends(collector: Collector) -> None:
    assert {metadata.get("x-token") for metadata in collector.metadata} == {"secret"}


@pytest.mark.thorough
def test_a_collector_that_is_away_costs_nothing_but_spans(tmp_path: Path) -> None:
    """Nobody listens there; the process ends in time, too."""
    code = """
import time
from services.common.settings import CommonSettings
from services.common.telemetry.tracing import open_tracer
tracer = open_tracer(CommonSettings(otlp_endpoint="http://127.0.0.1:9"), "test")
began = time.monotonic()
for number in range(20000):
    with tracer.start("x") as span:
        tracer.start("y", parent=span.traceparent).end()
assert time.monotonic() - began < 20
began = time.monotonic()
tracer.close()
print(round(time.monotonic() - began, 1))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean_environment(), cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.splitlines()[-1]) < 10


def test_without_a_collector_nothing_of_it_is_loaded() -> None:
    code = """
import sys
import services.gateway.server.app, services.engine.server.service, services.trainer.runtime.worker
from services.common.settings import CommonSettings
from services.common.telemetry.tracing import NO_TRACER, open_tracer
assert open_tracer(CommonSettings(), "test") is NO_TRACER
# redis imports the SDK's metrics by itself, where the package is.
heavy = ("opentelemetry.sdk.trace", "opentelemetry.exporter", "opentelemetry.proto")
print([name for name in sys.modules if name.startswith(heavy)])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean_environment(), cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr


def _completion() -> dict[str, object]:
    return {"model": "qwen3.5", "prompt": "one two", "max_tokens": 3}
