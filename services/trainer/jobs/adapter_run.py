"""Base of every job that trains: masters, optimizer, accumulation, checkpoints; and of those that train an adapter."""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from services.common.adapters.manifest import Lineage
from services.common.errors import DoesNotFit, InvalidRequest
from services.common.jobs import JobBase, LoraSettings, PublishingJob
from services.common.jobs.documents import Document
from services.common.jobs.dry_runs.guard_rails import check_scale
from services.common.jobs.fields.lora import check_agrees
from services.engine.models.lora.binding import bind_adapter, name_targets
from services.engine.models.lora.targets import target_shapes
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.training_forward import FrozenForward, TrainableForward
from services.trainer.host.policy_host import PolicyHost
from services.trainer.jobs.base import UNDER_WAY, RunData, RunState
from services.trainer.memory.budget import MemoryNeed
from services.trainer.memory.estimate import TeacherWork, TrainingMemory, Workload, check_fits, mib
from services.trainer.optimizer import ScheduledOptimizer
from services.trainer.packing import Microbatch, pack
from services.trainer.timers import StepTimer

_TOKENS_ON_CPU = 512
USUAL_TOKENS = 2048
"""Tokens of a microbatch, where a job does not say: on 2 CPU cores one layer of the tiny model takes 18 ms for 512
tokens and 56 ms for 2048, longer than the default goal for the time per output token."""


def microbatch_tokens(spec: JobBase, host: PolicyHost) -> int:
    """Tokens that documents are packed up to."""
    return chosen_microbatch_tokens(spec.max_tokens_per_microbatch, host)


def chosen_microbatch_tokens(given: int | None, host: PolicyHost) -> int:
    """Tokens of a microbatch: the given number, or one that suits the device."""
    if given is not None:
        return given
    return _TOKENS_ON_CPU if host.model.device.type == "cpu" else USUAL_TOKENS


def starting_adapter(lora: LoraSettings, host: PolicyHost, parent: Mapping[str, bytes] | None) -> LoraParams:
    """A new adapter of this shape, or the parent's to continue, on the CPU: nothing is taken of the device before it is
    reserved.

    Raises:
        InvalidRequest: the engine could not serve the rank, or a lora field that was given explicitly contradicts
            the parent.
        AdapterRejected: the parent does not bind to this base model.
    """
    if parent is None:
        if lora.rank > host.max_lora_rank:
            raise InvalidRequest(
                f"lora.rank is {lora.rank}, but the engine serves adapters up to rank {host.max_lora_rank}",
                param="lora.rank",
            )
        return LoraParams.create(host.model.config, lora)
    bound = bind_adapter(parent, host.model.config, max_rank=host.max_lora_rank)
    present = {name: getattr(bound, name) for name in ("rank", "alpha", "use_rslora", "target_modules")}
    check_agrees(lora, present, name_targets(target_shapes(host.model.config), host.model.config))
    return LoraParams.from_bound(bound)


def spec_digest(spec: PublishingJob) -> str:
    """Identifies the job whose checkpoint a state is."""
    return hashlib.sha256(spec.model_dump_json().encode()).hexdigest()


