"""The scheduler in simulated time: what its rules are for, and what they must not cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.lib.multiturn_workloads import GENERATORS, Sizes
from benchmarks.serving.scheduling import CONFIG, at_once, beside, conversations, decode_rate, mixed, simulate

BY_RANK = replace(CONFIG, short_prefill=0)
"""No prompt is short."""


def test_saturated_steps_are_as_without_short_prompts() -> None:
    found, by_rank = (simulate(config, at_once("64x512x16")) for config in (CONFIG, BY_RANK))
    assert found == by_rank
    assert found.prefills[1:-1] == [3840] * (len(found.prefills) - 2)


def test_the_rate_of_a_case() -> None:
    rate, found = decode_rate(CONFIG, "8x64x32")
    assert found.out_tokens == 8 * 32
    assert rate == pytest.approx(8 / 0.003, rel=0.2)


def test_turns_beside_long_prompts_come_sooner_and_nothing_is_lost_where_prompts_pile_up() -> None:
    sooner, later = (simulate(config, beside(turns=80), until=3.0) for config in (CONFIG, BY_RANK))
    assert sorted(sooner.warm)[-3] < 0.75 * sorted(later.warm)[-3]
    whole, by_rank = (simulate(config, mixed(128), until=1.5) for config in (CONFIG, BY_RANK))
    assert whole.out_tokens / whole.seconds > 0.98 * by_rank.out_tokens / by_rank.seconds


def test_conversations_go_on_from_what_was_said() -> None:
    (workload,) = GENERATORS["a"](Sizes(vocab_size=1000, sessions=0.1, tokens=0.25))
    found = simulate(CONFIG, conversations(workload))
    assert (len(found.cold), len(found.warm)) == (12, 18)
    assert max(found.warm) < max(found.cold)
