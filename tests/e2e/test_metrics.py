"""What a running gateway and engine export is what the guide, the dashboards and the alerts are made from."""

from __future__ import annotations

import httpx
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from observability.catalogue import exported
from tests.stack import PATIENCE, Stack


def families(url: str) -> dict[str, set[str]]:
    """Names → labels of the samples that there are, in the format that Prometheus asks for."""
    accept = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
    answer = httpx.get(f"{url}/metrics", headers=accept, timeout=10, trust_env=False)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    text = answer.text
    return {
        family.name: {label for sample in family.samples for label in sample.labels}
        for family in text_string_to_metric_families(text)
        # Times of creation, which the library adds; and what depends on the system.
        if not family.name.endswith("_created") and not family.name.startswith(("process_", "python_"))
    }


def test_pickers_read_the_same_of_the_gateway_as_of_its_only_engine(stack: Stack) -> None:
    asked = (stack.url, f"http://127.0.0.1:{stack.env['TEMPER_METRICS_PORT']}")
    names = ("num_requests_", "kv_cache_usage_perc", "lora_requests_info{", "cache_config_info{")
    gateway, engine = (
        [
            line.rpartition(" ")[0] if "lora" in line else line  # whose value is the time
            for line in httpx.get(f"{url}/metrics", timeout=PATIENCE).text.splitlines()
            if line.startswith(tuple(f"vllm:{name}" for name in names))
        ]
        for url in asked
    )
    assert len(engine) == 5
    assert sorted(gateway) == sorted(engine)


def test_the_catalogue_is_what_is_exported(stack: Stack) -> None:
    body = {"model": stack.served_model_name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=60, trust_env=False).raise_for_status()
    for service, url in (("gateway", stack.url), ("engine", f"http://127.0.0.1:{stack.env['TEMPER_METRICS_PORT']}")):
        found = families(url)
        catalogue = {metric.name: metric for metric in exported() if metric.service in (service, "tls")}
        assert found.keys() == catalogue.keys()
        for name, labels in found.items():
            assert labels <= {*catalogue[name].labels, "le"}
    assert (
        'temper_gateway_jobs{queue="training",state="queued"}'
        in httpx.get(f"{stack.url}/metrics", timeout=PATIENCE).text
    )
