"""One task of a coding agent against a running Temper, and what came of it."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conformance.clients.agents import AGENTS, Setting
from tests.conformance.clients.lessons import TASK
from tests.conformance.clients.recorder import recorded

_PROMPT = re.compile(rb'"(?:prompt_tokens|input_tokens)":\s*(\d+)')
SECONDS = 280.0
"""For a whole loop of a test: cores that others use, too."""


def greedily(path: str, body: dict[str, Any]) -> None:
    """The one thing that is changed in what an agent sends: it sets no temperature, and at that of the APIs, which is
    1, a model of six million parameters mistypes a letter now and then."""
    if path.startswith(("/v1/messages", "/v1/responses", "/v1/chat/completions")):
        body.setdefault("temperature", 0)


@dataclass(frozen=True, slots=True)
class Loop:
    """One task."""

    status: int
    output: str
    """Of the agent, with its standard error behind it."""
    written: str | None
    """The file that the task asks for."""
    requests: tuple[str, ...]
    """To models, with the status of each."""
    refusals: list[str]
    longest_prompt: int
    """Tokens."""
    seconds: float


def run_loop(name: str, word: str, url: str, directory: Path, *, seconds: float = SECONDS) -> Loop:
    """Gives an agent the task with this word, in a directory of its own; the model is the adapter of its name.

    Raises:
        subprocess.TimeoutExpired: it did not end.
    """
    began = time.monotonic()
    work = directory / "work"
    with recorded(url, greedily) as recording:
        setting = Setting(recording.url, name, directory / "home", work)
        done = AGENTS[name].run(setting, TASK.format(word=word), seconds=seconds)
    answer = work / "answer.txt"
    exchanges = recording.exchanges
    return Loop(
        status=done.returncode,
        output=done.stdout + done.stderr,
        written=answer.read_text() if answer.exists() else None,
        requests=tuple(f"{exchange.method} {exchange.path}: {exchange.status}" for exchange in exchanges),
        refusals=recording.refusals,
        longest_prompt=max(
            (int(found) for exchange in exchanges for found in _PROMPT.findall(exchange.answer)), default=0
        ),
        seconds=time.monotonic() - began,
    )
