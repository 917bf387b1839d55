"""Group-relative policy optimisation on scored rollouts.

The importance ratio is against the policy that sampled: the log-probabilities that came with the rollout. Rollouts
that came as text (or without log-probabilities) are scored under the policy the job starts from, and counted as
`recomputed_rollouts`: re-tokenized text is not always what was sampled.

A group whose rewards are all equal has no advantage and is skipped. If that is true of every group, the job fails: a
version that is identical to its parent would look like progress.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.common.errors import InvalidRequest
from services.common.jobs import GrpoCompletion, GrpoGroup, GrpoJob
from services.trainer.data import (
    Document,
    Microbatch,
    check_thinking,
    completion_document,
    completion_tokens,
    largest_microbatch,
    prompt_tokens,
)
from services.trainer.host import PolicyHost
from services.trainer.jobs.adapter_run import AdapterRun, microbatch_tokens
from services.trainer.jobs.base import RunState
from services.trainer.losses import group_advantages, policy_loss


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion of a group that has spread. ``document.source`` is its index among the run's rollouts."""

    document: Document
    advantage: float
    temperature: float
    behaviour: Tensor | None
    """[trained tokens] float32 on the CPU, None until recomputed."""


@dataclass(frozen=True, slots=True)
class RewardStats:
    """Of all rollouts of the job, those in skipped groups included: how good the policy that sampled them is."""

    mean: float
    std: float
    """Unbiased; 0 for a single rollout."""
    groups_skipped: int

    @classmethod
    def of(cls, rewards: Sequence[float], groups_skipped: int) -> RewardStats:
        mean = math.fsum(rewards) / len(rewards)
        variance = math.fsum((reward - mean) ** 2 for reward in rewards) / max(1, len(rewards) - 1)
        return cls(mean, math.sqrt(variance), groups_skipped)


def job_groups(spec: GrpoJob) -> list[GrpoGroup]:
    """The job's groups, whichever way they were given.

    Raises:
        InvalidRequest: there are completion ids left, which only the gateway can resolve.
    """
    if spec.completion_ids:
        raise InvalidRequest(
            "completion_id rollouts must be submitted through the gateway, which fetches their tokens from the engine",
            param="rollouts" if spec.rollouts is not None else "groups",
        )
    if spec.groups is not None:
        return spec.groups
    completions = [
        GrpoCompletion(text=text, reward=reward)
        for text, reward in zip(spec.completions or (), spec.rewards or (), strict=True)
    ]
    return [GrpoGroup(prompt=spec.prompt, completions=completions)]


@contextlib.contextmanager
def _located(where: str) -> Iterator[None]:
    """Puts the rollout's place in front of what is wrong with it."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(f"{where}: {error.message}", param=where) from error


def _rollouts(host: PolicyHost, spec: GrpoJob, where: str, group: GrpoGroup, first: int) -> list[Rollout] | None:
    """The group's rollouts, numbered from ``first``; None if it has no spread."""
    advantages = group_advantages([completion.reward for completion in group.completions], scale=spec.scale_rewards)
    if advantages is None:
        return None
    limit, vocab = host.max_train_tokens, host.model.config.vocab_size
    if group.prompt_token_ids is not None:
        prompt = group.prompt_token_ids
    else:
        asked = group.messages if group.prompt is None else group.prompt
        with _located(where):
            prompt = prompt_tokens(host.codec, spec, asked or "", group.tools)
    if not prompt:
        raise InvalidRequest(f"{where}: the prompt has no tokens", param=where)
    rollouts = []
    for number, (completion, advantage) in enumerate(zip(group.completions, advantages, strict=True)):
        at = f"{where}.completions[{number}]"
        tokens = completion.token_ids
        if tokens is None:
            tokens = completion_tokens(host.codec, completion.text or "", ends=not completion.truncated)
            if spec.prompt_format == "chat" and not completion.truncated:
                with _located(at):
                    check_thinking(host.codec, prompt, tokens)
        if not tokens:
            raise InvalidRequest(f"{at} has no tokens: an empty completion must not be truncated", param=at)
        if max(*prompt, *tokens) >= vocab:
            raise InvalidRequest(f"{at}: a token id is over the model's vocabulary of {vocab}", param=at)
        document = completion_document(prompt, tokens, first + number)
        if document.length > limit:
            raise InvalidRequest(
                f"{at} has {document.length} tokens with its prompt, over this engine's limit of {limit} for training "
                "(max_train_tokens): leave it out",
                param=at,
            )
        rollouts.append(
            Rollout(
                document=document,
                advantage=advantage,
                # A greedy rollout's log-probabilities are of the plain distribution.
                temperature=completion.temperature or 1.0,
                behaviour=None if completion.logprobs is None else torch.tensor(completion.logprobs),
            )
        )
    return rollouts


