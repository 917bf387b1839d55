"""Search for a faster decode step: one thing is changed at a time, against the best so far replayed in turn with it.

A change is kept if it is faster twice. What is kept in the end is measured once more against the table's step, with
adapters too, and loses what costs those; numbers of rows for which it is not faster keep the table. All of it ends with
the time that it is given. Nothing here knows of a device: what runs and measures the steps is a Bench.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from services.engine.executors.tuning.choice import Choice, Config, Subject, describe, name_of

log = structlog.get_logger(__name__)

WORTH = 0.002
"""Part of the step that a change gains at least."""
WORTH_IN_ALL = 0.003
"""Part of the step that all changes of some rows gain at least."""
TOLERANCE = 0.2
"""Largest distance of logits from those of the table, relative to their size. Sums in another order, and rows that one
variant rounds to float8 and another does not, are far below; wrong ones are as far away as any others: 1.4."""
_FIRST, _AGAIN, _LAST = 5, 11, 15
"""Pairs of replays: of a candidate, before it is kept, and of what is kept in the end."""
_CONFIRM_SECONDS = 0.8
"""Seconds that measuring the choice of one number of rows in the end takes, about."""
_COMPILE_SECONDS = 8.0
"""Seconds that are left for compiling what is kept as steps with adapters launch it."""
_LATER = 0.05
"""Weight of numbers of rows that are not the main ones."""

Pairs = Sequence[tuple[float, float]]
"""Seconds of the one and of the other step, replayed in turn."""


class Unfit(Exception):
    """A candidate that does not compile, does not fit the device or cannot be captured."""


class Compilation(Protocol):
    """Kernels of a candidate on their way through the compilers."""

    def done(self) -> bool:
        """True once all are compiled.

        Raises:
            Unfit: one of them does not compile.
        """
        ...


class Bench(Protocol):
    """Steps on a device."""

    def compile(self, rows: int, choice: Choice, *, adapters: bool = False) -> Compilation:
        """Begins to compile what a step launches, of rows that use adapters or none."""
        ...

    def wait(self, seconds: float) -> None:
        """Waits until more is compiled, at most so long."""
        ...

    def times(
        self, rows: int, mine: Choice, theirs: Choice, pairs: int, *, adapters: bool = False, long: bool = False
    ) -> Pairs:
        """Measures two steps.

        Args:
            adapters: the rows use adapters.
            long: the rows have a long context.

        Raises:
            Unfit: the first one does not run.
        """
        ...

    def difference(self, rows: int, choice: Choice) -> float:
        """Distance of logits from those of the table's kernels, relative to their size; infinite if one is not
        finite."""
        ...


@dataclass(frozen=True, slots=True)
class Proposal:
    """Configuration to try, and how much it promises: larger comes first."""

    subject: Subject
    config: Config
    promise: float


Propose = Callable[[int, Subject, Config], Iterable[Proposal]]
"""Proposals around a configuration that some rows were found to be faster with."""


@dataclass(frozen=True, slots=True)
class Band:
    """Result for one captured number of rows."""

    rows: int
    choice: Choice
    """Empty: the table's step is as fast."""
    seconds: float = 0.0
    """Seconds of the table's step; 0: not measured."""
    gain: float = 0.0
    """Part of that which the choice gains."""


@dataclass(slots=True)
class _Trial:
    rows: int
    proposal: Proposal
    weight: float
    compilation: Compilation | None = None


