"""Steps of a job that samples for itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.jobs.rollouts.rounds import Rounds

small = st.integers(1, 5)


@given(small, small, small, st.integers(0, 12))
def test_each_epoch_of_a_round_has_all_of_it_once(count: int, epochs: int, per_epoch: int, items: int) -> None:
    rounds = Rounds(count, epochs, per_epoch, None)
    sampled = list(range(items))
    for begin in range(0, rounds.total_steps, per_epoch):
        parts = [rounds.part(sampled, step) for step in range(begin, begin + per_epoch)]
        assert [item for part in parts for item in part] == sampled
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(small, small, small, st.none() | small)
def test_every_step_knows_its_round(count: int, epochs: int, per_epoch: int, every: int | None) -> None:
    rounds = Rounds(count, epochs, per_epoch, every)
    steps = range(rounds.total_steps)
    assert [rounds.number(step) for step in steps] == [n for n in range(count) for _ in range(epochs * per_epoch)]
    assert sum(rounds.in_first_epoch(step) for step in steps) == count * per_epoch
    evaluated = [rounds.number(step) + 1 for step in steps if rounds.evaluates_behind(step)]
    assert evaluated == [n for n in range(1, count + 1) if n == count or (every is not None and n % every == 0)]
    for step in steps:
        assert rounds.under_way(rounds.number(step), step)
        assert rounds.under_way(rounds.number(step), step + 1) == (rounds.number(step + 1) == rounds.number(step))


@pytest.mark.parametrize("numbers", [(0, 1, 1, None), (1, 0, 1, None), (1, 1, 0, None), (1, 1, 1, 0)])
def test_nothing_is_no_round(numbers: tuple[int, int, int, int | None]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        Rounds(*numbers)
