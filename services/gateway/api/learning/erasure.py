"""Erasure of what was made of traffic: rows of data sets, items of suites with the answers to them in evaluations, and
unfinished jobs that have such rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from services.common.adapters.registry import AdapterRegistry
from services.common.evaluation.runs.store import EvaluationStore
from services.common.evaluation.suites.store import SuiteStore
from services.common.queue.job_queue import JobQueue
from services.gateway.api.training.erased_rows import has_erased_rows, withdrawn
from services.gateway.api.training.leftovers import remove_leftovers
from services.gateway.core.file_store import StoreThreads
from services.gateway.protocol.learning.erasure import JobEnd
from services.learning.datasets.store import DatasetStore


@dataclass(frozen=True, slots=True)
class Erased:
    """What was taken out."""

    datasets: dict[str, int]
    """Rows by version."""
    suites: dict[str, int]
    """Items by version."""
    evaluations: dict[str, int]
    """Answers to such items, by run."""
    jobs: dict[str, JobEnd]


@dataclass(frozen=True, slots=True)
class Erasure:
    """Erases what a mark means. Stores block, and so are called in ``threads``."""

    datasets: DatasetStore
    suites: SuiteStore
    runs: EvaluationStore
    queue: JobQueue
    registry: AdapterRegistry
    threads: StoreThreads

    async def erase(self, mark: str) -> Erased:
        """Takes out what a mark of erasure means. May be repeated; raises Unavailable."""
        datasets = await self.threads.run(self.datasets.erase, mark)
        suites, answers = await self.threads.run(self._suites, mark)
        return Erased(datasets, suites, answers, await self._withdraw())

    def _suites(self, mark: str) -> tuple[dict[str, int], dict[str, int]]:
        """Items by version, and answers by run."""
        answers: Counter[str] = Counter()
        gone: list[tuple[str, Collection[str]]] = []

        def first(suite: str, items: Collection[str]) -> None:
            answers.update(self.runs.erase(suite, items))
            gone.append((suite, items))

        suites = self.suites.erase(mark, first)
        # Once more: a run that asks them at this moment looks for its suite behind what it writes.
        for suite, items in gone:
            answers.update(self.runs.erase(suite, items))
        return suites, dict(answers)

    async def _withdraw(self) -> dict[str, JobEnd]:
        """Ends the jobs that have rows which are gone."""
        ends: dict[str, JobEnd] = {}
        for job in await self.queue.unfinished():
            if not await has_erased_rows(self.datasets, self.threads, job):
                continue
            end = await withdrawn(self.queue, job)
            if end is not None:
                ends[job.id] = end
            if end == "cancelled":  # no owner comes any more who would remove what another one has left
                await remove_leftovers(self.threads, self.registry, job)
        return ends
