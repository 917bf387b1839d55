"""The policy of one session: adapter masters, gradients that accumulate, AdamW. Used by the trainer thread only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from services.common.errors import InvalidRequest, Overloaded
from services.common.jobs.base import Pace
from services.common.jobs.training_sessions.calls import Forward, ForwardBackward, OptimStep
from services.engine.models.interface import Recompute
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.training_arena import GraphMemory
from services.engine.models.training_forward import TrainableForward
from services.trainer.host.policy_host import PolicyHost
from services.trainer.memory.budget import MemoryNeed
from services.trainer.memory.estimate import Workload, estimate
from services.trainer.optimizer import MasterOptimizer
from services.trainer.training_sessions.forward import Scoring

_PACE = Pace(1e-4)
"""Defaults of training sessions."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a session's computation."""

    microbatch_tokens: int
    recompute: Recompute


def need_of(host: PolicyHost, lora: LoraParams, shape: Shape, tokens: int | None = None) -> MemoryNeed:
    """Bytes of a session with this adapter whose largest microbatch has ``tokens`` inputs (None: as it packs)."""
    fused = host.model.device.type == "cuda"
    work = Workload(
        adapter_numbers=lora.num_parameters(),
        rank=lora.rank,
        tokens=shape.microbatch_tokens if tokens is None else tokens,
        itemsize=host.model.dtype.itemsize,
        recompute=shape.recompute,
        fused=fused,
    )
    return MemoryNeed.of(estimate(host.model.config, work), captured=fused)


class SessionPolicy:
    """Policy of a session, which its calls change.

    Args:
        lora: the adapter to start with.
        graphs: where steps are captured; None: nowhere.
        steps: optimizer steps that were taken before (of a checkpoint).
    """

    def __init__(
        self,
        host: PolicyHost,
        lora: LoraParams,
        shape: Shape,
        graphs: GraphMemory | None = None,
        *,
        steps: int = 0,
    ) -> None:
        self._host = host
        self._shape = shape
        self.lora = lora = lora.on(host.model.device)
        lora.link_gradients()
        self.optimizer = MasterOptimizer([lora.flat_a, lora.flat_b])
        self.steps = steps
        self._forward = TrainableForward(host.model, lora, shape.recompute, graphs, most_tokens=shape.microbatch_tokens)
        self._accumulated = False
        """Whether there is a gradient to apply."""
        self._broken: str | None = None
        """Reason for which accumulated gradients were dropped, until an optim_step has told it."""

    def begin(self, call: Forward | ForwardBackward) -> Scoring:
        """A forward or forward_backward, to be computed part by part. When a part of a forward_backward fails, whatever
        the reason, no gradient is left.

        Raises:
            DoesNotFit: a datum is too long for what is left of the memory.
        """

        def failed(error: BaseException) -> None:
            self._forget_gradients()
            self._broken = f"forward_backward seq {call.seq} failed"
            if isinstance(error, torch.OutOfMemoryError):
                raise self._out_of_memory(error) from error

        try:
            if call.longest > self._shape.microbatch_tokens:
                self._check_longest(call)
            scoring = Scoring(
                self._host,
                self._forward,
                call,
                backward=isinstance(call, ForwardBackward),
                microbatch_tokens=self._shape.microbatch_tokens,
                failed=failed,
            )
            self._accumulated = self._accumulated or isinstance(call, ForwardBackward)
            return scoring
        except BaseException as error:
            if isinstance(call, ForwardBackward):
                failed(error)
            raise

    def drop(self, seq: int) -> None:
        """Drops what has been accumulated: a forward_backward of this number was refused."""
        self._forget_gradients()
        self._broken = f"forward_backward seq {seq} was refused"

    def step(self, call: OptimStep) -> dict[str, Any]:
        """Applies what has been accumulated.

        Raises:
            InvalidRequest: there is no gradient, or it is not finite; nothing was applied, and none is left.
            Overloaded: the device ran out of memory; no gradient is left.
        """
        if self._broken is not None:
            reason, self._broken = self._broken, None
            self._forget_gradients()
            raise InvalidRequest(
                f"nothing was applied: {reason}, and the gradients accumulated before it were dropped with it; send "
                "the forward_backward calls of this step again"
            )
        if not self._accumulated:
            raise InvalidRequest("there is no gradient to apply: call forward_backward before optim_step")
        rate = call.learning_rate
        if rate is None:
            rate = _PACE.rate(self._host.model.config.hidden_size)
        with self._host.gate.training():
            try:
                norm = self.optimizer.apply(
                    learning_rate=rate,
                    betas=(call.beta1, call.beta2),
                    eps=call.eps,
                    weight_decay=call.weight_decay,
                    max_grad_norm=call.max_grad_norm,
                )
            except torch.OutOfMemoryError as error:
                raise self._out_of_memory(error) from error
            finally:
                self._forget_gradients()
        self.steps += 1
        return {"step": self.steps, "grad_norm": norm, "learning_rate": rate}

    def _out_of_memory(self, error: torch.OutOfMemoryError) -> Overloaded:
        """Error to raise. Memory that nobody uses goes back to the device."""
        self._host.memory_budget.out_of_memory()
        return Overloaded(f"the device ran out of memory: {str(error).splitlines()[0][:200]}")

    def _forget_gradients(self) -> None:
        self.optimizer.zero_grad()
        self._accumulated = False

    def _check_longest(self, call: Forward | ForwardBackward) -> None:
        longest = max(range(len(call.data)), key=lambda index: len(call.data[index].token_ids))
        count = len(call.data[longest].inputs)
        need, usual = need_of(self._host, self.lora, self._shape, count), need_of(self._host, self.lora, self._shape)
        # Beside what the session has reserved to stay. So long a one is launched kernel by kernel.
        extra = need.uncaptured().working + need.resident - usual.resident
        what = f"data[{longest}] with {count} tokens"
        self._host.memory_budget.check_working(extra, what=what, param=f"data[{longest}].token_ids")
