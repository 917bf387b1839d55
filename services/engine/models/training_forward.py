"""Training forwards of a job: forwards over packed documents that autograd can go back through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from services.engine.models.lora.trainable import LoraParams

if TYPE_CHECKING:
    from services.engine.models.interface import CausalLM, Recompute
    from services.engine.models.training_arena import GraphMemory


class TrainableForward:
    """The forward of one adapter in training.

    Args:
        lora: masters on the model's device; on a GPU their gradients are added to where LoraParams.link_gradients()
            puts them, and must be zeroed, not dropped.
        recompute: what the backward computes again.
        memory: where steps are captured as CUDA graphs; None: none are.
        most_tokens: of the steps that ``memory`` has room for; None: of all that are captured.
    """

    def __init__(
        self,
        model: CausalLM,
        lora: LoraParams,
        recompute: Recompute,
        memory: GraphMemory | None = None,
        *,
        most_tokens: int | None = None,
    ) -> None:
        self._model, self._lora, self._recompute = model, lora, recompute
        self._captured = None if memory is None else model.captured_forwards(lora, recompute, memory, most_tokens)

    def __call__(
        self,
        token_ids: Tensor,
        lengths: Sequence[int],
        give_way: Callable[[], None],
        parents: Sequence[int | None] | None = None,
    ) -> Tensor:
        """See CausalLM.forward_train. Of steps that are captured only the newest can be gone back through."""
        if self._captured is not None and parents is None:
            hidden = self._captured.differentiable(token_ids, lengths, give_way)
            if hidden is not None:
                return hidden
        return self._model.forward_train(
            token_ids, lengths, self._lora, recompute=self._recompute, give_way=give_way, parents=parents
        )


class FrozenForward:
    """The forward of a model that nothing is trained in: a teacher, or a reference.

    Args:
        lora: on the model's device; not to be changed. None: the base model.
        memory: where forwards of few tokens are captured as CUDA graphs, half a layer each, because launching one
            kernel by kernel takes longer than computing it; None: none are.
        most_tokens: see TrainableForward.
    """

    def __init__(
        self,
        model: CausalLM,
        lora: LoraParams | None,
        memory: GraphMemory | None = None,
        *,
        most_tokens: int | None = None,
    ) -> None:
        self._model, self._lora = model, lora
        self._captured = None if memory is None else model.captured_forwards(lora, None, memory, most_tokens)

    @torch.no_grad()
    def __call__(
        self,
        token_ids: Tensor,
        lengths: Sequence[int],
        give_way: Callable[[], None],
        parents: Sequence[int | None] | None = None,
    ) -> Tensor:
        """[T, hidden]: see CausalLM.forward_train."""
        if self._captured is not None and parents is None:
            hidden = self._captured.frozen(token_ids, lengths, give_way)
            if hidden is not None:
                return hidden
        return self._model.forward_train(
            token_ids, lengths, self._lora, recompute="none", give_way=give_way, parents=parents
        )
