"""`temper agent` and `temper run`: their options."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.agent.approval import Approval
from cli.agent.loop import MOST_STEPS, Agent, Finish, Turn
from cli.agent.repl import Screen, converse
from cli.agent.setting_up import AgentOptions, agent_of, runner_of
from cli.agent.snapshots import NOT_COPIED, Snapshot
from cli.agent.tools import Runner
from cli.http.client import Client
from cli.options import Json, Url
from cli.output import CliError, ExitCode, Output, guarded
from cli.settings import CliSettings, read

Model = Annotated[str | None, typer.Option(help="Model or adapter name; default: the served model.")]
Adapter = Annotated[str | None, typer.Option(help='"name", "name@3" or "base".')]
System = Annotated[str | None, typer.Option(help="System message instead of the built-in one.")]
Temperature = Annotated[float, typer.Option(min=0.0)]
MaxTokens = Annotated[int | None, typer.Option(help="Of each answer.", min=1)]
Seed = Annotated[int | None, typer.Option(help="Of each answer.")]
Think = Annotated[bool | None, typer.Option("--think/--no-think", help="Let the model reason first.")]
Session = Annotated[str | None, typer.Option(help="Session that it belongs to; default: one of its own.")]
Place = Annotated[Path, typer.Option("--workspace", help="Directory that tools work in.", file_okay=False, exists=True)]
Approve = Annotated[
    Approval, typer.Option(help="What runs without a question: reading (ask), what stays in the workspace, or all.")
]
NoTools = Annotated[bool, typer.Option("--no-tools", help="Offer the model no tools.")]
Tools = Annotated[list[str] | None, typer.Option("--tool", help="Offer this tool only; may be repeated.")]
Unsafe = Annotated[
    bool, typer.Option("--unsafe-tools", help="Where no sandbox works, run commands as you instead of refusing.")
]
Hosts = Annotated[
    list[str] | None, typer.Option("--allow-host", help="HOST or HOST:PORT that commands may reach; may be repeated.")
]
Readable = Annotated[
    list[Path] | None, typer.Option(help="Directory outside of the workspace that commands may read; may be repeated.")
]
Mcp = Annotated[list[str] | None, typer.Option("--mcp", help="MCP server, NAME=URL or NAME=COMMAND; may be repeated.")]
ToolSeconds = Annotated[float, typer.Option(help="Limit on the time of a command.", min=0.1)]
MaxSteps = Annotated[int, typer.Option(help="Answers in one turn.", min=1)]
TraceFile = Annotated[Path | None, typer.Option("--trace", help="Append trajectories for `train submit grpo`.")]


def agent(
    model: Model = None,
    adapter: Adapter = None,
    system: System = None,
    temperature: Temperature = 0.7,
    max_tokens: MaxTokens = None,
    seed: Seed = None,
    think: Think = None,
    session: Session = None,
    workspace: Place = Path(),
    approve: Approve = Approval.ASK,
    no_tools: NoTools = False,
    tool: Tools = None,
    unsafe_tools: Unsafe = False,
    allow_host: Hosts = None,
    readable: Readable = None,
    mcp: Mcp = None,
    tool_seconds: ToolSeconds = 60.0,
    max_steps: MaxSteps = MOST_STEPS,
    trace: TraceFile = None,
    url: Url = None,
) -> None:
    """Work with the model on a directory: it reads, writes and runs programs in a sandbox. Ctrl-C stops a turn."""
    output = Output(as_json=False)
    options = AgentOptions(
        model=model,
        adapter=adapter,
        system=system,
        session=session,
        workspace=workspace,
        approve=approve,
        tools=tuple(tool or ()),
        no_tools=no_tools,
        unsafe_tools=unsafe_tools,
        allow_hosts=tuple(allow_host or ()),
        readable=tuple(readable or ()),
        mcp=tuple(mcp or ()),
        tool_seconds=tool_seconds,
        most_steps=max_steps,
        trace=trace,
        sampling=_sampling(temperature, max_tokens, seed, think),
    )
    with guarded(output), Client(url, read(CliSettings)) as client:
        runner = None if no_tools else runner_of(options)
        with agent_of(client, options, runner) as made:
            converse(made, output, None if no_tools else options.workspace_root())


def run(
    prompt: Annotated[str, typer.Option(help="The task; '-' reads stdin.")],
    model: Model = None,
    adapter: Adapter = None,
    system: System = None,
    temperature: Temperature = 0.7,
    max_tokens: MaxTokens = None,
    seed: Seed = None,
    think: Think = None,
    session: Session = None,
    workspace: Place = Path(),
    approve: Approve = Approval.WORKSPACE,
    no_tools: NoTools = False,
    tool: Tools = None,
    tool_choice: Annotated[
        str | None, typer.Option(help="auto, required or a tool's name: of the first answer.", show_default="auto")
    ] = None,
    unsafe_tools: Unsafe = False,
    allow_host: Hosts = None,
    readable: Readable = None,
    mcp: Mcp = None,
    tool_seconds: ToolSeconds = 60.0,
    max_steps: MaxSteps = MOST_STEPS,
    check: Annotated[
        str | None, typer.Option(help="Shell command, run in the sandbox at the end: status 0 is success.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Attempts, each from the workspace as it is now.", min=1)] = 1,
    trace: TraceFile = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Let the model do one task with tools, and print its answer. Nobody is asked: what needs it is refused."""
    output = Output(as_json=as_json)
    options = AgentOptions(
        model=model,
        adapter=adapter,
        system=system,
        session=session,
        workspace=workspace,
        approve=approve,
        tools=tuple(tool or ()),
        no_tools=no_tools,
        unsafe_tools=unsafe_tools,
        allow_hosts=tuple(allow_host or ()),
        readable=tuple(readable or ()),
        mcp=tuple(mcp or ()),
        tool_seconds=tool_seconds,
        most_steps=max_steps,
        first_choice=tool_choice,
        trace=trace,
        sampling=_sampling(temperature, max_tokens, seed, think),
    )
    with guarded(output), Client(url, read(CliSettings)) as client:
        task = sys.stdin.read() if prompt == "-" else prompt
        if not task.strip():
            raise CliError("the task is empty", ExitCode.USAGE)
        if samples > 1 and trace is None:
            raise CliError("--samples is for --trace: each attempt but the last is undone", ExitCode.USAGE)
        runner = None if no_tools and check is None else runner_of(options)
        with agent_of(client, options, runner) as made:
            code = _attempts(made, output, options, runner, task=task, samples=samples, check=check)
    raise typer.Exit(int(code))


