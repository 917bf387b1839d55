"""What an engine tells gateways of each other's prompts."""

from __future__ import annotations

from services.engine.server.recent_prompts import RecentPrompts


def test_each_prompt_is_told_once_to_who_says_what_it_has_heard() -> None:
    prompts = RecentPrompts()
    assert (prompts.after(0), prompts.seen) == ([], 0)
    prompts.note(b"1" * 8)
    prompts.note(b"")
    prompts.note(b"2" * 16)
    assert (prompts.after(0), prompts.seen) == ([b"1" * 8, b"2" * 16], 2)
    assert prompts.after(1) == [b"2" * 16]
    assert prompts.after(2) == []


def test_the_oldest_are_forgotten_and_numbers_go_on() -> None:
    prompts = RecentPrompts(most_bytes=24)
    for number in range(5):
        prompts.note(bytes([number]) * 8)
    assert prompts.after(0) == [bytes([number]) * 8 for number in (2, 3, 4)]
    assert prompts.after(4) == [bytes([4]) * 8]
    assert prompts.seen == 5


def test_a_number_of_an_engine_before_this_one_gets_all() -> None:
    prompts = RecentPrompts()
    prompts.note(b"1" * 8)
    assert prompts.after(700) == [b"1" * 8]
