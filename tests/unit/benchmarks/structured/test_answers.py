"""Some answers of the tiny model under drawn schemas."""

from __future__ import annotations

from benchmarks.structured.answers import Campaign


def test_answers_of_the_model_are_valid() -> None:
    campaign = Campaign(seed=1, answers=3)
    try:
        outcome = campaign.run(6)
    finally:
        campaign.stop()
    assert outcome.problems == []
    assert outcome.schemas == 6
    assert outcome.answers + outcome.cut == 18
    assert outcome.answers > 9