def _sampling(
    temperature: float, max_tokens: int | None, seed: int | None, think: bool | None
) -> tuple[tuple[str, Any], ...]:
    fields = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    if think is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": think}  # type: ignore[assignment]
    return tuple((name, value) for name, value in fields.items() if value is not None)


def _attempts(
    agent: Agent,
    output: Output,
    options: AgentOptions,
    runner: Runner | None,
    *,
    task: str,
    samples: int,
    check: str | None,
) -> ExitCode:
    """All attempts at a task; the last one's end is the command's."""
    screen = Screen(output)
    if not output.as_json:
        agent.show = screen.show
    with contextlib.ExitStack() as stack:
        if agent.trace is not None:
            stack.callback(agent.trace.write)  # whatever ends it: attempts that are over stay
        snapshot = None
        if samples > 1 and runner is not None:
            root = options.workspace_root()
            snapshot = stack.enter_context(Snapshot.taken(root))
            if snapshot is None:
                raise CliError(f"--samples cannot put {root} back between attempts: it {NOT_COPIED}", ExitCode.USAGE)
        for number in range(samples):
            if number:
                agent.conversation.turns.clear()
                if snapshot is not None:
                    snapshot.restore()
                if "seed" in agent.conversation.options:
                    agent.conversation.options["seed"] += 1
            turn, passed = agent.turn(task), None
            if turn.finish == Finish.INTERRUPTED:
                break  # which says nothing of the model
            passed = _passes(check, runner, options)
            if agent.trace is not None:
                agent.trace.end_attempt(0.0 if passed is None else float(passed))
    if output.as_json:
        output.json(_report(agent, turn, passed))
    else:
        screen.summary(turn)
    if turn.finish == Finish.INTERRUPTED:
        return ExitCode.INTERRUPTED
    if turn.finish == Finish.STEPS:
        return ExitCode.TIMED_OUT
    return ExitCode.FAILED if passed is False else ExitCode.OK


def _passes(check: str | None, runner: Runner | None, options: AgentOptions) -> bool | None:
    """Whether a command says that the task is done; None: there is no command."""
    if check is None or runner is None:
        return None
    outcome = runner.run(["/bin/sh", "-c", check], options.limits)
    return outcome.status == 0 and not outcome.stopped


def _report(agent: Agent, turn: Turn, passed: bool | None) -> dict[str, Any]:
    return {
        "answer": turn.text,
        "finish": turn.finish.value,
        "passed": passed,
        "steps": turn.steps,
        "tool_calls": [
            {"name": call.name, "arguments": call.arguments, "result": call.result, "failed": call.failed}
            for call in turn.calls
        ],
        "session": agent.conversation.session,
        "adapter": turn.adapter,
        "usage": {
            "prompt_tokens": turn.prompt_tokens,
            "cached_tokens": turn.cached_tokens,
            "completion_tokens": turn.completion_tokens,
        },
    }
