"""Chunks cut at their snapshots."""

from __future__ import annotations

from services.engine.requests.request import Request
from services.engine.requests.sampling_params import SamplingParams
from services.engine.scheduler.step_plan import Chunk, segments, split_at_snapshots

PROMPT = tuple(range(100, 130))


def chunk(start: int, end: int, **fields: object) -> Chunk:
    samples = end == len(PROMPT)
    request = Request("a", PROMPT, SamplingParams())
    next_id = -1 if samples else PROMPT[end]
    return Chunk(request, PROMPT[start:end], start, [4, 5], 3, samples, [], 0, next_id=next_id, **fields)


def parts(chunks: object) -> list[tuple[object, ...]]:
    return [(each.start, each.token_ids, each.slot, each.out_slot, each.samples, each.next_id) for each in chunks]


def test_each_link_is_a_chunk_of_its_own() -> None:
    whole = chunk(2, 30, snapshots=[(10, 7), (11, 8)])
    assert parts(segments(whole)) == [
        (2, PROMPT[2:10], 3, 7, False, 110),
        (10, PROMPT[10:11], 3, 8, False, 111),
        (11, PROMPT[11:], 3, 3, True, -1),
    ]
    assert not any(link.snapshots for link in segments(whole))
    unfinished = chunk(0, 20, snapshots=((9, 7),), out_slot=6)
    assert parts(segments(unfinished)) == [(0, PROMPT[:9], 3, 7, False, 109), (9, PROMPT[9:20], 3, 6, False, 120)]


def test_chunks_without_snapshots_stay_as_they_are() -> None:
    plain, marked = chunk(0, 30), chunk(0, 30, snapshots=((9, 7),))
    assert segments(plain)[0] is plain
    several = [plain, plain]
    assert split_at_snapshots(several) is several
    assert [len(each.token_ids) for each in split_at_snapshots([plain, marked, plain])] == [30, 9, 21, 30]