@dataclass(slots=True)
class Tuner:
    """One search.

    Args:
        first: what to try for each number of rows.
        main: numbers of rows that are searched thoroughly; the others are tried with what those found, and searched in
            the time that is left.
        propose: what to try once a configuration was kept.
        clock: seconds, monotonic.
        told: told after each trial: the seconds used, and what was kept, if anything.
        ahead: number of candidates that are compiled ahead.
    """

    bench: Bench
    first: Mapping[int, Sequence[Proposal]]
    main: Sequence[int]
    propose: Propose
    clock: Callable[[], float]
    seconds: float
    adapters: bool
    told: Callable[[float, str], None] = lambda _seconds, _text: None
    ahead: int = 16
    trials: int = 0
    """Number of candidates that were measured."""
    _best: dict[int, dict[Subject, Config]] = field(default_factory=dict)
    _pending: list[_Trial] = field(default_factory=list)
    _seen: set[tuple[int, Subject, Config]] = field(default_factory=set)
    _with_adapters: dict[int, Compilation] = field(default_factory=dict)
    _began: float = 0.0

    def run(self) -> list[Band]:
        """Searches until nothing is left to try or the time is over.

        Returns:
            A result for each number of rows, ascending.
        """
        self._began = self.clock()
        self._best = {rows: {} for rows in self.first}
        for rows, proposals in self.first.items():
            self._add(rows, proposals)
        reserve = _CONFIRM_SECONDS * len(self.first) * (1 + self.adapters) / 2 + _COMPILE_SECONDS * self.adapters
        reserve = min(reserve, self.seconds / 3)
        while self._pending and self._left() > reserve:
            self._compile_ahead()
            ready = next((trial for trial in self._pending[: self.ahead] if self._compiled(trial)), None)
            if ready is None:
                if self._pending:
                    self.bench.wait(max(0.0, min(1.0, self._left() - reserve)))
                continue
            self._pending.remove(ready)
            self._try(ready)
        bands = [self._confirmed(rows) for rows in sorted(self.first, key=lambda rows: (rows not in self.main, rows))]
        return sorted(bands, key=lambda band: band.rows)

    def _left(self) -> float:
        return self._began + self.seconds - self.clock()

    def _add(self, rows: int, proposals: Iterable[Proposal]) -> None:
        weight = 1.0 if rows in self.main else _LATER
        for each in proposals:
            key = (rows, each.subject, each.config)
            if key not in self._seen:
                self._seen.add(key)
                self._pending.append(_Trial(rows, each, weight * each.promise))
        self._pending.sort(key=lambda trial: -trial.weight)

    def _changed(self, trial: _Trial) -> Choice:
        return {**self._best[trial.rows], trial.proposal.subject: trial.proposal.config}

    def _compile_ahead(self) -> None:
        for trial in self._pending[: self.ahead]:
            if trial.compilation is None and self._left() > 0:
                self._begin(trial)

    def _begin(self, trial: _Trial) -> None:
        try:
            trial.compilation = self.bench.compile(trial.rows, self._changed(trial))
        except Unfit as reason:
            self._skip(trial, reason)

    def _compiled(self, trial: _Trial) -> bool:
        try:
            return trial.compilation is not None and trial.compilation.done()
        except Unfit as reason:
            self._skip(trial, reason)
            return False

    def _skip(self, trial: _Trial, reason: Exception) -> None:
        if trial in self._pending:
            self._pending.remove(trial)
        what = trial.proposal
        log.info(
            "candidate skipped",
            rows=trial.rows,
            of=name_of(what.subject),
            config=describe(what.config),
            why=str(reason),
        )

    def _try(self, trial: _Trial) -> None:
        rows, proposal = trial.rows, trial.proposal
        best, choice = self._best[rows], self._changed(trial)
        try:
            # What was kept since it was compiled may have changed kernels beside it.
            trial.compilation = self.bench.compile(rows, choice)
            if not trial.compilation.done():
                self._pending.insert(0, trial)
                self.bench.wait(0.05)
                return
            self.trials += 1
            kept = self._faster(rows, choice, best, attention=proposal.subject == "attention")
            distance = self.bench.difference(rows, choice) if kept else 0.0
            if kept and self.adapters:
                self._with_adapters[rows] = self.bench.compile(rows, choice, adapters=True)
        except Unfit as reason:
            self._skip(trial, reason)
            return
        if kept and not distance <= TOLERANCE:
            self._skip(trial, ValueError(f"its logits are {distance:.3f} away from the table's"))
            kept = False
        text = ""
        if kept:
            best[proposal.subject] = proposal.config
            text = f"{rows} rows: {name_of(proposal.subject)} {describe(proposal.config)}"
            log.info("faster", rows=rows, of=name_of(proposal.subject), config=describe(proposal.config))
            self._add(rows, self.propose(rows, proposal.subject, proposal.config))
            for other in self.first:
                if other != rows and other not in self.main:
                    self._add(other, [Proposal(proposal.subject, proposal.config, proposal.promise / _LATER)])
        self.told(self.clock() - self._began, text)

    def _faster(self, rows: int, choice: Choice, best: Choice, *, attention: bool) -> bool:
        for pairs in (_FIRST, _AGAIN):
            if not _gains(self.bench.times(rows, choice, best, pairs), WORTH):
                return False
        # What is good for short contexts only is not good.
        return not attention or _no_loss(self.bench.times(rows, choice, best, _AGAIN, long=True))

    def _confirmed(self, rows: int) -> Band:
        """What was found for some rows, measured once more; what costs rows with adapters is left out."""
        choice = dict(self._best[rows])
        seconds = gain = 0.0
        try:
            while choice and self._left() > 0:
                pairs = self.bench.times(rows, choice, {}, _LAST)
                seconds, gain = statistics.median(theirs for _, theirs in pairs), _median(pairs)
                if not _gains(pairs, WORTH_IN_ALL):
                    break
                harmless = self._harmless(rows, choice) if self.adapters else choice
                if self._left() > 0 and len(harmless) == len(choice):
                    return Band(rows, choice, seconds, gain)
                choice = harmless
        except Unfit as reason:
            log.warning("the tuned step does not run", rows=rows, why=str(reason))
            return Band(rows, {})
        if self._best[rows]:
            log.info("the table stays", rows=rows, gain=round(gain, 4))
        return Band(rows, {}, seconds)

    def _harmless(self, rows: int, choice: dict[Subject, Config]) -> dict[Subject, Config]:
        """The choice if steps with adapters are no slower by it; else what is so by itself, but for the least of that
        if nothing is harmful alone. {}: no time was left."""
        while not self._with_adapters[rows].done() and self._left() > 0:
            self.bench.wait(min(1.0, self._left()))
        if self._left() <= 0:
            log.warning("no time was left to measure the tuned step with adapters", rows=rows)
            return {}
        if _no_loss(self.bench.times(rows, choice, {}, _LAST, adapters=True)):
            return choice
        alone: list[tuple[float, Subject]] = []
        for subject, config in choice.items():
            if self._left() <= 0:
                return {}
            alone.append((_median(self.bench.times(rows, {subject: config}, {}, _AGAIN, adapters=True)), subject))
        losing = {subject for gain, subject in alone if gain <= -WORTH} or {min(alone, key=lambda each: each[0])[1]}
        return {subject: config for subject, config in choice.items() if subject not in losing}


def _gaps(pairs: Pairs) -> list[float]:
    return [(theirs - mine) / theirs for mine, theirs in pairs]


def _median(pairs: Pairs) -> float:
    return statistics.median(_gaps(pairs))


def _gains(pairs: Pairs, worth: float) -> bool:
    """True if the first step is faster by so much, and in three of four pairs at all: noise is not taken for a gain."""
    gaps = _gaps(pairs)
    return statistics.median(gaps) > worth and statistics.quantiles(gaps, n=4)[0] > 0


def _no_loss(pairs: Pairs) -> bool:
    return _median(pairs) > -WORTH
