"""Compaction of conversations: what stays, what becomes a summary."""

from __future__ import annotations

from typing import Any

from cli.agent.compaction import Compaction


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def test_what_is_before_the_last_question_becomes_a_summary() -> None:
    asked: list[tuple[str, int]] = []

    def summarise(prompt: str, most: int) -> str:
        asked.append((prompt, most))
        return "They counted to two."

    compaction = Compaction(1000, summarise)
    assert [compaction.needed(tokens) for tokens in (800, 801)] == [False, True]
    call = {"id": "a", "function": {"name": "list", "arguments": "{}"}}
    turns = [
        turn("user", "Count. " + "x" * 3000),
        turn("assistant", "One, two."),
        turn("user", "And now?"),
        turn("assistant", "", tool_calls=[call]),
        turn("tool", "file", tool_call_id="a"),
    ]
    made = compaction.compacted(turns, 900)
    assert made[0] == turn("user", "Summary of our work so far:\nThey counted to two.\n\nAnd now?")
    assert made[1:] == turns[3:]
    ((prompt, most),) = asked
    # The prompt of the summary is at most half of the context, by what the conversation's characters cost.
    assert len(prompt) < 2200
    assert "[…]" in prompt
    assert "assistant: One, two." in prompt
    assert most == 125
    assert compaction.compacted(turns[2:], 900) == turns[2:]  # nothing is before the last question


def test_old_results_are_shortened_first() -> None:
    turns = [turn("user", "Look."), *(turn("tool", letter * 5000, tool_call_id=letter) for letter in "abcd")]
    made = Compaction(1000, lambda *_: "").compacted(turns, 900)
    assert [len(one["content"]) < 500 for one in made[1:]] == [True, True, False, False]
    assert [one["tool_call_id"] for one in made[1:]] == list("abcd")
