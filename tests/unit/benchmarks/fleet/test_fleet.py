"""A small fleet in virtual time: what holds for every simulation."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from benchmarks.fleet import scenarios
from benchmarks.fleet.figures import beside_ideal
from benchmarks.fleet.ideal import ideal
from benchmarks.fleet.report import line
from benchmarks.fleet.scenarios import Options
from benchmarks.fleet.simulation import Outcome, Setting, simulate
from benchmarks.fleet.traces import SHAPES, Session, adapter_names, draw
from benchmarks.fleet.virtual import clock
from benchmarks.fleet.virtual.adapters import SharedLink
from tests.unit.benchmarks.fleet.fleets import SMALL

OPTIONS = Options(SMALL, engines=2, gateways=2, seconds=2.0, load=0.4, seed=3)


def drawn(name: str, seed: int = 3, seconds: float = 1.0) -> tuple[Setting, list[Session]]:
    shape = SHAPES[name]
    return (
        Setting(SMALL, 2, 2, seconds, seed=3, names=adapter_names(shape, 2)),
        draw(shape, SMALL, engines=2, seconds=seconds, load=0.4, seed=seed),
    )


def seen(outcome: Outcome) -> list[tuple[str, float | None, float | None, int]]:
    return [(one.name, one.first, one.end, one.cached) for one in outcome.answers]


def test_time_passes_only_while_nothing_is_left_to_do() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        assert await asyncio.to_thread(lambda: 7) == 7
        await asyncio.gather(asyncio.sleep(3600.0), asyncio.sleep(10.0))
        return loop.time()

    assert clock.run(main(), seed=0) == pytest.approx(3600.0)

    async def forever() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="nothing is left to happen"):
        clock.run(forever(), seed=0)


def test_transfers_share_a_link() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        link, ends = SharedLink(total=100.0, each=60.0), list[float]()
        link.transfer(60.0, lambda: ends.append(loop.time()))
        link.transfer(100.0, lambda: ends.append(loop.time()))
        await asyncio.sleep(10.0)
        return ends

    # Half of the link each, then the second alone at its own end's rate.
    assert clock.run(main(), seed=0) == pytest.approx([1.2, 1.2 + 40.0 / 60.0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SHAPES)
def test_every_trace_is_answered_and_equal_seeds_give_equal_answers(name: str) -> None:
    setting, sessions = drawn(name, seconds=8.0 if name == "agents" else 1.0)
    assert drawn(name)[1] == drawn(name)[1]
    assert sessions != drawn(name, seed=4)[1]
    outcome = simulate(setting, sessions)
    assert outcome.answers
    assert all(one.whole and 0 <= one.cached < one.prompt_tokens for one in outcome.answers)
    assert seen(outcome) == seen(simulate(setting, sessions))


def test_a_conversation_goes_on_where_it_was_whichever_gateway_it_meets() -> None:
    setting, sessions = drawn("agents", seconds=20.0)
    later = [one for one in simulate(setting, sessions).answers if int(one.name.split(".")[1])]
    assert sum(one.cached for one in later) > 0.75 * sum(one.prompt_tokens for one in later)


def test_no_fleet_finds_more_than_its_ideal() -> None:
    setting, sessions = drawn("chat", seconds=4.0)
    best = ideal(setting, sessions)
    found = beside_ideal(setting, simulate(setting, sessions), best)
    assert 0.5 < found["hit_of_ideal"] <= 1.02, "sessions go on at other times, so it is no bound to the token"
    assert all(one.whole for one in best.placed.answers)
    assert "hit" in line({"scenario": "trace", "trace": "chat"} | found)


def test_engines_that_are_killed_lose_no_request_without_a_token() -> None:
    found = scenarios.failure(replace(OPTIONS, engines=4, load=2.0), share=0.5, name="shared-prompts")
    assert found["killed"] == 2
    assert found["sent_again"] > 0
    assert found["lost_without_a_token"] == 0
    assert found["whole"] + found["cut_after_a_token"] == found["requests"]


def test_engines_that_start_are_found_and_work() -> None:
    found = scenarios.growth(replace(OPTIONS, load=0.5), share=1.0)
    assert (found["added"], found["lost"]) == (2, 0)
    assert 1 <= found["that_worked"] <= 2
    assert found["until_first_step_s"]["p50"] > SMALL.start_seconds


def test_a_new_version_is_everywhere_when_the_store_has_sent_it_to_all() -> None:
    found = scenarios.spread(OPTIONS, links=(1e9, 100e9))
    rows = found["rows"]
    slow, fast = (row["everywhere_s"] for row in rows)
    assert 2 * SMALL.adapter_bytes / 1e9 < slow < 2.0
    assert SMALL.adapter_bytes / SMALL.engine_link < fast < slow
    assert not any(row["failed"] for row in rows)
    assert [row["engines_with_it"] for row in rows] == [2, 2]
    assert 1 <= found["popular"]["engines_with_it"] <= 2
    assert 0.0 < found["popular"]["everywhere_s"] < slow
    assert "popular" in line(found)


def test_throughput_and_latency_are_told_by_size_and_load() -> None:
    found = scenarios.scale(replace(OPTIONS, seconds=4.0), drawn=4)
    assert list(found["output_tokens_per_s"]) == ["1", "2"]
    assert len(found["per_doubling"]) == 1
    rows = scenarios.load(replace(OPTIONS, seconds=10.0), loads=(0.2, 0.8))["rows"]
    assert rows[0]["output_tokens_per_s"] < rows[1]["output_tokens_per_s"]
