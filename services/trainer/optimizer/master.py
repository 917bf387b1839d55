"""AdamW over float32 masters with warm-up, schedule and clipping, and a state that resumes bit by bit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, assert_never

import torch
from torch import Tensor, nn

from services.common.errors import InvalidRequest
from services.common.jobs import OptimizerSettings
from services.trainer.optimizer.adamw_8bit import AdamW8bit

States: TypeAlias = Literal["float32", "8bit"]
"""Form of AdamW's moments."""


def learning_rate(settings: OptimizerSettings, peak: float, step: int, total_steps: int) -> float:
    """Rate of optimizer step ``step`` (from 0): linear warm-up that reaches ``peak`` on its last step, then
    constant, or a straight line or a half cosine towards 0. No step has rate 0."""
    warmup = min(settings.warmup_steps, total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, total_steps - warmup)
    match settings.schedule:
        case "constant":
            return peak
        case "linear":
            return peak * (1.0 - done)
        case "cosine":
            return peak * 0.5 * (1.0 + math.cos(math.pi * done))
        case _:
            assert_never(settings.schedule)


class MasterOptimizer:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101; torch's implementation) whose settings come with each step.

    Args:
        parameters: float32 tensors that require grad, always in the same order.
        states: "8bit": the moments are bytes (services.trainer.optimizer.adamw_8bit).
    """

    def __init__(self, parameters: Sequence[Tensor], *, states: States = "float32") -> None:
        self._parameters = list(parameters)
        self._fused = self._parameters[0].is_cuda and states == "float32"
        """One kernel for everything; it keeps its step counts on the device."""
        self._adamw: torch.optim.Optimizer
        if states == "8bit":
            self._adamw = AdamW8bit(self._parameters)
        else:
            self._adamw = torch.optim.AdamW(self._parameters, foreach=not self._fused, fused=self._fused)

    def zero_grad(self) -> None:
        """Forgets accumulated gradients, also those of an interrupted step; where they lie stays the same."""
        self._adamw.zero_grad(set_to_none=False)

    def apply(
        self,
        *,
        learning_rate: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        max_grad_norm: float | None,
        what: str = "the step",
    ) -> float:
        """Clips the accumulated gradients to ``max_grad_norm`` (global L2 norm; None: not) and applies them.

        Returns:
            The norm before clipping.

        Raises:
            InvalidRequest: the gradient is not finite; nothing has been applied. ``what`` names the step in the
                message.
        """
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        norm = float(nn.utils.get_total_norm(gradients))
        if not math.isfinite(norm):
            raise InvalidRequest(
                f"training diverged at {what}: the gradient norm is {norm}; lower the learning rate",
                param="learning_rate",
            )
        if max_grad_norm is not None:
            total = torch.tensor(norm, device=self._parameters[0].device)
            nn.utils.clip_grads_with_norm_(self._parameters, max_grad_norm, total)
        for group in self._adamw.param_groups:
            group |= {"lr": learning_rate, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self._adamw.step()
        return norm

    def state(self) -> dict[str, Tensor]:
        """Moments and step counts as copies on the CPU, named "<parameter index>.<name>"."""
        return {
            f"{index}.{name}": value.detach().to("cpu", copy=True)
            for index, parameter in enumerate(self._parameters)
            for name, value in self._adamw.state.get(parameter, {}).items()
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores ``state()``.

        Raises:
            InvalidRequest: it belongs to other parameters.
        """
        restored: dict[int, dict[str, Tensor]] = {}
        for key, value in state.items():
            index, _, name = key.partition(".")
            restored.setdefault(int(index), {})[name] = value
        for number, values in restored.items():
            if number >= len(self._parameters) or not self._fits(self._parameters[number], values):
                raise InvalidRequest(f"the checkpoint's optimizer state {number} does not fit what this job trains")
            parameter = self._parameters[number]
            self._adamw.state[parameter] = {
                name: value.to("cpu" if name == "step" and not self._fused else parameter.device, copy=True)
                for name, value in values.items()
            }

    def _fits(self, parameter: Tensor, values: Mapping[str, Tensor]) -> bool:
        if isinstance(self._adamw, AdamW8bit):
            wanted = self._adamw.new_state(parameter)
            return values.keys() == wanted.keys() and all(
                (value.shape, value.dtype) == (wanted[name].shape, wanted[name].dtype) for name, value in values.items()
            )
        return all(name == "step" or value.shape == parameter.shape for name, value in values.items())


class ScheduledOptimizer(MasterOptimizer):
    """A job's: one set of settings, and a schedule.

    Args:
        parameters: float32 tensors that require grad, always in the same order.
        settings: the job's.
        peak: the job's learning rate.
        total_steps: of the whole job, for the schedule.
        states: see MasterOptimizer.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        settings: OptimizerSettings,
        *,
        peak: float,
        total_steps: int,
        states: States = "float32",
    ) -> None:
        super().__init__(parameters, states=states)
        self._settings = settings
        self._peak = peak
        self._total_steps = total_steps

    def step(self, index: int) -> dict[str, float]:
        """Clips the accumulated gradients to ``max_grad_norm`` (global L2 norm) and applies them.

        Returns:
            ``grad_norm`` before clipping, and ``learning_rate``.

        Raises:
            InvalidRequest: the gradient is not finite; nothing has been applied.
        """
        rate = self._rate(index)
        norm = self.apply(
            learning_rate=rate,
            betas=(self._settings.beta1, self._settings.beta2),
            eps=self._settings.eps,
            weight_decay=self._settings.weight_decay,
            max_grad_norm=self._settings.max_grad_norm,
            what=f"step {index}",
        )
        return {"grad_norm": norm, "learning_rate": rate}

    def rest(self, index: int) -> dict[str, float]:
        """Stands in the place of step(), where there was nothing to learn from: moments of earlier steps move
        nothing."""
        return {"grad_norm": 0.0, "learning_rate": self._rate(index)}

    def _rate(self, index: int) -> float:
        return learning_rate(self._settings, self._peak, index, self._total_steps)
