"""Curriculum: which prompts are drawn, what is remembered of them, and that both survive a checkpoint."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, cast

import pytest
from pydantic import ValidationError

from services.common.jobs.fields.curriculum import Curriculum
from services.common.jobs.kinds.generate import GenerateSettings
from services.trainer.sampling.curriculum import CurriculumSampler

PROMPTS = list("abcdefgh")


def sampler(seed: int = 3, size: int = 2, **fields: Any) -> CurriculumSampler[str]:
    source = cast("Any", None)
    rest = {"source": source, "size": size, "seed": seed, "max_tokens": 1, "stop_token_ids": ()}
    return CurriculumSampler(Curriculum(**fields), PROMPTS, **rest)


def rewards(chosen: list[str]) -> list[list[float]]:
    """a and b are always right, c and d never, the others in half of the cases."""
    return [[1.0, 1.0 if one in "ab" else 0.0] if one not in "cd" else [0.0, 0.0] for one in chosen]


def earned(number: int, rewards: list[list[float]]) -> list[tuple[int, int, list[float]]]:
    return [(number, place, those) for place, those in enumerate(rewards)]


def taught(rounds: int, **fields: Any) -> tuple[CurriculumSampler[str], Counter[str]]:
    made, counts = sampler(**fields), Counter[str]()
    for number in range(rounds):
        chosen = made.chosen(number)
        assert len(set(chosen)) == 2, "no prompt is twice in a round"
        counts.update(chosen)
        made.learn(earned(number, rewards(chosen)), keep=number)
    return made, counts


def test_prompts_of_the_band_come_more_often_and_none_is_forgotten() -> None:
    made, counts = taught(2000, outside=0.1)
    # Two of the weights 1 1 1 1 .1 .1 .1 .1, one after the other: 0.4494 and 0.0506 a round.
    for name in PROMPTS:
        expected = 2000 * (0.0506 if name in "abcd" else 0.4494)
        assert abs(counts[name] - expected) < 5 * expected**0.5, (name, counts[name], expected)
    assert made.metrics() == {
        "curriculum_known": 1.0,
        "curriculum_below": 0.25,
        "curriculum_inside": 0.5,
        "curriculum_above": 0.25,
    }


def test_the_draw_follows_from_the_seed_and_what_was_seen() -> None:
    assert taught(50)[1] == taught(50)[1]
    assert taught(50)[1] != taught(50, seed=4)[1]
    made, _ = taught(20)
    ahead = [made.chosen(number) for number in (20, 21)]
    again = sampler()
    again.load_state(json.loads(json.dumps(made.state())))
    assert [again.chosen(number) for number in (20, 21)] == ahead
    for one in (made, again):
        one.learn(earned(20, rewards(ahead[0])), keep=20)
    assert again.state() == made.state()
    assert again.chosen(21) == ahead[1], "a round that was drawn stays, whatever is learnt meanwhile"
    assert again.chosen(22) == made.chosen(22)


def test_success_is_what_the_newest_rounds_say() -> None:
    made = sampler(size=8, newest=0.25, success_at=0.5)
    made.chosen(0)
    made.learn(earned(0, [[1.0, 0.5]] * 7 + [[]]), keep=0)
    assert made.metrics()["curriculum_known"] == 7 / 8, "nothing is known of a prompt whose episodes were dropped"
    made.chosen(1)
    made.learn(earned(1, [[0.4, 0.0]] * 8), keep=1)
    assert sorted(rate for _, rate in made.state()["success"]) == [0.0] + [0.75] * 7


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"curriculum": {"low": 0.9, "high": 0.1}}, "low must not be over high"),
        ({"curriculum": {"outside": 0}}, "greater than 0"),
        ({"curriculum": {}, "prompts_per_round": 2}, "curriculum would choose nothing"),
        ({"curriculum": {}, "prompts_per_round": None}, "curriculum would choose nothing"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], says: str) -> None:
    body = {"prompts": ["a", "b"], "rounds": 1, "prompts_per_round": 1, "max_tokens": 1}
    with pytest.raises(ValidationError, match=says):
        GenerateSettings.model_validate({**body, "reward": {"type": "regex", "pattern": "1"}, **fields})
