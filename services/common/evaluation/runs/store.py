"""Runs in the object store.

Layout, under one bucket:
    evaluations/{id}/run.json                            what the run asks (If-None-Match): every attempt asks the same
    evaluations/{id}/{suite:02d}-{target:02d}/{n:06d}    a shard of items with their answers (If-None-Match); suites
                                                         and targets are numbered as in run.json
    evaluations/{id}/result.json                         written last
    evaluations/{id}/gates.json                          what a training job's gates decided by the result
    evaluation-lists/{whose}/{id}                        empty; lists the runs: see evaluation/runs/lists.py
    evaluated/{adapter}/{n:08d}/{whose}/{id}             the same of the runs of a version
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from pydantic import TypeAdapter

from services.common.adapters.evidence import GateEvidence
from services.common.adapters.names import AdapterVersion
from services.common.evaluation.runs.lists import RunList
from services.common.evaluation.runs.records import GateRecord, ItemResult, RunRecord, RunResult, Shard
from services.common.storage.object_store import ObjectNotFound, ObjectStore, PreconditionFailed
from services.common.storage.record_versions import EVALUATION
from services.common.validation.strict_models import StrictModel

SHARD_ITEMS = 64
_ROOT = "evaluations/"
_LISTS = "evaluation-lists/"
_VERSIONS = "evaluated/"
_SHARD: TypeAdapter[Shard] = TypeAdapter(Shard)
Record = TypeVar("Record", bound=StrictModel)


class EvaluationStore:
    """Runs of suites. Thread-safe and blocking; Unavailable when the object store is away."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    # Reading.

    @property
    def all(self) -> RunList:
        """All runs: those that have begun, and those that a gateway has queued."""
        return RunList(self._store, _LISTS)

    def of_version(self, version: AdapterVersion) -> RunList:
        """Runs that a version is a target of, or that its gates decided by."""
        return RunList(self._store, f"{_VERSIONS}{version.name}/{version.version:08d}/")

    def record(self, run: str) -> RunRecord | None:
        """What a run asks; None: it has not begun, or there is none."""
        return self._read(RunRecord, f"{_prefix(run)}run.json", f"evaluation {run}")

    def result(self, run: str) -> RunResult | None:
        """Result of a run; None: it has none yet."""
        return self._read(RunResult, f"{_prefix(run)}result.json", f"result of evaluation {run}")

    def gates(self, run: str) -> tuple[GateEvidence, ...]:
        """What the gates of a training job decided by a run; nothing: they have not, or it is no run of a gate."""
        found = self._read(GateRecord, f"{_prefix(run)}gates.json", f"gates of evaluation {run}")
        return () if found is None else found.gates

    def shard(self, run: str, suite: int, target: int, number: int) -> Shard | None:
        """A shard of items; None: it is not there yet.

        Args:
            suite, target: places in the run's record.
        """
        key = _shard_key(run, suite, target, number)
        try:
            with EVALUATION.reading(key):
                return _SHARD.validate_json(self._store.get(key).data)
        except ObjectNotFound:
            return None

    def items(self, run: str, suite: int, target: int, start: int, limit: int) -> list[ItemResult]:
        """Items ``start`` to ``start + limit`` of a suite with their answers, as far as they are answered."""
        found: list[ItemResult] = []
        for number in range(start // SHARD_ITEMS, (start + limit - 1) // SHARD_ITEMS + 1):
            shard = self.shard(run, suite, target, number)
            if shard is None:
                break
            found += [one for one in shard.results if start <= one.index < start + limit]
        return found

    # Writing.

    def begin(self, record: RunRecord, versions: Iterable[AdapterVersion]) -> RunRecord:
        """Writes what a run asks, unless an earlier attempt has; returns what is written.

        Args:
            versions: the targets that are versions of adapters.
        """
        self.all.add(record.id, record.key_id)
        for version in versions:
            self.of_version(version).add(record.id, record.key_id)
        if self._put(f"{_prefix(record.id)}run.json", record):
            return record
        return self.record(record.id) or record

    def write_shard(self, run: str, suite: int, target: int, number: int, shard: Shard) -> Shard:
        """Writes a shard, unless another owner of the job has; returns what is written."""
        try:
            self._store.put(_shard_key(run, suite, target, number), _SHARD.dump_json(shard), if_absent=True)
        except PreconditionFailed:
            return self.shard(run, suite, target, number) or shard
        return shard

    def remove_shard(self, run: str, suite: int, target: int, number: int) -> None:
        """Removes a shard of a suite that was deleted meanwhile; none there is fine."""
        self._store.delete(_shard_key(run, suite, target, number))

    def decide(self, run: str, gates: GateRecord) -> None:
        """Writes what the gates of a training job decided by a result. May be repeated."""
        self._put(f"{_prefix(run)}gates.json", gates)

    def finish(self, result: RunResult) -> RunResult:
        """Writes a result, unless another owner of the job has; returns what is written."""
        if self._put(f"{_prefix(result.id)}result.json", result):
            return result
        return self.result(result.id) or result

    def add_whole(
        self, record: RunRecord, found: Mapping[tuple[int, int], Sequence[ItemResult]], result: RunResult
    ) -> None:
        """Writes a run that has ended already. It is there once its record is, which is written last.

        Args:
            found: every item, by the places of its suite and its target.
        """
        for (suite, target), items in found.items():
            for number, start in enumerate(range(0, len(items), SHARD_ITEMS)):
                self.write_shard(
                    record.id, suite, target, number, Shard(results=tuple(items[start : start + SHARD_ITEMS]))
                )
        self.finish(result)
        self.begin(record, [])

    def erase(self, suite: str, items: Collection[str]) -> dict[str, int]:
        """Takes away what was answered to items of a suite, in all runs of any of its versions: the item may have been
        in one that is gone. Scores stay, so that results still add up. Returns how many answers of which run. May be
        repeated.

        Args:
            suite: its name.
            items: their ids.
        """
        gone: Counter[str] = Counter()
        for run in self._everybodys():
            record = self.record(run)
            for place, one in enumerate(record.suites if record is not None else ()):
                if record is not None and one.suite.partition("@")[0] == suite:
                    for target in range(len(record.targets)):
                        gone[run] += self._blank(run, place, target, frozenset(items))
        return {run: answers for run, answers in gone.items() if answers}

    def _everybodys(self) -> Iterator[str]:
        after: str | None = None
        while page := self.all.newest(after=after):
            yield from page
            after = page[-1]

    def _blank(self, run: str, suite: int, target: int, items: Collection[str]) -> int:
        blanked = number = 0
        while (shard := self.shard(run, suite, target, number)) is not None:
            results = tuple(one.without_answers() if one.item in items else one for one in shard.results)
            if results != shard.results:
                self._store.put(_shard_key(run, suite, target, number), _SHARD.dump_json(Shard(results=results)))
                changed = (one for one, before in zip(results, shard.results, strict=True) if one != before)
                blanked += sum(len(one.answers) for one in changed)
            number += 1
        return blanked

    # Parts.

    def _put(self, key: str, record: StrictModel) -> bool:
        """False: something is there already."""
        try:
            self._store.put(
                key, json.dumps(EVALUATION.stamped(record.model_dump(mode="json"))).encode(), if_absent=True
            )
        except PreconditionFailed:
            return False
        return True

    def _read(self, model: type[Record], key: str, what: str) -> Record | None:
        try:
            found = json.loads(self._store.get(key).data)
        except ObjectNotFound:
            return None
        with EVALUATION.reading(what):
            return model.model_validate_json(json.dumps(EVALUATION.unstamped(found, what)))


def _prefix(run: str) -> str:
    return f"{_ROOT}{run}/"


def _shard_key(run: str, suite: int, target: int, number: int) -> str:
    return f"{_prefix(run)}{suite:02d}-{target:02d}/{number:06d}"
