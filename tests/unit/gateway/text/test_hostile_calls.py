"""What the chat template writes of calls with hostile arguments is read as these calls; grammars allow nothing else."""

from __future__ import annotations

import random

from tests.unit.gateway.call_checks import check_allowed, check_generated, check_read
from tests.unit.gateway.hostile_calls import draw

COUNT = 100


def test_drawn_calls_are_read_as_they_are() -> None:
    chance = random.Random(1)
    for _ in range(COUNT):
        check_read(draw(chance), chance)


def test_grammars_allow_drawn_calls() -> None:
    chance = random.Random(2)
    allowed = sum(check_allowed(draw(chance)) for _ in range(COUNT))
    assert allowed > COUNT // 2


def test_what_the_grammars_allow_is_valid() -> None:
    chance = random.Random(3)
    for _ in range(COUNT):
        check_generated(draw(chance), chance)
