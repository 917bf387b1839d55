"""Steps of a recovery: gradients of packed documents, looks at the held-out loss, and states that it resumes from."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor

from services.common.jobs.documents import Document, completion_document
from services.engine.models.interface import CausalLM
from services.engine.models.training_forward import FrozenForward
from services.forge.recovery.examples import Examples
from services.forge.recovery.sampling import OfflineSampler
from services.forge.recovery.settings import RecoverySettings
from services.forge.recovery.student import Student
from services.trainer.jobs.base import RunState
from services.trainer.losses import divergence_loss, negative_log_likelihood
from services.trainer.optimizer import ScheduledOptimizer
from services.trainer.packing import Microbatch, pack
from services.trainer.sampling.prompts import sample_seed

_DRAWS = 2**63
_STUDENT, _BEST, _OPTIMIZER = "student.", "best.", "optimizer."
"""Tensors of a state."""


@dataclass(slots=True)
class Course:
    """What has happened so far."""

    step: int = 0
    """Steps that are finished."""
    best_step: int = 0
    stale: int = 0
    """Looks since the held-out loss was lowest."""
    before: float | None = None
    """Held-out loss before the first step."""
    best: float | None = None
    tokens: int = 0
    sampled_tokens: int = 0
    seconds: float = 0.0

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Self:
        """Of its JSON."""
        return cls(**data)


class RecoveryRun:
    """A student that learns.

    Args:
        teacher: of distillation.
        ends: tokens that end a completion.
        give_way: called between layers.
        pause: called between forwards, for others to have the device a while.
    """

    def __init__(
        self,
        student: Student,
        teacher: CausalLM | None,
        examples: Examples,
        settings: RecoverySettings,
        *,
        ends: Sequence[int],
        give_way: Callable[[], None],
        pause: Callable[[], object] = lambda: None,
    ) -> None:
        self.student = student
        self.course = Course()
        self._teacher, self._examples, self._settings = teacher, examples, settings
        self._frozen = None if teacher is None else FrozenForward(teacher, None)
        self._ends, self._give_way, self._pause = ends, give_way, pause
        self._steps = examples.steps(settings)
        self._optimizer = ScheduledOptimizer(
            student.parameters,
            settings.optimizer,
            peak=settings.learning_rate(student.model.config.hidden_size),
            total_steps=settings.steps,
            states=settings.optimizer_states,
        )
        self._best: dict[str, Tensor] | None = None
        """Masters of the best step, if they are not those of now."""
        self._began = time.monotonic()

    @property
    def done(self) -> bool:
        """True if there is nothing left to do but to write what came of it."""
        return self.course.step >= self._settings.steps or self.stopped_early

    @property
    def stopped_early(self) -> bool:
        """True if the held-out loss does not fall any more."""
        patience = self._settings.patience
        return patience is not None and self.course.stale >= patience and self.course.step < self._settings.steps

    def begin(self) -> None:
        """The held-out loss before the first step; a resumed run has it."""
        if self.course.before is None:
            self.course.before = self.course.best = self.held_out_loss()

    def step(self) -> float:
        """One optimizer step, and the held-out loss where one is due. Returns the step's loss."""
        index = self.course.step
        documents = self._documents(index)
        total = sum(document.num_trained for document in documents)
        self._optimizer.zero_grad()
        loss = 0.0
        for batch in self._pack(documents):
            part = self._loss(self.student.hidden(batch, self._give_way), self._taught(batch), batch, total)
            with torch.autograd.set_multithreading_enabled(False):
                torch.autograd.backward(part)
            loss += float(part.detach())
            self.course.tokens += batch.num_tokens
            self._pause()
        self._before_change()
        self._optimizer.step(index)
        self._optimizer.zero_grad()
        self.course.step = index + 1
        if self.course.step % self._settings.eval_every == 0 or self.course.step == self._settings.steps:
            self._look()
        return loss

    def go_to_best(self) -> None:
        """Makes the weights those of the lowest held-out loss."""
        if self._best is not None:
            self.student.load_state(self._best)
            self._best = None

    @torch.no_grad()
    def held_out_loss(self, model: CausalLM | None = None) -> float:
        """Mean loss a trained token on what is held out.

        Args:
            model: of the student's shape; None: the student as it is.
        """
        total = sum(document.num_trained for document in self._examples.held_out)
        forward = None if model is None else FrozenForward(model, None)
        loss = 0.0
        for batch in self._pack(self._examples.held_out):
            if forward is None:
                hidden = self.student.hidden(batch, self._give_way)
            else:
                hidden = forward(batch.token_ids, batch.lengths, self._give_way).index_select(0, batch.rows)
            loss += float(self._loss(hidden, self._taught(batch), batch, total))
            self._pause()
        return loss

    def state(self) -> RunState:
        """State that resumes behind the last finished step."""
        tensors = {f"{_STUDENT}{name}": value for name, value in self.student.state().items()}
        tensors |= {f"{_OPTIMIZER}{name}": value for name, value in self._optimizer.state().items()}
        tensors |= {f"{_BEST}{name}": value for name, value in (self._best or {}).items()}
        now = time.monotonic()
        self.course.seconds += now - self._began
        self._began = now
        return RunState(tensors, asdict(self.course))

    def load_state(self, state: RunState) -> None:
        """Restores state().

        Raises:
            ValueError, InvalidRequest: it is of another student.
        """
        self.student.load_state(_under(_STUDENT, state.tensors))
        self._optimizer.load_state(_under(_OPTIMIZER, state.tensors))
        self._best = _under(_BEST, state.tensors) or None
        self.course = Course.read(state.data)

    def _before_change(self) -> None:
        if self.course.best_step == self.course.step and self._best is None:
            self._best = self.student.state()

    def _look(self) -> None:
        loss, course = self.held_out_loss(), self.course
        if course.best is None or loss < course.best:
            course.best, course.best_step, course.stale = loss, course.step, 0
            self._best = None
        else:
            course.stale += 1

    def _pack(self, documents: Sequence[Document]) -> list[Microbatch]:
        return pack(documents, self._settings.tokens_per_forward, self.student.model.device)

    def _taught(self, batch: Microbatch) -> Tensor | None:
        """[N, the teacher's hidden] of the same rows."""
        if self._frozen is None:
            return None
        return self._frozen(batch.token_ids, batch.lengths, self._give_way).index_select(0, batch.rows)

    def _loss(self, hidden: Tensor, taught: Tensor | None, batch: Microbatch, total: int) -> Tensor:
        model, settings = self.student.model, self._settings
        if self._teacher is None or taught is None:
            logprobs = model.token_logprobs(hidden, batch.targets, give_way=self._give_way)
            return negative_log_likelihood(logprobs, total)
        found = model.divergence(
            hidden,
            self._teacher,
            taught,
            beta=settings.beta,
            temperature=settings.temperature,
            give_way=self._give_way,
        )
        return divergence_loss(found.value, total)

    def _documents(self, index: int) -> list[Document]:
        """Documents of a step. A drawn share of them get a completion that the student samples as it is now."""
        settings = self._settings
        found = [self._examples.learnt[place] for place in self._steps[index]]
        drawn = [
            place
            for place in range(len(found))
            if sample_seed("on_policy", settings.seed, index, place) < settings.on_policy * _DRAWS
        ]
        if not drawn:
            return found
        sampler = OfflineSampler(
            self.student.current(),
            ends=self._ends,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.sampling_temperature,
            tokens_at_once=settings.tokens_per_forward,
            seed=sample_seed("sampling", settings.seed, index),
            give_way=self._give_way,
        )
        prompts = [_prompt(found[place]) for place in drawn]
        for place, prompt, completion in zip(drawn, prompts, sampler.sample(prompts), strict=True):
            found[place] = completion_document(prompt, completion, found[place].source)
            self.course.sampled_tokens += len(completion)
        return found


def _prompt(document: Document) -> list[int]:
    """Tokens in front of the first that is trained."""
    return list(document.token_ids[: list(document.trained).index(True)])


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
