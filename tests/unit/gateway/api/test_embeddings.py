"""Vectors of texts, through the real openai client and without it."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

import httpx
import openai
import pytest

from services.common.pb import engine_pb2
from services.gateway.protocol.pooling import EmbeddingsResponse
from tests.stack import PATIENCE
from tests.unit.gateway.conftest import MODEL, Running, Starter
from tests.unit.gateway.fake_engine import fails, hangs
from tests.unit.gateway.reading_engine import WIDTH, reads, vector

LAST, MEAN = engine_pb2.POOLING_LAST, engine_pb2.POOLING_MEAN


def unit(numbers: list[float]) -> list[float]:
    length = math.hypot(*numbers)
    return [number / length for number in numbers]


def test_every_form_of_input(running: Running, client: openai.OpenAI) -> None:
    running.engine.behaviour = reads()
    for given, prompts in (
        ("ab", [[97, 98]]),
        ([97, 98], [[97, 98]]),
        (["ab", "ß"], [[97, 98], [0xC3, 0x9F]]),
        ([[97], [98, 99, 100]], [[97], [98, 99, 100]]),
    ):
        # The client asks for base64 by itself, and decodes it.
        answer = client.embeddings.create(model=MODEL, input=given)
        assert [entry.index for entry in answer.data] == list(range(len(prompts)))
        for entry, prompt in zip(answer.data, prompts, strict=True):
            assert entry.embedding == pytest.approx(unit(vector(prompt, LAST)), rel=1e-6)
        count = sum(map(len, prompts))
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (count, count)
        assert (answer.object, answer.model, answer.data[0].object) == ("list", MODEL, "embedding")
    sampling = {request.sampling.max_tokens for request in running.engine.requests}
    assert sampling == {1}
    assert not any(request.keep_rollout for request in running.engine.requests)


def test_base64_says_the_same_as_numbers(running: Running, http: httpx.Client) -> None:
    running.engine.behaviour = reads()
    body = {"model": MODEL, "input": "abc", "pooling": "mean"}
    numbers = http.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
    packed = http.post("/v1/embeddings", json=body | {"encoding_format": "base64"}).json()["data"][0]["embedding"]
    assert list(struct.unpack(f"<{WIDTH}f", base64.b64decode(packed))) == numbers
    assert numbers == pytest.approx(unit(vector([97, 98, 99], MEAN)), rel=1e-6)


def test_dimensions_and_normalize(running: Running, client: openai.OpenAI) -> None:
    running.engine.behaviour = reads()
    raw = vector([97, 98], LAST)
    cut = client.embeddings.create(model=MODEL, input="ab", dimensions=2, encoding_format="float")
    assert cut.data[0].embedding == pytest.approx(unit(raw[:2]), rel=1e-6)
    assert math.hypot(*cut.data[0].embedding) == pytest.approx(1.0, rel=1e-6)
    plain = client.embeddings.create(model=MODEL, input="ab", dimensions=3, extra_body={"normalize": False})
    assert plain.data[0].embedding == raw[:3]
    with pytest.raises(openai.BadRequestError, match=f"vectors have {WIDTH}") as refused:
        client.embeddings.create(model=MODEL, input="ab", dimensions=WIDTH + 1)
    assert refused.value.param == "dimensions"


def test_the_policy_that_reads(running: Running, http: httpx.Client) -> None:
    running.engine.behaviour = reads()
    running.engine.attached = "a@3"
    body = {"model": MODEL, "input": ["x", "y"]}
    for change, adapter in (({}, "a@3"), ({"adapter": "base"}, None), ({"model": "b@7"}, "b@7")):
        answer = http.post("/v1/embeddings", json=body | change)
        EmbeddingsResponse.model_validate_json(answer.content, strict=True)
        assert answer.json()["adapter"] == adapter
        assert [entry["adapter"] for entry in answer.json()["data"]] == [adapter] * 2
        assert answer.headers.get("x-temper-adapter") == adapter
    assert running.engine.requests[-1].adapter.named.version == 7


def test_many_texts_with_few_places(start: Starter) -> None:
    running = start(max_choices=3, max_in_flight=3, max_inputs=20)
    running.engine.behaviour = reads()
    with httpx.Client(base_url=running.url, timeout=PATIENCE, verify=False) as http:
        body = {"model": MODEL, "input": [[97 + n] for n in range(20)], "normalize": False}
        answer = http.post("/v1/embeddings", json=body)
        assert [entry["embedding"][0] for entry in answer.json()["data"]] == [97.0 + n for n in range(20)]
        more = http.post("/v1/embeddings", json=body | {"input": ["x"] * 21})
        assert more.json()["error"]["param"] == "input"
        assert "may have 20" in more.json()["error"]["message"]
        running.engine.behaviour = hangs
        running.leave("/v1/embeddings", body, lambda: len(running.engine.running) == 3)
        # Only those that had a place ever ran; all are given up together.
        running.wait_for(lambda: not running.engine.running and running.inference.admission.in_flight == 0)
        assert len(running.engine.requests) == 23
        running.engine.behaviour = reads()
        held = running.inference.admission.reserve(2)
        assert http.post("/v1/embeddings", json=body).status_code == 503
        held.release()
    running.wait_for(lambda: running.inference.admission.in_flight == 0)


def test_one_failure_ends_all(running: Running, http: httpx.Client) -> None:
    good = reads()

    async def behave(engine, request, send) -> None:
        if request.prompt_token_ids[0] == 99:
            await fails(engine_pb2.ERROR_CODE_MODEL_NOT_FOUND, "no such adapter")(engine, request, send)
        elif request.prompt_token_ids[0] == 98:
            await hangs(engine, request, send)
        else:
            await good(engine, request, send)

    running.engine.behaviour = behave
    answer = http.post("/v1/embeddings", json={"model": MODEL, "adapter": "gone", "input": ["a", "b", "c"]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "adapter")
    running.wait_for(lambda: not running.engine.running)


def test_an_engine_without_an_answer(running: Running, http: httpx.Client) -> None:
    assert http.post("/v1/embeddings", json={"model": MODEL, "input": "a"}).status_code == 503


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input.1"),
        ({"input": ["a", [1]]}, "input[0]"),
        ({"input": [[]]}, "input[0]"),
        ({"input": [300]}, "input"),
        ({"input": "x" * 600}, "input"),
        ({"input": None}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 1.5}, "dimensions"),
        ({"pooling": "cls"}, "pooling"),
        ({"normalize": "yes"}, "normalize"),
        ({"model": "no such model"}, "model"),
        ({"adapter": "../x"}, "adapter"),
        ({"truncate": True}, "truncate"),
    ],
)
def test_bad_input(running: Running, http: httpx.Client, change: dict[str, Any], param: str) -> None:
    running.engine.behaviour = reads()
    answer = http.post("/v1/embeddings", json={"model": MODEL, "input": "a"} | change)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"] == param, answer.text
