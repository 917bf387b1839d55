"""Query parameters that a route does not have are refused by name, as fields of a body are; none is dropped."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import pytest

from tests.stack import PATIENCE
from tests.unit.gateway.conftest import MODEL, Running, Starter
from tests.unit.gateway.fake_engine import FakeEngine, says


def refused(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 400, answer.text
    return dict(answer.json()["error"])


@pytest.mark.parametrize(
    ("method", "path", "param", "said"),
    [
        ("DELETE", "/v1/feedback?user=u&lable=sums", "lable", "did you mean 'label'"),
        ("DELETE", "/v1/users/u-17?dry_run=true", "dry_run", "has none: remove it"),
        ("DELETE", "/v1/request_log?user=u&session=s", "session", "has user."),
        ("POST", "/v1/engine/sleep?enigne=engine-0", "enigne", "did you mean 'engine'"),
        ("POST", "/pause?mode=keep&clear_cache=true", "clear_cache", "POST /pause has mode."),
        ("GET", "/v1/files?purpos=batch", "purpos", "did you mean 'purpose'"),
        ("GET", "/v1/fine_tuning/jobs?metadta[a]=b", "metadta[a]", "after, limit, metadata"),
        ("POST", "/v1/chat/completions?stream=true", "stream", "has none"),
    ],
)
def test_an_unknown_one_is_refused_by_name(http: httpx.Client, method: str, path: str, param: str, said: str) -> None:
    error = refused(http.request(method, path))
    assert (error["param"], error["code"]) == (param, "unknown_parameter")
    assert said in error["message"]


def test_nothing_is_done_beside_an_unknown_one(running: Running, http: httpx.Client) -> None:
    for answer in ("a", "b"):
        http.post("/v1/feedback", json={"completion_id": f"chatcmpl-{answer}", "thumb": "up", "user": "u"})
    refused(http.delete("/v1/feedback", params={"user": "u", "completion_id": "chatcmpl-a"}))
    refused(http.delete("/v1/feedback?user=nobody&user=u"))
    assert len(http.get("/v1/feedback", params={"user": "u"}).json()["data"]) == 2


@pytest.mark.parametrize(
    "path", ["/v1/feedback?user=a&user=b", "/v1/files?limit=1&limit=2", "/v1/models?limit=1&limit=1"]
)
def test_one_that_is_given_twice_is_refused(http: httpx.Client, path: str) -> None:
    error = refused(http.get(path))
    assert error["param"] == path.partition("?")[2].partition("=")[0]
    assert "given 2 times: send it once" in error["message"]


@pytest.mark.parametrize("route", ["/v1/fine_tuning/jobs", "/v1/chat/completions"])
def test_metadata_are_pairs(http: httpx.Client, route: str) -> None:
    assert http.get(route, params={"metadata[a]": "b", "metadata[c]": "d"}).status_code == 200
    for query in ("metadata[a]=b&metadata[a]=c", "metadata=null", "metadata[a=b", "metadata[]=b"):
        assert refused(http.get(f"{route}?{query}"))["param"] == "metadata"


def test_lists_may_be_repeated_and_open_routes_take_anything(running: Running, http: httpx.Client) -> None:
    one = http.get("/v1/evaluations/compare?of=x&of=y")
    assert one.status_code == 404, one.text
    for path in ("/livez?x=1", "/metrics?name=a&name=b", "/docs?x=1", "/openapi.json?x"):
        assert http.get(path).status_code == 200


def test_what_clients_send_with_everything_is_accepted(running: Running, http: httpx.Client) -> None:
    running.engine.behaviour = says("hello")
    body = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    assert http.post("/v1/messages?beta=true", json=body).status_code == 200
    assert http.get("/v1/models?client_version=0.98.0").status_code == 200
    assert http.get("/server_info?config_format=json").status_code == 200, "TRL's question"
    assert http.post("/v1/chat/completions?api-version=2024-10-21", json=body).status_code == 200


def test_models_in_pages(start: Starter) -> None:
    running = start(FakeEngine())
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}
    for name in ("a", "b", "c"):
        running.registry.publish(name, files, base_digest="")
    plain = anthropic.DefaultHttpxClient(verify=False)
    with anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0, http_client=plain) as claude:
        assert [model.id for model in claude.models.list(limit=3)] == [MODEL, "a", "b", "c"]
        first = claude.models.list(limit=2)
        assert ([one.id for one in first.data], first.has_more, first.last_id) == ([MODEL, "a"], True, "a")
        last = claude.models.list(limit=2, after_id="a")
        assert ([one.id for one in last.data], last.has_more) == (["b", "c"], False)
        back = claude.models.list(limit=1, before_id="c")
        assert ([one.id for one in back.data], back.has_more) == (["b"], True)
        assert claude.models.list(before_id=MODEL).data == []
    other = httpx.get(f"{running.url}/v1/models?after_id=x", trust_env=False, timeout=PATIENCE)
    assert other.json()["error"]["param"] == "after_id"
