"""The search, on a bench whose times are a table: never slower, within its time, noise decides nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import pytest

from kernels.gpu.attention.decode import DecodeConfig
from kernels.gpu.configs import Product
from kernels.gpu.linear.skinny_configs import SkinnyConfig
from services.engine.executors.tuning.choice import Choice, Config, Subject
from services.engine.executors.tuning.tuner import Band, Pairs, Proposal, Tuner, Unfit

WIDE, DEEP = Product("none", 18432, 2560), Product("none", 2560, 9216)
NOW = SkinnyConfig("tma", 128, 64, 4, 4)
OTHER = [replace(NOW, stages=stages) for stages in (2, 3, 5, 6)]
STEP = 2.5e-3


Gains = dict[tuple[int, Subject, Config], float]


@dataclass
class Table:
    """Bench of steps whose times are known."""

    gains: Gains
    """Part of the step that a configuration gains; those not named: none."""
    noise: float = 0.0
    adapters_gain: float | Mapping[Subject, float] | None = None
    """The gain of any choice with adapters, or that of what it has for each subject; None: the same as without."""
    long_gain: float | None = None
    wrong: frozenset[Config] = frozenset()
    broken: Mapping[Config, str] = field(default_factory=dict)
    """Configurations that fail, and when: "compile", "done" or "capture"."""
    compile_seconds: float = 0.0
    now: float = 0.0
    measured: list[tuple[int, Choice]] = field(default_factory=list)
    waits: int = 0
    random: random.Random = field(default_factory=lambda: random.Random(0))
    _begun: dict[tuple[int, frozenset[tuple[Subject, Config]], bool], float] = field(default_factory=dict)

    def clock(self) -> float:
        return self.now

    def compile(self, rows: int, choice: Choice, *, adapters: bool = False) -> Compiled:
        self._refuse(choice, "compile")
        key = (rows, frozenset(choice.items()), adapters)
        self._begun.setdefault(key, self.now + self.compile_seconds)
        return Compiled(self, choice, self._begun[key])

    def wait(self, seconds: float) -> None:
        self.waits += 1
        self.now += max(seconds, 1e-3)

    def times(
        self, rows: int, mine: Choice, theirs: Choice, pairs: int, *, adapters: bool = False, long: bool = False
    ) -> Pairs:
        self._refuse(mine, "capture")
        self.measured.append((rows, mine))
        self.now += 0.02 * pairs
        other = self.adapters_gain if adapters else self.long_gain if long else None

        def seconds(choice: Choice) -> float:
            gain = sum(self.gains.get((rows, *each), 0.0) for each in choice.items())
            if isinstance(other, Mapping):
                gain = sum(other.get(subject, 0.0) for subject in choice)
            elif other is not None and choice == mine:
                gain = other
            return STEP * (1 - gain) * (1 + self.noise * self.random.gauss(0, 1))

        return [(seconds(mine), seconds(theirs)) for _ in range(pairs)]

    def difference(self, rows: int, choice: Choice) -> float:
        del rows
        return 1.4 if self.wrong & set(choice.values()) else 0.01

    def begun(self, rows: int, choice: Choice, *, adapters: bool) -> bool:
        return (rows, frozenset(choice.items()), adapters) in self._begun

    def _refuse(self, choice: Choice, when: str) -> None:
        if any(self.broken.get(config) == when for config in choice.values()):
            raise Unfit(f"out of resources: {when}")


@dataclass(frozen=True)
class Compiled:
    table: Table
    choice: Choice
    at: float

    def done(self) -> bool:
        self.table._refuse(self.choice, "done")
        return self.table.now >= self.at


def nothing(rows: int, subject: Subject, config: Config) -> Iterable[Proposal]:
    del rows, subject, config
    return ()


def tune(
    table: Table,
    first: Mapping[int, list[Proposal]],
    *,
    seconds: float = 60.0,
    adapters: bool = False,
    propose: Callable[[int, Subject, Config], Iterable[Proposal]] = nothing,
    main: tuple[int, ...] = (1, 8, 64),
) -> dict[int, Band]:
    bands = Tuner(table, first, main, propose, table.clock, seconds, adapters).run()
    assert [band.rows for band in bands] == sorted(first)
    return {band.rows: band for band in bands}


def proposals(subject: Subject = WIDE, configs: Iterable[Config] = OTHER) -> list[Proposal]:
    return [Proposal(subject, config, 1 / (1 + index)) for index, config in enumerate(configs)]


def test_the_fastest_of_each_product_is_kept_and_gains_add_up() -> None:
    gains: Gains = {
        (8, WIDE, OTHER[0]): 0.01,
        (8, WIDE, OTHER[2]): 0.02,
        (8, DEEP, None): 0.01,
        (8, DEEP, OTHER[1]): -0.5,
    }
    table = Table(gains, noise=0.0005)
    band = tune(table, {8: proposals() + proposals(DEEP, [*OTHER, None])})[8]
    assert band.choice == {WIDE: OTHER[2], DEEP: None}
    assert band.gain == pytest.approx(0.03, abs=0.002)
    assert band.seconds == pytest.approx(STEP, rel=0.01)


@pytest.mark.parametrize("seed", range(20))
def test_noise_decides_nothing(seed: int) -> None:
    """120 candidates as fast as the table, on a noisy device, and one that is slower."""
    configs = [replace(NOW, stages=stages, splits=splits) for stages in range(1, 13) for splits in range(1, 11)]
    gains: Gains = {(8, WIDE, configs[0]): -0.01}
    table = Table(gains, noise=0.003, random=random.Random(seed))
    band = tune(table, {8: proposals(configs=configs)}, seconds=600)[8]
    assert band == Band(8, {}, band.seconds)


def test_what_is_not_faster_in_the_end_is_dropped() -> None:
    """What was kept gains nothing any more when it is measured against the table's step."""
    table = Table({(1, WIDE, OTHER[0]): 0.01})
    kept: list[str] = []

    def told(_seconds: float, found: str) -> None:
        if found:
            kept.append(found)
            table.gains.clear()

    (band,) = Tuner(table, {1: proposals()}, (1,), nothing, table.clock, 60.0, adapters=False, told=told).run()
    assert len(kept) == 1
    assert (band.choice, band.gain) == ({}, 0)


