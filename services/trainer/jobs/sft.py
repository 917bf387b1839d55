"""Supervised fine-tuning: the loss is on the completion, a mean over the tokens of the whole optimizer step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from services.common.jobs import SftExample, SftJob
from services.trainer.data import (
    Document,
    apply_limit,
    example_documents,
    largest_microbatch,
    shuffled,
    split_evaluation,
)
from services.trainer.host import PolicyHost
from services.trainer.jobs.adapter_run import AdapterRun, microbatch_tokens
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


class SftRun(AdapterRun):
    """A prepared SFT job; see `prepare`."""

    def __init__(
        self,
        spec: SftJob,
        host: PolicyHost,
        parent: Mapping[str, bytes] | None,
        *,
        examples: Sequence[Sequence[Document]],
        held_out: Sequence[Sequence[Document]],
        notes: Sequence[str],
    ) -> None:
        self._job = spec
        self._examples = examples
        self._held_out = [document for example in held_out for document in example]
        self._steps_per_epoch = -(-len(examples) // spec.batch_size)
        lengths = sorted((document.length for example in examples for document in example), reverse=True)
        documents_a_step = spec.batch_size * max(len(example) for example in examples)
        super().__init__(
            spec,
            host,
            parent,
            total_steps=spec.epochs * self._steps_per_epoch,
            largest=largest_microbatch(lengths[:documents_a_step], microbatch_tokens(spec, host)),
            notes=notes,
        )

    @classmethod
    def prepare(cls, spec: SftJob, host: PolicyHost, parent: Mapping[str, bytes] | None) -> SftRun:
        """Tokenizes and sizes the job.

        Raises:
            InvalidRequest, DoesNotFit, AdapterRejected: as `prepare_run` says.
        """
        if spec.eval_examples:
            chosen, held = list(enumerate(spec.examples)), list(enumerate(spec.eval_examples))
        else:
            train, evaluate = split_evaluation(len(spec.examples), spec.eval_fraction, spec.seed)
            chosen = [(index, spec.examples[index]) for index in train]
            held = [(index, spec.examples[index]) for index in evaluate]
        examples, notes = _documents(host, spec, chosen, "examples")
        held_out: list[list[Document]] = []
        if held:
            held_out, more = _documents(host, spec, held, "eval_examples" if spec.eval_examples else "examples")
            notes += [f"evaluation: {note}" for note in more]
        return cls(spec, host, parent, examples=examples, held_out=held_out, notes=notes)

    def batch(self, index: int) -> list[Document]:
        """The documents of step ``index``."""
        epoch, position = divmod(index, self._steps_per_epoch)
        count = len(self._examples)
        order = shuffled(count, seed=self._job.seed, epoch=epoch) if self._job.shuffle else range(count)
        start = position * self._job.batch_size
        return [
            document for example in order[start : start + self._job.batch_size] for document in self._examples[example]
        ]

    def step(self, index: int, interrupt: Callable[[], None] = lambda: None) -> dict[str, float]:
        """See JobRun.step. An interrupted evaluation leaves the step applied."""
        metrics = super().step(index, interrupt)
        if self._held_out and self._evaluates_after(index):
            metrics |= self.evaluate(interrupt)
        return metrics

    def _evaluates_after(self, index: int) -> bool:
        every = self._job.eval_every or self._steps_per_epoch
        return (index + 1) % every == 0 or index + 1 == self.total_steps

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

    def evaluate(self, interrupt: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Loss and token accuracy on the held-out examples, as ``eval_loss`` and ``eval_token_accuracy``."""
        started = time.perf_counter()
        total = sum(document.num_trained for document in self._held_out)
        loss = correct = 0.0
        for microbatch in self._pack(self._held_out):
            interrupt()
            with self._host.gate.training(), torch.no_grad():
                hidden = self._scored_hidden(microbatch, self._lora)
                logprobs = self._host.model.token_logprobs(hidden, microbatch.targets)
                loss += float(negative_log_likelihood(logprobs, total))
                correct += float(self._correct(hidden, microbatch.targets))
        return {
            "eval_loss": loss,
            "eval_token_accuracy": correct / total,
            "eval_seconds": time.perf_counter() - started,
        }

    def _correct(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """How many targets are the most likely token."""
        with torch.no_grad():
            hits = torch.zeros((), device=hidden.device)
            for rows, wanted in zip(torch.split(hidden, LOGIT_ROWS), torch.split(targets, LOGIT_ROWS), strict=True):
                hits += (self._host.model.logits(rows).argmax(-1) == wanted).sum()
            return hits
