"""SDKs and agent frameworks from npm and PyPI, each by all of its ways to Temper: a tool loop to its end.

The scripts are what a user writes; they set a timer, which is a tool that the tiny model knows by itself, and ask on.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.clients.agents import OFFLINE
from tests.conformance.clients.place import HERE, NODE_MODULES, PYTHON, node
from tests.conformance.clients.recorder import Recording

THREADS, NO_THREAD = "anthropic_sdk.mjs", "thread_unsupported_request"
"""Its tool runner asks first whether the server keeps a thread of messages, and goes on without one where this error
says no. To accept the field and ignore it would lose the messages that it then does not send again."""
SET = "The timer is set for 89 minutes."


def run(script: str, recording: Recording, model: str, directory: Path) -> tuple[dict[str, Any], list[str]]:
    """What a script prints, and the timers that its tool has set."""
    timers = directory / "timers"
    source = HERE / "scripts" / script
    if script.endswith(".py"):
        program = [PYTHON, source]
    else:
        # Node.js looks for packages beside the script.
        (directory / "node_modules").symlink_to(NODE_MODULES)
        (directory / script).write_bytes(source.read_bytes())
        program = [node(), directory / script]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(directory), "LANG": "C.UTF-8", **OFFLINE}
    done = subprocess.run(
        [*program, recording.url, model, str(timers)],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), timers.read_text().split()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("script", "ways"),
    [
        ("vercel.mjs", {"responses", "chat", "compatible", "anthropic"}),
        ("openai_sdk.mjs", {"runner"}),
        ("anthropic_sdk.mjs", {"runner"}),
        ("langchain.mjs", {"chat", "responses", "anthropic"}),
        ("openai_agents.py", {"responses", "chat"}),
        ("pydantic_agents.py", {"chat", "responses", "anthropic"}),
    ],
)
def test_a_tool_loop_to_its_end(script: str, ways: set[str], recording: Recording, stack: Any, tmp_path: Path) -> None:
    found, timers = run(script, recording, stack.served_model_name, tmp_path)
    refusals = [refusal for refusal in recording.refusals if not (script == THREADS and NO_THREAD in refusal)]
    assert refusals == []
    assert set(found) == ways
    assert {text for said in found.values() for text in (said["text"], said.get("streamed", SET))} == {SET}
    loops = sum(1 + ("streamed" in said and script != "langchain.mjs") for said in found.values())
    assert timers == ["89"] * loops
    assert all(said.get("second", "said") for said in found.values())
