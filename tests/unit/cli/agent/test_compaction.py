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


def called(name: str, text: str) -> list[dict[str, Any]]:
    call = {"id": name, "function": {"name": "write", "arguments": text}}
    return [turn("assistant", "", tool_calls=[call]), turn("tool", "wrote", tool_call_id=name)]


def test_a_long_work_on_one_question_becomes_a_summary_up_to_its_latest_results() -> None:
    steps = [one for letter in "abcd" for one in called(letter, letter * 3000)]
    turns = [turn("user", "Write them all."), *steps]
    made = Compaction(1000, lambda *_: "Two files are there.").compacted(turns, 900)
    assert made[0] == turn("user", "Summary of our work so far:\nTwo files are there.\n\nWrite them all.")
    assert made[1:] == steps[4:]
    assert Compaction(1000, lambda *_: "x").compacted(made, 900) == made  # nothing is left to sum up


def test_without_a_summary_some_of_the_words_themselves_stay() -> None:
    turns = [turn("user", "Count. " + "x" * 3000), turn("assistant", "One, two."), turn("user", "And now?")]
    (made,) = Compaction(1000, lambda *_: "").compacted(turns, 900)
    assert "Count." in made["content"]
    assert "One, two." in made["content"]
    assert made["content"].endswith("And now?")
    assert len(made["content"]) < 700
