"""Check of what a job has learnt: how well its own examples are known before the first and after the last step, and a
note where that is hardly better.

What was found before the first step is remembered in every checkpoint, as the value of `publish_if` is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from services.common.errors import InvalidRequest
from services.common.jobs import DraftJob, GrpoJob, JobBase, PublishingSpec
from services.common.jobs.examples import ExampleJob
from services.trainer.jobs.base import JobRun, RunState
from services.trainer.jobs.passes import Course, examination_of
from services.trainer.runtime.attempts.acceptance import Acceptance

_KEY = "lesson_before"
_OF_ROUNDS = ("reward_mean", "divergence")
"""Metrics of a job that samples for itself: its examples are those of its first round and of its last one."""
_KNOWN = 0.05
"""A loss, in nats a token, from which there is little left to fall."""
_FEW, _NOT_KNOWN = 32, 1.0
"""Number of examples that are few enough to be known by heart, and the loss at which they are not."""


class LearningCheck:
    """Losses and rewards of a job on its own examples, before its first step and after its last one."""

    def __init__(self, spec: PublishingSpec) -> None:
        self._spec = spec
        self.acceptance = Acceptance(spec)
        """The job's `publish_if`, which is measured at the same two places on what is held out."""
        self._before: dict[str, float] | None = None
        self._found: dict[str, float] = {}

    def begin(self, run: JobRun, interrupt: Callable[[], None]) -> Course[None]:
        """Examines the policy that the job starts from, unless a checkpoint has told what was found then."""
        if self._before is None:
            self._before = yield from examination_of(run, interrupt)

    def saw(self, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a step: the first ones of a job that samples for itself say what it starts from."""
        if self._before is not None and "loss" not in self._before:
            for name in _OF_ROUNDS:
                if name in metrics:
                    self._before.setdefault(name, metrics[name])

    def end(self, run: JobRun, newest: Mapping[str, float], interrupt: Callable[[], None]) -> Course[dict[str, float]]:
        """Metrics of both evaluations: each value with `_before` and `_after` behind its name."""
        before = self._before or {}
        after = (yield from examination_of(run, interrupt)) if "loss" in before else newest
        for name in before.keys() & after.keys():
            self._found |= {f"{name}_before": before[name], f"{name}_after": after[name]}
        return dict(self._found)

    def note(self, run: JobRun, newest: Mapping[str, float]) -> str | None:
        """Note for the user when the examples were hardly learnt, with what to change; None: they were learnt."""
        if not isinstance(self._spec, JobBase):
            return None
        attached = "; it is attached all the same (`temper adapters detach`)" if self._spec.attach else ""
        if isinstance(self._spec, GrpoJob) and self._spec.generate is not None:
            if newest.get("num_tokens", 1):
                return None
            return (
                "nothing was learnt: in every round the completions of each prompt had equal rewards; sample more of "
                f"them, at a higher temperature, or score them more finely{attached}"
            )
        if "loss_before" in self._found:
            name = "divergence from its target" if isinstance(self._spec, DraftJob) else "loss on its own examples"
            before, after = self._found["loss_before"], self._found["loss_after"]
        elif "divergence_before" in self._found:
            name = "divergence from the teacher"
            before, after = self._found["divergence_before"], self._found["divergence_after"]
        else:
            return None
        if (verdict := self._verdict(before, after)) is None:
            return None
        return (
            f"{verdict}: the {name} was {before:.4g} before and is {after:.4g} after {run.total_steps} steps at "
            f"learning rate {run.settings['learning_rate']:.3g}; {self._way_out(run)}{attached}"
        )

    def _verdict(self, before: float, after: float) -> str | None:
        """Conclusion from the two values; None: the examples were learnt."""
        spec = self._spec
        if not isinstance(spec, ExampleJob):
            return "hardly learnt" if after >= before else None
        if spec.loss_in_nats and after <= _KNOWN:
            return None
        if after > before - spec.least_loss_fall * abs(before):
            return "hardly learnt"
        few = spec.loss_in_nats and len(spec.examples) <= _FEW
        return "not learnt by heart" if few and after > _NOT_KNOWN else None

    def _way_out(self, run: JobRun) -> str:
        """Whoever named less than the defaults hears of them."""
        less = {name: usual for name, usual in run.defaults.items() if run.settings[name] < usual}
        if less:
            usual = " and ".join(f"{name} {value:.3g}" for name, value in less.items())
            return f"leave {' and '.join(less)} out, for the default here is {usual}"
        return f"give more {' or a higher '.join(run.defaults)}, and examples that do not contradict each other"

    def stamp(self, state: RunState) -> RunState:
        """The state of a checkpoint with what was found before the first step; None: that was interrupted."""
        state = self.acceptance.stamp(state)
        return dataclasses.replace(state, data={**state.data, _KEY: self._before})

    def restore(self, state: RunState) -> None:
        """Takes that from a checkpoint. One of an earlier release has nothing, and then nothing is told.

        Raises:
            InvalidRequest: it is unreadable, or has no value for a `publish_if`.
        """
        self.acceptance.restore(state)
        found = state.data.get(_KEY, {})
        if found is None:
            return
        if not isinstance(found, dict):
            raise InvalidRequest("the checkpoint's examination before the first step is unreadable")
        self._before = {str(name): float(value) for name, value in found.items()}
