"""Supervised fine-tuning: the loss is on the completion, a mean over the tokens of the whole optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from kernels.token_logprobs import TokenScores
from services.common.jobs import DraftJob, SftExample, SftJob
from services.common.jobs.documents import Document
from services.common.jobs.kinds.sft import example_documents
from services.trainer.host.policy_host import PolicyHost
from services.trainer.jobs.adapter_run import AdapterRun
from services.trainer.jobs.example_run import ExampleRun
from services.trainer.losses import negative_log_likelihood
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
        chosen, held, held_field = spec.split
        examples, notes = sft_documents(host, spec, chosen, "examples")
        held_out: list[list[Document]] = []
        if held:
            held_out, more = sft_documents(host, spec, held, held_field)
            notes += [f"evaluation: {note}" for note in more]
        return cls(spec, host, parent, examples=examples, held_out=held_out, notes=notes)

    def batch(self, index: int) -> list[Document]:
        """The documents of step ``index``."""
        return [document for example in self.chosen(index) for document in example]

    def _accumulate(self, index: int, interrupt: Callable[[], None]) -> tuple[dict[str, float], int]:
        documents = self.batch(index)
        total = sum(document.num_trained for document in documents)
        device = self._host.model.device
        loss = torch.zeros((), device=device)
        correct = torch.zeros((), device=device)
        inputs = 0
        for microbatch in self._pack(documents):
            interrupt()
            with self._host.gate.training():
                with self._watch.part("forward"):
                    scores = self._scores(microbatch)
                    part = negative_log_likelihood(scores.logprobs, total)
                self._backward(part)
                loss += part.detach()
                correct += scores.hits.sum()
            inputs += microbatch.num_tokens
        return {"loss": float(loss), "token_accuracy": float(correct) / total}, inputs

    def _evaluate(self, examples: Sequence[Sequence[Document]], interrupt: Callable[[], None]) -> dict[str, float]:
        documents = [document for example in examples for document in example]
        total = sum(document.num_trained for document in documents)
        loss = correct = 0.0
        for microbatch in self._pack(documents):
            interrupt()
            with self._host.gate.training(), torch.no_grad():
                scores = self._scores(microbatch)
                loss += float(negative_log_likelihood(scores.logprobs, total))
                correct += float(scores.hits.sum())
        return {"loss": loss, "token_accuracy": correct / total}

    def _scores(self, microbatch: Microbatch) -> TokenScores:
        hidden = self._scored_hidden(microbatch, self._lora)
        return self._host.model.token_scores(hidden, microbatch.targets, give_way=self._host.gate.give_way)


prepare = SftRun.prepare
