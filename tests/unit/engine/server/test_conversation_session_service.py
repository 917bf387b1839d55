"""temper.v1.Histories over a real connection, in front of a desk in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from grpc import aio

from services.common.errors import ENGINE_FAULT, InvalidRequest
from services.common.pb import engine_pb2, histories_pb2_grpc
from services.common.pb import histories_pb2 as pb
from services.engine.requests.adapter import AdapterChoice
from services.engine.requests.conversation_session import SessionName
from services.engine.requests.sampling_params import SamplingParams
from services.engine.requests.submission import Submission
from services.engine.server.conversation_session_service import ConversationSessionService
from services.engine.server.protobuf import submission
from tests.unit.engine.server.memory_sessions import MAGIC, PIECE, MemorySessions

BIG = 128 * 2**20


@pytest.fixture
def desk() -> MemorySessions:
    return MemorySessions()


@pytest.fixture
async def stub(desk: MemorySessions) -> AsyncIterator[histories_pb2_grpc.HistoriesAsyncStub]:
    server, service = aio.server(), ConversationSessionService(desk)
    histories_pb2_grpc.add_HistoriesServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield histories_pb2_grpc.HistoriesStub(channel)
    await server.stop(None)
    service.close()


def ref(name: str = "talk", owner: str = "k-1") -> engine_pb2.SessionRef:
    return engine_pb2.SessionRef(owner=owner, name=name)


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)


async def pieces(*data: bytes, name: str = "talk") -> AsyncIterator[pb.ImportHistoryRequest]:
    yield pb.ImportHistoryRequest(session=ref(name))
    for piece in data:
        yield pb.ImportHistoryRequest(data=piece)
    yield pb.ImportHistoryRequest(last=True)


async def test_what_is_kept_of_a_session_is_told(
    desk: MemorySessions, stub: histories_pb2_grpc.HistoriesAsyncStub
) -> None:
    desk.keep("k-1", "older", b"12345", used=10.0)
    desk.keep("k-1", "newer", b"1", used=20.0)
    desk.keep("k-2", "older", b"", used=30.0)
    listed = await stub.List(pb.ListHistoriesRequest(owner="k-1"))
    assert [history.session.name for history in listed.histories] == ["newer", "older"]
    found = await stub.Get(pb.GetHistoryRequest(session=ref("older")))
    assert found == listed.histories[1]
    assert (found.session.owner, found.tokens, found.requests, found.adapter) == ("k-1", 5, 1, "bot@2")
    assert (found.created_unix_ms, found.used_unix_ms, found.expires_unix_ms) == (1500, 10_000, 70_000)
    assert (found.saved, dict(found.bytes)) == (False, {"device": 5})
    assert (await stub.Save(pb.SaveHistoryRequest(session=ref("older")))).saved
    await stub.Delete(pb.DeleteHistoryRequest(session=ref("older")))
    with pytest.raises(aio.AioRpcError) as gone:
        await stub.Get(pb.GetHistoryRequest(session=ref("older")))
    assert (gone.value.code(), gone.value.details()) == (grpc.StatusCode.NOT_FOUND, "no such session: 'older'")
    assert len(desk.kept) == 2, "the other owner's is another one"
    assert all(name.startswith("sessions") for name in desk.threads), "never on the event loop"


async def test_errors_of_the_manager_reach_the_client(
    desk: MemorySessions, stub: histories_pb2_grpc.HistoriesAsyncStub
) -> None:
    desk.keep("k-1", "talk")
    desk.can_save = False
    for call, code, message in (
        (stub.Save(pb.SaveHistoryRequest(session=ref())), grpc.StatusCode.INVALID_ARGUMENT, "TEMPER_TIERS"),
        (stub.Get(pb.GetHistoryRequest(session=ref(""))), grpc.StatusCode.INVALID_ARGUMENT, "1 to 256 characters"),
        (stub.Get(pb.GetHistoryRequest(session=ref("x" * 257))), grpc.StatusCode.INVALID_ARGUMENT, "257 and 3"),
        (stub.Delete(pb.DeleteHistoryRequest(session=ref("none"))), grpc.StatusCode.NOT_FOUND, "no such session"),
        (stub.Export(pb.ExportHistoryRequest(session=ref("none"))).read(), grpc.StatusCode.NOT_FOUND, "no such"),
        (stub.Export(pb.ExportHistoryRequest(session=ref("bug"))).read(), grpc.StatusCode.INTERNAL, ENGINE_FAULT),
        (stub.Import(pieces(b"something else")), grpc.StatusCode.INVALID_ARGUMENT, "not an exported session"),
        (stub.Import(pieces(name="")), grpc.StatusCode.INVALID_ARGUMENT, "1 to 256 characters"),
    ):
        with pytest.raises(aio.AioRpcError) as refused:
            await call  # type: ignore[misc]
        assert refused.value.code() == code
        assert message in (refused.value.details() or "")


async def test_an_import_begins_with_the_name_and_names_nothing_else(
    desk: MemorySessions, stub: histories_pb2_grpc.HistoriesAsyncStub
) -> None:
    async def nameless() -> AsyncIterator[pb.ImportHistoryRequest]:
        yield pb.ImportHistoryRequest(data=MAGIC)

    async def twice() -> AsyncIterator[pb.ImportHistoryRequest]:
        yield pb.ImportHistoryRequest(session=ref(), data=MAGIC)
        yield pb.ImportHistoryRequest(session=ref("other"), data=b"x")

    async def nothing() -> AsyncIterator[pb.ImportHistoryRequest]:
        for _ in ():
            yield _

    for requests in (nameless(), twice(), nothing()):
        with pytest.raises(aio.AioRpcError) as refused:
            await stub.Import(requests)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert not desk.kept
    assert not desk.open


async def test_a_session_goes_out_and_in_again(
    desk: MemorySessions, stub: histories_pb2_grpc.HistoriesAsyncStub
) -> None:
    data = bytes(range(256)) * 1000
    desk.keep("k-1", "talk", data)
    exported = [chunk.data async for chunk in stub.Export(pb.ExportHistoryRequest(session=ref()))]
    assert b"".join(exported) == MAGIC + data
    assert len(exported) == -(-(len(data) + len(MAGIC)) // PIECE)
    imported = await stub.Import(pieces(*exported, b"", name="copy"))
    assert (imported.session.name, imported.tokens) == ("copy", len(data))
    assert desk.kept[SessionName("k-1", "copy")][1] == data
    assert desk.taken == len(exported), "an empty piece is none"
    assert not desk.open


async def test_an_export_goes_at_its_clients_pace_and_ends_with_it(
    desk: MemorySessions, stub: histories_pb2_grpc.HistoriesAsyncStub
) -> None:
    desk.keep("k-1", "talk", bytes(BIG))
    call = stub.Export(pb.ExportHistoryRequest(session=ref()))
    assert (await call.read()).data.startswith(MAGIC)
    before = 0
    while desk.handed != before:
        before = desk.handed
        await asyncio.sleep(0.5)
    assert before < BIG // PIECE // 2, "what nobody reads is not asked for"
    call.cancel()
    await until(lambda: not desk.open)


async def test_an_import_goes_at_the_desks_pace(
    desk: MemorySessions, stub: histories_pb2_grpc.HistoriesAsyncStub
) -> None:
    sent = 0

    async def many() -> AsyncIterator[pb.ImportHistoryRequest]:
        nonlocal sent
        yield pb.ImportHistoryRequest(session=ref(), data=MAGIC)
        for sent in range(1, 129):
            yield pb.ImportHistoryRequest(data=bytes(2**20), last=sent == 128)

    desk.go_on.clear()
    call = stub.Import(many())
    await until(lambda: desk.taken)
    await asyncio.sleep(0.5)
    assert desk.taken == 1
    assert sent < 64, "what the desk does not take is not read from the network"
    desk.go_on.set()
    assert (await call).tokens == 128 * 2**20


async def test_an_import_that_breaks_off_is_not_one_that_ends(
    desk: MemorySessions, stub: histories_pb2_grpc.HistoriesAsyncStub
) -> None:
    async def half() -> AsyncIterator[pb.ImportHistoryRequest]:
        yield pb.ImportHistoryRequest(session=ref(), data=MAGIC)

    async def stuck() -> AsyncIterator[pb.ImportHistoryRequest]:
        yield pb.ImportHistoryRequest(session=ref(), data=MAGIC)
        await asyncio.Event().wait()

    with pytest.raises(aio.AioRpcError) as broken:
        await stub.Import(half())
    assert broken.value.code() == grpc.StatusCode.UNAVAILABLE
    desk.taken = 0

    call = stub.Import(stuck())
    await until(lambda: desk.taken)
    call.cancel()
    await until(lambda: not desk.open)
    assert not desk.kept


async def test_few_files_go_at_a_time_and_short_calls_do_not_wait_for_them(
    desk: MemorySessions, stub: histories_pb2_grpc.HistoriesAsyncStub
) -> None:
    desk.keep("k-1", "talk", bytes(BIG))
    calls = [stub.Export(pb.ExportHistoryRequest(session=ref())) for _ in range(4)]
    for call in calls:
        await call.read()
    with pytest.raises(aio.AioRpcError) as refused:
        await stub.Export(pb.ExportHistoryRequest(session=ref())).read()
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    await stub.Get(pb.GetHistoryRequest(session=ref()), timeout=60)
    calls[0].cancel()

    async def begun() -> Any:
        """Its place is given back right after it is closed."""
        async with asyncio.timeout(60):
            while True:
                again = stub.Export(pb.ExportHistoryRequest(session=ref()))
                with contextlib.suppress(aio.AioRpcError):
                    assert (await again.read()).data
                    return again
                await asyncio.sleep(0.01)

    again = await begun()
    for call in (*calls, again):
        call.cancel()
    await until(lambda: not desk.open)


# -- in requests


def message(prompt: int = 10, **fields: object) -> engine_pb2.GenerateRequest:
    return engine_pb2.GenerateRequest(
        request_id="r",
        prompt_token_ids=range(prompt),
        sampling=engine_pb2.SamplingParams(max_tokens=1),
        adapter=engine_pb2.AdapterRef(base=True),
        **fields,  # type: ignore[arg-type]
    )


def test_requests_say_their_session_and_where_messages_end() -> None:
    read = submission(message(session=ref(), boundaries=[1, 9]), 100)
    assert read.session == ("k-1", "talk")
    assert read.boundaries == (1, 9)
    bare = submission(message(), 100)
    assert (bare.session, bare.boundaries) == (None, ())
    assert submission(message(session=ref(owner="")), 100).session == ("", "talk")
    longest = submission(message(5000, boundaries=range(1, 4097)), 5000)
    assert len(longest.boundaries) == 4096


@pytest.mark.parametrize("boundaries", [(0,), (10,), (3, 3), (4, 2), tuple(range(1, 4098))])
def test_boundaries_that_are_none_are_refused(boundaries: tuple[int, ...]) -> None:
    size = 5000 if len(boundaries) > 4096 else 10
    with pytest.raises(InvalidRequest) as refused:
        submission(message(size, boundaries=boundaries), size)
    assert refused.value.param == "boundaries"


@pytest.mark.parametrize("session", [ref(""), ref("x" * 257), ref(owner="x" * 257)])
def test_names_that_no_session_has_are_refused(session: engine_pb2.SessionRef) -> None:
    with pytest.raises(InvalidRequest) as refused:
        submission(message(session=session), 100)
    assert refused.value.param == "session"


def test_a_submission_needs_neither() -> None:
    plain = Submission("r", (1, 2), SamplingParams(max_tokens=1), AdapterChoice())
    assert (plain.session, plain.boundaries) == (None, ())
