"""Tools of MCP servers: programs that speak over their standard streams, and servers that speak HTTP."""

from __future__ import annotations

import asyncio
import re
import shlex
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from cli.agent.approval import Effect
from cli.agent.tools import Tool, ToolFailed
from cli.output import CliError, ExitCode

if TYPE_CHECKING:
    from mcp import Client as McpClient

_T = TypeVar("_T")
CONNECT_SECONDS = 30.0
CALL_SECONDS = 120.0
_SAID = 300
"""Characters of what a server writes to its log that are told."""
_UNFIT, _MOST_NAME = re.compile(r"[^A-Za-z0-9_.-]"), 128
"""What names of the chat API's functions have not, and their length."""


@dataclass(frozen=True, slots=True)
class McpServer:
    """A server by name. Raises ValueError: it has no name or no place."""

    name: str
    place: str
    """A URL, or a command with its arguments."""

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or not self.place.strip():
            raise ValueError(f"--mcp {self.name}={self.place}: say NAME=URL or NAME=COMMAND, NAME in letters")

    @classmethod
    def parse(cls, text: str) -> McpServer:
        """From "name=https://…" or "name=command arguments"."""
        name, _, place = text.partition("=")
        return cls(name, place)

    @property
    def is_url(self) -> bool:
        return self.place.startswith(("http://", "https://"))


@contextmanager
def tools_of(servers: Sequence[McpServer], taken: Collection[str]) -> Iterator[list[Tool]]:
    """Connects to all servers, and yields their tools. One whose name is taken, or another's, has its server's before.

    Raises:
        CliError: a server is not there, or does not speak MCP.
    """
    if not servers:
        yield []
        return
    with _Loop() as loop:
        ready: Future[list[Tool]] = Future()
        gone = threading.Event()

        async def live() -> None:
            """Until it is cancelled: a connection is closed by the task that made it."""
            try:
                async with AsyncExitStack() as clients:
                    tools = [(server, tool) for server in servers for tool in await _connected(server, clients, loop)]
                    ready.set_result(_named(tools, taken))
                    await asyncio.Event().wait()
            except BaseException as error:  # the caller waits for one or the other; of an end nobody wants to know
                if not ready.done():
                    ready.set_exception(error)
            finally:
                gone.set()

        living = loop.start(live())
        try:
            yield ready.result()
        finally:
            living.cancel()
            gone.wait(CONNECT_SECONDS)


def _named(tools: Sequence[tuple[McpServer, Tool]], taken: Collection[str]) -> list[Tool]:
    """Tools with names that the chat API takes, each another one."""
    known = [(server, replace(tool, name=_UNFIT.sub("_", tool.name)[:_MOST_NAME])) for server, tool in tools]
    names = Counter([*taken, *(tool.name for _, tool in known)])
    return [
        tool if names[tool.name] == 1 else replace(tool, name=f"{server.name}_{tool.name}"[:_MOST_NAME])
        for server, tool in known
    ]


async def _connected(server: McpServer, clients: AsyncExitStack, loop: _Loop) -> list[Tool]:
    log = clients.enter_context(tempfile.TemporaryFile("w+", errors="replace"))  # noqa: SIM115 — closed with the clients
    try:
        # Imported here: agents without servers need none of it.
        from mcp import Client, StdioServerParameters, stdio_client

        place: Any = server.place
        if not server.is_url:
            command, *arguments = shlex.split(server.place)
            # The SDK gives it PATH, HOME and the like, and no other variable of this process.
            place = stdio_client(StdioServerParameters(command=command, args=arguments), errlog=log)
        client = Client(place, read_timeout_seconds=CALL_SECONDS)
        async with asyncio.timeout(CONNECT_SECONDS):
            await clients.enter_async_context(client)
            found, cursor = [], None
            while True:
                page = await client.list_tools(cursor=cursor)
                found += page.tools
                cursor = page.next_cursor
                if not cursor:
                    break
    except Exception as error:
        log.seek(0)
        reason = " ".join([_first(error), *log.read()[-_SAID:].splitlines()[-1:]])
        raise CliError(f"MCP server {server.name} ({server.place}): {reason}", ExitCode.USAGE) from error
    return [
        Tool(
            one.name,
            one.description or "",
            one.input_schema,
            Effect.OUTSIDE,
            _caller(client, one.name, loop),
        )
        for one in found
    ]


def _caller(client: McpClient, name: str, loop: _Loop) -> Callable[[Mapping[str, Any]], str]:
    async def called(arguments: Mapping[str, Any]) -> str:
        result = await client.call_tool(name, dict(arguments))
        texts = [
            part.text if part.type == "text" else f"[{part.type}: is not shown to the model]" for part in result.content
        ]
        text = "\n".join(texts) or "(no result)"
        if result.is_error:
            raise ToolFailed(text)
        return text

    def call(arguments: Mapping[str, Any]) -> str:
        waiting = loop.start(called(arguments))
        try:
            return waiting.result()
        except (ToolFailed, KeyboardInterrupt):
            raise
        except Exception as error:
            raise ToolFailed(_first(error)) from error
        finally:
            waiting.cancel()

    return call


def _first(error: BaseException) -> str:
    """What went wrong, of a group the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__


@dataclass(slots=True)
class _Loop:
    """An event loop in a thread of its own, for a program that is not asynchronous."""

    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _thread: threading.Thread | None = None

    def __enter__(self) -> _Loop:
        self._thread = threading.Thread(target=self._loop.run_forever, name="mcp", daemon=True)
        self._thread.start()
        return self

    def start(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        assert self._thread is not None  # noqa: S101 — entered
        self._thread.join()
        self._loop.close()
