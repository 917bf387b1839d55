"""What an agent is taught, made of its own requests: a call of its shell, and a sentence after the call's result.

A recording is the last request of a loop that a forced call has led through: everything the agent says by itself, its
tools, its call, the result. Examples are that conversation with other words, in other directories, and with parts of
its long instructions left out, so that the model learns what to do and not what one version of the instructions says.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from models.tiny.recipe.skills.words import invented, word
from services.gateway.api.messages.to_chat import as_chat
from services.gateway.api.responses.to_chat import chat_fields
from services.gateway.protocol.chat_request import ChatRequest
from services.gateway.protocol.messages.request import MessagesRequest
from services.gateway.protocol.responses.request import ResponseRequest

ADAPTERS = Path(__file__).resolve().parent / "adapters"
"""What teach.py learnt, a directory an agent."""
TASK = "Write the word {word} into answer.txt."
SHELL = "echo {word} > answer.txt"
ANSWER = "The word {word} is in answer.txt."
THOUGHT = "The shell writes it."
RECORDED_WORD = "river"

_ASKED = re.compile(r"Write the word \w+ into answer\.txt\.")


def chat_of(path: str, body: Mapping[str, Any]) -> ChatRequest:
    """A request to one of the three APIs as the chat that the gateway makes of it."""
    if path.startswith("/v1/messages"):
        return as_chat(MessagesRequest.model_validate(body))
    if path.startswith("/v1/responses"):
        asked = ResponseRequest.model_validate(body)
        given: Any = asked.input  # the agents that are taught refer to no stored item
        return chat_fields(asked, [], given).request()
    return ChatRequest.model_validate(body)


def example(recorded: ChatRequest, rng: random.Random, keep: float) -> dict[str, Any]:
    """One example of /v1/train/sft.

    Args:
        recorded: of a loop whose call has been answered.
        keep: share of the paragraphs of long texts, and of the tools, that stay.
    """
    turns = copy.deepcopy(recorded.turns())
    chosen = rng.choice((word, invented))(rng)
    called: set[str] = set()
    for turn in turns:
        for call in turn.get("tool_calls") or ():
            called.add(call["function"]["name"])
        if turn["role"] == "assistant":
            turn["content"] = turn.get("content") or ""
            turn.pop("reasoning_content", None)
            if recorded.template_kwargs.get("enable_thinking"):
                turn["reasoning_content"] = THOUGHT
        if isinstance(turn.get("content"), str):
            turn["content"] = _shortened(turn["content"], rng, keep)
    said: dict[str, Any] = {"role": "assistant", "content": ANSWER.format(word=chosen)}
    if recorded.template_kwargs.get("enable_thinking"):
        said["reasoning_content"] = THOUGHT
    tools = [tool for tool in recorded.offered_tools if _name(tool) in called or rng.random() < keep]
    rng.shuffle(tools)
    text = json.dumps({"messages": [*turns, said], "tools": tools})
    made: dict[str, Any] = json.loads(re.sub(rf"\b{RECORDED_WORD}\b", chosen, text))
    return made


def _name(tool: Mapping[str, Any]) -> str:
    return str(tool.get("function", tool)["name"])


def _shortened(text: str, rng: random.Random, keep: float) -> str:
    """Without some of its paragraphs; the one with the task stays."""
    if len(text) < 400:
        return text
    return "\n".join(line for line in text.split("\n") if _ASKED.search(line) or rng.random() < keep)


def job(recorded: ChatRequest, adapter: str, *, count: int, seed: int = 0, **settings: Any) -> dict[str, Any]:
    """The body of /v1/train/sft that teaches one agent."""
    rng = random.Random(seed)
    return {
        "adapter": adapter,
        "seed": seed,
        "chat_template_kwargs": recorded.template_kwargs,
        "examples": [example(recorded, rng, 1.0 if at % 4 == 0 else rng.random()) for at in range(count)],
        **settings,
    }


def taught(url: str) -> None:
    """Uploads the adapters of all agents, by their names."""
    for directory in sorted(ADAPTERS.iterdir()):
        files = {name: (directory / name).read_bytes() for name in ("adapter_model.safetensors", "adapter_config.json")}
        httpx.post(f"{url}/v1/adapters", data={"name": directory.name}, files=files, timeout=60).raise_for_status()
