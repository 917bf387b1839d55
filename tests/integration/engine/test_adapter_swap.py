"""Versions published, attached and swapped under running requests, with a real object store."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator

import pytest
from grpc import aio

from services.common.errors import Unavailable
from services.common.pb import adapters_pb2
from services.common.pb import engine_pb2 as pb
from services.common.storage.object_store import ObjectNotFound, ObjectStore
from tests.integration.engine.harness import EngineUnderTest, adapter_files, patiently, request
from tests.integration.servers import RunningServer

PROMPT = [5, 9, 17, 23, 31]


async def sync(engine: EngineUnderTest) -> adapters_pb2.SyncResponse:
    return await patiently(lambda: sync_once(engine), aio.AioRpcError)


async def sync_once(engine: EngineUnderTest) -> adapters_pb2.SyncResponse:
    return await engine.adapters.Sync(adapters_pb2.SyncRequest())


async def validate(engine: EngineUnderTest, files: dict[str, bytes]) -> adapters_pb2.ValidateResponse:
    async def chunks() -> AsyncIterator[pb.FileChunk]:
        for name, data in files.items():
            for start in range(0, len(data), 100_000):
                yield pb.FileChunk(name=name, data=data[start : start + 100_000])

    return await engine.adapters.Validate(chunks())


@pytest.mark.thorough
async def test_a_running_answer_keeps_its_version(engine: EngineUnderTest) -> None:
    stream = engine.stream()
    base = await engine.generate(request(PROMPT, max_tokens=60))
    await engine.publish("skill", seed=1)
    reply = await sync(engine)
    assert (reply.attached, [loaded.version for loaded in reply.loaded]) == ("skill@1", ["skill@1"])
    running = await stream.submit(request(PROMPT, max_tokens=300))
    await stream.tokens(running, 10)
    await engine.publish("skill", seed=2)
    assert (await sync(engine)).attached == "skill@2"
    assert len(stream.answers[running].token_ids) < 300, "the swap must not wait for the answer"
    newer = await engine.generate(request(PROMPT, max_tokens=60))
    old = await stream.answer(running)
    assert (base.adapter, old.adapter, newer.adapter) == ("", "skill@1", "skill@2")
    assert old.token_ids == (await engine.generate(request(PROMPT, adapter="skill@1", max_tokens=300))).token_ids
    assert newer.token_ids == (await engine.generate(request(PROMPT, adapter="skill@2", max_tokens=60))).token_ids
    assert base.token_ids == (await engine.generate(request(PROMPT, adapter="base", max_tokens=60))).token_ids
    assert len({tuple(a.token_ids[:60]) for a in (base, old, newer)}) == 3


async def test_versions_of_one_batch_do_not_mix(engine: EngineUnderTest) -> None:
    for seed in (1, 2):
        await engine.publish("a", seed=seed, attach=False)
    await engine.publish("b", seed=3, attach=False)
    refs = ["a@1", "a@2", "b", "base"]
    alone = [await engine.generate(request(PROMPT, adapter=ref, max_tokens=40)) for ref in refs]
    stream = engine.stream()
    names = [await stream.submit(request(PROMPT, adapter=ref, max_tokens=40)) for ref in refs * 2]
    together = [await stream.answer(name) for name in names]
    assert [a.adapter for a in together] == ["a@1", "a@2", "b@1", ""] * 2
    assert [a.token_ids for a in together] == [a.token_ids for a in alone] * 2


async def test_polling_finds_a_new_version_without_a_sync(engine: EngineUnderTest) -> None:
    await engine.publish("skill", seed=1)
    await engine.until(lambda s: s.attached_adapter == "skill@1")
    await asyncio.to_thread(engine.registry.detach, "skill")
    await engine.until(lambda s: s.attached_adapter == "")


async def test_a_corrupt_version_is_refused_and_the_old_one_stays(engine: EngineUnderTest, store: ObjectStore) -> None:
    await engine.publish("skill", seed=1)
    await sync(engine)
    await engine.publish("skill", seed=2, corrupt=True)
    assert (await sync(engine)).attached == "skill@1"
    assert (await engine.generate(request(PROMPT))).adapter == "skill@1"
    stream = engine.stream()
    refused = await stream.run(request(PROMPT, adapter="skill@2"))
    assert refused.error is not None
    assert refused.error.code == pb.ERROR_CODE_ADAPTER_REJECTED
    assert "skill@2" in refused.error.message

    # Attached once its file is another one: the engine looks for itself, too. The file changes between the manifest,
    # which has the digest, and the pointer: from then on the engine may have read it.
    files = adapter_files(engine.engine, seed=3)
    weights = "adapter_model.safetensors"
    altered = files[weights][:-1] + bytes([files[weights][-1] ^ 1])
    directory = "adapters/skill/versions/00000003/"

    def alter() -> None:
        with contextlib.suppress(ObjectNotFound):
            store.get(f"{directory}manifest.json")
            store.put(f"{directory}{weights}", altered)

    def publish() -> None:
        manifest = engine.registry.publish(
            "skill", files, base_digest=engine.engine.base_digest, job_id="altered", fence=alter
        )
        assert str(manifest.ref) == "skill@3"
        engine.registry.attach(manifest.ref)

    await patiently(lambda: asyncio.to_thread(publish), Unavailable)
    assert store.get(f"{directory}{weights}").data == altered
    assert (await sync(engine)).attached == "skill@1"
    tampered = await stream.run(request(PROMPT, adapter="skill@3"))
    assert tampered.error is not None
    assert "SHA-256" in tampered.error.message


async def test_validate_binds_without_loading(engine: EngineUnderTest) -> None:
    files = adapter_files(engine.engine, seed=1)
    good = await validate(engine, files)
    assert not good.HasField("error")
    assert good.rank == 4
    assert good.parameters > 0
    files["adapter_model.safetensors"] = files["adapter_model.safetensors"][:1000]
    bad = await validate(engine, files)
    assert bad.error.code == pb.ERROR_CODE_ADAPTER_REJECTED
    assert bad.error.message
    assert not (await engine.status()).loaded_adapters


@pytest.mark.thorough
async def test_more_versions_than_slots(engine: EngineUnderTest) -> None:
    """Requests for six versions over three slots: each waits for its turn and gets its own version."""
    for seed in range(6):
        await engine.publish("many", seed=seed, attach=False)
    stream = engine.stream()
    names = [await stream.submit(request(PROMPT, adapter=f"many@{n}", max_tokens=20)) for n in range(1, 7)]
    answers = [await stream.answer(name) for name in names]
    assert [answer.adapter for answer in answers] == [f"many@{n}" for n in range(1, 7)]
    for number, answer in enumerate(answers, start=1):
        again = await engine.generate(request(PROMPT, adapter=f"many@{number}", max_tokens=20))
        assert again.token_ids == answer.token_ids


@pytest.mark.thorough
async def test_many_versions_are_swapped_in_under_load(engine: EngineUnderTest) -> None:
    """No request fails, and each answer is the one its version gives alone."""
    stream = engine.stream()
    done: list[tuple[int, str, list[int]]] = []
    answered: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
    stop = asyncio.Event()

    async def client(number: int) -> None:
        while not stop.is_set():
            answer = await stream.run(request([5 + number, *PROMPT], max_tokens=16))
            assert answer.error is None, answer.error
            assert answer.adapter is not None
            done.append((number, answer.adapter, answer.token_ids))
            answered[answer.adapter].set()

    clients = [asyncio.create_task(client(number)) for number in range(6)]
    for seed in range(6):
        await engine.publish("policy", seed=seed)
        version = f"policy@{seed + 1}"
        assert (await sync(engine)).attached == version
        await asyncio.wait_for(answered[version].wait(), 60)
    stop.set()
    await asyncio.gather(*clients)
    expected: dict[tuple[int, str], list[int]] = {}
    for number, adapter, tokens in done:
        if (number, adapter) not in expected:
            alone = request([5 + number, *PROMPT], adapter=adapter or "base", max_tokens=16, cache_salt="alone")
            expected[number, adapter] = (await engine.generate(alone)).token_ids
        assert tokens == expected[number, adapter], (number, adapter)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("outage", ["frozen", "down"])
async def test_an_outage_of_the_store_does_not_stop_serving(
    engine: EngineUnderTest, s3: RunningServer, outage: str
) -> None:
    await engine.publish("skill", seed=1)
    await sync(engine)
    before = await engine.generate(request(PROMPT))
    context = s3.down() if outage == "down" else s3.frozen()
    with context:
        await asyncio.sleep(0.5)
        during = await asyncio.gather(*(engine.generate(request(PROMPT)) for _ in range(4)))
        assert [a.token_ids for a in during] == [before.token_ids] * 4
        with pytest.raises(aio.AioRpcError) as caught:
            await sync_once(engine)
        assert caught.value.code().name == "UNAVAILABLE"
    await engine.publish("skill", seed=2)
    assert (await sync(engine)).attached == "skill@2"


@pytest.mark.thorough
async def test_compositions_answer_beside_their_members_and_follow_them(engine: EngineUnderTest) -> None:
    """Over three slots: two compositions, and a member by itself. `a+a`, so to say, is `a` twice as strong."""
    await engine.publish("a", seed=1, attach=False)
    await engine.publish("b", seed=2, attach=False)
    stream = engine.stream()
    refs = ["a", "b+a", "a*2", "a+b", "base"]
    names = [await stream.submit(request(PROMPT, adapter=ref, max_tokens=40)) for ref in refs]
    alone, both, twice, turned, base = [await stream.answer(name) for name in names]
    assert [a.adapter for a in (alone, both, twice, turned, base)] == ["a@1", "a@1+b@1", "a@1*2", "a@1+b@1", ""]
    assert both.token_ids == turned.token_ids
    assert len({tuple(a.token_ids) for a in (alone, both, twice, base)}) == 4
    again = await engine.generate(request(PROMPT, adapter="a@1+b@1", max_tokens=40))
    assert again.token_ids == both.token_ids

    running = await stream.submit(request(PROMPT, adapter="a+b", max_tokens=300))
    await stream.tokens(running, 10)
    await engine.publish("a", seed=3, attach=False)
    assert "a@2+b@1" in [loaded.version for loaded in (await sync(engine)).loaded], (
        "loaded before a request asks for it"
    )
    newer = await engine.generate(request(PROMPT, adapter="a+b", max_tokens=40))
    old = await stream.answer(running)
    assert (old.adapter, newer.adapter) == ("a@1+b@1", "a@2+b@1")
    assert old.token_ids[:40] == both.token_ids
    assert newer.token_ids != both.token_ids


async def test_a_composition_over_the_largest_rank_is_refused_with_the_numbers(engine: EngineUnderTest) -> None:
    for number in range(3):
        await engine.publish(f"n{number}", seed=number, attach=False)
    refused = await engine.stream().run(request(PROMPT, adapter="n0+n1+n2"))
    assert refused.error is not None
    assert refused.error.code == pb.ERROR_CODE_ADAPTER_REJECTED
    assert "n0@1 has rank 4, n1@1 4, n2@1 4: together 12" in refused.error.message
    assert "TEMPER_MAX_LORA_RANK is 8" in refused.error.message
