"""Supervised fine-tuning: the loss is on the completion, a mean over the tokens of the whole optimizer step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from kernels.token_logprobs import TokenScores
from services.common.jobs import DraftJob, SftExample, SftJob
from services.common.jobs.documents import Document
from services.common.jobs.kinds.sft import example_documents
from services.trainer.host.policy_host import PolicyHost
from services.trainer.jobs.adapter_run import AdapterRun, microbatch_tokens
from services.trainer.jobs.example_run import ExampleRun, as_evaluated, as_examined, both_parts
from services.trainer.jobs.passes import Course, Pass, Sharing
from services.trainer.memory.estimate import estimate
from services.trainer.packing import Microbatch, apply_limit, some


def sft_documents(
    host: PolicyHost, spec: SftJob | DraftJob, examples: Sequence[tuple[int, SftExample]], field: str
) -> tuple[list[list[Document]], list[str]]:
    """Documents of each example that is left after the overlong policy, and notes."""
    everything = [
        document
        for index, example in examples
        for document in example_documents(host.codec, spec, example, index, field=field)
    ]
    kept, notes = apply_limit(everything, spec, host.max_train_tokens, field=field)
    if thoughtless := sorted({document.source for document in kept if document.thoughtless}):
        notes.append(
            f"{len(thoughtless)} of the {field} answer without reasoning although thinking is on "
            f"({some(thoughtless)}): they are learnt as answers given without it, and an empty thought is not learnt"
        )
    by_example: dict[int, list[Document]] = {}
    for document in kept:
        by_example.setdefault(document.source, []).append(document)
    return list(by_example.values()), notes


class SftRun(ExampleRun, AdapterRun):
    """A prepared SFT job; see `prepare`."""

    @classmethod
    def prepare(cls, spec: SftJob, host: PolicyHost, parent: Mapping[str, bytes] | None) -> SftRun:
        """Tokenizes and sizes the job.

        Raises:
            InvalidRequest, DoesNotFit, AdapterRejected: as `prepare_run` says.
        """
        examples, held_out, notes = both_parts(spec.split, partial(sft_documents, host, spec))
        return cls(spec, host, parent, examples=examples, held_out=held_out, notes=notes)

    def batch(self, index: int) -> list[Document]:
        """The documents of step ``index``."""
        return [document for example in self.chosen(index) for document in example]

    @property
    def sharing(self) -> Sharing:
        """See SharedRun."""
        return Sharing(self.lora.layout, self._spec.effective_recompute, microbatch_tokens(self._spec, self._host))

    @property
    def shared_working(self) -> int:
        """See SharedRun."""
        work = replace(self._workload, tokens=max(self._largest, microbatch_tokens(self._spec, self._host)))
        memory = estimate(self._host.model.config, work)
        return memory.total - memory.adapter

    def stepping(self, index: int) -> Course[dict[str, float]]:
        """See SharedRun."""
        if not self._is_applied(index):
            what = self._begin_step(index)
            started = time.perf_counter()
            work = self._step_pass(index)
            with self._within_plan(what):
                yield work
                self._end_step(index, work.found, work.inputs, started)
        if self._evaluation_left:
            self._found |= yield from self._evaluating()
        return self._told()

    def _evaluating(self) -> Course[dict[str, float]]:
        """`evaluate` as a course."""
        started = time.perf_counter()
        work = self._pass(self._held_out, trained=False)
        with self._within_plan("the evaluation"):
            yield work
        return as_evaluated(work.found, started)

    def examining(self) -> Course[dict[str, float]]:
        """See SharedRun."""
        work = self._pass(self._to_examine(), trained=False)
        with self._within_plan("looking at the examples"):
            yield work
        return as_examined(work.found)

    def _accumulate(self, index: int, interrupt: Callable[[], None]) -> tuple[dict[str, float], int]:
        work = self._step_pass(index)
        work.alone(interrupt)
        return work.found, work.inputs

    def _evaluate(self, examples: Sequence[Sequence[Document]], interrupt: Callable[[], None]) -> dict[str, float]:
        work = self._pass(examples, trained=False)
        work.alone(interrupt)
        return work.found

    def _step_pass(self, index: int) -> Pass:
        return self._pass(self.chosen(index), trained=True)

    def _pass(self, examples: Sequence[Sequence[Document]], *, trained: bool) -> Pass:
        documents = [document for example in examples for document in example]
        total = sum(document.num_whole for document in documents)
        return Pass(self, self._host, self._pack(documents), total, trained=trained)

    def scores(self, microbatch: Microbatch) -> TokenScores:
        """See ScoredRun."""
        hidden = self._scored_hidden(microbatch, self._lora)
        return self._host.model.token_scores(hidden, microbatch.targets, give_way=self._host.gate.give_way)


prepare = SftRun.prepare
