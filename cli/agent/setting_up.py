"""What an agent is made of, from the options of its commands."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.agent.approval import Approval, Approver
from cli.agent.conversation import SYSTEM, Conversation
from cli.agent.loop import MOST_STEPS, Agent
from cli.agent.mcp_servers import McpServer, tools_of
from cli.agent.tools import Runner, Tool, Unconfined, built_in
from cli.agent.trace import Trace
from cli.agent.workspace import Workspace
from cli.http.chat_stream import context_tokens, served_model
from cli.http.client import Client
from cli.output import CliError, ExitCode
from services.common.security.sandbox.allowed_hosts import AllowedHosts
from services.common.security.sandbox.commands import CommandLimits, available
from services.common.security.sandbox.shut_in import SandboxUnavailable


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """Options that `temper agent` and `temper run` share."""

    model: str | None = None
    adapter: str | None = None
    system: str | None = None
    session: str | None = None
    workspace: Path = Path()
    approve: Approval = Approval.ASK
    tools: tuple[str, ...] = ()
    """Names of those that are offered; none: all."""
    no_tools: bool = False
    unsafe_tools: bool = False
    allow_hosts: tuple[str, ...] = ()
    readable: tuple[Path, ...] = ()
    mcp: tuple[str, ...] = ()
    tool_seconds: float = 60.0
    most_steps: int = MOST_STEPS
    first_choice: str | None = None
    trace: Path | None = None
    sampling: tuple[tuple[str, Any], ...] = ()
    """More fields of the requests."""

    def workspace_root(self) -> Path:
        return Path(os.path.realpath(self.workspace))

    @property
    def limits(self) -> CommandLimits:
        """Limits of a command."""
        return CommandLimits(wall_seconds=self.tool_seconds, cpu_seconds=max(1, int(self.tool_seconds)))


def runner_of(options: AgentOptions) -> Runner:
    """What runs the agent's commands.

    Raises:
        CliError: no sandbox works here, or the workspace is none that can be shut in.
    """
    try:
        workspace = Workspace(options.workspace_root())
        hosts = AllowedHosts.parse(options.allow_hosts)
        readable = [os.path.realpath(path) for path in options.readable]
        return available(workspace.root, readable, hosts)
    except ValueError as error:
        raise CliError(str(error), ExitCode.USAGE) from error
    except SandboxUnavailable as error:
        if options.unsafe_tools:
            return Unconfined(workspace)
        raise CliError(
            f"{error.message}. Tools are refused without one: run with --no-tools, or with --unsafe-tools to let the "
            "model's commands run as you",
            ExitCode.USAGE,
        ) from error


@contextmanager
def agent_of(client: Client, options: AgentOptions, runner: Runner | None) -> Iterator[Agent]:
    """An agent with its tools, whose servers are there until the end.

    Args:
        runner: None: there are no tools.

    Raises:
        CliError: an option is wrong, or a server is not there.
    """
    try:
        servers = [] if options.no_tools else [McpServer.parse(text) for text in options.mcp]
    except ValueError as error:
        raise CliError(str(error), ExitCode.USAGE) from error
    own = []
    if runner is not None and not options.no_tools:
        own = built_in(Workspace(options.workspace_root()), runner, options.limits)
    conversation = Conversation(
        model=options.model or served_model(client),
        adapter=options.adapter,
        system=SYSTEM if options.system is None else options.system,
        options=dict(options.sampling),
    )
    if options.session is not None:
        conversation.session = options.session
    with tools_of(servers, [tool.name for tool in own]) as theirs:
        yield Agent(
            client=client,
            conversation=conversation,
            tools=_offered([*own, *theirs], options.tools),
            approver=Approver(options.approve),
            context=context_tokens(client),
            most_steps=options.most_steps,
            first_choice=_choice(options.first_choice),
            trace=None if options.trace is None else Trace(options.trace),
        )


def _offered(tools: Sequence[Tool], names: Sequence[str]) -> list[Tool]:
    there = {tool.name: tool for tool in tools}
    for name in names:
        if name not in there:
            raise CliError(f"there is no tool {name!r}: there are {', '.join(there) or 'none'}", ExitCode.USAGE)
    return [there[name] for name in names] if names else list(tools)


def _choice(text: str | None) -> Any:
    """tool_choice of a request."""
    if text in (None, "auto", "required", "none"):
        return text
    return {"type": "function", "function": {"name": text}}
