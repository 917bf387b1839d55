"""One forward or forward_backward call, a microbatch at a time, so that jobs and other sessions come in between."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from services.common.errors import InvalidRequest
from services.common.jobs.training_sessions.calls import Forward, ForwardBackward
from services.engine.models.training_forward import TrainableForward
from services.trainer.host.policy_host import PolicyHost
from services.trainer.training_sessions.losses import token_loss
from services.trainer.training_sessions.scoring import ScoredBatch, scored_batches, spread


class Failed(Protocol):
    """Told why a forward_backward cannot be completed; what it accumulated must not be used. May raise what is to be
    said instead."""

    def __call__(self, error: BaseException) -> None: ...


class Scoring:
    """Forwards and backwards of a call that are left to compute. Gradients are added to the adapter's masters at once.

    Args:
        forward: of the session's adapter.
        backward: whether gradients are made.
        microbatch_tokens: inputs that short data are packed up to.
        failed: see Failed; called before a part raises.
    """

    def __init__(
        self,
        host: PolicyHost,
        forward: TrainableForward,
        call: Forward | ForwardBackward,
        *,
        backward: bool,
        microbatch_tokens: int,
        failed: Failed,
    ) -> None:
        self._host = host
        self._call = call
        self._forward = forward
        self._backward = backward
        self._failed = failed
        self._batches = scored_batches(call.data, microbatch_tokens, host.model.device)[::-1]
        self._loss = torch.zeros((), dtype=torch.float64, device=host.model.device)
        self._sums: dict[str, Tensor] = {}
        self._logprobs: dict[int, list[float]] = {}

    def next_part(self) -> dict[str, Any] | None:
        """Computes a microbatch, inside the host's gate.

        Returns:
            None while there are more; then ``loss`` (the sum), ``num_tokens`` read, ``scored_tokens``, ``metrics``, and
            ``logprobs`` of each datum.

        Raises:
            InvalidRequest: the loss or a ratio is not finite.
        """
        try:
            with self._host.gate.training(), torch.set_grad_enabled(self._backward):
                self._microbatch(self._batches.pop())
        except BaseException as error:
            if self._backward:
                self._failed(error)
            raise
        return None if self._batches else self._result()

    def _microbatch(self, batch: ScoredBatch) -> None:
        call = self._call
        tokens, lengths, give_way = batch.microbatch.token_ids, batch.microbatch.lengths, self._host.gate.give_way
        hidden = self._forward(tokens, lengths, give_way)
        rows = hidden.index_select(0, batch.microbatch.rows)
        logprobs = self._host.model.token_logprobs(rows, batch.targets, call.temperature, give_way=give_way)
        part = token_loss(call.loss, call.loss_config, logprobs, batch.weights, batch.advantages, batch.behaviour)
        values = torch.stack([part.loss.detach(), *part.sums.values()])
        if not bool(torch.isfinite(values).all()):
            raise InvalidRequest(
                f"the loss is {float(values[0])} and the sums of its ratios {values[1:].tolist()}: ratios of far-off "
                "log-probabilities overflow, or the weights have diverged (load an earlier checkpoint, lower the "
                "learning rate)",
                param="data",
            )
        if self._backward:
            # On this thread: the one that holds the gate and gives way.
            with torch.autograd.set_multithreading_enabled(False):
                torch.autograd.backward(part.loss)
        self._loss += part.loss.detach()
        for name, value in part.sums.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        found = iter(logprobs.detach().tolist())
        for document in batch.microbatch.documents:
            self._logprobs[document.source] = [next(found) for _ in range(document.num_trained)]

    def _result(self) -> dict[str, Any]:
        scored = sum(len(values) for values in self._logprobs.values())
        data = self._call.data
        return {
            "loss": float(self._loss),
            "num_tokens": sum(len(datum.inputs) for datum in data),
            "scored_tokens": scored,
            "metrics": {name: float(value) / scored for name, value in self._sums.items()},
            "logprobs": [spread(datum, self._logprobs[index]) for index, datum in enumerate(data)],
        }
