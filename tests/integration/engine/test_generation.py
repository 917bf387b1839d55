"""Requests over real gRPC: answers, errors, ends and what they leave behind (the fixture checks: nothing)."""

from __future__ import annotations

import asyncio
import math
import random
import time

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.pb import engine_pb2 as pb
from services.engine.server.stream_load import MUCH_PREFILL
from tests.integration.engine.harness import EngineUnderTest, request


async def test_a_stream_answers_many_requests(engine: EngineUnderTest) -> None:
    stream = engine.stream()
    names = [await stream.submit(request([5 + i, 6, 7], top_logprobs=2, temperature=0.0)) for i in range(6)]
    answers = [await stream.answer(name) for name in names]
    for answer in answers:
        assert answer.error is None
        assert answer.finish_reason == pb.FINISH_REASON_LENGTH
        assert len(answer.token_ids) == len(answer.sampling_logprobs) == len(answer.logprobs) == 8
        assert answer.sampling_logprobs == pytest.approx(answer.logprobs, abs=1e-5)
        assert answer.adapter == ""
    # Six requests of eight tokens ran together: one frame a step, not one a token.
    assert stream.frames < 6 * 8


async def test_generate_equals_the_stream_and_seeds_do_not_depend_on_company(engine: EngineUnderTest) -> None:
    stream = engine.stream()
    alone = await engine.generate(request(temperature=1.0, seed=7, max_tokens=16))
    # So hot that every token is as likely as any other: two equal answers of one prompt had one seed.
    names = [await stream.submit(request([9, 3], temperature=100.0, max_tokens=20)) for _ in range(5)]
    together = await stream.run(request(temperature=1.0, seed=7, max_tokens=16))
    other = await stream.run(request(temperature=1.0, seed=8, max_tokens=16))
    assert alone.token_ids == together.token_ids != other.token_ids
    assert alone.sampling_logprobs == pytest.approx(together.sampling_logprobs, abs=1e-3)
    unseeded = [(await stream.answer(name)).token_ids for name in names]
    assert len({tuple(tokens) for tokens in unseeded}) == len(unseeded)


async def test_a_stop_token_ends_the_answer(engine: EngineUnderTest) -> None:
    tokens = (await engine.generate(request(temperature=1.0, seed=1))).token_ids
    index = next(i for i in range(1, 8) if tokens[i] not in tokens[:i])
    stopped = await engine.generate(request(temperature=1.0, seed=1, stop_token_ids=[tokens[index]]))
    assert stopped.token_ids == tokens[: index + 1]
    assert stopped.finish_reason == pb.FINISH_REASON_STOP
    later = await engine.generate(request(temperature=1.0, seed=1, stop_token_ids=[tokens[index]], min_tokens=8))
    assert len(later.token_ids) == 8
    assert tokens[index] not in later.token_ids


async def test_a_repeated_prompt_comes_from_the_cache(engine: EngineUnderTest) -> None:
    prompt = [3 + i % 50 for i in range(100)]
    first = await engine.generate(request(prompt))
    second = await engine.generate(request(prompt))
    salted = await engine.generate(request(prompt, cache_salt="other"))
    assert first.cached_tokens == salted.cached_tokens == 0
    assert second.cached_tokens >= 64
    assert first.token_ids == second.token_ids == salted.token_ids


@pytest.mark.parametrize("engine_settings", [{"max_model_len": 2 * MUCH_PREFILL}], indirect=True)
async def test_a_stream_hears_at_once_what_another_has_much_to_compute_of(engine: EngineUnderTest) -> None:
    sending, hearing = engine.stream(), engine.stream()
    await hearing.run(request())
    asked = request([3 + i % 50 for i in range(MUCH_PREFILL)])
    asked.expected_prefill, asked.prefix_hashes = MUCH_PREFILL, b"12345678"
    name = await sending.submit(asked)
    taken, begun = [await asyncio.wait_for(hearing.heard.get(), 30) for _ in range(2)]
    assert taken == pb.EngineFrame(
        others=pb.Load(requests=1, prefill_tokens=MUCH_PREFILL), prompts=[asked.prefix_hashes]
    )
    assert (begun.others.prefill_tokens, list(begun.prompts)) == (0, [])
    assert (await sending.answer(name)).error is None
    assert sending.heard.empty(), "its own is no news"
    left = await engine.until(lambda status: status.load == pb.Load())
    assert left.prompts_seen == 1


