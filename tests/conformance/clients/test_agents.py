"""Coding agents on the tiny model: a task, a call of the agent's shell, its result, and a final answer.

The model has learnt the loop by adapters that are trained on the agents' own requests (teach.py), with hundreds of
words: it copies that of the task, and no answer is written down anywhere. A prompt of 20,000 tokens is half a minute of
a core, so the suite has two agents: `python -m tests.conformance.clients` runs all.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.clients.loop import run_loop
from tests.stack import Stack


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "word"), [("claude-code", "temper"), ("codex", "table")])
def test_a_task_to_its_end(name: str, word: str, lessons: Stack, tmp_path: Path) -> None:
    loop = run_loop(name, word, lessons.url, tmp_path)
    assert loop.refusals == []
    assert (loop.status, loop.written) == (0, f"{word}\n"), loop.output
    assert f"The word {word} is in answer.txt." in loop.output
    assert loop.longest_prompt > 12_000
