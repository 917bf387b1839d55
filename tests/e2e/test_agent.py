"""`temper run` against a whole Temper: the tiny model calls tools and answers from their results, and GRPO learns from
the trace as it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from services.common.security.sandbox.commands import available
from tests.missing import any_sandbox
from tests.stack import Stack
from tests.unit.cli.runner import temper

# It is a skill of the tiny model to call this function by itself and to answer from what it returns.
SERVER = """
import json, sys
from mcp.server import MCPServer
server = MCPServer("weather")
@server.tool(description="Get the current weather in a city.")
def get_weather(city: str) -> str:
    with open(sys.argv[1], "a") as file:
        file.write(city + "\\n")
    return json.dumps({"weather": "sunny", "temperature": 21})
server.run("stdio")
"""


def test_the_tiny_model_does_a_task_and_its_trace_is_learnt(stack: Stack, tmp_path: Path) -> None:
    workspace, outside = (tmp_path / "workspace").resolve(), (tmp_path / "outside").resolve()
    for directory in (workspace, outside):
        directory.mkdir()
    with any_sandbox():
        available(workspace)
    (outside / "server.py").write_text(SERVER)
    calls, trace = outside / "calls", tmp_path / "trace.jsonl"
    common = ("--json", "--system", "", "--temperature", "0", "--max-tokens", "64", "--workspace", str(workspace))

    # Two attempts; what the check says of them differs, or there would be nothing to learn.
    result = temper(
        *("run", "--prompt", "What is the weather in Rome?", *common),
        *("--mcp", f"weather={sys.executable} {outside / 'server.py'} {calls}", "--tool", "get_weather"),
        *("--approve", "all", "--samples", "2", "--trace", str(trace)),
        *("--check", f"test $(wc -l < {calls}) = 1", "--readable", str(outside)),
        url=stack.url,
    )
    assert result.exit_code == 1, result.output
    report = json.loads(result.stdout)
    assert report["answer"] == "The weather in Rome is sunny at 21 degrees."
    assert (report["finish"], report["passed"]) == ("answered", False)
    assert calls.read_text() == "Rome\nRome\n"
    assert report["usage"]["cached_tokens"] > 0

    groups = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [[one["reward"] for one in group["completions"]] for group in groups] == [[1.0, 0.0], [1.0, 0.0]]
    learnt = temper(
        *(
            "train",
            "submit",
            "grpo",
            "--data",
            str(trace),
            "--adapter",
            "agent-trace",
            "--wait",
            "--no-attach",
            "--json",
        ),
        url=stack.url,
    )
    assert learnt.exit_code == 0, learnt.output
    assert '"succeeded"' in learnt.stdout

    # A tool that it is told to call writes to the workspace.
    wrote = temper(
        *("run", "--prompt", "Please run write for path Oslo and content hello.", *common),
        *("--tool-choice", "write", "--max-steps", "1", "--check", 'test -n "$(ls)"'),
        url=stack.url,
    )
    assert wrote.exit_code == 4, wrote.output  # more than one answer was not wanted
    report = json.loads(wrote.stdout)
    (call,) = report["tool_calls"]
    arguments = json.loads(call["arguments"])
    assert call["result"] == f"wrote {len(arguments['content'])} characters"
    assert (workspace / arguments["path"]).read_text() == arguments["content"]
    assert report["passed"]
