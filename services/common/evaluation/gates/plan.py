"""Plan of a job's gates: their suites and what the result is compared with, looked up. The gateway refuses by it what
cannot be decided and writes versions in place of names, and the trainer begins with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from services.common.adapters.evidence import ConditionKind
from services.common.adapters.names import BASE, AdapterVersion
from services.common.adapters.registry import AdapterRegistry
from services.common.errors import InvalidRequest, TemperError
from services.common.evaluation.runs.plan import RunPlan, plan_run, resolved
from services.common.evaluation.statistics.margins import items_needed
from services.common.evaluation.statistics.power import smallest_gain
from services.common.evaluation.suites.manifest import SuiteManifest
from services.common.evaluation.suites.names import parse_suite_ref
from services.common.evaluation.suites.store import SuiteStore
from services.common.jobs.base import JobBase
from services.common.jobs.fields.gates import MAX_SUITES, PARENT, SuiteGate
from services.common.jobs.kinds.evaluate import EvalJob

J = TypeVar("J", bound=JobBase)
DISCORDANT = 0.2
"""Share of the items that two targets answer differently, where nothing is known of them."""


@dataclass(frozen=True, slots=True)
class PlannedCondition:
    """Condition of a gate."""

    kind: ConditionKind
    at_least: float
    """See Measured.at_least."""
    suite: int
    """Place among the run's suites."""


@dataclass(frozen=True, slots=True)
class PlannedGate:
    """A gate with its suites and its target."""

    field: str
    gate: SuiteGate
    conditions: Sequence[PlannedCondition]
    against: int
    """Place among the run's targets."""


@dataclass(frozen=True, slots=True)
class GatePlan:
    """Gates of a job, and the one run of suites that decides all of them."""

    gates: Sequence[PlannedGate]
    run: RunPlan
    """Run of all suites; its targets are what the result is compared with, without the result."""

    def warnings(self) -> list[str]:
        """Conditions that suites of this size can hardly show, each with what they could."""
        found = []
        for planned in self.gates:
            gains = sum(one.kind == "gain" for one in planned.conditions)
            level = planned.gate.alpha / (gains if planned.gate.need == "any" else 1)
            for one in planned.conditions:
                suite = self.run.suites[one.suite]
                said = _weak_gain(suite, level) if one.kind == "gain" else _weak_bound(suite, one, planned.gate.alpha)
                if said is not None:
                    found.append(f"{planned.field}: {said}")
        return found

    def pinned(self, spec: J) -> J:
        """The job with versions in place of the names of suites and adapters."""
        changed: dict[str, Any] = {}
        for planned in self.gates:
            names = iter(str(self.run.suites[one.suite].ref) for one in planned.conditions)
            gate = planned.gate
            parts: dict[str, Any] = {
                field: [one.model_copy(update={"suite": next(names)}) for one in given]
                for field, given in (("gain", gate.gain), ("no_loss", gate.no_loss))
            }
            if gate.against != PARENT:
                parts["against"] = str(self.run.job.targets[planned.against])
            changed[planned.field] = gate.model_copy(update=parts)
        return spec.model_copy(update=changed)


def plan_gates(
    spec: JobBase, suites: SuiteStore, registry: AdapterRegistry, base_digest: str, parent: AdapterVersion | None
) -> GatePlan | None:
    """Looks up what a job's gates name; None: it has none. Blocking.

    Args:
        parent: what the job starts from; None: the base, or it is not known yet.

    Raises:
        NotFound, ModelNotFound: a suite or a version does not exist; ``param`` names the field.
        AdapterRejected: a version belongs to another base model than ``base_digest``.
        InvalidRequest: a suite could never decide its condition.
        Unavailable: the object store is away.
    """
    if not spec.gates:
        return None
    places: dict[str, int] = {}
    targets: dict[str, int] = {}
    gates = []
    for field, gate in spec.gates.items():
        against = _against(field, gate, registry, base_digest, parent)
        conditions = []
        for where, kind, name, at_least in _conditions(field, gate):
            suite = _suite(where, name, suites)
            _check(where, suite, at_least)
            place = places.setdefault(str(suite.ref), len(places))
            conditions.append(PlannedCondition(kind, at_least, place))
        gates.append(PlannedGate(field, gate, conditions, targets.setdefault(against, len(targets))))
    if len(places) > MAX_SUITES:
        raise InvalidRequest(
            f"{' and '.join(spec.gates)} name {len(places)} suites, and a run has at most {MAX_SUITES}: name fewer",
            param=next(iter(spec.gates)),
        )
    job = EvalJob(suites=list(places), targets=list(targets), seed=spec.seed, metadata=spec.metadata)
    try:
        return GatePlan(gates, plan_run(job, suites, registry, base_digest))
    except TemperError as error:
        error.param = _origin(error.param, gates, job)
        raise


