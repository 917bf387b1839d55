"""Kahneman-Tversky optimisation: the loss is a mean over the examples of the whole optimizer step.

It is no sum over examples alone: the reference point z₀ is a mean over the step. No gradient flows through z₀, so it is
computed first, from the whole step, and what is left is a sum, whose gradient does not depend on the microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from services.common.jobs import KtoExample, KtoJob
from services.common.jobs.documents import Document, completion_document
from services.common.jobs.kinds.kto import LEAST_COMPARED, check_held_out, check_labels
from services.trainer.host.policy_host import PolicyHost
from services.trainer.jobs.example_run import both_parts
from services.trainer.jobs.preference_run import PreferenceRun, Scores, answered, by_source, gathered, numbered
from services.trainer.losses import kto_loss, kto_reference_point


def mismatched(documents: Sequence[Document], limit: int) -> list[Document]:
    """Each completion behind the next example's prompt, the last behind the first's (TRL pairs them so, too).

    A prompt that is too long for this completion loses its beginning.
    """
    found = []
    for index, document in enumerate(documents):
        completion = _part(document, trained=True)
        prompt = _part(documents[(index + 1) % len(documents)], trained=False)[-(limit - len(completion)) :]
        found.append(completion_document(prompt, completion, index))
    return found


def _part(document: Document, *, trained: bool) -> list[int]:
    return [token for token, flag in zip(document.token_ids, document.trained, strict=True) if flag == trained]


class KtoRun(PreferenceRun):
    """A prepared KTO job; see `prepare`. Each example is one document."""

    def __init__(
        self,
        spec: KtoJob,
        host: PolicyHost,
        parent: Mapping[str, bytes] | None,
        *,
        examples: Sequence[tuple[KtoExample, Sequence[Document]]],
        held_out: Sequence[tuple[KtoExample, Sequence[Document]]],
        notes: Sequence[str],
    ) -> None:
        self._job = spec
        self._references = {}
        self._labels = [example.label for example, _ in (*examples, *held_out)]
        super().__init__(
            spec,
            host,
            parent,
            examples=numbered(documents for _, documents in examples),
            held_out=numbered((documents for _, documents in held_out), first=len(examples)),
            notes=notes,
            smallest_step=LEAST_COMPARED,
        )

    @classmethod
    def prepare(cls, spec: KtoJob, host: PolicyHost, parent: Mapping[str, bytes] | None) -> KtoRun:
        """Tokenizes and sizes the job.

        Raises:
            InvalidRequest, DoesNotFit, AdapterRejected: as `prepare_run` says.
        """
        _, held, held_field = split = spec.split
        examples, held_out, notes = both_parts(split, partial(answered, host, spec, lambda each: (each.completion,)))
        check_labels([example.label for example, _ in examples])
        if held:
            check_held_out(len(held_out), "eval_fraction" if held_field == "examples" else held_field)
        return cls(spec, host, parent, examples=examples, held_out=held_out, notes=notes)

    def _accumulate(self, index: int, interrupt: Callable[[], None]) -> tuple[dict[str, float], int]:
        documents = [document for example in self.chosen(index) for document in example]
        reference_point = self._reference_point(documents, interrupt)
        microbatches = self._pack(documents)
        references = self._reference_scores(microbatches, interrupt)
        policy: Scores = {}
        for microbatch in microbatches:
            interrupt()
            with self._host.gate.training():
                with self.watch.part("forward"):
                    logprobs = self._sequence_logprobs(microbatch, self._lora)
                    log_ratios = logprobs - gathered(references, microbatch.documents)
                    losses = self._losses(log_ratios, microbatch.documents, reference_point)
                self.add_gradients(losses.sum() / len(documents))
            policy |= by_source(microbatch, logprobs)
        self._keep_references(references)
        inputs = sum(microbatch.num_tokens for microbatch in microbatches)
        return self._metrics(policy, references, documents, reference_point), inputs

    def _evaluate(self, examples: Sequence[Sequence[Document]], interrupt: Callable[[], None]) -> dict[str, float]:
        documents = [document for example in examples for document in example]
        reference_point = self._reference_point(documents, interrupt)
        microbatches = self._pack(documents)
        references = self._reference_scores(microbatches, interrupt)
        policy = self._score(microbatches, self._lora, interrupt)
        self._keep_references(references)
        return self._metrics(policy, references, documents, reference_point)

    def _reference_point(self, documents: Sequence[Document], interrupt: Callable[[], None]) -> Tensor:
        wrong = mismatched(documents, self._host.max_train_tokens)
        microbatches = self._pack(wrong)
        policy = self._score(microbatches, self._lora, interrupt)
        reference = self._score(microbatches, None, interrupt, part="reference")
        return kto_reference_point(gathered(policy, wrong) - gathered(reference, wrong))

    def _losses(self, log_ratios: Tensor, documents: Sequence[Document], reference_point: Tensor) -> Tensor:
        return kto_loss(
            log_ratios,
            self._label_rows(documents),
            reference_point,
            beta=self._job.beta,
            desirable_weight=self._job.desirable_weight,
            undesirable_weight=self._job.undesirable_weight,
        )

    def _label_rows(self, documents: Sequence[Document]) -> Tensor:
        labels = [self._labels[document.source] for document in documents]
        return torch.tensor(labels, device=self._host.model.device)

    def _metrics(
        self, policy: Scores, references: Scores, documents: Sequence[Document], reference_point: Tensor
    ) -> dict[str, float]:
        logprobs = gathered(policy, documents)
        log_ratios = logprobs - gathered(references, documents)
        found = {
            "loss": float(self._losses(log_ratios, documents, reference_point).mean()),
            "kl": float(reference_point),
        }
        labels = self._label_rows(documents)
        for name, rows in (("desirable", labels), ("undesirable", ~labels)):
            # A step, or a held-out set, may be without one of the two.
            if rows.any():
                found[f"rewards_{name}"] = self._job.beta * float(log_ratios[rows].mean())
                found[f"logps_{name}"] = float(logprobs[rows].mean())
        if "rewards_desirable" in found and "rewards_undesirable" in found:
            found["margin"] = found["rewards_desirable"] - found["rewards_undesirable"]
        return found


prepare = KtoRun.prepare
