"""Training steps as CUDA graphs: half a layer in a direction is one launch, where kernel by kernel it is ten or twenty.

A step of 512 tokens is 27 ms of kernels on an H200 and 143 ms of Python that launches them, which would also keep the
engine's thread from the interpreter. So steps of few rows are captured once for a number of rows and of documents, a
graph for each half of a layer and direction so that the trainer can give way between them, and replayed from then on.

All graphs share one memory pool (arena.GraphMemory), and those of a chain always run in the same order: what a later
one allocates may lie where an earlier one's temporaries were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from kernels.gpu.train.documents import Documents
from kernels.rope import Rotation
from services.engine.models.cuda_graphs import captured_shape, capturing, no_collection
from services.engine.models.interface import Recompute
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.qwen3_5.training.adapters import WorkingAdapter
from services.engine.models.qwen3_5.training.frozen import FrozenLinears
from services.engine.models.qwen3_5.training.layer import Kept
from services.engine.models.qwen3_5.training.trunk import Trunk, differentiable
from services.engine.models.qwen3_5.weights import ModelWeights
from services.engine.models.training_arena import GraphMemory


class GraphChain:
    """The graphs of all layers for one shape.

    Args:
        adapter: already taken over from the masters; its place stays the same. None: the base model.
        rows, room: rows, and documents there is room for.
        recompute: what the backward computes again; None: there will be none.
        memory: shared with other chains, of which only one is in use at a time.
        linears: see Trunk.
    """

    def __init__(
        self,
        config: Qwen3_5Config,
        weights: ModelWeights,
        rotation: Rotation,
        adapter: WorkingAdapter | None,
        rows: int,
        room: int,
        recompute: Recompute | None,
        memory: GraphMemory,
        linears: Sequence[FrozenLinears] | None,
    ) -> None:
        device, dtype = weights.embedding.device, weights.embedding.dtype
        self._documents = Documents.build([rows], device, room=room)
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._grad = torch.zeros(rows, config.hidden_size, dtype=dtype, device=device)
        self._forward: list[torch.cuda.CUDAGraph] = []
        self._backward: list[torch.cuda.CUDAGraph] = []
        self._memory = memory
        # Held, because its scratch is what the graphs write to.
        self._trunk = trunk = Trunk(config, weights, rotation, self._documents, adapter, linears=linears)
        memory.stream.wait_stream(torch.cuda.current_stream(device))
        with memory.allocating():  # what the captures take again
            self._rehearse(trunk, recompute)
        with torch.cuda.stream(memory.stream), no_collection():
            self._hidden = self._capture(trunk, recompute)
        torch.cuda.current_stream(device).wait_stream(memory.stream)

    def _rehearse(self, trunk: Trunk, recompute: Recompute | None) -> None:
        """Compiles everything that will be captured. With a gradient of zeros, which adds nothing to the masters'."""
        x = trunk.embed(self._tokens)
        for layer in (trunk.layers[0], trunk.layers[-1]):
            middle, kept = layer.mixer(x, recompute)
            x = layer.mlp(middle, kept, recompute)
            if recompute is not None:
                layer.again(kept)
                layer.mixer_backward(kept, layer.mlp_backward(kept, self._grad), input_grad=True)
        trunk.finish(x)
        if recompute is not None:
            trunk.finish_backward(x, self._grad)

    def _capture(self, trunk: Trunk, recompute: Recompute | None) -> Tensor:
        def graph(into: list[torch.cuda.CUDAGraph]) -> AbstractContextManager[None]:
            into.append(torch.cuda.CUDAGraph())
            return capturing(into[-1], self._memory.id)

        everything: list[Kept] = []
        x = hidden = self._grad
        for index, layer in enumerate(trunk.layers):
            with graph(self._forward):
                if index == 0:
                    x = trunk.embed(self._tokens)
                middle, kept = layer.mixer(x, recompute)
            with graph(self._forward):
                x = layer.mlp(middle, kept, recompute)
                if index == len(trunk.layers) - 1:
                    hidden = trunk.finish(x)
            del middle
            if recompute is not None:
                everything.append(kept)
        result: Tensor | None = self._grad
        while everything:
            index, kept = len(everything) - 1, everything.pop()
            layer = trunk.layers[index]
            if recompute != "none":
                with graph(self._backward):
                    layer.again(kept)
            with graph(self._backward):
                if index == len(trunk.layers) - 1:
                    result = trunk.finish_backward(x, self._grad)
                    x = self._grad  # what follows may lie where the last layer's output did
                if result is None:
                    raise ValueError("a layer behind the first gave no gradient")
                result = layer.mlp_backward(kept, result)
            with graph(self._backward):
                result = layer.mixer_backward(kept, result, input_grad=index > 0)
        return hidden

    def step(self, token_ids: Tensor, lengths: Sequence[int], give_way: Callable[[], None]) -> CapturedStep:
        """A forward and its backward over these documents."""
        rows, total = self._tokens.shape[0], token_ids.shape[0]
        self._tokens[:total].copy_(token_ids)
        self._documents.replace([*lengths, rows - total] if total < rows else lengths)
        self._memory.newest += 1
        return CapturedStep(self, self._memory.newest, total, give_way)

    def run_forward(self, use: int, total: int, give_way: Callable[[], None]) -> Tensor:
        """See Step; only for the newest step()."""
        self._check(use)
        for graph in self._forward:
            give_way()
            graph.replay()
        give_way()
        return self._hidden[:total].clone()

    def run_backward(self, use: int, grad: Tensor, give_way: Callable[[], None]) -> None:
        """See Step; only for the newest step()."""
        self._check(use)
        self._memory.newest += 1  # what was kept is used up
        self._grad[: len(grad)].copy_(grad)
        self._grad[len(grad) :].zero_()
        for graph in self._backward:
            give_way()
            graph.replay()

    def _check(self, use: int) -> None:
        if use != self._memory.newest:
            raise RuntimeError("this forward has been gone through backwards already, or another one came after it")


