"""GET /v1/logs: the last lines of the logs of the gateway that answers and of all engines, read once or followed.

Each process keeps them in a ring of its own (services/common/telemetry/recent_logs.py), and filters where they are.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import grpc
from fastapi import Query
from fastapi.responses import Response
from grpc import aio
from pydantic import BaseModel, ConfigDict

from services.common.errors import NotFound
from services.common.pb import engine_pb2
from services.common.telemetry.recent_logs import MOST_LINES, Level, LogLine, LogQuery, Plain, RecentLogs
from services.gateway.api.base.routing import Routes, provided
from services.gateway.auth.route_permissions import ADMIN, Permission
from services.gateway.core.admission import Lifecycle
from services.gateway.core.sse import EventStream, event
from services.gateway.engines.client import EngineClient
from services.gateway.engines.pool import EnginePool

routes = Routes("logs")
_GATEWAY = "gateway"
_PATIENCE_SECONDS = 2.0
"""Longest wait for one engine."""
_PAUSE_SECONDS = 0.5
"""Between two looks for new lines."""
_SSE = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "Lines of logs"}}


class LogLineObject(BaseModel):
    """One line of a log."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    """Unique among the lines of all processes."""
    object: Literal["log_line"] = "log_line"
    time: float
    """Seconds since 1970."""
    level: str
    """"debug", "info", "warning" or "error"."""
    process: str
    """"gateway", or the name of an engine."""
    logger: str
    message: str
    request_id: str | None
    """`x-request-id` of the request that it is about; lines of engines have the completion's id in `fields`."""
    fields: dict[str, Plain]
    exception: str | None
    """Traceback."""


