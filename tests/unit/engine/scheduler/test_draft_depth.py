"""The choice of draft tokens: by what they cost and bring, for good where they do not pay."""

from __future__ import annotations

import pytest

from services.engine.scheduler.draft_depth import Acceptance, DraftDepth, StepCosts
from services.engine.scheduler.step_plan import MOST_VERIFYING

COUNTS = (1, 4, 16, 32)


def costs(row: float, draft: float = 0.05) -> StepCosts:
    """A step of plain decodes takes 1, each further row of a chunk ``row`` more at 1 chunk and 4 times that at 32."""
    return StepCosts({(n, count): 1 + count * (row * (1 + 3 * n / 32) + draft) for n in COUNTS for count in range(5)})


def shares(*values: float) -> Acceptance:
    return Acceptance("a", list(values))


def learn(depth: DraftDepth, one: Acceptance, accepted: int, chunks: int = 40) -> None:
    for _ in range(chunks):
        depth.add(one, 4, accepted)


def test_the_number_with_the_most_tokens_a_second() -> None:
    good, bad = shares(0.95, 0.9, 0.9, 0.9), shares(0.5, 0.2, 0.1, 0.0)
    cheap = DraftDepth(4, costs(0.02))
    assert cheap.choose([good]) == 4
    assert cheap.choose([bad]) == 1, "1.5 tokens in 1.07; a second one is right in one of ten"
    assert DraftDepth(2, costs(0.02)).choose([good]) == 2
    dear = DraftDepth(4, costs(0.3))
    assert dear.choose([good]) == 4
    assert dear.choose([bad]) == 1
    assert dear.choose([good] * 32) == 0, "1.2 for each further row"
    assert dear.choose([bad] * 8) == 0


def test_plain_steps_unless_draft_tokens_win() -> None:
    """By two in a hundred at least; with sequences beside it that have none, too."""
    even = StepCosts({(1, 0): 1.0, (1, 1): 1.495, (2, 0): 1.0, (2, 1): 1.4})
    half = shares(0.5, 0.0, 0.0, 0.0)
    assert DraftDepth(4, even).choose([half]) == 0, "1.5 tokens in 1.495"
    assert DraftDepth(4, even).choose([half, half]) == 1, "3 tokens in 1.4 instead of 2 in 1"
    assert DraftDepth(4, even).choose([half, None]) == 0, "2.5 tokens in 1.4"
    assert DraftDepth(4, even).choose([None, None]) == 0
    assert DraftDepth(4, even).choose([]) == 0


def test_numbers_of_chunks_between_those_measured() -> None:
    measured = StepCosts({(1, 0): 1.0, (1, 1): 1.2, (9, 0): 2.0, (9, 1): 5.2, (20, 0): 3.0})
    assert measured.seconds(1, 0) == 1.0
    assert measured.seconds(5, 0) == pytest.approx(1.5)
    assert measured.seconds(5, 1) == pytest.approx(2.8 + 0.4)
    assert measured.seconds(9, 1) == pytest.approx(5.2)
    assert measured.seconds(10, 1) is None
    assert measured.seconds(1, 2) is None
    right = shares(1.0, 1.0, 1.0, 1.0)
    depth = DraftDepth(4, measured)
    assert depth.choose([right]) == 1, "two draft tokens were not measured"
    assert depth.choose([right] * 9) == 0
    assert depth.choose([right] * 10) == 0, "nor was one for more than 9 chunks"
    assert depth.choose([right] * (MOST_VERIFYING + 1)) == 0
    with pytest.raises(ValueError, match=r"steps of \[2\] decodes"):
        StepCosts({(1, 0): 1.0, (2, 1): 1.0})


def test_shares_follow_what_is_accepted() -> None:
    one = shares(0.5, 0.5, 0.5, 0.5)
    one.add(4, 1, 0.5)
    assert one.shares == [0.75, 0.25, 0.5, 0.5], "nothing is known behind the rejected one"
    one.add(1, 1, 0.5)
    assert one.shares == [0.875, 0.25, 0.5, 0.5]
    assert one.most_tokens(2) == pytest.approx(2 + 0.25 + (0.25 * 0.75 / 4) ** 0.5), (
        "the first may well be always right"
    )
    with pytest.raises(ValueError, match="0 shares"):
        Acceptance("a", [])
    with pytest.raises(ValueError, match="1 shares, and 2 places"):
        Acceptance("a", [0.5], seen=[0, 0])