@pytest.mark.parametrize(("with_adapters", "stays"), [(0.0, True), (0.02, True), (-0.01, False)])
def test_a_choice_that_costs_adapters_is_dropped(with_adapters: float, stays: bool) -> None:
    table = Table({(1, WIDE, OTHER[0]): 0.01}, adapters_gain=with_adapters)
    assert bool(tune(table, {1: proposals()}, adapters=True)[1].choice) is stays


@pytest.mark.parametrize(
    ("with_adapters", "kept"),
    [({WIDE: -0.01}, {DEEP}), ({WIDE: -0.01, DEEP: -0.01}, set()), ({WIDE: -0.0015, DEEP: -0.001}, {DEEP})],
)
def test_only_what_costs_adapters_is_dropped(with_adapters: dict[Subject, float], kept: set[Subject]) -> None:
    """By itself, or the worse of two that only cost together."""
    gains: Gains = {(1, WIDE, OTHER[0]): 0.01, (1, DEEP, OTHER[1]): 0.02}
    band = tune(Table(gains, adapters_gain=with_adapters), {1: proposals() + proposals(DEEP)}, adapters=True)[1]
    assert set(band.choice) == kept
    assert band.gain == pytest.approx(0.02 if kept else 0.0)


@pytest.mark.parametrize(("seconds", "stays"), [(60.0, True), (9.0, False)])
def test_steps_with_adapters_are_compiled_before_they_are_measured(seconds: float, stays: bool) -> None:
    table = Table({(1, WIDE, OTHER[0]): 0.01}, compile_seconds=5.0)
    band = tune(table, {1: proposals()}, adapters=True, seconds=seconds)[1]
    assert table.begun(1, {WIDE: OTHER[0]}, adapters=True)
    assert bool(band.choice) is stays
    assert table.now <= seconds


@pytest.mark.parametrize(("long", "stays"), [(0.0, True), (-0.01, False)])
def test_attention_is_no_slower_behind_a_long_context(long: float, stays: bool) -> None:
    config = DecodeConfig(32, 4, 3, 8)
    table = Table({(8, "attention", config): 0.01}, long_gain=long)
    assert bool(tune(table, {8: proposals("attention", [config])})[8].choice) is stays


@pytest.mark.parametrize("when", ["compile", "done", "capture"])
def test_a_candidate_that_does_not_run_is_skipped(when: str) -> None:
    table = Table({(1, WIDE, OTHER[0]): 0.1, (1, WIDE, OTHER[1]): 0.01}, broken={OTHER[0]: when})
    assert tune(table, {1: proposals()})[1].choice == {WIDE: OTHER[1]}


def test_a_faster_candidate_with_other_logits_is_refused() -> None:
    table = Table({(1, WIDE, OTHER[0]): 0.1, (1, WIDE, OTHER[1]): 0.01}, wrong=frozenset({OTHER[0]}))
    assert tune(table, {1: proposals()})[1].choice == {WIDE: OTHER[1]}


@pytest.mark.parametrize("compile_seconds", [0.0, 3.0, 1000.0])
def test_it_ends_in_time_with_what_it_has(compile_seconds: float) -> None:
    configs = [replace(NOW, stages=stages, splits=splits) for stages in range(1, 40) for splits in range(1, 40)]
    table = Table({(1, WIDE, configs[0]): 0.05}, compile_seconds=compile_seconds)
    band = tune(table, {1: proposals(configs=configs), 8: proposals(configs=configs)}, seconds=20.0)[1]
    assert table.now <= 20.0
    assert band.choice == ({WIDE: configs[0]} if compile_seconds < 20 else {})


def test_what_cannot_be_measured_again_in_time_is_dropped() -> None:
    gains: Gains = {(rows, WIDE, config): 0.01 for rows in (1, 8) for config in OTHER}
    table = Table(gains)

    def told(_seconds: float, _found: str) -> None:
        table.now = 61.0

    first = {1: proposals(), 8: proposals()}
    bands = Tuner(table, first, (1, 8), nothing, table.clock, 60.0, adapters=False, told=told).run()
    assert table.measured
    assert not any(band.choice for band in bands)


def test_what_was_kept_leads_to_its_neighbours_and_to_other_numbers_of_rows() -> None:
    better = replace(NOW, stages=7)
    gains: Gains = {(8, WIDE, OTHER[0]): 0.01, (8, WIDE, better): 0.03, (16, WIDE, better): 0.02}
    table = Table(gains)

    def propose(rows: int, subject: Subject, config: Config) -> Iterable[Proposal]:
        assert (subject, config) in {(WIDE, OTHER[0]), (WIDE, better)}
        return [Proposal(WIDE, better, 1.0)] if rows == 8 else []

    bands = tune(table, {8: proposals(), 16: []}, propose=propose, main=(8,))
    assert {rows: band.choice for rows, band in bands.items()} == {8: {WIDE: better}, 16: {WIDE: better}}
    assert len({(rows, frozenset(choice.items())) for rows, choice in table.measured if rows == 16}) == 2
