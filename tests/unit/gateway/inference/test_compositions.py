"""Adapters that answer together, on every endpoint that answers: by name in `model` and `adapter`, as a list in
`adapters`; what is wrong with them is said in each API's own form."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from services.common.pb import engine_pb2
from services.gateway.engines.load_balancing import holds, named_adapter
from services.gateway.inference.engine_request import version_ref
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import MODEL, Running, Starter
from tests.unit.gateway.fake_engine import FakeEngine
from tests.unit.gateway.reading_engine import reads

MESSAGES = {"messages": [{"role": "user", "content": "x"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": MESSAGES,
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {**MESSAGES, "max_tokens": 9},
    "/v1/embeddings": {"input": "x"},
    "/v1/score": {"prompt": "x", "completion": "y"},
}
COMPOSITION = "a@1*0.5+b@1*1"
WAYS: dict[str, dict[str, Any]] = {
    "model": {"model": "b+a@1*0.5"},
    "adapter": {"model": MODEL, "adapter": "a@1*0.5+b"},
    "adapters": {"model": MODEL, "adapters": [{"adapter": "b"}, {"adapter": "a@1", "scale": 0.5}]},
    "both": {"model": "a@1*0.5+b", "adapters": [{"adapter": "b"}, {"adapter": "a@1", "scale": 0.5}]},
}


@pytest.fixture
def engine_reads(running: Running) -> Running:
    running.engine.behaviour = reads()
    return running


@pytest.mark.parametrize("path", BODIES)
def test_every_way_to_name_a_composition(engine_reads: Running, http: httpx.Client, path: str) -> None:
    for way, fields in WAYS.items():
        if path == "/v1/messages" and way == "adapter":
            continue
        answer = http.post(path, json=BODIES[path] | fields)
        assert answer.status_code == 200, answer.text
        assert answer.json()["adapter"] == COMPOSITION
        assert answer.headers["x-temper-adapter"] == COMPOSITION
        members = [(one.adapter.name, one.adapter.version, one.scale) for one in _asked(engine_reads).members]
        assert members == [("a", 1, 0.5), ("b", 0, 1.0)]
    scaled = http.post(path, json=BODIES[path] | {"model": MODEL, "adapters": [{"adapter": "a", "scale": -2}]})
    assert scaled.json()["adapter"] == "a@1*-2"
    plain = http.post(path, json=BODIES[path] | {"model": MODEL, "adapters": [{"adapter": "a"}]})
    assert plain.json()["adapter"] == "a@1"
    assert engine_reads.engine.requests[-1].adapter.HasField("named")


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"adapters": []}, "adapters"),
    ({"adapters": [{"adapter": f"n{n}"} for n in range(17)]}, "adapters"),
    ({"adapters": [{"adapter": "a", "scale": 101}]}, "adapters[0].scale"),
    ({"adapters": [{"adapter": "a", "scale": 0}]}, "adapters"),
    ({"adapters": [{"adapter": "a"}, {"adapter": "a", "scale": 2}]}, "adapters"),
    ({"adapters": [{"adapter": "base"}]}, "adapters[0].adapter"),
    ({"adapters": [{"adapter": "a", "weight": 1}]}, "adapters[0].weight"),
)


@pytest.mark.parametrize("path", BODIES)
def test_what_is_wrong_is_named_in_the_form_of_the_api(running: Running, http: httpx.Client, path: str) -> None:
    for fields, param in WRONG:
        refused = http.post(path, json=BODIES[path] | {"model": MODEL} | fields)
        assert refused.status_code == 400, (fields, refused.text)
        if path == "/v1/messages":
            assert (refused.json()["type"], refused.json()["error"]["type"]) == ("error", "invalid_request_error")
            assert param in refused.json()["error"]["message"]
        else:
            assert refused.json()["error"]["param"] == param
    for model in ("a+", "a*0+b", "a+a", "a*1e9"):
        unknown = http.post(path, json=BODIES[path] | {"model": model})
        assert unknown.status_code == 404, unknown.text
    other = http.post(path, json=BODIES[path] | {"model": "c", "adapters": [{"adapter": "a"}]})
    assert other.status_code == 404
    assert "with `adapters` set, `model` must be 'tiny' or 'a'" in other.json()["error"]["message"]
    if path != "/v1/messages":
        both = http.post(path, json=BODIES[path] | {"model": MODEL, "adapter": "a", "adapters": [{"adapter": "a"}]})
        assert (both.status_code, both.json()["error"]["param"]) == (400, "adapters")
    assert not running.engine.requests


def test_the_tokens_of_a_message_are_counted_whoever_answers(running: Running, http: httpx.Client) -> None:
    counted = http.post("/v1/messages/count_tokens", json=MESSAGES | {"model": "a+b"})
    assert counted.json()["input_tokens"] > 0


def test_an_engine_that_composes_nothing_gets_no_compositions(start: Starter) -> None:
    running = start(FakeEngine(composes=False))
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        refused = http.post("/v1/chat/completions", json=MESSAGES | {"model": "a+b"})
        assert refused.status_code == 503
        assert "earlier release" in refused.json()["error"]["message"]
        assert http.post("/v1/chat/completions", json=MESSAGES | {"model": "a"}).status_code == 200


@pytest.mark.parametrize(
    ("loaded", "asked", "held"),
    [
        ("a@1", "a", True),
        ("a@1", "a@1", True),
        ("a@1", "a@11", False),
        ("ab@1", "a", False),
        ("a@1*0.5+b@2", "b+a*0.5", True),
        ("a@1*0.5+b@2", "b@3+a*0.5", False),
        ("a@1*0.5+b@2", "a+b", False),
        ("a@1*0.5+b@2", "a*0.5", False),
        ("a@1*0.5+b@2", "a", False),
    ],
)
def test_an_engine_is_known_to_hold_a_composition(loaded: str, asked: str, held: bool) -> None:
    request = engine_pb2.GenerateRequest(adapter=version_ref(asked))
    assert holds(loaded, named_adapter(request)) == held


def _asked(running: Running) -> engine_pb2.Composition:
    return running.engine.requests[-1].adapter.composition