def test_a_block_of_sixteen() -> None:
    """Of the numbers that were measured; at places far behind as much is hoped for as at the fourth."""
    measured = {(1, 0): 1.0} | {(1, count): 1.1 + 0.01 * count for count in (1, 2, 3, 4, 6, 8, 12, 16)}
    depth = DraftDepth(16, StepCosts(measured))
    one = depth.begin("a", 0)
    assert one is not None
    assert (len(one.shares), one.shares[15]) == (16, one.shares[3])
    for _ in range(60):
        depth.add(one, 16, 16)
    assert depth.choose([one]) == 16
    for _ in range(60):
        depth.add(one, 16, 5)
    assert depth.choose([one]) == 6, "five of six count, and five alone were not measured"


def test_a_sequence_whose_draft_tokens_are_wrong_gives_up() -> None:
    depth = DraftDepth(4, costs(0.1))
    one, other = depth.begin("a", 0), depth.begin("b", 0)
    assert one is not None
    assert other is not None
    assert not depth.gives_up(one)
    learn(depth, one, 0, 11)
    assert not depth.gives_up(one), "too early to say"
    learn(depth, one, 0, 10)
    learn(depth, other, 4, 30)
    assert depth.gives_up(one)
    assert not depth.gives_up(other)


def test_a_sequence_that_none_are_drawn_for_gives_up() -> None:
    depth = DraftDepth(4, costs(0.1))
    one = shares(0.9, 0.9, 0.9, 0.9)
    for _ in range(31):
        depth.skip([one, None])
    assert not depth.gives_up(one)
    assert depth.choose([one]) > 0
    for _ in range(31):
        assert depth.choose([one] + [None] * MOST_VERIFYING) == 0
    assert not depth.gives_up(one), "it was drawn for in between"
    depth.skip([one])
    assert depth.gives_up(one)


def test_sequences_of_an_adapter_that_does_not_pay_begin_without() -> None:
    """But one of 16, so that it is found if that changes. Others begin as before."""
    depth = DraftDepth(4, costs(0.1))
    first, other = depth.begin("bad", 0), depth.begin("good", 0)
    assert first is not None
    assert other is not None
    learn(depth, other, 3, 40)
    learn(depth, first, 0, 400)
    begun = [depth.begin("bad", 0) for _ in range(48)]
    assert [place for place, one in enumerate(begun) if one is not None] == [15, 31, 47]
    probe = begun[15]
    assert probe is not None
    assert depth.choose([probe]) > 0
    assert depth.begin("good", 0) is not None
    assert depth.begin("unknown", 0) is None, "as of all"
    learn(depth, probe, 4, 100)
    assert depth.begin("bad", 0) is not None


def test_a_crowd_begins_without() -> None:
    """Where steps of as many as there are would be slower with draft tokens, and where none are checked at all."""
    depth = DraftDepth(4, costs(0.01))
    assert depth.begin("a", MOST_VERIFYING - 1) is not None
    assert not any(depth.begin("a", MOST_VERIFYING) for _ in range(20)), "not even to try again"
    depth = DraftDepth(4, costs(0.3))
    assert depth.begin("a", 3) is not None
    assert not any(depth.begin("a", MOST_VERIFYING - 1) for _ in range(20))


def test_what_an_adapter_had_is_expected_of_the_next() -> None:
    depth = DraftDepth(4, costs(0.2))
    one = depth.begin("a", 0)
    assert one is not None
    learn(depth, one, 1, 300)
    following, stranger = depth.begin("a", 0), depth.begin("b", 0)
    assert following is not None
    assert stranger is not None
    assert following.shares[0] > 0.95
    assert following.shares[1] < 0.05
    assert depth.choose([following]) == 1
    assert stranger.shares == pytest.approx(following.shares, abs=0.05), "as of all, where nothing else is known"


def test_adapters_are_forgotten() -> None:
    depth = DraftDepth(4, costs(0.1))
    for number in range(1000):
        depth.begin(f"a{number}", 0)
    assert len(depth._adapters) == 256
    assert "a999" in depth._adapters


def test_without_costs_the_number_is_fixed() -> None:
    depth = DraftDepth(3, None)
    one = depth.begin("a", 1000)
    assert one is not None
    learn(depth, one, 0, 200)
    assert not depth.gives_up(one)
    assert depth.choose([one, None]) == 3
    assert depth.choose([None]) == 0
    assert depth.choose([one] * (MOST_VERIFYING + 1)) == 0
    assert depth.begin("a", 0) is not None
