"""Names of metrics as Prometheus reads them, in both formats."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from cli.local.ports import claim_ports
from services.common.errors import Unavailable
from services.common.telemetry.prometheus import expose, serving
from tests.stack import PATIENCE

PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=underscores;q=0.5,application/openmetrics-text;version=0.0.1;"
    "q=0.4,text/plain;version=1.0.0;escaping=underscores;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Gauge("vllm:num_requests_waiting", "Waiting.", ["model_name"], registry=registry).labels("q").set(3)
    Counter("temper_things", "Things.", registry=registry).inc(exemplar=None)
    latency = Histogram("temper_seconds", "Seconds.", registry=registry, buckets=(1.0,))
    latency.observe(0.5, exemplar={"trace_id": "abc"})
    return registry


@pytest.mark.parametrize("accept", ["", "*/*", "text/plain;version=0.0.4"])
def test_plain_text_unless_asked(registry: CollectorRegistry, accept: str) -> None:
    body, content_type = expose(registry, accept)
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert 'vllm:num_requests_waiting{model_name="q"} 3.0' in body.decode()
    assert "# EOF" not in body.decode()


def test_openmetrics_keeps_colons_and_has_exemplars(registry: CollectorRegistry) -> None:
    body, content_type = expose(registry, PROMETHEUS)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    text = body.decode()
    assert 'vllm:num_requests_waiting{model_name="q"} 3.0' in text
    assert text.endswith("# EOF\n")
    found = {family.name: family for family in text_string_to_metric_families(text)}
    exemplars = [sample.exemplar for sample in found["temper_seconds"].samples if sample.exemplar]
    assert [exemplar.labels for exemplar in exemplars] == [{"trace_id": "abc"}]


@pytest.fixture
def url(registry: CollectorRegistry) -> Iterator[str]:
    (claim,) = claim_ports(1)
    claim.release()
    with serving(registry, "127.0.0.1", claim.number):
        yield f"http://127.0.0.1:{claim.number}/metrics"


def test_over_http(url: str) -> None:
    with httpx.Client(trust_env=False, timeout=PATIENCE) as http:
        assert "temper_things_total 1.0" in http.get(url).text
        answer = http.get(url, headers={"accept": PROMETHEUS})
        assert answer.headers["content-type"].startswith("application/openmetrics-text")
        assert "vllm:num_requests_waiting{" in answer.text
        assert http.post(url).status_code == 405


def test_a_taken_port_is_an_error(url: str, registry: CollectorRegistry) -> None:
    port = int(url.split(":")[2].split("/")[0])
    with pytest.raises(Unavailable, match="TEMPER_METRICS_PORT"), serving(registry, "127.0.0.1", port):
        pass


def test_a_port_is_free_again(registry: CollectorRegistry) -> None:
    (claim,) = claim_ports(1)
    claim.release()
    for _ in range(2):
        with serving(registry, "127.0.0.1", claim.number), httpx.Client(trust_env=False, timeout=PATIENCE) as http:
            assert http.get(f"http://127.0.0.1:{claim.number}/metrics").status_code == 200
