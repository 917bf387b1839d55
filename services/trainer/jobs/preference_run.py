"""Base of DPO and KTO: log-probabilities of whole completions, under the policy and under its reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from services.common.errors import InvalidRequest
from services.common.jobs import AskedExample, DpoJob, KtoJob
from services.common.jobs.documents import Document, answer_documents, placed
from services.engine.models.lora.trainable import LoraParams
from services.trainer.host.policy_host import PolicyHost
from services.trainer.jobs.adapter_run import AdapterRun, microbatch_tokens
from services.trainer.jobs.base import RunState
from services.trainer.jobs.example_run import ExampleRun
from services.trainer.losses import sequence_sums
from services.trainer.packing import Microbatch, overlong, pack_together, some
from services.trainer.timers import Part

X = TypeVar("X", bound=AskedExample)
Scores: TypeAlias = dict[int, Tensor]
"""Log-probability (scalar, float32, detached) of each document's completion, by ``Document.source``."""


def answered(
    host: PolicyHost,
    spec: DpoJob | KtoJob,
    completions: Callable[[X], Sequence[str]],
    examples: Sequence[tuple[int, X]],
    field: str,
) -> tuple[list[tuple[X, list[Document]]], list[str]]:
    """The documents of each example that is left after the overlong policy, and notes.

    Raises:
        InvalidRequest: an example cannot be rendered or is over the limit, or none is left; it is named.
    """
    limit = host.max_train_tokens
    kept: list[tuple[X, list[Document]]] = []
    dropped: list[int] = []
    for index, example in examples:
        with placed(f"{field}[{index}]"):
            documents = answer_documents(host.codec, spec, example, completions(example), index)
            if len({document.token_ids for document in documents}) < len(documents):
                raise InvalidRequest("chosen and rejected are the same tokens: the pair prefers nothing, leave it out")
        longest = max(document.length for document in documents)
        if longest <= limit:
            kept.append((example, documents))
        elif spec.overlong == "drop":
            dropped.append(index)
        else:
            raise overlong(f"{field}[{index}]", longest, limit, "shorten it, or set overlong to drop")
    if not kept:
        raise InvalidRequest(f"none of the {field} is within the limit of {limit} tokens", param=field)
    notes = [f"{len(dropped)} examples over {limit} tokens dropped: {field} {some(dropped)}"] if dropped else []
    return kept, notes


def numbered(examples: Iterable[Sequence[Document]], first: int = 0) -> list[list[Document]]:
    """The same documents, with ``source`` counting up from ``first``."""
    found = []
    for documents in examples:
        found.append([dataclasses.replace(document, source=first + at) for at, document in enumerate(documents)])
        first += len(documents)
    return found


class PreferenceRun(ExampleRun, AdapterRun):
    """A job whose loss is of sequence log-probabilities against a frozen reference.

    The reference's log-probabilities never change, so each is computed once, in the step that needs it first, and kept
    in the checkpoint: a resumed job goes on with the same bits.
    """

    _references: dict[int, float]
    """Reference log-probabilities by ``Document.source``, which is unique over the documents of the run, held-out ones
    included."""

    def _sequence_logprobs(self, microbatch: Microbatch, lora: LoraParams | None) -> Tensor:
        """[D] float32: log-probability of each document's completion."""
        hidden = self._scored_hidden(microbatch, lora)
        logprobs = self._host.model.token_logprobs(hidden, microbatch.targets, give_way=self._host.gate.give_way)
        return sequence_sums(logprobs, [document.num_trained for document in microbatch.documents])

    def _score(
        self,
        microbatches: Sequence[Microbatch],
        lora: LoraParams | None,
        interrupt: Callable[[], None],
        *,
        part: Part = "forward",
    ) -> Scores:
        """Scores without gradients."""
        scores: Scores = {}
        for microbatch in microbatches:
            interrupt()
            with self._host.gate.training(), self.watch.part(part), torch.no_grad():
                scores |= by_source(microbatch, self._sequence_logprobs(microbatch, lora))
        return scores

    def _reference_scores(self, microbatches: Sequence[Microbatch], interrupt: Callable[[], None]) -> Scores:
        """Under the base model, or as they are known already."""
        missing = [
            microbatch
            for microbatch in microbatches
            if any(document.source not in self._references for document in microbatch.documents)
        ]
        device = self._host.model.device
        known = {
            document.source: torch.tensor(self._references[document.source], device=device)
            for microbatch in microbatches
            for document in microbatch.documents
            if document.source in self._references
        }
        return self._score(missing, None, interrupt, part="reference") | known

    def _keep_references(self, scores: Scores) -> None:
        """At the end of a step, so that an interrupted one leaves nothing behind."""
        fresh = {source: value for source, value in scores.items() if source not in self._references}
        if fresh:
            self._references |= dict(zip(fresh, torch.stack(list(fresh.values())).tolist(), strict=True))

    def _pack_together(self, examples: Sequence[Sequence[Document]]) -> list[Microbatch]:
        return pack_together(examples, microbatch_tokens(self._spec, self._host), self._host.model.device)

    def state(self) -> RunState:
        """See JobRun.state."""
        state = super().state()
        references = {
            "reference.sources": torch.tensor(list(self._references), dtype=torch.int64),
            "reference.logprobs": torch.tensor(list(self._references.values()), dtype=torch.float32),
        }
        return RunState(state.tensors | references, state.data)

    def load_state(self, state: RunState) -> int:
        """See JobRun.load_state."""
        step = super().load_state(state)
        sources, logprobs = state.tensors["reference.sources"], state.tensors["reference.logprobs"]
        self._references = dict(zip(sources.tolist(), logprobs.tolist(), strict=True))
        return step


def by_source(microbatch: Microbatch, values: Tensor) -> Scores:
    """[D], detached, by document."""
    sources = [document.source for document in microbatch.documents]
    return dict(zip(sources, values.detach().unbind(), strict=True))


def gathered(scores: Mapping[int, Tensor], documents: Iterable[Document]) -> Tensor:
    """[D] of the documents, in their order."""
    return torch.stack([scores[document.source] for document in documents])
