"""/tokenize, /detokenize, and what a server says about itself."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import openai
import pytest

from services.common.telemetry.process import installed_version
from services.common.text.tokenizer import TextCodec
from services.gateway.protocol.models import ModelList, ModelObject
from services.gateway.protocol.tokenize import DetokenizeAnswer, TokenizeAnswer, TokenizeRequest
from tests.stack import PATIENCE
from tests.unit.gateway.api.adapters.test_adapters import CONFIG, WEIGHTS, config, upload, weights
from tests.unit.gateway.api.base.test_bad_input import error_of
from tests.unit.gateway.conftest import MODEL, Running, Starter
from tests.unit.gateway.fake_engine import FakeEngine
from tests.unit.gateway.tokens import tokenizer_files

USER = [{"role": "user", "content": "naïve 🙂"}]
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


def test_a_text_there_and_back(running: Running, http: httpx.Client) -> None:
    text = "naïve 🙂<|im_end|><think>"
    answer = http.post("/tokenize", json={"prompt": text}).json()
    tokens = running.engine.codec.encode(text)
    assert answer == {"count": len(tokens), "max_model_len": 512, "tokens": tokens, "token_strs": None}
    TokenizeAnswer.model_validate(answer, strict=True)
    named = http.post("/tokenize", json={"model": MODEL, "prompt": "a <think>", "return_token_strs": True}).json()
    assert named["token_strs"] == ["a", "Ġ", "<think>"]
    back = http.post("/detokenize", json={"model": f"{MODEL}", "tokens": tokens}).json()
    assert back == {"prompt": text}
    DetokenizeAnswer.model_validate(back, strict=True)
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    assert http.post("/tokenize", json={"prompt": ""}).json()["count"] == 0
    assert http.post("/detokenize", json={"tokens": [97, 271]}).json() == {"prompt": "a"}, "271 is padding"


def test_a_conversation_is_the_prompt_of_its_completion(
    running: Running, http: httpx.Client, client: openai.OpenAI
) -> None:
    kwargs = {"enable_thinking": True}
    for more in ({}, {"tools": [TOOL]}, {"chat_template_kwargs": kwargs}):
        tokens = http.post("/tokenize", json={"messages": USER} | more).json()["tokens"]
        http.post("/v1/chat/completions", json={"model": MODEL, "messages": USER} | more)
        assert tokens == list(running.engine.requests[-1].prompt_token_ids)
        body = {"model": MODEL, "messages": USER, "max_tokens": 4, "stream": True} | more
        assert http.post("/v1/chat/completions/render", json=body).json() == {"token_ids": tokens}


def test_what_a_function_returns_is_shown_to_the_model(running: Running, http: httpx.Client) -> None:
    """transformers' get_json_schema says it of every function."""
    function = {**TOOL["function"], "return": {"type": "integer", "description": "seconds"}}
    tools = [{**TOOL, "function": function}]
    answer = http.post("/tokenize", json={"messages": USER, "tools": tools}).json()
    assert '"return": {"type": "integer", "description": "seconds"}' in running.engine.codec.decode(answer["tokens"])


def test_prompts_of_completions_are_rendered_as_they_are_sent_to_engines(running: Running, http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": ["naïve", "b"], "max_tokens": 1}
    rendered = http.post("/v1/completions/render", json=body).json()
    assert rendered == [{"token_ids": running.engine.codec.encode(text)} for text in body["prompt"]]
    asked = len(running.engine.requests)
    assert http.post("/v1/completions/render", json=body | {"prompt": [5, 6]}).json() == [{"token_ids": [5, 6]}]
    assert len(running.engine.requests) == asked, "no engine is asked"
    assert error_of(http.post("/v1/completions/render", json=body | {"prompt": [10**9]}), 400)["param"] == "prompt"


def test_the_fields_of_a_conversation_are_those_of_the_chat() -> None:
    given = {"messages": USER, "add_generation_prompt": False, "chat_template_kwargs": {"x": None}}
    body = TokenizeRequest.model_validate(given | {"continue_final_message": True, "model": "bot"})
    form = body.chat_form("tiny")
    assert form["messages"][0].content == "naïve 🙂"
    del form["messages"]
    assert form == {
        "model": "bot",
        "add_generation_prompt": False,
        "continue_final_message": True,
        "chat_template_kwargs": {"x": None},
    }


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": USER}, "prompt"),
        ({"prompt": "x", "tools": [TOOL]}, "tools"),
        ({"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"prompt": [1]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": USER, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": USER, "chat_template": "x"}, "chat_template"),
        ({"messages": USER, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"prompt": "x", "model": "gpt/4"}, "model"),
        ({"prompt": "x", "frobnicate": 1}, "frobnicate"),
    ],
)
def test_tokenize_refuses(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    assert error_of(http.post("/tokenize", json=body), 404 if param == "model" else 400)["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "tokens"),
        ({"tokens": [272]}, "tokens"),
        ({"tokens": [-1]}, "tokens[0]"),
        ({"tokens": [2**40]}, "tokens[0]"),
        ({"tokens": ["a"]}, "tokens[0]"),
        ({"tokens": [True]}, "tokens[0]"),
        ({"tokens": "abc"}, "tokens"),
    ],
)
def test_detokenize_refuses(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    assert error_of(http.post("/detokenize", json=body))["param"] == param


def test_both_are_bounded_and_leave_the_event_loop(start: Starter) -> None:
    running = start(offload_chars=0, max_in_flight=1)
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        tokens = http.post("/tokenize", json={"prompt": "ab", "return_token_strs": True}).json()["tokens"]
        assert http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "ab"}
        assert http.get("/load").json() == {"server_load": 0}
        place = running.inference.admission.reserve(1)
        assert http.get("/load").json() == {"server_load": 1}
        for route, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [97]})):
            assert error_of(http.post(route, json=body), 503)["code"] == "overloaded"
        place.release()


