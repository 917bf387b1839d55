"""Group-relative policy optimisation on scored rollouts.

The importance ratio is against the policy that sampled: the log-probabilities that came with the rollout. Rollouts
that came as text (or without log-probabilities) are scored under the policy the job starts from, and counted as
`recomputed_rollouts`: re-tokenized text is not always what was sampled. With a mismatch_correction the ratio of every
rollout is against the trainer's own log-probabilities of the policy the job starts from, and what the sampler computed
goes into a weight.

With exact_forward the values of all these log-probabilities, of the policy in training, of the one the job starts from
and of the base, are the engine's, which takes the step's completions token by token as it would sample them; gradients
are those of the trainer's forward. See services/trainer/sampling/replay.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set

import torch
from torch import Tensor

from services.common.jobs import GrpoGroup, GrpoJob
from services.common.jobs.documents import Document
from services.engine.models.lora.trainable import LoraParams
from services.trainer.host.policy_host import PolicyHost
from services.trainer.jobs.adapter_run import AdapterRun, microbatch_tokens
from services.trainer.jobs.base import RunData, RunState
from services.trainer.losses import (
    GroupSize,
    MismatchStats,
    mismatch_weights,
    policy_loss,
    policy_loss_type,
)
from services.trainer.losses.logprob_gap import ForwardGap
from services.trainer.packing import Microbatch, largest_microbatch, pack, pack_branches
from services.trainer.sampling.replay import replay, with_values
from services.trainer.sampling.scored_rollouts import ScoredRollouts, scored_rollouts


class GrpoRun(AdapterRun):
    """A prepared GRPO job; see `prepare`."""

    def __init__(
        self,
        spec: GrpoJob,
        host: PolicyHost,
        parent: Mapping[str, bytes] | None,
        scored: ScoredRollouts,
        *,
        total_steps: int,
        longest: Sequence[int],
    ) -> None:
        """``longest`` are the lengths of the documents that a microbatch may have to hold."""
        self._job = spec
        self._loss_type = policy_loss_type(spec.loss_type)
        self._use(scored)
        super().__init__(
            spec,
            host,
            parent,
            total_steps=total_steps,
            largest=largest_microbatch(longest, microbatch_tokens(spec, host)),
            notes=scored.notes,
        )

    def _pack(self, documents: Sequence[Document]) -> list[Microbatch]:
        """What rollouts begin with in common, a prompt or the first turns, is read once where the model can and steps
        are launched kernel by kernel. Captured ones know no branches, and theirs is the memory that this would take."""
        host = self._host
        packed = pack_branches if host.model.shares_prefixes and self._graphs is None else pack
        return packed(documents, microbatch_tokens(self._spec, host), host.model.device)

    def _use(self, scored: ScoredRollouts) -> None:
        """These are the rollouts to learn from."""
        self._scored = scored
        self._rollouts = scored.rollouts
        self._start: dict[int, Tensor] = {}
        """[trained tokens] float32 on the CPU: log-probabilities of the policy before the first step on them, by
        rollout."""
        self._reference: dict[int, Tensor] = {}
        """The same of the model without adapter, as the engine has them; of exact_forward."""
        self._values: dict[int, Tensor] = {}
        """The same of the policy in training, for the present step."""

    @classmethod
    def prepare(cls, spec: GrpoJob, host: PolicyHost, parent: Mapping[str, bytes] | None) -> GrpoRun:
        """Tokenizes, computes advantages and sizes the job.

        Raises:
            InvalidRequest, DoesNotFit, AdapterRejected: as `prepare_run` says.
        """
        scored = scored_rollouts(host, spec)
        per_step = min(spec.groups_per_step or len(scored.groups), len(scored.groups))
        return cls(
            spec,
            host,
            parent,
            scored,
            total_steps=spec.epochs * -(-len(scored.groups) // per_step),
            longest=[rollout.document.length for rollout in scored.rollouts if not rollout.masked],
        )

    def data(self) -> RunData:
        """See TrainingRun."""
        learnt = [
            [self._rollouts[member].document for member in group if not self._rollouts[member].masked]
            for group in self._scored.groups
        ]
        rewards = [group.rewards for group in self._groups()]
        return RunData("group", learnt, rewards=rewards, groups_skipped=self._scored.rewards.groups_skipped)

    def _groups(self) -> Sequence[GrpoGroup]:
        """Groups with their rewards."""
        return self._job.scored_groups

    def right_already(self, interrupt: Callable[[], None] = lambda: None) -> tuple[float, str, int] | None:
        """See TrainingRun: completions with the highest reward of all. Rewards that are all equal say nothing."""
        del interrupt
        rewards = [reward for group in self._groups() for reward in group.rewards]
        if len(set(rewards)) < 2:
            return None
        share = rewards.count(max(rewards)) / len(rewards)
        return share, "completions with the best reward", len(rewards)

    @property
    def _steps_on_these(self) -> int:
        """Optimizer steps on the same rollouts."""
        return self.total_steps

    def _is_first(self, index: int) -> bool:
        """Whether no step on these rollouts has changed the policy yet: those before had none to learn from."""
        begin = index - index % self._steps_on_these
        return not any(self._members(at) for at in range(begin, index))

    def _is_samplers(self, index: int) -> bool:
        """Whether the policy before step ``index`` is the one that sampled, as far as anybody knows."""
        return self._is_first(index)

    @property
    def _longest(self) -> int:
        """Completion length that dr_grpo divides by."""
        return self._job.max_completion_length or self._scored.longest

    def batch(self, index: int) -> list[Document]:
        """The documents of step ``index``, in the order the groups were given."""
        return [document for group in self._trained(index) for document in group]

    def _members(self, index: int) -> Sequence[Sequence[int]]:
        """Rollouts of the groups of step ``index``."""
        groups = self._scored.groups
        per_step = min(self._job.groups_per_step or len(groups), len(groups))
        start = index % (self.total_steps // self._job.epochs) * per_step
        return groups[start : start + per_step]

    def _trained(self, index: int) -> list[list[Document]]:
        return [
            [self._rollouts[member].document for member in group if not self._rollouts[member].masked]
            for group in self._members(index)
        ]

    @property
    def _recomputed(self) -> list[int]:
        """Rollouts whose sampler said nothing."""
        return [at for at, rollout in enumerate(self._rollouts) if rollout.behaviour is None and not rollout.masked]

    @property
    def _learnt_from(self) -> list[int]:
        """Rollouts that are not masked."""
        return [at for at, rollout in enumerate(self._rollouts) if not rollout.masked]

    @property
    def _scored_at_start(self) -> list[int]:
        """Rollouts whose log-probabilities under the starting policy later steps need. A single step does not: there
        the starting policy is the one in training."""
        if self._steps_on_these == 1:
            return []
        return self._recomputed if self._job.mismatch_correction == "none" else self._learnt_from

    def _known_values(self, index: int) -> dict[int, Tensor]:
        """Log-probabilities that the engine computes for rollouts under the policy as it is before step ``index``,
        where they are known without asking. Those of posted rollouts are not: another adapter, engine or setting may
        have sampled them."""
        del index
        return {}

    def _before(self, index: int, interrupt: Callable[[], None]) -> None:
        super()._before(index, interrupt)
        if self._job.exact_forward and self._members(index):
            self._ask_engine(index, interrupt)

    def examine(self, interrupt: Callable[[], None] = lambda: None) -> dict[str, float]:
        """See JobRun.examine. The loss is minus the mean of advantage times log-probability a token, by the trainer's
        forward: it falls where better completions become likelier and worse ones less likely."""
        learnt = self._learnt_from
        chosen = [learnt[at] for at in self._examined([self._rollouts[at].document.length for at in learnt])]
        total = 0.0
        for microbatch in self._pack([self._rollouts[at].document for at in chosen]):
            interrupt()
            with self._within_plan("looking at the rollouts"), self._host.gate.training(), torch.no_grad():
                logprobs = self._logprobs(microbatch, with_adapter=True)
                gains = logprobs * self._advantages(microbatch)
                total -= sum(float(part.mean()) for part in torch.split(gains, _sizes(microbatch)))
        return {"loss": total / len(chosen)}

    def _ask_engine(self, index: int, interrupt: Callable[[], None]) -> None:
        """Gets the values that step ``index`` takes from the engine, and before the first one also what later ones need
        of the policy as it still is. The base never changes: it is asked once, of all rollouts."""
        trained = {document.source for document in self.batch(index)}
        at_start = set(self._scored_at_start) if self._is_first(index) else set()
        known = self._known_values(index)
        asked = (trained | at_start) - known.keys()
        self._values = known | self._replay(asked, self._lora, interrupt)
        if at_start:
            self._start = {at: self._values[at] for at in sorted(at_start)}
        if self._job.beta > 0 and not self._reference:
            self._reference = self._replay(set(self._learnt_from), None, interrupt)

    def _replay(self, rollouts: Set[int], lora: LoraParams | None, interrupt: Callable[[], None]) -> dict[int, Tensor]:
        if not rollouts:
            return {}
        with self.watch.waiting("replay"):
            return replay(self._host, [self._rollouts[at] for at in sorted(rollouts)], lora, interrupt)

    def _score_start(self, interrupt: Callable[[], None]) -> None:
        """Scores rollouts under the starting policy, before the first step changes it."""
        wanted = self._scored_at_start
        if not wanted:
            return
        found = {}
        for microbatch in self._pack([self._rollouts[at].document for at in wanted]):
            interrupt()
            with self._host.gate.training(), self.watch.part("forward"), torch.no_grad():
                logprobs = self._logprobs(microbatch, with_adapter=True).cpu()
            for document, part in zip(microbatch.documents, torch.split(logprobs, _sizes(microbatch)), strict=True):
                found[document.source] = part.clone()
        self._start = found

    def _accumulate(self, index: int, interrupt: Callable[[], None]) -> tuple[dict[str, float], int]:
        job, device = self._job, self._host.model.device
        if self._is_first(index) and not job.exact_forward:
            self._score_start(interrupt)
        trained = self._trained(index)
        documents = [document for group in trained for document in group]
        total = sum(document.num_trained for document in documents)
        weights = self._completion_weights(index)
        sums = torch.zeros(6, device=device)
        mismatch = MismatchStats(device, job.mismatch_correction)
        gap = ForwardGap(device)
        observed = torch.zeros((), device=device)
        inputs = 0
        for microbatch in self._pack(documents):
            interrupt()
            with self._host.gate.training():
                reference = self._base_logprobs(microbatch) if job.beta > 0 else None
                with self.watch.part("forward"):
                    hidden = self._hidden(microbatch, self._lora)
                    logprobs = self._targets_logprobs(microbatch, hidden.index_select(0, microbatch.rows))
                    if job.exact_forward:
                        values = _rows(self._values, microbatch)
                        gap.add(values, logprobs)
                        logprobs = with_values(logprobs, values)
                    old, behaviour, recorded = self._past_rows(microbatch, logprobs.detach())
                    lengths = _sizes(microbatch)
                    correction, outside = mismatch_weights(
                        old, behaviour, lengths, correction=job.mismatch_correction, cap=job.mismatch_cap
                    )
                    # Only of the starting policy do the sampler and the trainer mean the same.
                    if self._is_samplers(index) or job.mismatch_correction != "none":
                        mismatch.add(old, behaviour, correction, outside, recorded)
                    part = policy_loss(
                        logprobs,
                        behaviour if job.mismatch_correction == "none" else old,
                        self._advantages(microbatch),
                        clip_low=job.clip_low,
                        clip_high=job.clip_high,
                        total_tokens=total,
                        reference=reference,
                        beta=job.beta,
                        surrogate=self._loss_type.surrogate,
                        lengths=lengths,
                        cispo_max_ratio=job.cispo_max_ratio,
                        weights=self._per_row(microbatch, [weights[d.source] for d in microbatch.documents]),
                        correction=correction,
                        unbiased_kl=job.unbiased_kl,
                    )
                    seen = self._observations_loss(microbatch, hidden) / total
                    loss = part.loss + job.observation_weight * seen
                self.add_gradients(loss)
                observed += seen.detach()
                sums += torch.stack(
                    [loss.detach(), part.ratio, part.clipped_low, part.clipped_high, part.drift, part.kl]
                )
            inputs += microbatch.num_tokens
        found = self._metrics(index, sums.tolist(), total) | mismatch.metrics()
        if job.exact_forward:
            found |= gap.metrics()
        if job.observation_weight:
            found["observation_loss"] = float(observed)
        return found, inputs

    def _completion_weights(self, index: int) -> dict[int, float]:
        """Weights of a step's completions, by rollout."""
        trained = self._trained(index)
        sizes, learnt = [], []
        for members, documents in zip(self._members(index), trained, strict=True):
            lengths: dict[int, int] = {}
            for document in documents:
                member = self._rollouts[document.source].member
                lengths[member] = lengths.get(member, 0) + document.num_trained
            sizes.append(GroupSize(len({self._rollouts[at].member for at in members}), list(lengths.values())))
            learnt.append([list(lengths).index(self._rollouts[document.source].member) for document in documents])
        weights = iter(self._loss_type.completion_weights(sizes, self._longest))
        found: dict[int, float] = {}
        for size, documents, places in zip(sizes, trained, learnt, strict=True):
            of_members = [next(weights) for _ in size.lengths]
            found |= {document.source: of_members[at] for document, at in zip(documents, places, strict=True)}
        return found

    def _metrics(self, index: int, sums: Sequence[float], total: int) -> dict[str, float]:
        loss, *means = sums
        ratio, low, high, drift, kl = (value / total for value in means)
        rewards = self._scored.rewards
        members = self._members(index)
        sampled = [self._rollouts[member] for group in members for member in group]
        count = sum(len({self._rollouts[at].member for at in group}) for group in members)
        metrics = {
            "loss": loss,
            "reward_mean": rewards.mean,
            "reward_std": rewards.std,
            "groups_skipped": float(rewards.groups_skipped),
            "frac_reward_zero_std": rewards.groups_skipped / rewards.groups,
            "ratio_mean": ratio,
            "clip_fraction_low": low,
            "clip_fraction_high": high,
            "behaviour_kl": drift,
            "recomputed_rollouts": float(len(self._recomputed)),
            "completion_length_mean": sum(rollout.document.num_trained for rollout in sampled) / count,
            "truncated_fraction": sum(rollout.truncated for rollout in sampled) / len(sampled),
            "tokens": float(total),
        }
        if self._job.beta > 0:
            metrics["kl"] = kl
        return metrics

    def _base_logprobs(self, microbatch: Microbatch) -> Tensor:
        """[N] log-probabilities under the model without adapter, by whoever has those of the policy."""
        if self._job.exact_forward:
            return _rows(self._reference, microbatch)
        with self.watch.part("reference"), torch.no_grad():
            return self._logprobs(microbatch, with_adapter=False)

    def _logprobs(self, microbatch: Microbatch, *, with_adapter: bool) -> Tensor:
        """[N] log-probabilities of the targets, each at the temperature its rollout was sampled at."""
        hidden = self._scored_hidden(microbatch, self._lora if with_adapter else None)
        return self._targets_logprobs(microbatch, hidden)

    def _observations_loss(self, microbatch: Microbatch, hidden: Tensor) -> Tensor:
        """Sum over what was observed of minus its log-probability; 0 where nobody asks for it."""
        if microbatch.observed is None or not self._job.observation_weight:
            return torch.zeros((), device=hidden.device)
        rows, targets = microbatch.observed
        model, give_way = self._host.model, self._host.gate.give_way
        return -model.token_logprobs(hidden.index_select(0, rows), targets, 1.0, give_way=give_way).sum()

    def _targets_logprobs(self, microbatch: Microbatch, hidden: Tensor) -> Tensor:
        """The same of the hidden states [N, hidden] of the rows."""
        temperatures = [
            value for document in microbatch.documents for value in self._rollouts[document.source].temperatures
        ]
        if len(set(temperatures)) == 1:
            return self._host.model.token_logprobs(
                hidden, microbatch.targets, temperatures[0], give_way=self._host.gate.give_way
            )
        row_temperatures = torch.tensor(temperatures, dtype=torch.float64, device=hidden.device)
        logprobs = torch.zeros(len(microbatch.targets), device=hidden.device)
        for temperature in sorted(set(temperatures)):
            rows = (row_temperatures == temperature).nonzero().squeeze(1)
            part = self._host.model.token_logprobs(
                hidden[rows], microbatch.targets[rows], temperature, give_way=self._host.gate.give_way
            )
            logprobs = logprobs.index_copy(0, rows, part)
        return logprobs

    def _past_rows(self, microbatch: Microbatch, current: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[N] each: log-probabilities of the policy the job starts from as the trainer has them (or the engine, with
        exact_forward), as the sampler had them (or else the former), and whether it was the sampler.

        Where the starting policy has not been scored, ``current`` is it: in the only step of a job of one step; in
        other steps it stands in where nobody reads it.
        """
        old: list[Tensor] = []
        behaviour: list[Tensor] = []
        recorded: list[bool] = []
        for document, part in zip(microbatch.documents, torch.split(current, _sizes(microbatch)), strict=True):
            start = self._start.get(document.source)
            old.append(part if start is None else start.to(part.device))
            sampled = self._rollouts[document.source].behaviour
            behaviour.append(old[-1] if sampled is None else sampled.to(part.device))
            recorded += [sampled is not None] * document.num_trained
        return torch.cat(old), torch.cat(behaviour), torch.tensor(recorded, device=current.device)

    def _advantages(self, microbatch: Microbatch) -> Tensor:
        """[N] those of each token's turn."""
        values = [value for document in microbatch.documents for value in self._rollouts[document.source].advantages]
        return torch.tensor(values, dtype=torch.float32, device=microbatch.rows.device)

    def _per_row(self, microbatch: Microbatch, values: Sequence[float]) -> Tensor:
        per_document = torch.tensor(values, dtype=torch.float32, device=microbatch.rows.device)
        return per_document.index_select(0, microbatch.row_documents)

    def state(self) -> RunState:
        """See JobRun.state. The starting policy is gone after the first step: what it said is kept."""
        state = super().state()
        kept = {f"start.{at}": part for at, part in self._start.items()}
        kept |= {f"reference.{at}": part for at, part in self._reference.items()}
        return RunState(state.tensors | kept, state.data)

    def load_state(self, state: RunState) -> int:
        """See JobRun.load_state."""
        step = super().load_state(state)
        self._start = _by_rollout("start.", state)
        self._reference = _by_rollout("reference.", state)
        return step


def _by_rollout(prefix: str, state: RunState) -> dict[int, Tensor]:
    kept = {name.removeprefix(prefix): part for name, part in state.tensors.items() if name.startswith(prefix)}
    return {int(at): part.clone() for at, part in kept.items()}


def _rows(values: Mapping[int, Tensor], microbatch: Microbatch) -> Tensor:
    """[N] those of the microbatch's rollouts."""
    return torch.cat([values[document.source] for document in microbatch.documents]).to(microbatch.rows.device)


def _sizes(microbatch: Microbatch) -> list[int]:
    return [document.num_trained for document in microbatch.documents]
