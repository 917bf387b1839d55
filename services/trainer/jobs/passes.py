"""Passes over microbatches whose tokens are scored: the work that one job can leave to a forward it shares with others.

A run that shares (`SharedRun`) takes its steps as a course: a generator that yields each pass it wants computed, and
goes on once that is done. `complete` computes them one after another, for a job that is alone; `compute_together`
computes those of several jobs in packed forwards, in which each adapter has its own rows. Either way a pass has the
same microbatches, the same loss and the same gradients, up to the order in which numbers are added.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeGuard, TypeVar

import torch
from torch import Tensor

from kernels.token_logprobs import TokenScores
from services.engine.models.interface import Recompute
from services.engine.models.lora.lora_batch import LoraBatch
from services.engine.models.lora.trainable import LoraParams
from services.trainer.host.policy_host import PolicyHost
from services.trainer.jobs.base import JobRun
from services.trainer.losses import negative_log_likelihood
from services.trainer.packing import Microbatch, best_fit
from services.trainer.timers import Part, StepTimer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sharing:
    """Properties that runs have in common whose microbatches one forward can take."""

    layout: tuple[tuple[str, tuple[int, ...], tuple[int, ...], float], ...]
    """See LoraParams.layout."""
    recompute: Recompute
    most_tokens: int
    """Tokens that microbatches are packed up to."""


class ScoredRun(Protocol):
    """A run as its passes see it."""

    watch: StepTimer
    """Timer of the step under way."""

    @property
    def lora(self) -> LoraParams: ...

    @property
    def sharing(self) -> Sharing: ...

    def scores(self, microbatch: Microbatch) -> TokenScores:
        """Scores of the microbatch's targets by the run's own forward, inside the compute gate."""
        ...

    def add_gradients(self, loss: Tensor) -> None:
        """Adds the gradients of a microbatch to those of the step."""
        ...

    def zero_grad(self) -> None:
        """Forgets all gradients of the step so far."""
        ...


class Pass:
    """One pass of a run over microbatches, for a step's gradients or without gradients.

    Args:
        total: targets of all microbatches of weight 1, over which the loss is a mean.
        trained: whether gradients are wanted.
    """

    def __init__(
        self, run: ScoredRun, host: PolicyHost, microbatches: Sequence[Microbatch], total: int, *, trained: bool
    ) -> None:
        self.run, self.host, self.microbatches, self.trained = run, host, microbatches, trained
        self._total = total
        self.begin()

    def begin(self) -> None:
        """Begins anew: nothing has been computed, and of a step there are no gradients."""
        device = self.host.model.device
        self._loss = torch.zeros((), device=device)
        self._correct = torch.zeros((), device=device)
        if self.trained:
            self.run.zero_grad()

    def alone(self, interrupt: Callable[[], None]) -> None:
        """Computes everything by the run's own forward.

        Args:
            interrupt: called before each microbatch; what it raises passes through.
        """
        self.begin()
        for microbatch in self.microbatches:
            interrupt()
            self.compute(microbatch)

    def compute(self, microbatch: Microbatch) -> None:
        """Computes one microbatch by the run's own forward."""
        with self.host.gate.training(), torch.set_grad_enabled(self.trained):
            with self.run.watch.part("forward"):
                loss = self.take(self.run.scores(microbatch), [microbatch])
            if self.trained:
                self.run.add_gradients(loss)

    def take(self, scores: TokenScores, microbatches: Sequence[Microbatch]) -> Tensor:
        """Counts the scores of microbatches; returns their part of the loss, for the backward."""
        logprobs, hits = scores
        if any(microbatch.weights is not None for microbatch in microbatches):
            weights = torch.cat([_weights(microbatch) for microbatch in microbatches])
            logprobs, hits = logprobs * weights, hits[weights == 1.0]
        part = negative_log_likelihood(logprobs, self._total)
        self._loss += part.detach()
        self._correct += hits.sum()
        return part

    @property
    def inputs(self) -> int:
        """Tokens that the pass reads."""
        return sum(microbatch.num_tokens for microbatch in self.microbatches)

    @property
    def found(self) -> dict[str, float]:
        """Metrics of the finished pass; waits for the device."""
        return {"loss": float(self._loss), "token_accuracy": float(self._correct) / self._total}


def _weights(microbatch: Microbatch) -> Tensor:
    """[N] float32."""
    given = microbatch.weights
    return torch.ones(len(microbatch.rows), device=microbatch.rows.device) if given is None else given


Course: TypeAlias = Generator[Pass, None, T]
"""Work of a run or an attempt that yields each pass it wants computed, and ends with a result."""


