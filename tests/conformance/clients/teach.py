"""Makes the adapters of adapters/ anew, for agents whose prompts or tools have changed.

    TEMPER_MAX_TRAIN_TOKENS=49152 temper up            # on a machine with a GPU: a minute an agent; on a CPU hours
    python -m tests.conformance.clients.teach --url http://127.0.0.1:8420 codex opencode

An agent is led once through the loop by a forced call with fixed arguments; of its second request an SFT job is made
(lessons.py), and its result is downloaded.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import httpx
from typer.testing import CliRunner

from cli.main import app
from services.gateway.protocol.chat_request import ChatRequest
from tests.conformance.clients.agents import AGENTS, Setting
from tests.conformance.clients.lessons import ADAPTERS, RECORDED_WORD, SHELL, TASK, chat_of, job
from tests.conformance.clients.recorder import recorded
from tests.e2e.jobs import wait_for_end

_SHELLS: dict[str, dict[str, Any]] = {
    "Bash": {"command": SHELL, "description": "Write {word}"},
    "bash": {"command": SHELL, "description": "Write {word}"},
    "exec_command": {"cmd": SHELL},
    "run_shell_command": {"command": SHELL, "is_background": False},
}
"""Of the agents, with the arguments of the call."""
_RESULTS = ("tool_result", "function_call_output", "tool")
_LEARNING = {"epochs": 5, "batch_size": 6, "learning_rate": 2e-3, "lora": {"rank": 4, "alpha": 8}}
_EXAMPLES = 192


def answered(body: dict[str, Any]) -> bool:
    """Whether the result of a call is among what the request says."""
    turns = body.get("messages") or body.get("input") or []
    kinds = [turn.get("type") or turn.get("role") for turn in turns]
    kinds += [block.get("type") for turn in turns if isinstance(turn.get("content"), list) for block in turn["content"]]
    return any(kind in _RESULTS for kind in kinds)


def lead(path: str, body: dict[str, Any]) -> None:
    """Forces the call of the agent's shell in a request that offers it, unless it has been made."""
    if answered(body):
        return
    for tool in body.get("tools") or ():
        function = tool.get("function", tool)
        name = function.get("name")
        if name not in _SHELLS:
            continue
        given = {key: _filled(value) for key, value in _SHELLS[name].items()}
        schema = {
            "type": "object",
            "properties": {key: {"const": value} for key, value in given.items()},
            "required": list(given),
            "additionalProperties": False,
        }
        if path.startswith("/v1/messages"):
            function["input_schema"], body["tool_choice"] = schema, {"type": "tool", "name": name}
            for thinking in ("thinking", "output_config", "context_management"):
                body.pop(thinking, None)
        elif path.startswith("/v1/responses"):
            function["parameters"], body["tool_choice"] = schema, {"type": "function", "name": name}
        else:
            function["parameters"] = schema
            body["tool_choice"] = {"type": "function", "function": {"name": name}}


def _filled(value: Any) -> Any:
    return value.format(word=RECORDED_WORD) if isinstance(value, str) else value


def record(name: str, url: str, model: str) -> ChatRequest:
    """The request of an agent that has the result of its call."""
    with tempfile.TemporaryDirectory() as scratch, recorded(url, lead) as recording:
        setting = Setting(recording.url, model, Path(scratch, "home"), Path(scratch, "work"))
        AGENTS[name].run(setting, TASK.format(word=RECORDED_WORD), seconds=900)
    for exchange in recording.exchanges:
        body = json.loads(exchange.body or b"{}")
        if answered(body):
            return chat_of(exchange.path, body)
    raise RuntimeError(f"{name} did not call its shell: {[str(exchange) for exchange in recording.exchanges]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8420")
    parser.add_argument("--model", default="qwen3.5")
    parser.add_argument("agents", nargs="*", default=list(AGENTS), metavar="AGENT", help=", ".join(AGENTS))
    options = parser.parse_args()
    with httpx.Client(base_url=options.url, timeout=120) as client:
        for name in options.agents:
            asked = job(record(name, options.url, options.model), name, count=_EXAMPLES, seed=1, **_LEARNING)
            made = client.post("/v1/train/sft", json=asked).raise_for_status().json()
            ended = wait_for_end(client, made["id"], timeout=36_000)
            print(name, ended["state"], ended.get("error") or ended.get("result"), flush=True)
            words = ["adapters", "download", name, str(ADAPTERS / name), "--url", options.url]
            CliRunner().invoke(app, words, catch_exceptions=False)


if __name__ == "__main__":
    main()
