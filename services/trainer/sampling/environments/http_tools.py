"""Tools over HTTP as a world: arguments that fit a tool's schema are posted, and what comes back is read.

A request looks as one to a reward's webhook does, signature included. Its key stays the same when it is sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx

from services.common.jobs.kinds.environment import EnvironmentReward, FailureKind, HttpTool
from services.common.jobs.scorers.allowed_webhooks import Webhooks
from services.common.jobs.scorers.sample import ToolCall
from services.common.jobs.scorers.webhook_client import SIGNATURE_HEADER, TIMESTAMP_HEADER, sign
from services.trainer.sampling.answers import ReadAnswer
from services.trainer.sampling.environments.world import (
    MOST_BYTES,
    CallCheck,
    EnvironmentFailed,
    Outcome,
    error_text,
    tool_message,
)

IDEMPOTENCY_HEADER = "Idempotency-Key"
_WRONG_ARGUMENTS = (400, 404, 409, 422)
"""Statuses of a tool that cannot do what it was asked: the model reads why."""


class _Again(Exception):
    """A tool may answer when it is asked again, not before so many seconds have passed."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.seconds = seconds


class ToolWorlds:
    """Worlds of the tools of one job.

    Raises:
        InvalidRequest: the URL of one is not allowed.
    """

    def __init__(self, spec: EnvironmentReward, webhooks: Webhooks, where: str) -> None:
        for index, tool in enumerate(spec.tools or ()):
            webhooks.check(tool.url, f"{where}.tools[{index}]")
        self._spec = spec
        self._webhooks = webhooks
        self._tls = webhooks.tls or httpx.create_ssl_context()

    @contextlib.asynccontextmanager
    async def open(self, tools: Sequence[Mapping[str, Any]]) -> AsyncIterator[ToolWorld]:
        """See Worlds.open."""
        async with httpx.AsyncClient(
            follow_redirects=False,
            trust_env=False,
            timeout=self._spec.timeout_seconds,
            verify=self._tls,
        ) as client:
            yield ToolWorld(client, self._spec, self._webhooks, CallCheck(tools))


class ToolWorld:
    """The tools in one episode."""

    def __init__(
        self, client: httpx.AsyncClient, spec: EnvironmentReward, webhooks: Webhooks, calls: CallCheck
    ) -> None:
        self._client = client
        self._spec = spec
        self._webhooks = webhooks
        self._calls = calls
        self._tools = {tool.name: tool for tool in spec.tools or ()}
        self._episode = uuid.uuid4().hex

    async def begin(self, params: Mapping[str, Any]) -> str:
        """See World.begin. Tools show nothing."""
        del params
        return ""

    async def state(self) -> str:
        """See World.state. Tools have none that they tell."""
        return ""

    async def act(self, answer: ReadAnswer) -> Outcome:
        """See World.act. An answer without calls is the last."""
        if answer.broken:
            return Outcome([tool_message(error_text("the call is not complete"))])
        if not answer.calls:
            return Outcome(done=True)
        return Outcome([tool_message(await self._call(call)) for call in answer.calls])

    async def _call(self, call: ToolCall) -> str:
        wrong = self._calls.wrong(call)
        if wrong is not None:
            return error_text(wrong)
        body = json.dumps({"name": call.name, "arguments": call.arguments, "episode": self._episode}).encode()
        key = uuid.uuid4().hex
        least = 0.0
        for attempt in range(self._webhooks.attempts):
            if attempt:
                await asyncio.sleep(max(min(0.25 * 2**attempt, 5.0), least))
            try:
                async with asyncio.timeout(self._spec.timeout_seconds):
                    return await self._attempt(self._tools[call.name], body, key)
            except _Again as again:
                least = min(again.seconds, self._spec.timeout_seconds)
            except TimeoutError as error:
                raise EnvironmentFailed(
                    FailureKind.TIMEOUT, f"{call.name} did not answer within {self._spec.timeout_seconds:g} s"
                ) from error
        raise EnvironmentFailed(
            FailureKind.CONNECTION, f"{call.name} could not be asked in {self._webhooks.attempts} attempts"
        )

    async def _attempt(self, tool: HttpTool, body: bytes, key: str) -> str:
        """What the tool answered. Raises _Again."""
        timestamp = str(int(time.time()))
        headers = {
            "content-type": "application/json",
            "accept-encoding": "identity",
            "user-agent": "temper",
            IDEMPOTENCY_HEADER: key,
            TIMESTAMP_HEADER: timestamp,
            SIGNATURE_HEADER: sign(self._webhooks.secret or "", timestamp, body),
        }
        try:
            async with self._client.stream("POST", tool.url, content=body, headers=headers) as response:
                text = await self._read(response)
        except httpx.TimeoutException as error:
            raise EnvironmentFailed(FailureKind.TIMEOUT, f"{tool.name}: {type(error).__name__}") from error
        except httpx.HTTPError as error:
            raise _Again from error
        if response.status_code in (429, 502, 503, 504):
            asked = response.headers.get("retry-after", "")
            raise _Again(float(asked) if asked.isascii() and asked.isdigit() else 0.0)
        if response.status_code in _WRONG_ARGUMENTS:
            return error_text(text)
        if response.status_code != 200:
            raise EnvironmentFailed(FailureKind.ERROR, f"{tool.name} answered with status {response.status_code}")
        return text

    async def _read(self, response: httpx.Response) -> str:
        parts, size = [], 0
        async for part in response.aiter_raw():
            size += len(part)
            if size > MOST_BYTES:
                raise EnvironmentFailed(FailureKind.OVERSIZED, f"a tool's answer is over {MOST_BYTES} bytes")
            parts.append(part)
        try:
            return b"".join(parts).decode()
        except UnicodeDecodeError as error:
            raise EnvironmentFailed(FailureKind.PROTOCOL, "a tool's answer is no UTF-8") from error
