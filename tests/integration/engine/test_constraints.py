"""Constraints over gRPC, with the tiny model: what comes back is of the language, or was refused before it began."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import grpc
import jsonschema_rs
import pytest
from grpc import aio

from services.common.pb import engine_pb2 as pb
from services.common.text.tokenizer import TextCodec
from tests.integration.engine.harness import Answer, EngineUnderTest, request

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["red", "green", 3, None]}, "maxItems": 3},
        "size": {"type": "integer", "minimum": -10, "maximum": 10},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}
THINK_END = 2047


def constrained(seed: int = 0, *, param: str = "response_format", **fields: Any) -> pb.GenerateRequest:
    kinds = {"json_schema", "regex", "lark", "choices"}
    constraint = pb.Constraint(param=param, **{kind: fields.pop(kind) for kind in kinds & set(fields)})
    return request(
        **{"temperature": 1.0, "seed": seed, "max_tokens": 400, "ignore_eos": False, "constraint": constraint, **fields}
    )


def text_of(answer: Answer, codec: TextCodec) -> str:
    """Output as a gateway reads it, without the token that ends it."""
    assert answer.finish_reason == pb.FINISH_REASON_STOP, answer
    tokens = answer.token_ids[:-1] if answer.token_ids[-1] in codec.eos_ids else answer.token_ids
    return b"".join(codec.token_bytes(token) for token in tokens).decode()


async def test_answers_are_of_their_languages(engine: EngineUnderTest) -> None:
    stream, codec = engine.stream(), engine.engine.codec
    schema = json.dumps(SCHEMA)
    thinking = pb.Thinking(end_token_id=THINK_END, budget=6, closing_token_ids=[66, THINK_END])
    names = [await stream.submit(constrained(seed, json_schema=schema)) for seed in range(6)]
    names += [
        await stream.submit(constrained(7, regex="[a-c]{3,5}")),
        await stream.submit(constrained(8, choices=pb.Choices(texts=["yes", "no", "maybe"]))),
        await stream.submit(constrained(9, lark='start: "x" /[0-9]/+ "."', temperature=0.0, logit_bias={13: 5.0})),
        await stream.submit(constrained(10, json_schema=schema, top_k=20, presence_penalty=0.5, top_logprobs=2)),
        await stream.submit(constrained(11, json_schema=schema, thinking=thinking)),
    ]
    free = await stream.submit(request(temperature=1.0, seed=3, max_tokens=20, thinking=thinking))
    plain = await stream.submit(request(temperature=1.0, seed=3, max_tokens=20))
    texts = [text_of(await stream.answer(name), codec) for name in names]
    reasoning, answer = texts.pop().split("</think>")
    for text in (*texts[:6], texts[9], answer):
        assert jsonschema_rs.is_valid(SCHEMA, json.loads(text)), (text, reasoning)
    assert re.fullmatch("[a-c]{3,5}", texts[6])
    assert texts[7] in ("yes", "no", "maybe")
    assert re.fullmatch(r"x[0-9]+\.", texts[8])
    # The budget alone changes nothing up to where it is used up.
    ours, theirs = await stream.answer(free), await stream.answer(plain)
    assert ours.token_ids[:6] == theirs.token_ids[:6]
    assert THINK_END in ours.token_ids[:8]
    assert len(ours.token_ids) == 20


async def test_log_probabilities_are_those_of_the_plain_model(engine: EngineUnderTest) -> None:
    prompt = [5, 6, 7, 8]
    answer = await engine.stream().run(constrained(1, regex="[qz]{4}", top_logprobs=0))
    scores: list[float] = []
    scoring = pb.GenerateRequest(
        request_id="scoring",
        prompt_token_ids=[*prompt, *answer.token_ids],
        sampling=pb.SamplingParams(max_tokens=1),
        prompt_logprobs=0,
    )
    async for update in engine.stub.Generate(scoring):
        scores += update.prompt_logprobs.logprobs
    assert answer.logprobs == pytest.approx(scores[len(prompt) - 1 :], abs=1e-4)
    assert answer.sampling_logprobs == pytest.approx(answer.logprobs, abs=1e-5)
    assert min(answer.logprobs) < -3, "some of these would hardly have been drawn"


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"json_schema": '{"type": "array", "uniqueItems": true}'}, "response_format", "uniqueItems"),
    ({"json_schema": "{"}, "response_format", "not JSON"),
    ({"regex": "(", "param": "guided_regex"}, "guided_regex", "unclosed"),
    ({"lark": "start: nothing"}, "response_format", "unknown name"),
    ({"choices": pb.Choices()}, "response_format", "at least one"),
    ({}, "response_format", "no kind"),
    ({"json_schema": "{}", "min_tokens": 3}, "min_tokens", "min_tokens"),
    ({"json_schema": "{}", "ignore_eos": True}, "ignore_eos", "ignore_eos"),
    ({"regex": "a", "thinking": pb.Thinking(end_token_id=10**6)}, "thinking", "outside the vocabulary"),
    ({"regex": "a", "thinking": pb.Thinking(end_token_id=9, closing_token_ids=[8])}, "thinking", "closing_token_ids"),
    ({"regex": "a", "thinking": pb.Thinking(end_token_id=9), "stop_token_ids": [9]}, "stop_token_ids", "reasoning"),
    ({"regex": "a" * 300_000}, "response_format", "TEMPER_CONSTRAINT_MAX_BYTES"),
]


async def test_what_cannot_be_enforced_is_refused_before_anything_is_generated(engine: EngineUnderTest) -> None:
    stream = engine.stream()
    good = await stream.submit(constrained(3, regex="[ab]{30}"))
    for fields, param, why in BAD:
        answer = await stream.run(constrained(**fields))
        assert answer.error is not None, fields
        assert (answer.error.code, answer.error.param) == (pb.ERROR_CODE_INVALID_REQUEST, param), (fields, answer.error)
        assert why in answer.error.message
        assert answer.token_ids == []
        assert answer.finish_reason == pb.FINISH_REASON_ERROR
    assert re.fullmatch("[ab]{30}", text_of(await stream.answer(good), engine.engine.codec))
    with pytest.raises(aio.AioRpcError) as caught:
        await engine.generate(constrained(regex="("))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_request_can_be_ended_while_its_grammar_is_compiled(
    engine: EngineUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream goes on meanwhile: nothing waits for a compiler but who needs it."""
    constraints = engine.engine.constraints
    may_go_on, compile_now = asyncio.Event(), constraints.matcher
    compiling = 0

    async def slow(sampling: Any) -> Any:
        nonlocal compiling
        compiling += 1
        await may_go_on.wait()
        return await compile_now(sampling)

    monkeypatch.setattr(constraints, "matcher", slow)
    stream, gone = engine.stream(), engine.stream()
    aborted = await stream.submit(constrained(1, regex="a{3}"))
    kept = await stream.submit(constrained(2, regex="b{3}"))
    await gone.submit(constrained(3, regex="c{3}"))
    assert len((await stream.run(request())).token_ids) == 8
    assert compiling == 3
    await stream.abort(aborted)
    assert (await stream.answer(aborted)).finish_reason == pb.FINISH_REASON_ABORT
    again = await stream.submit(constrained(4, regex="a{4}", request_id=aborted))
    await gone.close()
    await asyncio.sleep(0.05)
    may_go_on.set()
    codec = engine.engine.codec
    assert text_of(await stream.answer(kept), codec) == "bbb"
    assert text_of(await stream.answer(again), codec) == "aaaa"
