"""What engines are told of a request's caller and of its prompt: session, salt, and where messages end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError

from services.common.pb import engine_pb2
from services.common.security.api_keys import ANONYMOUS, Scope
from services.gateway.auth.caller import Caller, Principal, working_for
from services.gateway.engines.load_balancing import Affinity, route_of
from services.gateway.engines.served_model import ServedModel
from services.gateway.inference.engine_request import cache_salt
from services.gateway.inference.prompts import turn_boundaries
from services.gateway.settings import CacheScope, GatewaySettings
from tests.unit.gateway.batch_client import BODY, OPTIONS, Batches, line
from tests.unit.gateway.conftest import MODEL, Running, Starter
from tests.unit.gateway.key_file import NO_REDIS, Keys
from tests.unit.gateway.reading_engine import reads
from tests.unit.gateway.tokens import codec

USER = {"role": "user", "content": "hi"}
GENERATING: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi", "store": False},
    "/v1/messages": {"messages": [USER], "max_tokens": 8},
}
READING: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "hi"},
    "/v1/score": {"prompt": "hi", "completion": ["a", "b"]},
}
TURN = 257
"""<|im_start|>"""


def sent(running: Running, path: str, *, headers: dict[str, str] | None = None, **more: Any) -> Any:
    """The engine's request that a call of the API becomes."""
    before = len(running.engine.requests)
    body = {"model": MODEL, **(GENERATING | READING)[path], **more}
    answer = httpx.post(running.url + path, json=body, headers=headers or {}, timeout=20, verify=False)
    assert answer.status_code == 200, answer.text
    running.wait_for(lambda: len(running.engine.requests) > before)  # in the background
    return running.engine.requests[before]


def session(request: engine_pb2.GenerateRequest) -> tuple[str, str] | None:
    return (request.session.owner, request.session.name) if request.HasField("session") else None


# -- sessions


@pytest.mark.parametrize("path", GENERATING)
def test_a_request_says_its_session(running: Running, path: str) -> None:
    header = {"x-session-id": "mine"}
    assert session(sent(running, path)) is None
    assert session(sent(running, path, headers=header)) == ("", "mine")
    by_user: dict[str, Any]
    if path == "/v1/messages":
        by_user = {"metadata": {"user_id": "u"}}
        assert session(sent(running, path, metadata={})) is None
    else:
        by_user = {"user": "u"}
        by_key = {"prompt_cache_key": "k"}
        assert session(sent(running, path, **by_key)) == ("", "k")
        assert session(sent(running, path, **by_user, **by_key)) == ("", "k")
        assert session(sent(running, path, **by_user, prompt_cache_key="")) == ("", "u"), "an empty key is none"
        assert session(sent(running, path, user="")) is None
    assert session(sent(running, path, **by_user)) == ("", "u")
    assert session(sent(running, path, **by_user, headers=header)) == ("", "mine")
    if path in ("/v1/chat/completions", "/v1/completions"):
        assert session(sent(running, path, session_id="body", user="u")) == ("", "body")
    by_user = {"metadata": {"user_id": "x" * 300}} if path == "/v1/messages" else {"user": "x" * 300}
    long = session(sent(running, path, **by_user))
    assert long is not None
    assert long[1].startswith("sha256-")
    assert len(long[1]) <= 256


def test_all_choices_are_of_the_session(running: Running) -> None:
    sent(running, "/v1/completions", prompt=["a", "b"], n=2, session_id="s")
    assert [session(request) for request in running.engine.requests] == [("", "s")] * 4


def test_a_background_response_is_of_a_session(running: Running) -> None:
    found = sent(running, "/v1/responses", store=True, background=True, headers={"x-session-id": "s"})
    assert session(found) == ("", "s")