class TrainingRun(ABC):
    """Masters of one result, one optimizer, gradients accumulated over packed microbatches.

    There is no random state to save: dropout does not exist here, the masters' initial values come from the
    checkpoint, and the order of the data is a function of the seed and the step.

    Args:
        spec: the job.
        host: the pod.
        parent: files of the version to continue.
        total_steps: optimizer steps of the whole job.
        largest: inputs of the largest microbatch there will be.
        notes: for the user.
        teacher: what reads the same microbatches beside the adapter.

    Raises:
        DoesNotFit: the host's memory plan leaves too little.
        MemoryTaken: it would fit, but not beside the open sessions.
        InvalidRequest, AdapterRejected: see `_first_masters`.
    """

    def __init__(
        self,
        spec: JobBase,
        host: PolicyHost,
        parent: Mapping[str, bytes] | None,
        *,
        total_steps: int,
        largest: int,
        notes: Sequence[str],
        teacher: TeacherWork | None = None,
    ) -> None:
        self._largest = largest
        self._spec = spec
        self._host = host
        self._memory = memory = self._first_masters(parent, teacher)
        self._graphs = host.memory_budget.reserve_job(MemoryNeed.of(memory, captured=host.model.device.type == "cuda"))
        """Memory of captured steps; None: steps are launched kernel by kernel."""
        self._total_steps = total_steps
        self._notes = tuple(notes)
        usual = spec.pace.rate(host.model.config.hidden_size)
        chosen = usual * (spec.learning_rate_multiplier or 1.0)
        peak = chosen if spec.named_learning_rate is None else spec.named_learning_rate
        self._settings: dict[str, float] = {"learning_rate": peak, "steps": total_steps}
        self._defaults: dict[str, float] = {"learning_rate": usual}
        self._optimizer = ScheduledOptimizer(self._place(), spec.optimizer, peak=peak, total_steps=total_steps)
        self._make_forwards()
        self._finished = 0
        self._found: dict[str, float] = {}
        """Metrics of the step under way so far: one that is interrupted is told as a whole once it has gone on."""
        self._evaluation_left = False
        """Whether the step under way has been applied, and waits only for its evaluation."""
        self._num_tokens = 0
        self.watch = StepTimer(host.model.device)
        """Timer of the step under way."""

    @property
    def total_steps(self) -> int:
        return self._total_steps

    @property
    @abstractmethod
    def lora(self) -> LoraParams | None:
        """See JobRun.lora."""

    @abstractmethod
    def files(self, base_model_name: str) -> dict[str, bytes]:
        """See JobRun.files."""

    @abstractmethod
    def _first_masters(self, parent: Mapping[str, bytes] | None, teacher: TeacherWork | None) -> TrainingMemory:
        """Makes the masters on the CPU, because nothing is taken of the device before it is reserved. Returns the
        memory plan of the job.

        Raises:
            DoesNotFit: the host's plan leaves too little.
            InvalidRequest, AdapterRejected: the parent cannot be continued so.
        """

    @abstractmethod
    def _place(self) -> list[Tensor]:
        """Puts the masters on the device; what of them is optimized."""

    @abstractmethod
    def _make_forwards(self) -> None:
        """Captures forwards. None of larger microbatches than those trained on: an evaluation may pack more."""

    @abstractmethod
    def _masters(self) -> dict[str, Tensor]:
        """Copies of the masters on the CPU, for a checkpoint."""

    @abstractmethod
    def _load_masters(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores them. Raises ValueError: they are another job's."""

    @property
    def notes(self) -> tuple[str, ...]:
        return self._notes

    @property
    def memory(self) -> TrainingMemory:
        """Plan that the job was admitted by."""
        return self._memory

    @abstractmethod
    def data(self) -> RunData:
        """What it learns from, for those who want to look at it."""

    def right_already(self, interrupt: Callable[[], None] = lambda: None) -> tuple[float, str, int] | None:
        """Share of the job's own data that the adapter as it is gets right, what it is a share of, and how many of
        those were looked at; None: the method has no right answers. Changes nothing."""
        del interrupt
        return None

    @property
    def outcome(self) -> tuple[str, ...]:
        """See JobRun.outcome: nothing, unless a job says otherwise."""
        return ()

    @property
    def settings(self) -> Mapping[str, float]:
        """See JobRun.settings."""
        return self._settings

    @property
    def defaults(self) -> Mapping[str, float]:
        """See JobRun.defaults."""
        return self._defaults

    @property
    def lineage(self) -> Lineage | None:
        """Lineage of the result: its parent says it all."""
        return None

    def evaluate(self, interrupt: Callable[[], None] = lambda: None) -> dict[str, float]:
        """See JobRun.evaluate. Nothing is held out unless a job says otherwise."""
        del interrupt
        return {}

    def _evaluates_behind(self, index: int) -> bool:
        """Whether an evaluation belongs to step ``index``."""
        del index
        return False

    def examine(self, interrupt: Callable[[], None] = lambda: None) -> dict[str, float]:
        """See JobRun.examine. A job that samples for itself has no examples before."""
        del interrupt
        return {}

    def step(self, index: int, interrupt: Callable[[], None] = lambda: None) -> dict[str, float]:
        """See JobRun.step."""
        if not self._is_applied(index):
            what = self._begin_step(index)
            with self._within_plan(what):
                self._before(index, interrupt)
            started = time.perf_counter()
            self.zero_grad()
            with self._within_plan(what):
                self._end_step(index, *self._accumulate(index, interrupt), started)
        if self._evaluation_left:
            self._found |= self.evaluate(interrupt)
        return self._told()

    def _is_applied(self, index: int) -> bool:
        """Whether an interruption left only the evaluation of step ``index``."""
        return self._evaluation_left and index == self._finished - 1

    def _begin_step(self, index: int) -> str:
        """Words for step ``index``, whose timer runs from now on."""
        if index != self._finished or index >= self._total_steps:
            raise ValueError(f"step {index} asked for after {self._finished} of {self._total_steps} finished steps")
        self.watch = StepTimer(self._host.model.device)
        return f"step {index}"

    def _end_step(self, index: int, found: Mapping[str, float], tokens: int, started: float) -> None:
        """Applies the gradients of step ``index``, and finds all metrics of it but those of its evaluation.

        Args:
            found: metrics of the gradients.
            tokens: inputs that were read for the gradients; 0: the adapter stays as it is.
            started: when the step began, of time.perf_counter().
        """
        with self._host.gate.training(), self.watch.part("optimizer"):
            metrics = dict(found) | (self._optimizer.step(index) if tokens else self._optimizer.rest(index))
        self.zero_grad()
        self._finished = index + 1
        self._evaluation_left = self._evaluates_behind(index)
        self._num_tokens += tokens
        metrics |= self.watch.seconds()
        seconds = time.perf_counter() - started
        metrics["train_seconds"] = seconds
        metrics["num_tokens"] = float(self._num_tokens)
        metrics["tokens_per_second"] = tokens / max(seconds, 1e-9)
        self._found |= metrics

    def _told(self) -> dict[str, float]:
        """All metrics of the step under way, which is over with that."""
        found, self._found, self._evaluation_left = self._found, {}, False
        return found

    def close(self) -> None:  # noqa: B027 - most runs have nothing
        """See JobRun.close."""

    def zero_grad(self) -> None:
        """Forgets accumulated gradients, also those of an interrupted step."""
        self._optimizer.zero_grad()

    @contextmanager
    def _within_plan(self, what: str) -> Iterator[None]:
        """Around whatever computes: a device without memory fails the job in words, and what the job held of it that
        nobody needs goes to the device.

        Args:
            what: computes.

        Raises:
            DoesNotFit: the device ran out of memory.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            self._give_memory_back()
            raise DoesNotFit(
                f"the device ran out of memory in {what}, although the job's plan of {mib(self._memory.total)} "
                f"is within the {mib(self._host.train_memory_bytes)} for training: something else takes more than its "
                'share. Set recompute to "full", a smaller max_tokens_per_microbatch, or give the engine less of the '
                "device (TEMPER_MEMORY_FRACTION)",
                param="max_tokens_per_microbatch",
            ) from error

    def _give_memory_back(self) -> None:
        """Gives cached memory back to the device, so that the engine beside this job is not the next to find none."""
        self.zero_grad()
        self._make_forwards()
        self._host.memory_budget.out_of_memory()

    def state(self) -> RunState:
        """See JobRun.state."""
        tensors = self._masters()
        tensors |= {f"optimizer.{name}": value for name, value in self._optimizer.state().items()}
        data = {"step": self._finished, "num_tokens": self._num_tokens, "spec": spec_digest(self._spec)}
        under_way = {UNDER_WAY: dict(self._found), "evaluation_left": self._evaluation_left}
        return RunState(tensors, data | (under_way if self._found else {}))

    def load_state(self, state: RunState) -> int:
        """See JobRun.load_state."""
        if state.data.get("spec") != spec_digest(self._spec):
            raise InvalidRequest("the checkpoint belongs to another job")
        try:
            self._load_masters(state.tensors)
        except ValueError as error:
            raise InvalidRequest(f"the checkpoint does not fit what this job trains: {error}") from error
        self._optimizer.load_state(under("optimizer.", state.tensors))
        self._finished = int(state.data["step"])
        self._num_tokens = int(state.data["num_tokens"])
        self._found = {str(name): float(value) for name, value in state.data.get(UNDER_WAY, {}).items()}
        self._evaluation_left = bool(state.data.get("evaluation_left", False))
        return self._finished - self._evaluation_left

    # -- for the jobs

    def _before(self, index: int, interrupt: Callable[[], None]) -> None:  # noqa: B027 - most jobs have it
        """Makes what step ``index`` trains on, where it does not exist yet. Metrics of what has been made are found at
        once, for an interruption not to lose them. ``train_seconds`` begin behind it."""

    @abstractmethod
    def _accumulate(self, index: int, interrupt: Callable[[], None]) -> tuple[dict[str, float], int]:
        """Leaves the step's gradients in the masters; returns its metrics and how many inputs it read: with none they
        stay as they are. What it computes is in parts of ``watch``."""

    def _examined(self, lengths: Sequence[int], *, least: int = 1) -> list[int]:
        """Indices of the examples that `examine` looks at, of examples of these lengths: about two microbatches."""
        return evenly(lengths, 2 * microbatch_tokens(self._spec, self._host), least=least)

    def _pack(self, documents: Sequence[Document]) -> list[Microbatch]:
        return pack(documents, microbatch_tokens(self._spec, self._host), self._host.model.device)

    def add_gradients(self, loss: Tensor) -> None:
        """Adds the gradients of a microbatch, on this thread: the one that holds the gate and gives way."""
        with self.watch.part("backward"), torch.autograd.set_multithreading_enabled(False):
            torch.autograd.backward(loss)


class AdapterRun(TrainingRun):
    """A run that trains one adapter."""

    @property
    def lora(self) -> LoraParams:
        return self._lora

    def files(self, base_model_name: str) -> dict[str, bytes]:
        """See JobRun.files."""
        return self._lora.to_files(base_model_name)

    def _first_masters(self, parent: Mapping[str, bytes] | None, teacher: TeacherWork | None) -> TrainingMemory:
        spec, host = self._spec, self._host
        if parent is None:
            check_scale(spec.lora)
        self._lora = starting_adapter(spec.lora, host, parent)
        self._workload = Workload(
            adapter_numbers=self._lora.num_parameters(),
            rank=self._lora.rank,
            tokens=self._largest,
            itemsize=host.model.dtype.itemsize,
            recompute=spec.effective_recompute,
            fused=host.model.device.type == "cuda",
            teacher=teacher,
        )
        return check_fits(host.model.config, self._workload, host.train_memory_bytes)

    def _place(self) -> list[Tensor]:
        self._lora = lora = self._lora.on(self._host.model.device)
        lora.link_gradients()
        self._settings["lora_rank"] = lora.rank
        return [lora.flat_a, lora.flat_b]

    def _make_forwards(self) -> None:
        model, most = self._host.model, self._largest
        recompute = self._spec.effective_recompute
        self._forward = TrainableForward(model, self._lora, recompute, self._graphs, most_tokens=most)
        self._base_forward = FrozenForward(model, None, self._graphs, most_tokens=most)

    def _masters(self) -> dict[str, Tensor]:
        return {f"lora.{name}": value for name, value in self._lora.state().items()}

    def _load_masters(self, tensors: Mapping[str, Tensor]) -> None:
        self._lora.load_state(under("lora.", tensors))

    def _scored_hidden(self, microbatch: Microbatch, lora: LoraParams | None) -> Tensor:
        """[N, hidden]: final hidden states of the rows whose next token is trained; see _hidden()."""
        return self._hidden(microbatch, lora).index_select(0, microbatch.rows)

    def _hidden(self, microbatch: Microbatch, lora: LoraParams | None) -> Tensor:
        """[T, hidden]: final hidden states of all inputs.

        Args:
            lora: the adapter in training, or None for the base model.
        """
        if lora is self._lora:
            forward: Callable[..., Tensor] = self._forward
        elif lora is None:
            forward = self._base_forward
        else:
            raise ValueError("neither the adapter in training nor the base model")
        return forward(microbatch.token_ids, microbatch.lengths, self._host.gate.give_way, microbatch.parents)


def evenly(lengths: Sequence[int], most: int, *, least: int = 1) -> list[int]:
    """Indices spread over all of ``lengths`` that sum up to about ``most``, and ``least`` of them in any case."""
    count = len(lengths)
    chosen = min(count, max(least, most * count // sum(lengths)))
    return [place * count // chosen for place in range(chosen)]


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The tensors whose names begin so, without that."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
