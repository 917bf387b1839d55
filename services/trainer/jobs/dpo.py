"""Direct preference optimisation: the loss is a mean over the pairs of the whole optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from services.common.jobs import DpoJob
from services.common.jobs.documents import Document
from services.trainer.host.policy_host import PolicyHost
from services.trainer.jobs.example_run import both_parts
from services.trainer.jobs.preference_run import PreferenceRun, Scores, answered, by_source, gathered, numbered
from services.trainer.losses import dpo_loss
from services.trainer.packing import Microbatch


class DpoRun(PreferenceRun):
    """A prepared DPO job; see `prepare`. Each example is two documents, the chosen one first."""

    def __init__(
        self,
        spec: DpoJob,
        host: PolicyHost,
        parent: Mapping[str, bytes] | None,
        *,
        pairs: Sequence[Sequence[Document]],
        held_out: Sequence[Sequence[Document]],
        notes: Sequence[str],
    ) -> None:
        self._job = spec
        self._references = {}
        # A new adapter adds nothing yet: the policy it starts as is the base model.
        self._starts_elsewhere = spec.reference == "start" and parent is not None
        pairs = numbered(pairs)
        held_out = numbered(held_out, first=2 * len(pairs))
        super().__init__(spec, host, parent, examples=pairs, held_out=held_out, notes=notes)

    @classmethod
    def prepare(cls, spec: DpoJob, host: PolicyHost, parent: Mapping[str, bytes] | None) -> DpoRun:
        """Tokenizes and sizes the job.

        Raises:
            InvalidRequest, DoesNotFit, AdapterRejected: as `prepare_run` says.
        """
        completions = partial(answered, host, spec, lambda pair: (pair.chosen, pair.rejected))
        found, kept, notes = both_parts(spec.split, completions)
        pairs, held_out = ([documents for _, documents in part] for part in (found, kept))
        return cls(spec, host, parent, pairs=pairs, held_out=held_out, notes=notes)

    def _accumulate(self, index: int, interrupt: Callable[[], None]) -> tuple[dict[str, float], int]:
        if self._starts_elsewhere and not self._references:
            self._score_start(interrupt)
        pairs = self.chosen(index)
        microbatches = self._pack_together(pairs)
        references = self._reference_scores(microbatches, interrupt)
        policy = self._score(_apart(microbatches, pairs), self._lora, interrupt)
        for microbatch in microbatches:
            interrupt()
            with self._host.gate.training():
                with self.watch.part("forward"):
                    logprobs = self._sequence_logprobs(microbatch, self._lora)
                    sources = [document.source for document in microbatch.documents]
                    here = dict(zip(sources, logprobs, strict=True))
                    # Where the two completions of a pair do not fit into one microbatch, the one that is elsewhere is a
                    # constant: the pair's loss is taken once for each of them, and each time the gradient is its own.
                    touched = [pair for pair in pairs if any(document.source in here for document in pair)]
                    losses = self._losses({**policy, **here}, references, touched)
                self.add_gradients(losses.sum() / len(pairs))
            policy |= by_source(microbatch, logprobs)
        self._keep_references(references)
        inputs = sum(microbatch.num_tokens for microbatch in microbatches)
        return self._metrics(policy, references, pairs), inputs

    def _score_start(self, interrupt: Callable[[], None]) -> None:
        """The policy the job starts from is gone after the first step: every document is scored before."""
        everything = self._pack_together([*self._examples, *self._held_out])
        self._keep_references(self._score(everything, self._lora, interrupt, part="reference"))

    def _evaluate(self, examples: Sequence[Sequence[Document]], interrupt: Callable[[], None]) -> dict[str, float]:
        if self._starts_elsewhere and not self._references:
            self._score_start(interrupt)
        microbatches = self._pack_together(examples)
        references = self._reference_scores(microbatches, interrupt)
        policy = self._score(microbatches, self._lora, interrupt)
        self._keep_references(references)
        return self._metrics(policy, references, examples)

    def right_already(self, interrupt: Callable[[], None] = lambda: None) -> tuple[float, str, int] | None:
        """See TrainingRun: pairs whose chosen completion is the likelier one."""
        pairs = self._to_examine()
        scores = self._score(self._pack_together(pairs), self._lora, interrupt)
        chosen, rejected = (gathered(scores, documents) for documents in zip(*pairs, strict=True))
        return float((chosen > rejected).float().mean()), "pairs whose chosen completion is the likelier", len(pairs)

    def _losses(self, policy: Scores, references: Scores, pairs: Sequence[Sequence[Document]]) -> Tensor:
        chosen, rejected = (
            gathered(policy, documents) - gathered(references, documents) for documents in zip(*pairs, strict=True)
        )
        return dpo_loss(chosen, rejected, beta=self._job.beta, label_smoothing=self._job.label_smoothing)

    def _metrics(self, policy: Scores, references: Scores, pairs: Sequence[Sequence[Document]]) -> dict[str, float]:
        chosen, rejected = zip(*pairs, strict=True)
        logps_chosen, logps_rejected = gathered(policy, chosen), gathered(policy, rejected)
        rewards_chosen = self._job.beta * (logps_chosen - gathered(references, chosen))
        rewards_rejected = self._job.beta * (logps_rejected - gathered(references, rejected))
        means = {
            "loss": self._losses(policy, references, pairs),
            "rewards_chosen": rewards_chosen,
            "rewards_rejected": rewards_rejected,
            "margin": rewards_chosen - rewards_rejected,
            "accuracy": (rewards_chosen > rewards_rejected).float(),
            "logps_chosen": logps_chosen,
            "logps_rejected": logps_rejected,
        }
        return dict(zip(means, torch.stack([value.mean() for value in means.values()]).tolist(), strict=True))


def _apart(microbatches: Sequence[Microbatch], pairs: Sequence[Sequence[Document]]) -> list[Microbatch]:
    """The microbatches with a completion whose partner is in another one."""
    partner = {}
    for chosen, rejected in pairs:
        partner[chosen.source], partner[rejected.source] = rejected.source, chosen.source
    found = []
    for microbatch in microbatches:
        here = {document.source for document in microbatch.documents}
        if any(partner[source] not in here for source in here):
            found.append(microbatch)
    return found


prepare = DpoRun.prepare
