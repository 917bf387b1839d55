"""A `temper up` with a second gateway beside its own, and a client that is answered however often it takes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx
import psutil

from cli.local.ports import claim_ports
from tests.stack import ROOT, Stack

OTHER_GATEWAY: Final = "gateway-2"
PROCESSES: Final = ("engine", "gateway", OTHER_GATEWAY, "s3", "valkey")
PAUSE: Final = 0.25
"""Seconds before somebody who was refused asks again."""
_ANSWER_SECONDS = 60.0
_POLL_SECONDS = 0.2


class Fleet:
    """Two gateways, an engine with its trainer, Valkey and S3. The second gateway is restarted here, the others by
    `temper up`."""

    def __init__(self, directory: Path, env: Mapping[str, str]) -> None:
        logging = {"TEMPER_REQUEST_LOG": "true", "TEMPER_REQUEST_LOG_PART_SECONDS": "0.5"}
        spool = {"TEMPER_REQUEST_LOG_SPOOL": str(directory / "spool")}
        self.stack = Stack(directory / "data", env={**logging, **spool, **env})
        self._log = directory / "gateway-2.log"
        (self._claim,) = claim_ports(1)
        self._env: Mapping[str, str] = {}
        self._other: subprocess.Popen[bytes] | None = None

    @property
    def urls(self) -> tuple[str, str]:
        """Where the gateways listen."""
        return self.stack.url, f"http://127.0.0.1:{self._claim.number}"

    def __enter__(self) -> Self:
        self.stack.start()
        first = psutil.Process(self.stack.pid("gateway")).environ()
        self._env = {**first, "TEMPER_PORT": str(self._claim.number), "TEMPER_EXIT_WITH_PARENT": "true"}
        self._start_other()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._other is not None:
            self._other.kill()
            self._other.wait()
        self._claim.release()
        self.stack.stop()

    def _start_other(self) -> None:
        argv = [sys.executable, "-m", "services.gateway"]
        with self._log.open("ab") as log:
            self._other = subprocess.Popen(argv, env=dict(self._env), cwd=ROOT, stdout=log, stderr=log)

    async def keep(self) -> None:
        """Starts the second gateway again whenever it has ended, until it is cancelled."""
        while True:
            if self._other is None or self._other.poll() is not None:
                self._start_other()
            await asyncio.sleep(_POLL_SECONDS)

    def process(self, name: str) -> psutil.Process | None:
        """What runs under a name; None: it is being restarted."""
        with suppress(KeyError, FileNotFoundError, psutil.NoSuchProcess):
            if name == OTHER_GATEWAY:
                return (
                    None if self._other is None or self._other.poll() is not None else psutil.Process(self._other.pid)
                )
            process = psutil.Process(self.stack.pid(name))
            # What the supervisor has not missed yet is none; its number may be somebody else's by now.
            if process.status() != psutil.STATUS_ZOMBIE and process.ppid() == self.stack.state["pid"]:
                return process
        return None


class Client:
    """A client of both gateways, which asks the other one after an outage. For one asyncio loop."""

    def __init__(self, urls: tuple[str, str]) -> None:
        self.urls = urls
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self.http = httpx.AsyncClient(timeout=_ANSWER_SECONDS, limits=limits, trust_env=False)
        self.again = 0
        """Requests that had to be sent again."""
        self._turn = 0

    async def aclose(self) -> None:
        await self.http.aclose()

    def next_url(self) -> str:
        """The gateways, by turns."""
        self._turn += 1
        return self.urls[self._turn % 2]

    async def sure(self, method: str, path: str, **options: Any) -> httpx.Response:
        """The answer, however often it takes: 5xx, a lost connection and a request that still runs say nothing."""
        while True:
            with suppress(httpx.TransportError):
                response = await self.http.request(method, self.next_url() + path, **options)
                running = response.status_code == httpx.codes.CONFLICT and "retry-after" in response.headers
                if response.status_code < 500 and not running:
                    return response
            self.again += 1
            await asyncio.sleep(PAUSE)

    async def get(self, path: str, **params: str) -> Any:
        """The JSON of an answer.

        Raises:
            httpx.HTTPStatusError: it was refused.
        """
        return (await self.sure("GET", path, params=params)).raise_for_status().json()

    async def all(self, path: str, **params: str) -> list[Any]:
        """The entries of every page of a list."""
        found: list[Any] = []
        while True:
            page = await self.get(path, **params)
            found += page["data"]
            if not page.get("has_more", page["data"]):  # pages of jobs do not say
                return found
            params["after"] = page["data"][-1]["id"]
