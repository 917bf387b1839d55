"""The policy of one session: adapter masters, gradients that accumulate, AdamW. Used by the trainer thread only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.common.errors import InvalidRequest, Overloaded
from services.common.sessions import Forward, ForwardBackward, OptimStep
from services.engine.model.lora import LoraParams
from services.trainer.host import PolicyHost
from services.trainer.ledger import Need
from services.trainer.memory import estimate
from services.trainer.optimizer import MasterOptimizer
from services.trainer.sessions.losses import token_loss
from services.trainer.sessions.scoring import ScoredBatch, scored_batches, spread


@dataclass(frozen=True, slots=True)
class Shape:
    """How a session computes."""

    microbatch_tokens: int
    gradient_checkpointing: bool


def need_of(host: PolicyHost, lora: LoraParams, shape: Shape, tokens: int | None = None) -> Need:
    """Bytes of a session with this adapter whose largest microbatch has ``tokens`` inputs (None: as it packs)."""
    memory = estimate(
        host.model.config,
        adapter_numbers=lora.num_parameters(),
        rank=lora.rank,
        tokens=shape.microbatch_tokens if tokens is None else tokens,
        itemsize=host.model.dtype.itemsize,
        checkpointing=shape.gradient_checkpointing,
    )
    return Need(resident=memory.adapter, working=memory.total - memory.adapter)


class SessionPolicy:
    """What the calls of a session change.

    Args:
        lora: the adapter to start with.
        steps: optimizer steps that were taken before (of a checkpoint).
    """

    def __init__(self, host: PolicyHost, lora: LoraParams, shape: Shape, *, steps: int = 0) -> None:
        self._host = host
        self._shape = shape
        self.lora = lora
        self.optimizer = MasterOptimizer(lora.parameters())
        self.steps = steps
        self._broken: str | None = None
        """Why accumulated gradients were dropped, until an optim_step has said so."""

    def score(self, call: Forward | ForwardBackward, interrupt: Callable[[], None]) -> dict[str, Any]:
        """Runs one forward, or forward_backward; takes the host's gate itself, microbatch by microbatch.

        Args:
            interrupt: called between microbatches; may raise.

        Returns:
            ``loss`` (the sum), ``num_tokens`` read, ``scored_tokens``, ``metrics``, and ``logprobs`` of each datum.

        Raises:
            InvalidRequest: the loss is not finite. After a forward_backward that failed, whatever the reason, no
                gradient is left.
            DoesNotFit: a datum is too long for what is left of the memory.
        """
        if isinstance(call, Forward):
            return self._score(call, interrupt, backward=False)
        try:
            return self._score(call, interrupt, backward=True)
        except BaseException as error:
            self.optimizer.zero_grad()
            self._broken = f"forward_backward seq {call.seq} failed"
            if isinstance(error, torch.OutOfMemoryError):
                raise Overloaded(f"the device ran out of memory: {str(error).splitlines()[0][:200]}") from error
            raise

    def step(self, call: OptimStep) -> dict[str, Any]:
        """Applies what has been accumulated.

        Raises:
            InvalidRequest: there is no gradient, or it is not finite; nothing was applied, and none is left.
        """
        if self._broken is not None:
            reason, self._broken = self._broken, None
            self.optimizer.zero_grad()
            raise InvalidRequest(
                f"nothing was applied: {reason}, and the gradients accumulated before it were dropped with it; send "
                "the forward_backward calls of this step again"
            )
        if not self.optimizer.has_gradients:
            raise InvalidRequest("there is no gradient to apply: call forward_backward before optim_step")
        with self._host.gate.training():
            try:
                norm = self.optimizer.apply(
                    learning_rate=call.learning_rate,
                    betas=(call.beta1, call.beta2),
                    eps=call.eps,
                    weight_decay=call.weight_decay,
                    max_grad_norm=call.max_grad_norm,
                )
            finally:
                self.optimizer.zero_grad()
        self.steps += 1
        return {"step": self.steps, "grad_norm": norm, "learning_rate": call.learning_rate}

    def forget_gradients(self) -> None:
        """As after a load."""
        self.optimizer.zero_grad()
        self._broken = None

    def _score(
        self, call: Forward | ForwardBackward, interrupt: Callable[[], None], *, backward: bool
    ) -> dict[str, Any]:
        if call.longest > self._shape.microbatch_tokens:
            self._check_longest(call)
        device = self._host.model.device
        loss = torch.zeros((), dtype=torch.float64, device=device)
        sums: dict[str, Tensor] = {}
        logprobs: dict[int, list[float]] = {}
        for batch in scored_batches(call.data, self._shape.microbatch_tokens, device):
            interrupt()
            with self._host.gate.training(), torch.set_grad_enabled(backward):
                found = self._logprobs(batch, call.temperature)
                part = token_loss(call.loss, call.loss_config, found, batch.weights, batch.advantages, batch.behaviour)
                values = torch.stack([part.loss.detach(), *part.sums.values()])
                if not bool(torch.isfinite(values).all()):
                    raise InvalidRequest(
                        f"the loss is {float(values[0])} and the sums of its ratios {values[1:].tolist()}: ratios of "
                        "far-off log-probabilities overflow, or the weights have diverged (load an earlier checkpoint, "
                        "lower the learning rate)",
                        param="data",
                    )
                if backward:
                    # On this thread: the one that holds the gate and gives way.
                    with torch.autograd.set_multithreading_enabled(False):
                        torch.autograd.backward(part.loss)
                loss += part.loss.detach()
                for name, value in part.sums.items():
                    sums[name] = sums.get(name, torch.zeros((), device=device)) + value
                self._collect(batch, found.detach(), logprobs)
        scored = sum(len(values) for values in logprobs.values())
        return {
            "loss": float(loss),
            "num_tokens": sum(len(datum.inputs) for datum in call.data),
            "scored_tokens": scored,
            "metrics": {name: float(value) / scored for name, value in sums.items()},
            "logprobs": [spread(datum, logprobs[index]) for index, datum in enumerate(call.data)],
        }

    def _logprobs(self, batch: ScoredBatch, temperature: float) -> Tensor:
        """[N] float32, with gradient to the adapter where gradients are on."""
        hidden = self._host.model.forward_train(
            batch.microbatch.token_ids,
            batch.microbatch.lengths,
            self.lora,
            checkpointing=self._shape.gradient_checkpointing and torch.is_grad_enabled(),
            give_way=self._host.gate.give_way,
        )
        rows = hidden.index_select(0, batch.microbatch.rows)
        return self._host.model.token_logprobs(rows, batch.targets, temperature)

    def _collect(self, batch: ScoredBatch, logprobs: Tensor, into: dict[int, list[float]]) -> None:
        values = logprobs.tolist()
        start = 0
        for document in batch.microbatch.documents:
            into[document.source] = values[start : start + document.num_trained]
            start += document.num_trained

    def _check_longest(self, call: Forward | ForwardBackward) -> None:
        longest = max(range(len(call.data)), key=lambda index: len(call.data[index].token_ids))
        count = len(call.data[longest].inputs)
        need = need_of(self._host, self.lora, self._shape, count)
        what = f"data[{longest}] with {count} tokens"
        self._host.ledger.check_working(need.working, what=what, param=f"data[{longest}].token_ids")