async def test_abort_ends_a_request_at_once(engine: EngineUnderTest) -> None:
    stream = engine.stream()
    name = await stream.submit(request(max_tokens=400))
    await stream.first(name)
    await stream.abort(name)
    answer = await stream.answer(name)
    assert answer.finish_reason == pb.FINISH_REASON_ABORT
    assert len(answer.token_ids) < 400
    await engine.assert_nothing_left()


async def test_the_end_of_a_stream_aborts_its_requests_only(engine: EngineUnderTest) -> None:
    leaving, staying = engine.stream(), engine.stream()
    names = [await leaving.submit(request([5, i + 3], max_tokens=450)) for i in range(3)]
    kept = await staying.submit(request(max_tokens=60))
    for name in names:
        await leaving.first(name)
    await leaving.close()
    assert len((await staying.answer(kept)).token_ids) == 60
    await engine.assert_nothing_left()


async def test_a_half_closed_stream_gets_its_answers(engine: EngineUnderTest) -> None:
    stream = engine.stream()
    name = await stream.submit(request())
    await stream.call.done_writing()
    assert len((await stream.answer(name)).token_ids) == 8
    assert await asyncio.wait_for(stream.call.code(), 30) == grpc.StatusCode.OK


async def test_clients_that_disconnect_at_random_leave_nothing(engine: EngineUnderTest) -> None:
    chance = random.Random(0)

    async def client(number: int) -> None:
        prompt = [3 + (number * 7 + i) % 90 for i in range(chance.randrange(1, 60))]
        call = engine.stub.Generate(request(prompt, max_tokens=100, temperature=1.0))
        await asyncio.sleep(chance.random() * 0.4)
        for _ in range(chance.randrange(3)):
            if await call.read() is aio.EOF:
                break
        call.cancel()

    await asyncio.gather(*(client(number) for number in range(60)), return_exceptions=True)
    await engine.assert_nothing_left()
    assert len((await engine.generate(request())).token_ids) == 8


async def test_a_deadline_ends_a_request(engine: EngineUnderTest) -> None:
    stream = engine.stream()
    late = await stream.run(request(deadline_unix_ms=int((time.time() + 0.15) * 1000), max_tokens=500))
    assert late.error is not None
    assert late.error.code == pb.ERROR_CODE_DEADLINE_EXCEEDED
    # Of a gateway whose clock is a day ahead.
    ahead = int((time.time() + 86_400) * 1000)
    soon = await stream.run(request(deadline_unix_ms=ahead, timeout_ms=150, max_tokens=500))
    assert soon.error is not None
    assert soon.error.code == pb.ERROR_CODE_DEADLINE_EXCEEDED
    assert (await stream.run(request(deadline_unix_ms=1, timeout_ms=60_000))).error is None
    passed = await stream.run(request(deadline_unix_ms=1))
    assert passed.error is not None
    assert passed.error.code == pb.ERROR_CODE_DEADLINE_EXCEEDED
    with pytest.raises(aio.AioRpcError) as caught:
        async for _ in engine.stub.Generate(request(max_tokens=500), timeout=0.15):
            pass
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


