"""The sizing page says what the planner does."""

from __future__ import annotations

from benchmarks.serving.sizing import CARDS, TARGET, render, rows


def test_the_page_is_current() -> None:
    page = TARGET.read_text()
    assert page == render(page), "run `python -m benchmarks.serving.sizing`"


def test_every_card_holds_the_model() -> None:
    lines = list(rows())
    assert len(lines) >= 2 * len(CARDS)
    assert not [line for line in lines if "does not fit" in line]