class LogList(BaseModel):
    """Lines of logs, oldest first."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    object: Literal["list"] = "list"
    data: list[LogLineObject]
    processes: list[str]
    """Processes that there are: the gateway that answers, and its engines."""
    unreachable: list[str]
    """Engines that did not say what they have."""


@dataclass(frozen=True, slots=True)
class LogServices:
    """Processes whose logs may be read."""

    recent: RecentLogs
    """Lines of this process."""
    engines: EnginePool
    lifecycle: Lifecycle
    keep_alive_seconds: float

    def names(self) -> dict[str, EngineClient | None]:
        """Processes by name; None: this one. An engine that shares its name goes by its address, too."""
        found: dict[str, EngineClient | None] = {_GATEWAY: None}
        for client in self.engines.clients:
            name = client.name or client.address
            found[name if name not in found else f"{name} {client.address}"] = client
        return found


Logs = Annotated[LogServices, provided(LogServices)]


@dataclass(frozen=True, slots=True)
class _Place:
    """Place up to which the log of a process was read."""

    process: str = ""
    last: int = 0


class _Reader:
    """Reads what is new in the logs of some processes since it did so before."""

    def __init__(self, logs: LogServices, process: str | None, query: LogQuery) -> None:
        self._logs = logs
        self._process = process
        self._query = query
        self._places: dict[str, _Place] = {}

    async def new(self) -> tuple[list[LogLineObject], list[str]]:
        """New lines, oldest first, at most as many as are asked for; and the engines that did not answer."""
        chosen = {name: client for name, client in self._logs.names().items() if self._process in (None, name)}
        query = replace(self._query, requests=self._query.requests | self._completions())
        answers = await asyncio.gather(*(self._read(name, client, query) for name, client in chosen.items()))
        lines = sorted((line for answer in answers for line in answer or ()), key=lambda line: line.time)
        missing = [name for name, answer in zip(chosen, answers, strict=True) if answer is None]
        return lines[-query.limit :], missing

    def _completions(self) -> frozenset[str]:
        """Names under which engines have the requests that are asked for."""
        if not self._query.requests:
            return frozenset()
        about, _ = self._logs.recent.find(LogQuery(requests=self._query.requests, limit=MOST_LINES))
        return frozenset(str(line.fields["completion_id"]) for line in about if line.fields.get("completion_id"))

    async def _read(self, name: str, client: EngineClient | None, query: LogQuery) -> list[LogLineObject] | None:
        place = self._places.get(name, _Place())
        if client is None:
            recent = self._logs.recent
            lines, last = recent.find(query, place.last)
            self._places[name] = _Place(recent.process, last)
            return [_object(name, recent.process, line, line.fields) for line in lines]
        try:
            answer = await client.engine_stub().GetLogs(_request(query, place), timeout=_PATIENCE_SECONDS)
        except aio.AioRpcError as error:
            # One of an earlier release has no such call.
            return [] if error.code() == grpc.StatusCode.UNIMPLEMENTED else None
        self._places[name] = _Place(answer.process, answer.last)
        return [_line_of(name, answer.process, line) for line in answer.lines]


@routes.get("/v1/logs", Permission(ADMIN), response_model=LogList, responses=dict(_SSE))
async def read_logs(
    logs: Logs,
    process: Annotated[str | None, Query(max_length=256, description='"gateway", or the name of an engine.')] = None,
    level: Annotated[Level, Query(description="The least severe level.")] = "debug",
    text: Annotated[str, Query(max_length=256, description="What a line has somewhere, in capitals or not.")] = "",
    request_id: Annotated[
        str | None, Query(max_length=128, description="Lines about this request: `x-request-id`, or a completion's id.")
    ] = None,
    since: Annotated[float, Query(ge=0, le=1e11, description="Seconds since 1970.")] = 0.0,
    limit: Annotated[int, Query(ge=1, le=MOST_LINES, description="Most lines; the newest are taken.")] = 200,
    follow: Annotated[
        bool, Query(description="Go on with new lines, as server-sent events of the type `log`.")
    ] = False,
) -> LogList | Response:
    """The last lines of the logs of the gateway that answers and of all engines, as many as each keeps in memory
    (`TEMPER_LOG_LINES`). Secrets are masked. With `follow`, those lines and then new ones; a client that has lost its
    connection goes on with `since`, and knows the lines that it has by their ids."""
    names = list(logs.names())
    if process is not None and process not in names:
        raise NotFound(f"there is no process {process!r}: there are {', '.join(names)}", param="process")
    requests = frozenset([request_id] if request_id else ())
    reader = _Reader(logs, process, LogQuery(level, text, requests, since, limit))
    if follow:
        return EventStream(_follow(reader, logs.lifecycle), keep_alive=logs.keep_alive_seconds, begun=False)
    lines, missing = await reader.new()
    return LogList(data=lines, processes=names, unreachable=missing)


async def _follow(reader: _Reader, lifecycle: Lifecycle) -> AsyncGenerator[bytes, None]:
    while not lifecycle.closing.is_set():
        lines, _ = await reader.new()
        for line in lines:
            yield event(line.model_dump(mode="json"), name="log", event_id=line.id)
        with suppress(TimeoutError):
            await asyncio.wait_for(lifecycle.closing.wait(), _PAUSE_SECONDS)


def _request(query: LogQuery, place: _Place) -> engine_pb2.GetLogsRequest:
    return engine_pb2.GetLogsRequest(
        level=query.level,
        text=query.text,
        request_ids=sorted(query.requests),
        since=query.since,
        limit=query.limit,
        after=place.last,
        process=place.process,
    )


def _line_of(name: str, process: str, line: engine_pb2.LogLine) -> LogLineObject:
    return _object(name, process, line, json.loads(line.fields or "{}"))


def _object(name: str, process: str, line: LogLine | engine_pb2.LogLine, fields: Mapping[str, Plain]) -> LogLineObject:
    request = fields.get("request_id")
    return LogLineObject(
        id=f"{process}-{line.number}",
        time=line.time,
        level=line.level,
        process=name,
        logger=line.logger,
        message=line.message,
        request_id=None if request is None else str(request),
        fields={key: value for key, value in fields.items() if key != "request_id"},
        exception=line.exception or None,
    )
