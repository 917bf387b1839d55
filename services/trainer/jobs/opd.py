"""On-policy distillation: the student samples, the teacher reads, the student moves towards the teacher.

A round samples completions with the engine that serves, by the adapter as it is then, and trains on them
(services/trainer/jobs/rollouts/rounds.py). With lmbda below 1 some completions are those of the data instead (GKD,
Agarwal et al., arXiv 2306.13649, algorithm 1; there a coin a step, here a coin a prompt).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kernels.divergence import Divergence
from services.common.errors import InvalidRequest
from services.common.jobs import OpdJob
from services.common.jobs.documents import Document, completion_document
from services.trainer.host.policy_host import PolicyHost
from services.trainer.host.rollouts import Completion, RolloutRequest, sampling_rate
from services.trainer.jobs.adapter_run import microbatch_tokens
from services.trainer.jobs.base import RunData, RunState
from services.trainer.jobs.rollouts.rounds import RoundRun, Rounds
from services.trainer.losses import divergence_loss, sampled_reverse_kl
from services.trainer.losses.logprob_gap import SamplerGap
from services.trainer.losses.logprobs import importance_ratio
from services.trainer.packing import Microbatch, largest_microbatch
from services.trainer.sampling.distillation_samples import (
    DistillationRound,
    DistillationSample,
    TokenizedPrompt,
    distillation_round,
    drawn,
    known_part,
    tokenized_prompts,
)
from services.trainer.sampling.prompts import check_stop_tokens, sample_seed
from services.trainer.sampling.rounds.round import completion_tensors, completions_of
from services.trainer.sampling.rounds.round_sampler import RoundSampler
from services.trainer.sampling.teacher import Teacher

_ROUND, _HELD_OUT = "round.", "held_out."
"""Tensors of a checkpoint."""


class OpdRun(RoundRun[TokenizedPrompt]):
    """A prepared distillation job; see `prepare`."""

    measure = "eval_divergence"

    def __init__(
        self,
        spec: OpdJob,
        host: PolicyHost,
        parent: Mapping[str, bytes] | None,
        *,
        teacher: Teacher,
        prompts: Sequence[TokenizedPrompt],
        held_out: Sequence[TokenizedPrompt],
    ) -> None:
        self._job = spec
        self._teacher = teacher
        self._references: list[Completion] = []
        """Completions of those held-out prompts that came without one, once they have been sampled."""
        self._sampled: list[Completion] = []
        self._round = DistillationRound((), 0, 0)
        per_epoch = -(-spec.round_prompts // spec.step_prompts)
        sampler = RoundSampler(
            host.rollouts,
            prompts,
            size=spec.round_prompts,
            seed=spec.seed,
            max_tokens=spec.max_tokens,
            stop_token_ids=spec.stop_token_ids,
        )
        rounds = Rounds(spec.rounds, spec.epochs, per_epoch, spec.eval_every)
        self._plan_rounds(rounds, sampler, spec.sampling_temperature, held_out)
        lengths = [_longest(spec, prompt) for prompt in prompts]
        longest = sorted(lengths, reverse=True)[: spec.step_prompts]
        longest += [_longest(spec, prompt) for prompt in held_out]
        super().__init__(
            spec,
            host,
            parent,
            total_steps=self._rounds.total_steps,
            largest=largest_microbatch(longest, microbatch_tokens(spec, host)),
            notes=(),
            teacher=teacher.work,
        )
        self._teacher = teacher.within(self._graphs, self._largest)
        if teacher.says_the_same(host.model, self._lora):
            raise InvalidRequest(
                f'nothing to learn: the policy that the job starts from is its teacher, "{spec.teacher}"; name another '
                "teacher, or start_from an adapter that is not the teacher",
                param="teacher",
            )

    @classmethod
    def prepare(cls, spec: OpdJob, host: PolicyHost, parent: Mapping[str, bytes] | None) -> OpdRun:
        """Finds the teacher, tokenizes the prompts and sizes the job for the longest completions it may sample.

        Raises:
            InvalidRequest, DoesNotFit, AdapterRejected, Unavailable: as `prepare_run` says; also if the teacher is what
                the job starts from.
        """
        check_stop_tokens(host, spec.stop_token_ids, "stop_token_ids")
        teacher = Teacher.of(spec, host)
        return cls(
            spec,
            host,
            parent,
            teacher=teacher,
            prompts=tokenized_prompts(host, spec, teacher, spec.prompts, "prompts"),
            held_out=tokenized_prompts(host, spec, teacher, spec.eval_prompts, "eval_prompts"),
        )

    def data(self) -> RunData:
        """See TrainingRun."""
        return RunData("prompt", [[sample.document] for sample in self._round.given], len(self._held_out))

    # -- steps

    def batch(self, index: int) -> list[Document]:
        """The documents of step ``index`` of the round that is under way."""
        return [member.document for member in self._members(index)]

    def _members(self, index: int) -> Sequence[DistillationSample]:
        """An even part of the round's completions: how many the teacher can read is not known before."""
        return self._rounds.part(self._round.given, index)

    def _accumulate(self, index: int, interrupt: Callable[[], None]) -> tuple[dict[str, float], int]:
        members = self._members(index)
        total = sum(member.document.num_trained for member in members)
        metrics = self._composition(members) | {"tokens": float(total)}
        if not members:
            return metrics, 0
        device = self._host.model.device
        watch, sums = self.watch, _Sums()
        gap = SamplerGap(device)
        inputs = 0
        for microbatch in self._pack([member.document for member in members]):
            interrupt()
            with self._host.gate.training():
                # The teacher first: of captured forwards only the newest can be gone back through.
                with watch.part("teacher"):
                    own = self._teacher.hidden(microbatch, self._host.gate.give_way)
                with watch.part("forward"):
                    hidden = self._scored_hidden(microbatch, self._lora)
                    if self._job.loss == "divergence":
                        loss = self._divergence(hidden, own, total, sums)
                    else:
                        first = self._rounds.in_first_epoch(index)
                        loss = self._policy_gradient(microbatch, hidden, own, total, sums, gap if first else None)
                self.add_gradients(loss)
            inputs += microbatch.num_tokens
        return metrics | sums.means(total) | gap.metrics(), inputs

    def _divergence(self, hidden: Tensor, own: Tensor, total: int, sums: _Sums) -> Tensor:
        found = self._compare(hidden, own)
        diverged = found.value.sum()
        sums.add(
            loss=diverged,
            divergence=diverged,
            kl_student_teacher=found.student_kl.sum(),
            teacher_agreement=found.agreed.sum(),
        )
        return divergence_loss(found.value, total)

    def _compare(self, hidden: Tensor, own: Tensor) -> Divergence:
        return self._teacher.compare(
            self._host.model,
            hidden,
            own,
            beta=self._job.beta,
            temperature=self._temperature,
            give_way=self._host.gate.give_way,
        )

    def _policy_gradient(
        self,
        microbatch: Microbatch,
        hidden: Tensor,
        own: Tensor,
        total: int,
        sums: _Sums,
        gap: SamplerGap | None,
    ) -> Tensor:
        """Divergences of the distributions that were sampled from, so both sides at that temperature."""
        temperature, give_way = self._temperature, self._host.gate.give_way
        teacher = self._teacher.logprobs(own, microbatch.targets, temperature, give_way)
        logprobs = self._host.model.token_logprobs(hidden, microbatch.targets, temperature, give_way=give_way)
        behaviour = torch.cat([self._behaviour(document) for document in microbatch.documents]).to(hidden.device)
        if gap is not None:
            gap.add(behaviour, logprobs)
        loss = sampled_reverse_kl(logprobs, behaviour, teacher, total)
        sums.add(
            loss=loss * total,
            kl_student_teacher=(behaviour - teacher).sum(),
            ratio_mean=importance_ratio(logprobs - behaviour).sum(),
        )
        return loss

    def _behaviour(self, document: Document) -> Tensor:
        behaviour = self._round.given[document.source].behaviour
        if behaviour is None:
            raise ValueError("a completion of the data has no log-probabilities of a sampler")
        return behaviour

    @property
    def _temperature(self) -> float:
        """Temperature of the comparison."""
        sampled = self._job.loss == "sampled_reverse_kl"
        return self._job.sampling_temperature if sampled else self._job.temperature

    def _composition(self, members: Sequence[DistillationSample]) -> dict[str, float]:
        """Metrics of the composition of a step and its round."""
        metrics = {"cut_completions": float(self._round.cut)}
        if members:
            sampled = [member for member in members if member.sampled]
            metrics |= {
                "on_policy_fraction": len(sampled) / len(members),
                "completion_length_mean": sum(member.document.num_trained for member in members) / len(members),
                "truncated_fraction": sum(member.truncated for member in sampled) / max(1, len(sampled)),
            }
        return metrics

    # -- rounds

    def _begin(self, number: int, interrupt: Callable[[], None]) -> dict[str, float]:
        requests = self._requests(number)
        found = self._sampler.sample(self._lora, requests, self._sampling_temperature, self.watch, interrupt)
        self._receive(number, found)
        return sampling_rate(sum(len(one.token_ids) for one in found), self.watch)

    def _requests(self, number: int) -> list[RolloutRequest]:
        return [
            RolloutRequest(prompt.token_ids, sample_seed(self._job.seed, number, place))
            for place, prompt in enumerate(self._sampler.chosen(number))
            if drawn(self._job, number, place)
        ]

    def _receive(self, number: int, found: list[Completion]) -> None:
        waiting = iter(found)
        chosen = self._sampler.chosen(number)
        sampled = [next(waiting) if drawn(self._job, number, place) else None for place in range(len(chosen))]
        self._round = distillation_round(self._teacher, chosen, sampled)
        self._sampled = found

    # -- what is held out

    def _sample_references(self, interrupt: Callable[[], None]) -> None:
        """Samples the completions of held-out prompts that came without one, once, before the first step."""
        if self._references:
            return
        prompts = [prompt for prompt in self._held_out if prompt.completion is None]
        self._references = self._sample_greedily(prompts, interrupt)

    def _held_out_documents(self) -> list[Document]:
        references = iter(self._references)
        documents: list[Document] = []
        for prompt in self._held_out:
            tokens = prompt.completion
            if tokens is None:
                tokens = known_part(next(references), self._teacher.model.config.vocab_size).token_ids
            if tokens:
                documents.append(completion_document(prompt.token_ids, tokens, len(documents)))
        return documents

    def evaluate(self, interrupt: Callable[[], None] = lambda: None) -> dict[str, float]:
        """See JobRun.evaluate: the mean divergence over the tokens of the held-out completions, ``eval_divergence``."""
        if not self._held_out:
            return {}
        started = time.perf_counter()
        self._sample_references(interrupt)
        documents = self._held_out_documents()
        if not documents:
            raise InvalidRequest(
                "eval_prompts: the teacher knows the first token of none of their completions: give them completions",
                param="eval_prompts",
            )
        sums = _Sums()
        for microbatch in self._pack(documents):
            interrupt()
            with self._within_plan("the evaluation"), self._host.gate.training(), torch.no_grad():
                own = self._teacher.hidden(microbatch, self._host.gate.give_way)
                hidden = self._scored_hidden(microbatch, self._lora)
                found = self._compare(hidden, own)
                sums.add(
                    eval_divergence=found.value.sum(),
                    eval_kl_student_teacher=found.student_kl.sum(),
                    eval_teacher_agreement=found.agreed.sum(),
                )
        total = sum(document.num_trained for document in documents)
        return sums.means(total) | {"eval_seconds": time.perf_counter() - started}

    # -- checkpoints

    def state(self) -> RunState:
        """See JobRun.state: with the completions of a round that is under way, and those of held-out prompts."""
        state = super().state()
        tensors, data = dict(state.tensors), dict(state.data)
        if self._references:
            tensors |= completion_tensors(_HELD_OUT, self._references)
        if self._under_way:
            tensors |= completion_tensors(_ROUND, self._sampled)
            data["round"] = self._number
        return RunState(tensors, data)

    def load_state(self, state: RunState) -> int:
        """See JobRun.load_state."""
        step = super().load_state(state)
        if f"{_HELD_OUT}lengths" in state.tensors:
            self._references = completions_of(_HELD_OUT, state.tensors)
        if "round" in state.data:
            self._number = int(state.data["round"])
            self._receive(self._number, completions_of(_ROUND, state.tensors))
        return step


class _Sums:
    """Sums over tokens by name, on the device until somebody asks."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, **parts: Tensor) -> None:
        for name, part in parts.items():
            before = self._sums.get(name)
            self._sums[name] = part.double() if before is None else before + part.double()

    def means(self, count: int) -> dict[str, float]:
        """Each sum over ``count`` tokens."""
        values = torch.stack(list(self._sums.values())).tolist()
        # Plus 0: what is nothing shall not read -0.
        return {name: value / count + 0.0 for name, value in zip(self._sums, values, strict=True)}


def _longest(spec: OpdJob, prompt: TokenizedPrompt) -> int:
    """Tokens of the longest document that a prompt may lead to."""
    return len(prompt.token_ids) + max(spec.max_tokens, len(prompt.completion or ()))


prepare = OpdRun.prepare