def _conditions(field: str, gate: SuiteGate) -> list[tuple[str, ConditionKind, str, float]]:
    """Place, kind, suite and bound of each condition, in their order."""
    found: list[tuple[str, ConditionKind, str, float]] = []
    for at, gain in enumerate(gate.gain):
        found.append((f"{field}.gain[{at}]", "gain", gain.suite, gain.min_gain))
    for at, bound in enumerate(gate.no_loss):
        found.append((f"{field}.no_loss[{at}]", "no_loss", bound.suite, -bound.max_loss))
    return found


def _against(
    field: str, gate: SuiteGate, registry: AdapterRegistry, base_digest: str, parent: AdapterVersion | None
) -> str:
    """Target that the result of a job is compared with."""
    if gate.against == PARENT:
        return BASE if parent is None else str(parent)
    return str(resolved(gate.against, registry, base_digest, f"{field}.against")[0])


def _suite(where: str, name: str, suites: SuiteStore) -> SuiteManifest:
    try:
        return suites.get(*parse_suite_ref(name))
    except TemperError as error:
        error.param = f"{where}.suite"
        raise


def _check(where: str, suite: SuiteManifest, at_least: float) -> None:
    """Raises InvalidRequest if no answers to a suite could show a gain of more than ``at_least``, or hide it."""
    if suite.clusters < 2:
        raise InvalidRequest(
            f"{where}: all items of {suite.ref} are of one group, whose spread nobody knows: it cannot decide",
            param=f"{where}.suite",
        )
    if suite.settings.scorer.better == "higher" and abs(at_least) >= 1:
        field = "min_gain" if at_least > 0 else "max_loss"
        raise InvalidRequest(
            f"{where}.{field} is {abs(at_least):g}, and scores of {suite.ref} lie between 0 and 1: give less than 1",
            param=f"{where}.{field}",
        )


def _origin(param: str | None, gates: Sequence[PlannedGate], job: EvalJob) -> str | None:
    """Field of the gates that a field of the run comes from."""
    for planned in gates:
        if param == f"targets[{planned.against}]":
            return f"{planned.field}.against"
        for one in planned.conditions:
            if param is not None and param.startswith(f"suites[{one.suite}]"):
                return planned.field
    return gates[0].field if job.suites else param


def _weak_gain(suite: SuiteManifest, level: float) -> str | None:
    """What is to be said of a suite that shows a gain at ``level`` to hardly anybody."""
    sees = smallest_gain(suite.effective_items, DISCORDANT, alpha=2 * level)  # the test has one side
    if sees is not None:
        return None
    best = smallest_gain(suite.effective_items, 1.0, alpha=2 * level)
    if best is None or 0.5**suite.clusters > level:
        seen = "no gain at all, so that nothing passes"
    else:
        seen = f"differences above {best:.2g} only"
    return f"{suite.ref} has {_size(suite)}: this suite sees {seen} (at alpha {level:.3g}); take one with more items"


def _weak_bound(suite: SuiteManifest, one: PlannedCondition, alpha: float) -> str | None:
    """What is to be said of a suite that cannot rule the loss out even where nothing is lost."""
    if (
        suite.settings.scorer.better == "lower"
        or (needed := items_needed(-one.at_least, alpha)) <= suite.effective_items
    ):
        return None
    sees = 1 - alpha ** (1 / suite.effective_items)
    return (
        f"{suite.ref} has {_size(suite)}: where nothing is gained or lost, this suite sees differences above "
        f"{sees:.2g} only (at alpha {alpha:g}); a max_loss of {-one.at_least:g} needs {needed} items"
    )


def _size(suite: SuiteManifest) -> str:
    return f"{suite.items} items" + ("" if suite.clusters == suite.items else f" in {suite.clusters} groups")