class SharedRun(JobRun, Protocol):
    """A run whose passes may be computed together with those of other jobs; see shares()."""

    @property
    def sharing(self) -> Sharing:
        """Runs with an equal one may share forwards."""
        ...

    @property
    def step_tokens(self) -> int:
        """Tokens that an optimizer step reads, at most."""
        ...

    @property
    def shared_working(self) -> int:
        """Bytes that a shared forward and its backward work in, beside what the runs themselves hold."""
        ...

    def stepping(self, index: int) -> Course[dict[str, float]]:
        """See JobRun.step."""
        ...

    def examining(self) -> Course[dict[str, float]]:
        """See JobRun.examine."""
        ...


def shares(run: JobRun) -> TypeGuard[SharedRun]:
    """True if a run has the courses of a SharedRun. Its class is looked at: isinstance() would read all properties of
    the run, in an order that differs between processes, and not every run has all of them before it ends."""
    return hasattr(type(run), "stepping")


def steps_of(run: JobRun, index: int, interrupt: Callable[[], None]) -> Course[dict[str, float]]:
    """JobRun.step as a course, which wants nothing of others where the run does not share."""
    if shares(run):
        return (yield from run.stepping(index))
    return run.step(index, interrupt)


def examination_of(run: JobRun, interrupt: Callable[[], None]) -> Course[dict[str, float]]:
    """JobRun.examine as a course, in the same way."""
    if shares(run):
        return (yield from run.examining())
    return run.examine(interrupt)


def complete(course: Course[T], interrupt: Callable[[], None] = lambda: None) -> T:
    """Result of a course whose passes are computed alone."""
    error: Exception | None = None
    while True:
        try:
            wanted = next(course) if error is None else course.throw(error)
        except StopIteration as stop:
            result: T = stop.value
            return result
        error = None
        try:
            wanted.alone(interrupt)
        except Exception as failed:
            error = failed


def compute_together(passes: Sequence[Pass], pause: Callable[[], None], goes_on: Callable[[Pass], bool]) -> None:
    """Computes passes of runs with equal `Sharing` in as few forwards as their microbatches fit into.

    Args:
        pause: called before each forward; what it raises passes through.
        goes_on: asked before each forward; of a pass that does not go on nothing more is computed.
    """
    for one in passes:
        one.begin()
    owned = [(one, microbatch) for one in passes for microbatch in one.microbatches]
    sizes = [microbatch.num_tokens for _, microbatch in owned]
    for chosen in best_fit(sizes, passes[0].run.sharing.most_tokens):
        pause()
        members: dict[Pass, list[Microbatch]] = {}  # in the order of the passes, as the indices are
        for index in chosen:
            one, microbatch = owned[index]
            members.setdefault(one, []).append(microbatch)
        going = {one: found for one, found in members.items() if goes_on(one)}
        if len(going) > 1:
            _shared_forward(list(going), list(going.values()))
            continue
        for one, found in going.items():
            for microbatch in found:
                one.compute(microbatch)


def _shared_forward(passes: Sequence[Pass], microbatches: Sequence[Sequence[Microbatch]]) -> None:
    """One forward, and backward where gradients are wanted, over microbatches of several passes."""
    host, trained = passes[0].host, passes[0].trained
    give_way = host.gate.give_way
    flat = [microbatch for found in microbatches for microbatch in found]
    starts = _starts([microbatch.num_tokens for microbatch in flat])
    lora = LoraBatch(
        tuple(one.run.lora for one in passes),
        tuple(sum(len(microbatch.lengths) for microbatch in found) for found in microbatches),
    )
    with host.gate.training(), torch.set_grad_enabled(trained):
        with _timed(passes, "forward"):
            hidden = host.model.forward_train(
                torch.cat([microbatch.token_ids for microbatch in flat]),
                [length for microbatch in flat for length in microbatch.lengths],
                lora,
                recompute=passes[0].run.sharing.recompute,
                give_way=give_way,
            )
            rows = torch.cat([microbatch.rows + start for microbatch, start in zip(flat, starts, strict=True)])
            targets = torch.cat([microbatch.targets for microbatch in flat])
            scores = host.model.token_scores(hidden.index_select(0, rows), targets, give_way=give_way)
            counts = [sum(len(microbatch.targets) for microbatch in found) for found in microbatches]
            parts = zip(torch.split(scores.logprobs, counts), torch.split(scores.hits, counts), strict=True)
            losses = [
                one.take(TokenScores(*part), found)
                for one, part, found in zip(passes, parts, microbatches, strict=True)
            ]
        if trained:
            with _timed(passes, "backward"), torch.autograd.set_multithreading_enabled(False):
                torch.autograd.backward(losses)


def _timed(passes: Sequence[Pass], part: Part) -> ExitStack:
    """Counts what a block launches as this part of every pass's step: each has waited for all of it."""
    stack = ExitStack()
    for one in passes:
        stack.enter_context(one.run.watch.part(part))
    return stack


def _starts(sizes: Sequence[int]) -> list[int]:
    found, start = [], 0
    for size in sizes:
        found.append(start)
        start += size
    return found