def test_sessions_belong_to_keys(tmp_path: Path, start: Starter) -> None:
    keys = Keys(tmp_path / "keys.json")
    for name in ("one", "two"):
        keys.add(name, Scope.INFERENCE)
    running = start(api_keys_file=str(keys.path), redis_url=NO_REDIS, **OPTIONS)
    for name in ("one", "two"):
        found = session(sent(running, "/v1/chat/completions", session_id="s", headers=keys.bearer(name)))
        assert found == (keys.entries[name].id, "s")
    assert len(running.inference.engines._sessions) == 2, "nor do they decide each other's engine"
    running.engine.requests.clear()
    plain = openai.DefaultHttpxClient(verify=False)
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key=keys.secrets["two"], http_client=plain) as client:
        assert Batches(running, client).run(line("a", BODY | {"session_id": "s"})).status == "completed"
    assert [session(request) for request in running.engine.requests] == [(keys.entries["two"].id, "s")]


def test_a_key_of_prompts_is_not_bound_to_an_engine() -> None:
    assert Affinity(cache_key="k").history == "k"
    assert Affinity("s", "k").history == "s"
    assert Affinity().history is None


# -- boundaries


def test_messages_end_where_others_begin(running: Running) -> None:
    messages = [
        {"role": "system", "content": "be <|im_start|> kind"},
        {"role": "user", "content": "a <|im_start|> b"},
        {"role": "assistant", "content": "<|im_start|>"},
        USER,
    ]
    request = sent(running, "/v1/chat/completions", messages=messages)
    prompt, found = list(request.prompt_token_ids), list(request.boundaries)
    assert [prompt[place] for place in found] == [TURN] * 4, "the three messages behind the first one, and the answer"
    assert found == [place for place, token in enumerate(prompt) if token == TURN and place]
    assert codec().decode(prompt[found[-1] :], skip_special=False).startswith("<|im_start|>assistant\n<think>")
    for path, more in (
        ("/v1/responses", {"input": messages[1:]}),
        ("/v1/messages", {"messages": messages[1:]}),
    ):
        request = sent(running, path, **more)
        assert [request.prompt_token_ids[place] for place in request.boundaries] == [TURN] * 3
    assert not sent(running, "/v1/completions", prompt="<|im_start|>user\nhi<|im_end|>\n<|im_start|>a").boundaries


def test_only_the_last_boundaries_are_told(running: Running) -> None:
    served: ServedModel = running.inference.engines.served
    prompt = [TURN, 1] * 5000
    assert turn_boundaries(served, prompt) == list(range(2, 10000, 2))[-4096:]
    assert turn_boundaries(served, [TURN, 1, 2]) == []
    assert turn_boundaries(served, []) == []


def test_completions_that_are_scored_part_behind_their_prompt(running: Running) -> None:
    running.engine.behaviour = reads()
    request = sent(running, "/v1/score", prompt="say", completion=["abc", "d"])
    assert list(request.boundaries) == [3]
    assert not sent(running, "/v1/score", prompt=None, completion="abc").boundaries


# -- salts


@pytest.mark.parametrize("path", [*GENERATING, *READING])
def test_a_clients_salt_is_marked_as_one(running: Running, path: str) -> None:
    running.engine.behaviour = reads()
    assert sent(running, path).cache_salt == ""
    if path != "/v1/messages":
        assert sent(running, path, cache_salt="score:1").cache_salt == "client:score:1"


def test_keys_share_nothing_under_their_scope(tmp_path: Path, start: Starter) -> None:
    keys = Keys(tmp_path / "keys.json")
    for name in ("one", "two"):
        keys.add(name, Scope.INFERENCE)
    running = start(api_keys_file=str(keys.path), redis_url=NO_REDIS, cache_scope="key", **OPTIONS)
    running.engine.behaviour = reads()
    found: dict[tuple[str, str | None], set[str]] = {}
    for name in ("one", "two"):
        for path in [*GENERATING, *READING]:
            salts: list[str | None] = [None] if path == "/v1/messages" else [None, "a", "b"]
            for salt in salts:
                more = {} if salt is None else {"cache_salt": salt}
                request = sent(running, path, headers=keys.bearer(name), **more)
                found.setdefault((name, salt), set()).add(request.cache_salt)
    assert all(len(salts) == 1 for salts in found.values()), "the same on every route"
    assert len({salt for salts in found.values() for salt in salts}) == len(found) == 6, "and another for every scope"

    running.engine.requests.clear()
    sent(running, "/v1/responses", headers=keys.bearer("one"), store=True, background=True)
    assert running.engine.requests[0].cache_salt in found["one", None]
    running.engine.requests.clear()
    plain = openai.DefaultHttpxClient(verify=False)
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key=keys.secrets["two"], http_client=plain) as client:
        assert Batches(running, client).run(line("a")).status == "completed"
    assert {request.cache_salt for request in running.engine.requests} == found["two", None]