class CapturedStep:
    """Step that replays captured graphs. Implements trunk.Step."""

    def __init__(self, chain: GraphChain, use: int, total: int, give_way: Callable[[], None]) -> None:
        self._chain, self._use, self._total, self._give_way = chain, use, total, give_way

    def forward(self) -> Tensor:
        """See Step."""
        return self._chain.run_forward(self._use, self._total, self._give_way)

    def backward(self, grad: Tensor) -> None:
        """See Step."""
        self._chain.run_backward(self._use, grad, self._give_way)


class CapturedSteps:
    """Captured training steps of one adapter, one chain of graphs a shape, captured as they are needed.

    Args:
        lora: the masters, on the model's device. Their gradients must stay where they are: zero them, do not drop them.
            None: the base model.
        recompute: what the backwards compute again; None: there will be none, and the masters stay as they are now.
        memory: where the graphs compute.
        most_tokens: of the steps that it has room for; None: of all that are captured.
        linears: see Trunk.
    """

    def __init__(
        self,
        config: Qwen3_5Config,
        weights: ModelWeights,
        rotation: Rotation,
        lora: LoraParams | None,
        recompute: Recompute | None,
        memory: GraphMemory,
        most_tokens: int | None = None,
        linears: Sequence[FrozenLinears] | None = None,
    ) -> None:
        self._config, self._weights, self._rotation = config, weights, rotation
        self._lora = lora
        self._most_tokens, self._linears = most_tokens, linears
        self._recompute: Recompute | None = recompute
        self._adapter = None if lora is None else WorkingAdapter(lora, config, weights.embedding.dtype)
        self._memory = memory
        self._chains: dict[tuple[int, int], GraphChain] = {}

    def differentiable(self, token_ids: Tensor, lengths: Sequence[int], give_way: Callable[[], None]) -> Tensor | None:
        """See CapturedForwards."""
        step = self.step(token_ids, lengths, give_way)
        if step is None or self._lora is None:
            return None
        return differentiable(step, self._lora)

    def frozen(self, token_ids: Tensor, lengths: Sequence[int], give_way: Callable[[], None]) -> Tensor | None:
        """See CapturedForwards."""
        step = self.step(token_ids, lengths, give_way)
        return None if step is None else step.forward()

    def step(self, token_ids: Tensor, lengths: Sequence[int], give_way: Callable[[], None]) -> CapturedStep | None:
        """A forward over packed documents and its backward; None if so many rows are not captured.

        Raises:
            RuntimeError: the masters' gradients are elsewhere by now.
        """
        if self._most_tokens is not None and len(token_ids) > self._most_tokens:
            return None
        if (shape := captured_shape(lengths)) is None:
            return None
        if self._adapter is not None and self._recompute is not None:
            if not self._adapter.in_place():
                raise RuntimeError("the adapter's gradients were dropped: the captured graphs add to the old ones")
            self._adapter.refresh()
        if (chain := self._chains.get(shape)) is None:
            chain = self._chains[shape] = GraphChain(
                self._config,
                self._weights,
                self._rotation,
                self._adapter,
                *shape,
                self._recompute,
                self._memory,
                self._linears,
            )
        return chain.step(token_ids, lengths, give_way)