class GrpoRun(AdapterRun):
    """A prepared GRPO job; see `prepare`."""

    def __init__(
        self,
        spec: GrpoJob,
        host: PolicyHost,
        parent: Mapping[str, bytes] | None,
        *,
        groups: Sequence[Sequence[int]],
        rollouts: Sequence[Rollout],
        rewards: RewardStats,
        notes: Sequence[str],
    ) -> None:
        self._job = spec
        self._groups = groups
        self._rollouts = rollouts
        self._rewards = rewards
        self._behaviour = [rollout.behaviour for rollout in rollouts]
        self._groups_per_step = min(spec.groups_per_step or len(groups), len(groups))
        self._steps_per_epoch = -(-len(groups) // self._groups_per_step)
        super().__init__(
            spec,
            host,
            parent,
            total_steps=spec.epochs * self._steps_per_epoch,
            largest=largest_microbatch(
                [rollout.document.length for rollout in rollouts], microbatch_tokens(spec, host)
            ),
            notes=notes,
        )

    @classmethod
    def prepare(cls, spec: GrpoJob, host: PolicyHost, parent: Mapping[str, bytes] | None) -> GrpoRun:
        """Tokenizes, computes advantages, sizes the job and scores rollouts that came without log-probabilities.

        Raises:
            InvalidRequest, DoesNotFit, AdapterRejected: as `prepare_run` says.
        """
        given = job_groups(spec)
        groups: list[list[int]] = []
        rollouts: list[Rollout] = []
        for number, group in enumerate(given):
            members = _rollouts(host, spec, f"groups[{number}]", group, len(rollouts))
            if members is not None:
                groups.append(list(range(len(rollouts), len(rollouts) + len(members))))
                rollouts.extend(members)
        rewards = RewardStats.of(
            [completion.reward for group in given for completion in group.completions], len(given) - len(groups)
        )
        if not groups:
            raise InvalidRequest(
                f"nothing to learn: in each of the {len(given)} groups all rewards are equal (mean {rewards.mean:g}), "
                "so no completion is better than another; sample more completions, at a higher temperature, or "
                "score them more finely",
                param="rewards",
            )
        notes = []
        if rewards.groups_skipped:
            notes.append(f"{rewards.groups_skipped} of {len(given)} groups skipped: all rewards in them are equal")
        recomputed = sum(rollout.behaviour is None for rollout in rollouts)
        if recomputed:
            notes.append(
                f"behaviour=recomputed for {recomputed} of {len(rollouts)} rollouts: they came without the "
                "log-probabilities of the policy that sampled them"
            )
        run = cls(spec, host, parent, groups=groups, rollouts=rollouts, rewards=rewards, notes=notes)
        if recomputed and run.total_steps > 1:
            run._recompute()
        return run

    @property
    def _recomputed(self) -> list[int]:
        return [index for index, rollout in enumerate(self._rollouts) if rollout.behaviour is None]

    def _recompute(self) -> None:
        """Scores rollouts under the starting policy, before the first step changes it."""
        for microbatch in self._pack([self._rollouts[index].document for index in self._recomputed]):
            with self._host.gate.training(), torch.no_grad():
                logprobs = self._logprobs(microbatch, with_adapter=True).cpu()
            sizes = [document.num_trained for document in microbatch.documents]
            for document, part in zip(microbatch.documents, torch.split(logprobs, sizes), strict=True):
                self._behaviour[document.source] = part.clone()

    def batch(self, index: int) -> list[Document]:
        """The documents of step ``index``, in the order the groups were given."""
        steps_per_epoch = self.total_steps // self._job.epochs
        per_step = min(self._job.groups_per_step or len(self._groups), len(self._groups))
        start = index % steps_per_epoch * per_step
        return [self._rollouts[member].document for group in self._groups[start : start + per_step] for member in group]

    def _accumulate(self, index: int, interrupt: Callable[[], None]) -> tuple[dict[str, float], int]:
        documents = self.batch(index)
        total = sum(document.num_trained for document in documents)
        sums = torch.zeros(6, device=self._host.model.device)
        inputs = 0
        for microbatch in self._pack(documents):
            interrupt()
            with self._host.gate.training():
                reference = None
                if self._job.beta > 0:
                    with torch.no_grad():
                        reference = self._logprobs(microbatch, with_adapter=False)
                logprobs = self._logprobs(microbatch, with_adapter=True)
                part = policy_loss(
                    logprobs,
                    self._behaviour_rows(microbatch, logprobs),
                    self._per_row(microbatch, [self._rollouts[d.source].advantage for d in microbatch.documents]),
                    clip_low=self._job.clip_low,
                    clip_high=self._job.clip_high,
                    total_tokens=total,
                    reference=reference,
                    beta=self._job.beta,
                )
                self._backward(part.loss)
                sums += torch.stack(
                    [part.loss.detach(), part.ratio, part.clipped_low, part.clipped_high, part.drift, part.kl]
                )
            inputs += microbatch.num_tokens
        loss, *means = sums.tolist()
        ratio, low, high, drift, kl = (value / total for value in means)
        metrics = {
            "loss": loss,
            "reward_mean": self._rewards.mean,
            "reward_std": self._rewards.std,
            "groups_skipped": float(self._rewards.groups_skipped),
            "ratio_mean": ratio,
            "clip_fraction_low": low,
            "clip_fraction_high": high,
            "behaviour_kl": drift,
            "recomputed_rollouts": float(len(self._recomputed)),
            "tokens": float(total),
        }
        if self._job.beta > 0:
            metrics["kl"] = kl
        return metrics, inputs

    def _logprobs(self, microbatch: Microbatch, *, with_adapter: bool) -> Tensor:
        """[N] log-probabilities of the targets, each at the temperature its rollout was sampled at."""
        hidden = self._scored_hidden(microbatch, self._lora if with_adapter else None)
        temperatures = [self._rollouts[document.source].temperature for document in microbatch.documents]
        if len(set(temperatures)) == 1:
            return self._host.model.token_logprobs(hidden, microbatch.targets, temperatures[0])
        row_temperatures = self._per_row(microbatch, temperatures, dtype=torch.float64)
        logprobs = torch.zeros(len(microbatch.targets), device=hidden.device)
        for temperature in sorted(set(temperatures)):
            rows = (row_temperatures == temperature).nonzero().squeeze(1)
            part = self._host.model.token_logprobs(hidden[rows], microbatch.targets[rows], temperature)
            logprobs = logprobs.index_copy(0, rows, part)
        return logprobs

    def _behaviour_rows(self, microbatch: Microbatch, logprobs: Tensor) -> Tensor:
        """[N] log-probabilities under the policy that sampled. What is still unknown is scored by the starting policy,
        which is what the parameters are in the only step of a job of one step."""
        current = logprobs.detach()
        parts = []
        start = 0
        for document in microbatch.documents:
            known = self._behaviour[document.source]
            end = start + document.num_trained
            parts.append(current[start:end] if known is None else known.to(current.device))
            start = end
        return torch.cat(parts)

    def _per_row(self, microbatch: Microbatch, values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        per_document = torch.tensor(values, dtype=dtype, device=microbatch.rows.device)
        return per_document.index_select(0, microbatch.row_documents)

    def state(self) -> RunState:
        """See JobRun.state. Recomputed log-probabilities are kept: the starting policy is gone after the first step."""
        state = super().state()
        known = {f"behaviour.{index}": self._behaviour[index] for index in self._recomputed}
        return RunState(state.tensors | {name: value for name, value in known.items() if value is not None}, state.data)

    def load_state(self, state: RunState) -> int:
        """See JobRun.load_state."""
        step = super().load_state(state)
        for index in self._recomputed:
            if (value := state.tensors.get(f"behaviour.{index}")) is not None:
                self._behaviour[index] = value.clone()
        return step