def salt_of(scope: CacheScope, key: str, given: str | None) -> str:
    principal = Principal(key, frozenset())
    with working_for(Caller(principal, None)):  # type: ignore[arg-type]
        return cache_salt(scope, given)


def test_no_two_callers_and_salts_are_taken_for_each_other() -> None:
    callers = [
        ("a", "bc"),
        ("ab", "c"),
        ("a", None),
        ("ab", None),
        ("abc", None),
        (ANONYMOUS, "abc"),
        (ANONYMOUS, None),
    ]
    salts = [salt_of("key", key, given) for key, given in callers]
    assert len(set(salts)) == len(callers)
    assert salt_of("shared", "a", None) == ""
    assert salt_of("shared", "a", "x") == salt_of("shared", "b", "x")
    assert salt_of("shared", "a", salts[0]) not in salts, "nor can a salt be made up under the other scope"


def test_routing_knows_the_salt_that_engines_are_told() -> None:
    tokens = list(range(200))
    chains = {
        route_of(
            engine_pb2.GenerateRequest(cache_salt=salt_of("key", key, None), adapter=engine_pb2.AdapterRef(base=True)),
            tokens,
            Affinity(),
        ).chain
        for key in ("a", "b")
    }
    assert len(chains) == 2


def test_a_scope_of_keys_needs_keys() -> None:
    with pytest.raises(ValidationError, match="TEMPER_API_KEYS_FILE"):
        GatewaySettings(cache_scope="key")
    with pytest.raises(ValidationError, match="'shared' or 'key'"):
        GatewaySettings(cache_scope="all")  # type: ignore[arg-type]


# -- what a client is told


def usage(running: Running, path: str, **more: Any) -> dict[str, Any]:
    """The last token counts that an answer tells."""
    body = {"model": MODEL, **(GENERATING | READING)[path], **more}
    answer = httpx.post(running.url + path, json=body, timeout=20, verify=False)
    assert answer.status_code == 200, answer.text
    if not more.get("stream"):
        return dict(answer.json()["usage"])
    events = [json.loads(text[6:]) for text in answer.text.splitlines() if text.startswith("data: {")]
    counts = [event.get("response", event).get("usage") for event in events]
    return dict([found for found in counts if found][-1])


@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_are_told_in_every_form(running: Running, stream: bool) -> None:
    running.engine.cached_tokens = 2
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert usage(running, path, **options)["prompt_tokens_details"] == {"cached_tokens": 2}
        assert usage(running, path, **options, n=3)["prompt_tokens_details"] == {"cached_tokens": 2}, "once a prompt"
    listed = usage(running, "/v1/completions", **options, prompt=["hi", "ho", "ha"], n=2)
    assert (listed["prompt_tokens"], listed["prompt_tokens_details"]) == (6, {"cached_tokens": 6})
    plain = {"stream": stream}
    details = usage(running, "/v1/responses", **plain)["input_tokens_details"]
    assert details == {"cached_tokens": 2, "cache_write_tokens": 0}
    told = usage(running, "/v1/messages", **plain)
    assert (told["cache_read_input_tokens"], told["cache_creation_input_tokens"]) == (2, 0)
    prompt = running.engine.requests[-1].prompt_token_ids
    assert told["input_tokens"] == len(prompt) - 2, "input_tokens are those that were computed"


def test_cached_tokens_of_what_is_only_read(running: Running) -> None:
    running.engine.behaviour, running.engine.cached_tokens = reads(), 2
    assert usage(running, "/v1/score")["prompt_tokens_details"] == {"cached_tokens": 4}
    assert usage(running, "/v1/embeddings")["prompt_tokens_details"] == {"cached_tokens": 2}
