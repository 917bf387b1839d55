"""Server of an environment, by OpenEnv's protocol (openenv-core 0.3): JSON messages over a WebSocket at /ws, each
connection with an environment of its own; /health, /schema and /metadata over HTTP.

Clients send {"type": "reset", "data": {...}}, "step" (its data is the action), "state" and "close"; each but the last
has one answer: {"type": "observation", "data": {"observation", "reward", "done"}}, "state", or "error" with a message
and a code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from pydantic import ValidationError

from services.environments.base import ActionRefused, Environment, Observation

MOST_SESSIONS = 256
"""Connections at once, unless told otherwise."""


class _Answered(Exception):
    """A message that has an error for an answer."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.answer = {"type": "error", "data": {"message": message, "code": code}}


class Sessions:
    """Connections to one kind of environment.

    Args:
        make: makes the environment of a connection.
        most: connections at once; one more is told so and closed.
    """

    def __init__(self, make: Callable[[], Environment], most: int) -> None:
        self._make = make
        self._most = most
        self.open = 0

    async def serve(self, socket: WebSocket) -> None:
        """Serves one connection to its end."""
        await socket.accept()
        if self.open >= self._most:
            await socket.send_text(
                json.dumps(
                    {
                        "type": "error",
                        "data": {"message": f"all {self._most} sessions are taken", "code": "CAPACITY_REACHED"},
                    }
                )
            )
            await socket.close()
            return
        self.open += 1
        try:
            await self._talk(socket, self._make())
        except WebSocketDisconnect:
            return
        finally:
            self.open -= 1

    async def _talk(self, socket: WebSocket, environment: Environment) -> None:
        while True:
            try:
                answer = _answer(environment, await socket.receive_text())
            except _Answered as error:
                answer = error.answer
            if answer is None:
                await socket.close()
                return
            await socket.send_text(json.dumps(answer))


def _answer(environment: Environment, text: str) -> Mapping[str, Any] | None:
    """Answer to a message; None: it closes the session."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Answered("INVALID_JSON", f"Invalid JSON: {error}") from error
    kind = message.get("type") if isinstance(message, dict) else None
    data = message.get("data", {}) if isinstance(message, dict) else None
    if not isinstance(data, dict):
        raise _Answered("VALIDATION_ERROR", "data is an object")
    match kind:
        case "reset":
            try:
                params = environment.params.model_validate(data)
            except ValidationError as error:
                raise _Answered("VALIDATION_ERROR", str(error)) from error
            return _told(environment.reset(params))
        case "step":
            if data.get("type") == "list_tools":
                return _told(Observation({"tools": _mcp_tools(environment)}))
            try:
                return _told(environment.step(data))
            except ActionRefused as error:
                raise _Answered("VALIDATION_ERROR", str(error)) from error
        case "state":
            return {"type": "state", "data": environment.state}
        case "close":
            return None
    raise _Answered("UNKNOWN_TYPE", f"Unknown message type: {kind}")


def _told(observation: Observation) -> dict[str, Any]:
    data = {"observation": dict(observation.fields), "reward": observation.reward, "done": observation.done}
    return {"type": "observation", "data": data}


def _mcp_tools(environment: Environment) -> list[dict[str, Any]]:
    """Tools as MCP lists them, from function definitions."""
    functions = [tool["function"] for tool in environment.tools]
    return [
        {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]} for one in functions
    ]


def create_app(make: Callable[[], Environment], most_sessions: int = MOST_SESSIONS) -> FastAPI:
    """Application that serves environments, one a connection."""
    kind = make()
    sessions = Sessions(make, most_sessions)
    app = FastAPI(title=kind.name, docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    def health() -> dict[str, Any]:
        return {"status": "healthy", "sessions": sessions.open}

    @app.get("/schema")
    def schema() -> dict[str, Any]:
        return {"action": kind.action_schema, "observation": kind.observation_schema, "state": {"type": "object"}}

    @app.get("/metadata")
    def metadata() -> dict[str, Any]:
        return {"name": kind.name, "description": kind.description}

    @app.websocket("/ws")
    async def session(socket: WebSocket) -> None:
        await sessions.serve(socket)

    return app