def test_special_tokens_are_added_on_demand(start: Starter) -> None:
    files = tokenizer_files()
    tokenizer = json.loads(files["tokenizer.json"])
    ends = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}]
    special = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [256], "tokens": ["<|endoftext|>"]}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": ends,
        "pair": [*ends, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": special,
    }
    codec = TextCodec(files | {"tokenizer.json": json.dumps(tokenizer).encode()})
    long = "a" * 5000
    assert codec.encode("a") == [97]
    assert codec.encode("a", add_special_tokens=True) == [97, 256]
    assert codec.encode(long, add_special_tokens=True) == [*codec.encode(long), 256]


def test_tokenizer_info(running: Running, http: httpx.Client) -> None:
    info = http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>"
    assert info["chat_template"].encode() == tokenizer_files()["chat_template.jinja"]


def test_what_routers_ask_for(start: Starter) -> None:
    running = start(FakeEngine())
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        assert http.get("/version").json() == {"version": installed_version()}
        for method, route in (("GET", "/ping"), ("POST", "/ping"), ("GET", "/health")):
            assert http.request(method, route).text == "ok"
        running.lifecycle.stopping.set()
        for route in ("/ping", "/health", "/readyz"):
            assert http.get(route).status_code == 503
        running.lifecycle.stopping.clear()


# -- models


def test_models_are_typed_for_both_clients(running: Running, http: httpx.Client, claude: anthropic.Anthropic) -> None:
    upload(http)
    upload(http, files={WEIGHTS: weights(3.0), CONFIG: config()})
    ModelList.model_validate(http.get("/v1/models").json(), strict=True)
    for name, root in (("bot", "bot@2"), ("bot@2", "bot@2"), ("bot@1", "bot@1")):
        found = ModelObject.model_validate(http.get(f"/v1/models/{name}").json(), strict=True)
        assert (found.id, found.root, found.adapter, found.parent) == (name, root, root, MODEL)
    assert [model.id for model in claude.models.list()] == [MODEL, "bot"]
    model = claude.models.retrieve("bot@1")
    assert anthropic.types.ModelInfo.model_validate(model.model_dump()).display_name == "bot@1"
    assert int(model.created_at.timestamp()) == running.inference.engines.created


@pytest.mark.parametrize("name", ["nobody", "bot@3", "bot@0", "bot@x", "bot@", "a/b", "base", "..", "bot@1/x", "%00"])
def test_models_that_are_not(running: Running, http: httpx.Client, name: str) -> None:
    upload(http)
    error = error_of(http.get(f"/v1/models/{name}"), 404)
    assert error["code"] == ("not_found" if name == ".." else "model_not_found")


def test_versions_without_the_object_store(running: Running, http: httpx.Client) -> None:
    running.engine.attached = "bot@2"
    running.store.down = True
    running.wait_for(lambda: running.inference.engines.attached == "bot@2")
    assert http.get("/v1/models/bot@2").json()["attached"] is True
    error_of(http.get("/v1/models/bot@1"), 404)


def test_a_model_name_with_a_slash(start: Starter) -> None:
    running = start(served_model_name="org/tiny")
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        assert client.models.retrieve("org/tiny").id == "org/tiny"
    assert httpx.get(f"{running.url}/v1/models/org/tiny", timeout=PATIENCE).json()["id"] == "org/tiny"
