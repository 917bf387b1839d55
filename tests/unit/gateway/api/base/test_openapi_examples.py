"""The examples in the description are submitted as they are; who describes a body without an example is found out."""

from __future__ import annotations

import httpx
import jsonschema_rs
import pytest

from services.common.text.tokenizer import TextCodec
from services.gateway.api.base.openapi import EXAMPLES
from tests.stack import TINY
from tests.unit.gateway.conftest import Running, Starter
from tests.unit.gateway.fake_engine import FakeEngine

JOBS = [path for path in EXAMPLES if path.startswith("/v1/train/") and not path.endswith("/sessions")]
# What stands in a request there names something that has to exist first.
WITHOUT = (
    "/v1/adapters/{name}/",
    "/v1/train/sessions/{session_id}/",
    "/v1/batches",
    "/v1/fine_tuning/jobs",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/canaries",
    "/v1/chat/completions/{completion_id}",
    "/v1/conversations/{conversation_id}",
)


@pytest.fixture
def tiny(start: Starter) -> Running:
    """A gateway with the tiny model's chat template: the other one has turns that are never generated like that.

    It has the adapter that "/v1/train/opd" goes on from: what starts from its own teacher, the base model, is refused.
    """
    engine = FakeEngine()
    engine.codec = TextCodec.from_directory(TINY)
    running = start(engine)
    adapter = EXAMPLES["/v1/train/opd"]["base"]["adapter"]
    running.registry.publish(adapter, {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}, base_digest="")
    return running


@pytest.mark.parametrize("path", JOBS)
def test_a_job_is_submitted(tiny: Running, path: str) -> None:
    for body in EXAMPLES[path].values():
        answer = httpx.post(f"{tiny.url}{path}", json=body, timeout=20, trust_env=False)
        assert answer.status_code == 202, answer.text


def test_an_evaluation_is_submitted(tiny: Running) -> None:
    """Of the suites that are examples themselves, on versions that exist."""
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}
    for content in (b"x", b"y", b"z"):
        files["adapter_model.safetensors"] = content
        tiny.registry.publish("polite", files, base_digest=tiny.inference.engines.served.info.digest)
    for path, status in (("/v1/eval/suites", 201), ("/v1/evaluations", 202), ("/v1/evaluations/import", 201)):
        for body in EXAMPLES[path].values():
            answer = httpx.post(f"{tiny.url}{path}", json=body, timeout=20, trust_env=False)
            assert answer.status_code == status, answer.text


def test_every_body_has_examples_that_fit_its_schema(running: Running) -> None:
    description = running.app.openapi()
    for path, operations in description["paths"].items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json")
        if content is None or path.startswith(WITHOUT):
            continue
        schema = {**content["schema"], "components": description["components"]}
        assert content["examples"], path
        for name, example in content["examples"].items():
            assert jsonschema_rs.is_valid(schema, example["value"]), f"{path} {name}"
