"""Supervised fine-tuning: the loss is on the completion, a mean over the tokens of the whole optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from services.common.jobs import SftExample, SftJob
from services.trainer.data import Document, apply_limit, example_documents
from services.trainer.host import PolicyHost
from services.trainer.jobs.example_run import ExampleRun, split_examples
from services.trainer.losses import negative_log_likelihood
from services.trainer.memory import LOGIT_ROWS


def _documents(
    host: PolicyHost, spec: SftJob, examples: Sequence[tuple[int, SftExample]], field: str
) -> tuple[list[list[Document]], list[str]]:
    """Documents of each example that is left after the overlong policy, and notes."""
    everything = [
        document
        for index, example in examples
        for document in example_documents(host.codec, spec, example, index, field=field)
    ]
    kept, notes = apply_limit(everything, spec, host.max_train_tokens, field=field)
    by_example: dict[int, list[Document]] = {}
    for document in kept:
        by_example.setdefault(document.source, []).append(document)
    return list(by_example.values()), notes


class SftRun(ExampleRun):
    """A prepared SFT job; see `prepare`."""

    @classmethod
    def prepare(cls, spec: SftJob, host: PolicyHost, parent: Mapping[str, bytes] | None) -> SftRun:
        """Tokenizes and sizes the job.

        Raises:
            InvalidRequest, DoesNotFit, AdapterRejected: as `prepare_run` says.
        """
        chosen, held, held_field = split_examples(spec)
        examples, notes = _documents(host, spec, chosen, "examples")
        held_out: list[list[Document]] = []
        if held:
            held_out, more = _documents(host, spec, held, held_field)
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
                hidden = self._scored_hidden(microbatch, self._lora)
                part = negative_log_likelihood(self._host.model.token_logprobs(hidden, microbatch.targets), total)
                self._backward(part)
                loss += part.detach()
                correct += self._correct(hidden.detach(), microbatch.targets)
            inputs += microbatch.num_tokens
        return {"loss": float(loss), "token_accuracy": float(correct) / total}, inputs

    def _evaluate(self, interrupt: Callable[[], None]) -> dict[str, float]:
        documents = [document for example in self._held_out for document in example]
        total = sum(document.num_trained for document in documents)
        loss = correct = 0.0
        for microbatch in self._pack(documents):
            interrupt()
            with self._host.gate.training(), torch.no_grad():
                hidden = self._scored_hidden(microbatch, self._lora)
                logprobs = self._host.model.token_logprobs(hidden, microbatch.targets)
                loss += float(negative_log_likelihood(logprobs, total))
                correct += float(self._correct(hidden, microbatch.targets))
        return {"loss": loss, "token_accuracy": correct / total}

    def _correct(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """How many targets are the most likely token."""
        with torch.no_grad():
            hits = torch.zeros((), device=hidden.device)
            for rows, wanted in zip(torch.split(hidden, LOGIT_ROWS), torch.split(targets, LOGIT_ROWS), strict=True):
                hits += (self._host.model.logits(rows).argmax(-1) == wanted).sum()
            return hits
