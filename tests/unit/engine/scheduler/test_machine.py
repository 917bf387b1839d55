"""The stand-in of the scheduler's tests: that it keeps what a plan asks for, and sees what it must not ask for."""

from __future__ import annotations

import pytest

from services.engine.scheduler.config import SchedulerConfig
from services.engine.scheduler.step_plan import BlockCopy, Chunk, StateCopy, StepPlan
from tests.unit.engine.machine import ToyRunner, reference, request

PROMPT = tuple(range(1, 22))


def _runner() -> ToyRunner:
    return ToyRunner(SchedulerConfig(4, 64, block_size=4, num_blocks=32, num_slots=12, max_model_len=64))


def _chunk(name: str, end: int, slot: int, blocks: list[int], *, start: int = 0, **changes: object) -> Chunk:
    samples = end == len(PROMPT)
    next_id = -1 if samples else PROMPT[end]
    asked = request(name, PROMPT)
    return Chunk(
        asked,
        PROMPT[start:end],
        start,
        blocks,
        slot,
        samples,
        [],
        0,
        asked.sampling.max_tokens,
        next_id=next_id,
        **changes,
    )


def test_a_second_request_goes_on_behind_a_snapshot_inside_of_a_block() -> None:
    runner = _runner()
    first = _chunk("a", 21, 1, [1, 2, 3, 4, 5, 6], snapshots=((8, 5), (10, 6)))
    runner.execute(StepPlan([first]))
    assert [len(runner.states[slot][1]) for slot in (1, 5, 6)] == [21, 8, 10]
    second = _chunk("b", 21, 2, [1, 2, 7, 8, 9, 10], start=10)
    result = runner.execute(StepPlan([second], [StateCopy(6, 2)], block_copies=[BlockCopy(3, 7)]))
    assert [token.token_id for token in result.tokens] == reference(PROMPT, 1)


def test_without_its_block_copy_it_reads_what_is_not_there() -> None:
    runner = _runner()
    runner.execute(StepPlan([_chunk("a", 21, 1, [1, 2, 3, 4, 5, 6], snapshots=((10, 6),))]))
    with pytest.raises(KeyError):
        runner.execute(StepPlan([_chunk("b", 21, 2, [1, 2, 7, 8, 9, 10], start=10)], [StateCopy(6, 2)]))


@pytest.mark.parametrize(
    "snapshots",
    [
        ((7, 5),),
        ((21, 5),),
        ((12, 5), (12, 6)),
        ((12, 5), (10, 6)),
        ((10, 5), (12, 5)),
        ((10, 1),),
        ((10, 0),),
        ((10, 12),),
        ((10, 9),),
    ],
)
def test_snapshots_in_wrong_places(snapshots: tuple[tuple[int, int], ...]) -> None:
    chunk = _chunk("a", 21, 1, [1, 2, 3, 4, 5, 6], snapshots=snapshots)
    with pytest.raises(AssertionError):
        _runner().execute(StepPlan([chunk], copies_after=[StateCopy(1, 9)]))


@pytest.mark.parametrize("copies", [[(3, 7), (4, 7)], [(3, 7), (7, 8)], [(3, 0)], [(32, 7)], [(3, 8)], [(3, 1)]])
def test_block_copies_to_wrong_places(copies: list[tuple[int, int]]) -> None:
    runner = _runner()
    runner.execute(StepPlan([_chunk("a", 21, 1, [1, 2, 3, 4, 5, 6], snapshots=((10, 6),))]))
    chunk = _chunk("b", 21, 2, [1, 2, 7, 8, 9, 10], start=10)
    with pytest.raises(AssertionError):
        runner.execute(StepPlan([chunk], [StateCopy(6, 2)], block_copies=[BlockCopy(*copy) for copy in copies]))
