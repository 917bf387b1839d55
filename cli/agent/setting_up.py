"""What an agent is made of, from the options of its commands."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Option

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
    """Options that `temper agent` and `temper run` share: each field is one (cli.options.with_options)."""

    model: Annotated[str | None, Option(help="Model or adapter name; default: the served model.")] = None
    adapter: Annotated[str | None, Option(help='"name", "name@3", "base", or several: "a@3*0.7+b".')] = None
    system: Annotated[str | None, Option(help="System message instead of the built-in one.")] = None
    temperature: Annotated[float, Option(min=0.0)] = 0.7
    max_tokens: Annotated[int | None, Option(help="Of each answer.", min=1)] = None
    seed: Annotated[int | None, Option(help="Of each answer.")] = None
    think: Annotated[bool | None, Option("--think/--no-think", help="Let the model reason first.")] = None
    session: Annotated[str | None, Option(help="Session that it belongs to; default: one of its own.")] = None
    workspace: Annotated[Path, Option(help="Directory that tools work in.", file_okay=False, exists=True)] = Path()
    approve: Annotated[
        Approval, Option(help="What runs without a question: reading (ask), what stays in the workspace, or all.")
    ] = Approval.ASK
    no_tools: Annotated[bool, Option("--no-tools", help="Offer the model no tools.")] = False
    tool: Annotated[list[str] | None, Option(help="Offer this tool only; may be repeated.")] = None
    unsafe_tools: Annotated[
        bool, Option("--unsafe-tools", help="Where no sandbox works, run commands as you instead of refusing.")
    ] = False
    allow_host: Annotated[
        list[str] | None, Option(help="HOST or HOST:PORT that commands may reach; may be repeated.")
    ] = None
    readable: Annotated[
        list[Path] | None, Option(help="Directory outside of the workspace that commands may read; may be repeated.")
    ] = None
    mcp: Annotated[list[str] | None, Option(help="MCP server, NAME=URL or NAME=COMMAND; may be repeated.")] = None
    tool_seconds: Annotated[float, Option(help="Limit on the time of a command.", min=0.1)] = 60.0
    max_steps: Annotated[int, Option(help="Answers in one turn.", min=1)] = MOST_STEPS
    trace: Annotated[Path | None, Option(help="Append trajectories for `train submit grpo`.")] = None

    def workspace_root(self) -> Path:
        return Path(os.path.realpath(self.workspace))

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields of the requests."""
        fields: dict[str, Any] = {"temperature": self.temperature, "max_tokens": self.max_tokens, "seed": self.seed}
        if self.think is not None:
            fields["chat_template_kwargs"] = {"enable_thinking": self.think}
        return {name: value for name, value in fields.items() if value is not None}

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
        hosts = AllowedHosts.parse(options.allow_host or ())
        readable = [os.path.realpath(path) for path in options.readable or ()]
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
def agent_of(
    client: Client, options: AgentOptions, runner: Runner | None, *, first_choice: str | None = None
) -> Iterator[Agent]:
    """An agent with its tools, whose servers are there until the end.

    Args:
        runner: None: there are no tools.
        first_choice: auto, required or a tool's name, of the first answer.

    Raises:
        CliError: an option is wrong, or a server is not there.
    """
    try:
        servers = [] if options.no_tools else [McpServer.parse(text) for text in options.mcp or ()]
    except ValueError as error:
        raise CliError(str(error), ExitCode.USAGE) from error
    own = []
    if runner is not None and not options.no_tools:
        own = built_in(Workspace(options.workspace_root()), runner, options.limits)
    conversation = Conversation(
        model=options.model or served_model(client),
        adapter=options.adapter,
        system=SYSTEM if options.system is None else options.system,
        options=options.sampling,
    )
    if options.session is not None:
        conversation.session = options.session
    with tools_of(servers, [tool.name for tool in own]) as theirs:
        yield Agent(
            client=client,
            conversation=conversation,
            tools=_offered([*own, *theirs], options.tool or ()),
            approver=Approver(options.approve),
            context=context_tokens(client),
            most_steps=options.max_steps,
            first_choice=_choice(first_choice),
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
