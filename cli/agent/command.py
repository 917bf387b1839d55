"""`temper agent` and `temper run`: their options."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated, Any

import typer

from cli.agent.approval import Approval
from cli.agent.loop import Agent, Finish, Turn
from cli.agent.repl import Screen, converse
from cli.agent.setting_up import AgentOptions, agent_of, runner_of
from cli.agent.snapshots import NOT_COPIED, Snapshot
from cli.agent.tools import Runner
from cli.http.client import Client
from cli.options import Json, Url, with_options
from cli.output import CliError, ExitCode, Output, guarded
from cli.settings import CliSettings, read


@with_options(AgentOptions)
def agent(options: AgentOptions, *, url: Url = None) -> None:
    """Work with the model on a directory: it reads, writes and runs programs in a sandbox. Ctrl-C stops a turn."""
    output = Output(as_json=False)
    with guarded(output), Client(url, read(CliSettings)) as client:
        runner = None if options.no_tools else runner_of(options)
        with agent_of(client, options, runner) as made:
            converse(made, output, None if options.no_tools else options.workspace_root())


@with_options(AgentOptions, approve=Approval.WORKSPACE)
def run(
    options: AgentOptions,
    *,
    prompt: Annotated[str, typer.Option(help="The task; '-' reads stdin.")],
    tool_choice: Annotated[
        str | None, typer.Option(help="auto, required or a tool's name: of the first answer.", show_default="auto")
    ] = None,
    check: Annotated[
        str | None, typer.Option(help="Shell command, run in the sandbox at the end: status 0 is success.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Attempts, each from the workspace as it is now.", min=1)] = 1,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Let the model do one task with tools, and print its answer. Nobody is asked: what needs it is refused."""
    output = Output(as_json=as_json)
    with guarded(output), Client(url, read(CliSettings)) as client:
        task = sys.stdin.read() if prompt == "-" else prompt
        if not task.strip():
            raise CliError("the task is empty", ExitCode.USAGE)
        if samples > 1 and options.trace is None:
            raise CliError("--samples is for --trace: each attempt but the last is undone", ExitCode.USAGE)
        runner = None if options.no_tools and check is None else runner_of(options)
        with agent_of(client, options, runner, first_choice=tool_choice) as made:
            code = _attempts(made, output, options, runner, task=task, samples=samples, check=check)
    raise typer.Exit(int(code))


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