BAD = [
    ({"prompt": []}, pb.ERROR_CODE_INVALID_REQUEST, "prompt"),
    ({"prompt": [10**6]}, pb.ERROR_CODE_INVALID_REQUEST, "prompt"),
    ({"prompt": [5] * 512}, pb.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED, "prompt"),
    ({"temperature": -1.0}, pb.ERROR_CODE_INVALID_REQUEST, "temperature"),
    ({"temperature": math.nan}, pb.ERROR_CODE_INVALID_REQUEST, "temperature"),
    ({"top_p": 1.5}, pb.ERROR_CODE_INVALID_REQUEST, "top_p"),
    ({"min_p": -0.5}, pb.ERROR_CODE_INVALID_REQUEST, "min_p"),
    ({"max_tokens": 0}, pb.ERROR_CODE_INVALID_REQUEST, "max_tokens"),
    ({"min_tokens": 9}, pb.ERROR_CODE_INVALID_REQUEST, "min_tokens"),
    ({"top_logprobs": 21}, pb.ERROR_CODE_INVALID_REQUEST, "top_logprobs"),
    ({"logit_bias": {10**6: 1.0}}, pb.ERROR_CODE_INVALID_REQUEST, "logit_bias"),
    ({"logit_bias": {5: 101.0}}, pb.ERROR_CODE_INVALID_REQUEST, "logit_bias"),
    ({"stop_token_ids": [10**6]}, pb.ERROR_CODE_INVALID_REQUEST, "stop_token_ids"),
    ({"repetition_penalty": -1.0}, pb.ERROR_CODE_INVALID_REQUEST, "repetition_penalty"),
    ({"request_id": "x" * 300}, pb.ERROR_CODE_INVALID_REQUEST, "request_id"),
    ({"adapter": "../etc"}, pb.ERROR_CODE_INVALID_REQUEST, "adapter"),
    ({"adapter": "nobody"}, pb.ERROR_CODE_MODEL_NOT_FOUND, "model"),
    ({"adapter": "nobody@3"}, pb.ERROR_CODE_MODEL_NOT_FOUND, "model"),
]


async def test_bad_requests_name_their_field_and_harm_nobody(engine: EngineUnderTest) -> None:
    stream = engine.stream()
    good = await stream.submit(request(max_tokens=100))
    for fields, code, param in BAD:
        answer = await stream.run(request(**fields))  # type: ignore[arg-type]
        assert answer.error is not None, fields
        assert (answer.error.code, answer.error.param) == (code, param), (fields, answer.error)
        assert answer.finish_reason == pb.FINISH_REASON_ERROR
    assert len((await stream.answer(good)).token_ids) == 100
    with pytest.raises(aio.AioRpcError) as caught:
        await engine.generate(request(temperature=-1.0))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "temperature" in (caught.value.details() or "")


async def test_a_request_id_is_used_once_at_a_time(engine: EngineUnderTest) -> None:
    stream, other = engine.stream(), engine.stream()
    name = await stream.submit(request(max_tokens=80, request_id="twice"))
    await stream.first(name)
    clash = await other.run(request(request_id="twice"))
    assert clash.error is not None
    assert clash.error.param == "request_id"
    await other.close()
    assert len((await stream.answer(name)).token_ids) == 80
    assert len((await stream.run(request(request_id="twice"))).token_ids) == 8


async def test_a_full_engine_refuses(engine: EngineUnderTest) -> None:
    stream = engine.stream()
    names = [await stream.submit(request([5, 3 + i], max_tokens=30)) for i in range(100)]
    answers = [await stream.answer(name) for name in names]
    refused = [answer for answer in answers if answer.error is not None]
    assert refused
    assert all(a.error is not None and a.error.code == pb.ERROR_CODE_OVERLOADED for a in refused)
    assert all(len(a.token_ids) == 30 for a in answers if a.error is None)
    assert len(answers) - len(refused) >= 64


async def test_rollouts_are_remembered(engine: EngineUnderTest) -> None:
    stream = engine.stream()
    kept = request(temperature=0.7, seed=3, keep_rollout=True)
    answer = await stream.run(kept)
    cut = await stream.submit(request(max_tokens=400, keep_rollout=True))
    await stream.tokens(cut, 5)
    await stream.abort(cut, keep_tokens=4)
    assert (await stream.answer(cut)).finish_reason == pb.FINISH_REASON_STOP
    dropped = await stream.run(request())
    assert dropped.error is None
    reply = await engine.stub.GetRollouts(
        pb.GetRolloutsRequest(completion_ids=[kept.request_id, cut, "unknown", "request-of-nobody"])
    )
    assert list(reply.missing) == ["unknown", "request-of-nobody"]
    whole, short = reply.rollouts
    assert list(whole.token_ids) == answer.token_ids
    assert list(whole.prompt_token_ids) == list(kept.prompt_token_ids)
    assert list(whole.sampling_logprobs) == pytest.approx(answer.sampling_logprobs)
    assert whole.temperature == pytest.approx(0.7)
    assert list(short.token_ids) == stream.answers[cut].token_ids[:4]
    assert short.finish_reason == pb.FINISH_REASON_STOP


