"""One decode step of a model with random weights: launched as the engine launches it, and with parts of it left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.lib.random_model import RandomWeights, random_adapter
from kernels.gpu.attention.decode import DecodeConfig, DecodeWorkspace, decode_splits
from kernels.gpu.configs import KernelConfigs, Product
from kernels.gpu.delta.step import LATE_ROWS
from kernels.gpu.linear.skinny import Norm, Scaled, SplitWorkspace, weight_kind
from kernels.gpu.linear.skinny_configs import Kind, SkinnyConfig
from services.engine.models.device_batch import DecodeAttention, DeviceCache, StepRows
from services.engine.models.footprint import Quantization
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.qwen3_5.fused import FusedForward
from services.engine.models.qwen3_5.model import rotation_of
from services.engine.models.qwen3_5.weights import LayerWeights, ModelWeights
from services.engine.models.residual import Residual
from services.engine.models.weights.matrix import Matrix
from services.pod.memory import WAITING_WRITES

MATRICES = ("in_proj", "out_proj", "gate_up", "down", "head")
_BLOCK = 16
_RANK = 16


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Takes the place of a Matrix: launches nothing, and its result has the right shape and any contents."""

    shape: tuple[int, int]
    nbytes: int = 0

    def project(self, x: Tensor | Residual, *, swiglu: bool = False, **_: Any) -> Tensor:
        rows = x.take()[0] if isinstance(x, Residual) else x
        outputs = self.shape[0]
        return torch.empty(len(rows), outputs // 2 if swiglu else outputs, dtype=rows.dtype, device=rows.device)

    def add_to(
        self, stream: Residual, x: Tensor, *, ahead: tuple[Norm, Matrix | LeftOut] | None = None, **_: Any
    ) -> None:
        """Adds nothing; what it makes ready for the next norm has any contents as well."""
        del x
        if ahead is None or not ahead[1].few(stream.shape[0]):
            return
        norm, rows = ahead[0], stream.settled()
        squares = torch.empty(1, len(rows), dtype=torch.float32, device=rows.device)
        stream.added(norm, Scaled(torch.empty_like(rows), squares, norm.eps))

    def few(self, rows: int) -> bool:
        """True if it reads what others make ready: never."""
        del rows
        return False

    convolves = few

    def of_prompts(self) -> LeftOut:
        """What rows of prompts are multiplied with: nothing, either."""
        return self


class DecodeStep:
    """Rows of one decode step, of sequences of one length, each with a state slot and pages of its own.

    Args:
        rows: most of them.
        context: tokens of each sequence, the step's own included.
        adapters: row i uses adapter i mod ``adapters``; 0: none can be used.
        empty: tensors of any contents, for launches that do not run.
    """

    def __init__(
        self,
        config: Qwen3_5Config,
        device: torch.device,
        *,
        rows: int,
        context: int,
        adapters: int = 0,
        quantization: Quantization = "none",
        kv_dtype: torch.dtype | None = None,
        state_dtype: torch.dtype = torch.float32,
        dtype: torch.dtype = torch.bfloat16,
        empty: bool = False,
    ) -> None:
        self.config, self.quantization = config, quantization
        self._device, self._empty, self._dtype = device, empty, dtype
        self._most, self._context = rows, context
        self.kernels = KernelConfigs.on(device)
        self.weights = RandomWeights(
            config, device, quantization, SplitWorkspace.allocate(device), dtype, empty, self.kernels
        ).build()
        each = -(-context // _BLOCK)
        held = 1 if empty else rows
        self.cache = DeviceCache.allocate(
            config,
            dtype,
            device,
            num_blocks=1 + held * each,
            block_size=_BLOCK,
            num_slots=1 + held,
            kv_dtype=kv_dtype,
            state_dtype=state_dtype,
            waiting_writes=WAITING_WRITES,
        )
        # Two more than are used, as in an engine that swaps them.
        self._lora = LoraSlots(config, 1 + adapters + 2 if adapters else 1, _RANK, dtype, device)
        if adapters and not empty:
            adapter = random_adapter(config, _RANK)
            for slot in range(1, adapters + 1):
                self._lora.load(slot, adapter)

        def ints(values: Any) -> Tensor:
            return torch.tensor(list(values), dtype=torch.int32, device=device)

        self._tables = torch.zeros(1 + rows, -(-each // 4) * 4, dtype=torch.int32, device=device)
        order = torch.randperm(rows * each, generator=torch.Generator().manual_seed(0)).int() + 1
        self._tables[1:, :each] = order.view(rows, each).to(device)
        self._tokens = ints((row * 7919 + 1) % config.vocab_size for row in range(rows))
        self._positions = ints([context - 1] * rows)
        self._slots = ints(range(1, rows + 1))
        self._adapters = ints(1 + row % adapters if adapters else 0 for row in range(rows))
        self._active = {
            count: ints([min(count, adapters), *range(1, 1 + min(count, adapters + 2))]) for count in range(1, rows + 1)
        }
        self._rotation = rotation_of(config, device)
        self._last_tokens = torch.zeros(1 + rows, dtype=torch.int32, device=device)
        self._attention: dict[tuple[int, int], DecodeAttention] = {}

    @torch.inference_mode()
    def refresh(self) -> None:
        """New contents for pages and states: whatever ran before may have left NaN there."""
        for pages in self.cache.pages:
            for pool in (pages.keys, pages.values):
                if pool.dtype.itemsize > 1:
                    pool.normal_()
        self.cache.conv.normal_()
        self.cache.recurrent.normal_(std=0.1)
        if self.cache.waiting is not None:
            self.cache.waiting.clear()

    @torch.inference_mode()
    def launch(
        self,
        rows: int,
        *,
        adapters: bool = False,
        pdl: bool = True,
        left_out: frozenset[str] = frozenset(),
        attention: tuple[int, DecodeConfig] | None = None,
    ) -> Tensor:
        """Layers and head of the first ``rows`` rows.

        Args:
            attention: splits that are launched and how they are cut; None: as the engine does.
            left_out: of MATRICES: these products, with their norm, activation and adapters, are not launched.

        Returns:
            [rows, vocab] logits.
        """
        forward = FusedForward(
            self.config,
            _without(self.weights, left_out),
            self._rotation,
            self.cache,
            self._lora,
            tables=self._tables,
            last_tokens=self._last_tokens,
            pdl=pdl,
        )
        step = StepRows(
            tokens=self._tokens[:rows],
            positions=self._positions[:rows],
            slots=self._slots[:rows],
            adapters=self._adapters[:rows],
            active_adapters=self._active[rows],
            decodes=rows,
            segments=None,
        )
        launched, cut = attention or (self.attention_splits(rows), None)
        prepared = replace(self._attention_of(rows, launched), config=cut)
        return forward.logits(forward.layers(step, prepared, adapters=adapters))

    def attention_splits(self, rows: int) -> int:
        """Splits of each row's context that the engine launches."""
        return decode_splits(rows, self.config.num_kv_heads, self.kernels.device)

    def _attention_of(self, rows: int, splits: int) -> DecodeAttention:
        if (rows, splits) not in self._attention:
            config, device = self.config, self._device
            workspace = DecodeWorkspace.allocate(
                rows, config.num_heads, config.num_kv_heads, splits, config.head_dim, device
            )
            self._attention[rows, splits] = DecodeAttention(splits, workspace)
        return self._attention[rows, splits]

    def bytes_a_step(self, rows: int) -> float:
        """Read and written by a step, each number once: weights, states, keys and values. Without activations."""
        passes = 1 + 1 / WAITING_WRITES if rows >= LATE_ROWS else 2
        states = rows * (2 * self.cache.conv[:, :1].nbytes + passes * self.cache.recurrent[:, :1].nbytes)
        tokens = rows * self._context
        kv = sum(
            (pages.keys[0, :1].nbytes + pages.values[0, :1].nbytes) * tokens
            + 8 * pages.kv_heads * tokens * pages.quantized
            for pages in self.cache.pages
        )
        return _matrix_bytes(self.weights) + states + kv

    def shapes(self) -> Mapping[str, set[tuple[int, int]]]:
        """[out, in] of the matrices of each name."""
        found: dict[str, set[tuple[int, int]]] = {name: set() for name in MATRICES}
        found["head"].add(self.weights.head.shape)
        for layer in self.weights.layers:
            for name, matrix in _matrices(layer).items():
                found[name].add(matrix.shape)
        return found

    def part(self, kernel: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """The matrix that a launch multiplies with, of MATRICES; of other kernels their name, and of those that shrink
        for adapters the inputs and targets."""
        if kwargs.get("TARGETS"):
            return f"{kernel} {kwargs['K']} x {kwargs['TARGETS']}"
        if "SWIGLU" in kwargs:
            counts = {value for value in args if isinstance(value, int)}
            for name, shapes in self.shapes().items():
                if any(inputs == kwargs["K"] and outputs in counts for outputs, inputs in shapes):
                    return name
        return kernel

    def kind_of(self, name: str) -> Kind:
        """Storage of the matrices of a name."""
        weights = self.weights
        return weight_kind(weights.head.weight if name == "head" else weights.layers[0].gate_up.weight)

    @contextmanager
    def cut(self, name: str, rows: int, config: SkinnyConfig | None) -> Iterator[None]:
        """Inside, products of so many rows with the matrices of a name are cut up so; None: torch's product, with the
        rest in kernels of its own."""
        kind = self.kind_of(name)
        changed = {(Product(kind, *shape), rows): config for shape in self.shapes()[name]}
        with patch.dict(self.kernels.tuned.products, changed):
            yield

    def chosen(self, name: str, rows: int) -> SkinnyConfig | None:
        """Current cut of such products; None: not at all."""
        weights = self.weights
        found = [weights.head] if name == "head" else [_matrices(layer)[name] for layer in weights.layers]
        matrix = min(found, key=lambda each: each.shape)
        return self.kernels.product(rows, matrix.weight, swiglu=name == "gate_up") if matrix.few(rows) else None


def one_of_each(config: Qwen3_5Config) -> Qwen3_5Config:
    """Config with as few layers as launch every kernel: one of each kind behind another."""
    return replace(config, layer_types=("linear_attention", "linear_attention", "full_attention"))


def _matrices(layer: LayerWeights) -> dict[str, Matrix]:
    mixer = layer.mixer
    return {"in_proj": mixer.in_proj, "out_proj": mixer.out_proj, "gate_up": layer.gate_up, "down": layer.down}


def _matrix_bytes(weights: ModelWeights) -> int:
    return weights.head.nbytes + sum(m.nbytes for layer in weights.layers for m in _matrices(layer).values())


def _without(weights: ModelWeights, names: frozenset[str]) -> ModelWeights:
    if not names:
        return weights

    def kept(name: str, matrix: Matrix) -> Matrix:
        return cast("Matrix", LeftOut(matrix.shape)) if name in names else matrix

    def layer(each: LayerWeights) -> LayerWeights:
        found = {name: kept(name, matrix) for name, matrix in _matrices(each).items()}
        mixer = replace(each.mixer, in_proj=found["in_proj"], out_proj=found["out_proj"])
        return replace(each, mixer=mixer, gate_up=found["gate_up"], down=found["down"])

    return replace(weights, layers=tuple(map(layer, weights.layers)), head=kept("head", weights.head))
