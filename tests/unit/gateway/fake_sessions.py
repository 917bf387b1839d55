"""Training sessions that compute nothing: calls end at once with an echo, or when the test says so."""

from __future__ import annotations

import asyncio
import contextlib
import json

from services.common.jobs.training_sessions.calls import CALL, Call, OpenSession
from services.common.jobs.training_sessions.names import future_id, session_id
from services.common.pb import engine_pb2, sessions_pb2_grpc
from services.common.pb import sessions_pb2 as pb


def refused(code: engine_pb2.ErrorCode, message: str, param: str = "") -> engine_pb2.Error:
    return engine_pb2.Error(code=code, message=message, param=param)


class FakeSessions(sessions_pb2_grpc.SessionsServicer):
    """temper.v1.Sessions of one engine process."""

    def __init__(self, instance: str) -> None:
        self.instance = instance
        self.opened: dict[str, OpenSession] = {}
        self.owners: dict[str, str] = {}
        self.futures: dict[str, pb.Future] = {}
        self.refuses: engine_pb2.Error | None = None
        self.results: dict[str, dict[str, object]] = {}
        """Results of calls by kind; without one it is an echo."""
        self.calls: list[Call] = []
        self.holds = False
        """Calls stay pending until `finish`."""
        self.changed = asyncio.Event()

    def finish(self, error: engine_pb2.Error | None = None) -> None:
        """Ends every pending call."""
        for future in self.futures.values():
            if future.state == pb.FUTURE_STATE_PENDING:
                self._end(future, error)
        self.changed.set()

    async def Open(self, request, context) -> pb.SessionAnswer:  # noqa: N802
        if self.refuses is not None:
            return pb.SessionAnswer(error=self.refuses)
        name = session_id(self.instance, f"{len(self.opened):012x}")
        self.opened[name] = OpenSession.model_validate_json(request.request_json)
        self.owners[name] = request.owner
        return self._session(name, request.owner)

    async def Get(self, request, context) -> pb.SessionAnswer:  # noqa: N802
        return self._session(request.id, request.owner)

    async def List(self, request, context) -> pb.ListSessionsResponse:  # noqa: N802
        return pb.ListSessionsResponse(
            session_json=[
                self._session(name, request.owner).session_json
                for name in self.opened
                if self.owners[name] == request.owner
            ]
        )

    async def Close(self, request, context) -> pb.SessionAnswer:  # noqa: N802
        answer = self._session(request.id, request.owner)
        if not answer.HasField("error"):
            self.opened.pop(request.id, None)
        return answer

    async def Submit(self, request, context) -> pb.FutureAnswer:  # noqa: N802
        if request.session not in self.opened or self.owners[request.session] != request.owner:
            return pb.FutureAnswer(error=self._unknown(request.session))
        call = CALL.validate_json(request.call_json)
        self.calls.append(call)
        future = pb.Future(
            id=future_id(request.session, call.seq, "abcdef"),
            session=request.session,
            seq=call.seq,
            operation=call.kind,
            state=pb.FUTURE_STATE_PENDING,
            ahead=2,
        )
        self.futures[future.id] = future
        if not self.holds:
            self._end(future, None)
        return pb.FutureAnswer(future=future)

    async def Wait(self, request, context) -> pb.FutureAnswer:  # noqa: N802
        future = self.futures.get(request.id)
        if future is None or self.owners.get(future.session, "") != request.owner:
            return pb.FutureAnswer(error=refused(engine_pb2.ERROR_CODE_NOT_FOUND, f"no such future {request.id}", "id"))
        if future.state == pb.FUTURE_STATE_PENDING and request.wait_ms:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), request.wait_ms / 1000)
        return pb.FutureAnswer(future=future)

    def _session(self, name: str, owner: str) -> pb.SessionAnswer:
        if name not in self.opened or self.owners[name] != owner:
            return pb.SessionAnswer(error=self._unknown(name))
        described = {"id": name, "object": "train.session", "lora": {"rank": self.opened[name].lora.rank}}
        return pb.SessionAnswer(session_json=json.dumps(described).encode())

    def _unknown(self, name: str) -> engine_pb2.Error:
        return refused(engine_pb2.ERROR_CODE_NOT_FOUND, f"no such training session {name}", "id")

    def _end(self, future: pb.Future, error: engine_pb2.Error | None) -> None:
        if error is None:
            future.state = pb.FUTURE_STATE_DONE
            result = self.results.get(future.operation, {"echo": future.operation})
            future.result_json = json.dumps(result).encode()
        else:
            future.state = pb.FUTURE_STATE_FAILED
            future.error.CopyFrom(error)