async def test_rollouts_of_a_session_are_found_in_their_order(engine: EngineUnderTest) -> None:
    stream = engine.stream()
    session = pb.SessionRef(owner="", name="walk")
    first = request(temperature=1.0, seed=1, keep_rollout=True, session=session)
    answer = await stream.run(first)
    longer = [*first.prompt_token_ids, *answer.token_ids, 5]
    second = request(longer, temperature=1.0, seed=2, keep_rollout=True, session=session)
    await stream.run(second)
    await stream.run(request(keep_rollout=True, session=pb.SessionRef(owner="", name="other")))
    reply = await engine.stub.GetRollouts(pb.GetRolloutsRequest(sessions=[session]))
    assert [one.completion_id for one in reply.rollouts] == [first.request_id, second.request_id]
    assert list(reply.rollouts[1].prompt_token_ids) == longer
    assert {one.session for one in reply.rollouts} == {"walk"}
    assert 0 < reply.rollouts[0].ended_at <= reply.rollouts[1].ended_at
    nobody = await engine.stub.GetRollouts(pb.GetRolloutsRequest(sessions=[pb.SessionRef(owner="x", name="walk")]))
    assert not nobody.rollouts


async def test_an_abort_that_keeps_says_when_it_has(engine: EngineUnderTest) -> None:
    """At that moment the rollout is known and cut, whether the request still ran or had ended by itself."""
    stream = engine.stream()

    async def kept(name: str, tokens: int) -> list[int]:
        await stream.abort(name, keep_tokens=tokens)
        await asyncio.wait_for(stream.kept[name].wait(), 20)
        reply = await engine.stub.GetRollouts(pb.GetRolloutsRequest(completion_ids=[name]))
        return [len(rollout.token_ids) for rollout in reply.rollouts]

    names = [await stream.submit(request(max_tokens=400, keep_rollout=True)) for _ in range(6)]
    for number, name in enumerate(names, start=1):
        await stream.tokens(name, number)
        assert await kept(name, number) == [number]
        assert stream.answers[name].finish_reason == pb.FINISH_REASON_STOP, "told before"
    ended = request(keep_rollout=True)
    await stream.run(ended)
    assert await kept(ended.request_id, 3) == [3]
    assert await kept("request-of-nobody", 3) == []
    assert (await engine.stub.GetModel(pb.GetModelRequest())).tells_kept


async def test_the_model_and_its_tokenizer_are_described(engine: EngineUnderTest) -> None:
    model = await engine.stub.GetModel(pb.GetModelRequest())
    assert (model.max_model_len, model.max_lora_rank, model.dtype) == (512, 8, "float32")
    assert model.digest == engine.engine.base_digest
    files: dict[str, bytes] = {}
    async for chunk in engine.stub.GetTokenizerFiles(pb.GetTokenizerFilesRequest()):
        files[chunk.name] = files.get(chunk.name, b"") + chunk.data
    assert files == dict(engine.engine.codec.files)
    assert model.tokenizer_digest == engine.engine.codec.digest


async def test_draining_refuses_new_requests_and_finishes_old_ones(engine: EngineUnderTest) -> None:
    stub = health_pb2_grpc.HealthStub(engine.channel)

    async def serving(service: str) -> bool:
        await engine.health.publish()
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    assert await serving("engine")
    stream = engine.stream()
    name = await stream.submit(request(max_tokens=100))
    await stream.first(name)
    draining = asyncio.create_task(asyncio.to_thread(engine.engine.loop.drain, 30.0))
    await engine.until(lambda s: s.draining)
    assert (await serving("engine"), await serving("")) == (False, True)
    refused = await stream.run(request())
    assert refused.error is not None
    assert refused.error.code == pb.ERROR_CODE_UNAVAILABLE
    assert len((await stream.answer(name)).token_ids) == 100
    assert await draining
