"""Bench on a GPU: decode steps of the engine's own runner, captured as CUDA graphs and replayed in turn."""

from __future__ import annotations

import statistics
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Future
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kernels.gpu.configs import KernelConfigs, Product
from services.engine.executors.cuda.compile_ahead import Compiling
from services.engine.executors.cuda.runner import CudaRunner
from services.engine.executors.tuning.choice import Choice, put
from services.engine.executors.tuning.tuner import Pairs, Unfit
from services.engine.models.cuda_graphs import capturing
from services.engine.models.device_batch import DeviceCache
from services.engine.models.interface import DeviceForward
from services.engine.models.lora.slots import LoraSlots
from services.engine.requests.adapter import AdapterPin
from services.engine.requests.request import Request
from services.engine.requests.sampling_params import SamplingParams
from services.engine.scheduler.step_plan import Chunk

_SHORT, _LONG = 640, 4096
"""Tokens of each row's context."""
_SAMPLE_SECONDS = 6e-3
"""Seconds that a step is replayed for, before it is the other's turn."""
_KEPT = 24
"""Captured steps that are kept: those that candidates are compared with."""
_RANK, _ADAPTERS = 16, 8
"""Rank and number of adapters of a step with adapters."""


@dataclass(frozen=True, slots=True)
class _Kernels:
    """Kernels of a candidate on their way through the compilers."""

    futures: Sequence[Future[str | None]]

    def done(self) -> bool:
        """See tuner.Compilation."""
        try:
            failures = [future.result() for future in self.futures if future.done()]
        except BrokenExecutor as error:
            raise Unfit(f"a compiling process died: {_line(error)}") from error
        for failure in failures:
            if failure is not None:
                raise Unfit(failure.splitlines()[0])
        return len(failures) == len(self.futures)


class CapturedSteps:
    """Decode steps of a runner that serves nothing yet. Rows have contexts, pages and states of their own.

    Args:
        kernels: configurations that the runner's model is run by.
        compiling: compiles what is not compiled yet.
    """

    def __init__(
        self,
        runner: CudaRunner,
        kernels: KernelConfigs,
        cache: DeviceCache,
        lora: LoraSlots,
        compiling: Compiling,
        *,
        max_model_len: int,
    ) -> None:
        self._runner, self._kernels, self._cache, self._lora = runner, kernels, cache, lora
        self._contexts = tuple(min(length, max_model_len) for length in (_SHORT, _LONG))
        self._few = runner.forward.one_of_each_layer()
        self._compiling = compiling
        self._pool: Any = None
        self._graphs: OrderedDict[tuple[Any, ...], tuple[torch.cuda.CUDAGraph, Tensor]] = OrderedDict()
        # torch takes a pool without graphs for gone.
        self._first: torch.cuda.CUDAGraph | None = None
        self._placed: tuple[int, bool, bool] | None = None
        self._chunks: dict[tuple[int, bool, bool], list[Chunk]] = {}
        self._blocks: list[list[int]] = []
        if lora.num_slots > 1:
            lora.pretend(min(_RANK, lora.max_rank))

    @property
    def adapters(self) -> bool:
        """True if rows can use adapters."""
        return self._lora.num_slots > 1

    @torch.inference_mode()
    def prepare(self, sizes: Sequence[int]) -> dict[int, Counter[tuple[Product, bool]]]:
        """Compiles the table's steps; the products of each number of rows, see KernelConfigs.asked()."""
        found: dict[int, Counter[tuple[Product, bool]]] = {}
        futures: list[Future[str | None]] = []
        for rows in sizes:
            for adapters in (False, True) if self.adapters else (False,):
                futures += self._begin(rows, {}, self._few, adapters=adapters)
            with self._kernels.asked() as asked:
                futures += self._begin(rows, {}, self._runner.forward, adapters=False)
            found[rows] = asked
        for future in futures:
            if (failure := future.result()) is not None:
                raise RuntimeError(f"a kernel of the table's step does not compile: {failure}")
        return found

    @torch.inference_mode()
    def compile(self, rows: int, choice: Choice, *, adapters: bool = False) -> _Kernels:
        """See tuner.Bench."""
        try:
            return _Kernels(self._begin(rows, choice, self._few, adapters=adapters))
        except Exception as error:  # whatever kernels refuse a configuration with
            raise Unfit(_line(error)) from error

    def wait(self, seconds: float) -> None:
        """See tuner.Bench."""
        self._compiling.wait(seconds)

    @torch.inference_mode()
    def times(
        self, rows: int, mine: Choice, theirs: Choice, pairs: int, *, adapters: bool = False, long: bool = False
    ) -> Pairs:
        """See tuner.Bench."""
        self._place(rows, long=long, adapters=adapters)
        graph, _ = self._captured(rows, mine, adapters)
        other, _ = self._captured(rows, theirs, adapters)
        with self._runner.stream.active():
            count = max(1, round(_SAMPLE_SECONDS / self._seconds(lambda: other.replay(), 3)))
            marks = [self._event() for _ in range(2 * pairs + 1)]
            graph.replay()
            marks[0].record()
            for pair in range(pairs):
                for mark, each in ((2 * pair + 1, graph), (2 * pair + 2, other)):
                    for _ in range(count):
                        each.replay()
                    marks[mark].record()
            marks[-1].synchronize()
        taken = [1e-3 * begin.elapsed_time(end) / count for begin, end in pairwise(marks)]
        return list(zip(taken[0::2], taken[1::2], strict=True))

    @torch.inference_mode()
    def difference(self, rows: int, choice: Choice) -> float:
        """See tuner.Bench. Of a few layers that launch every kernel: from layer to layer the roundings of all grow."""
        self._place(rows, long=False, adapters=False)
        choices: tuple[Choice, ...] = ({}, choice)
        results: list[Tensor] = []
        with self._runner.stream.active():
            for each in choices:
                put(self._kernels.tuned, [rows], each)
                self._fill(rows)
                results.append(self._runner.run_decodes(rows, self._few, adapters=False).float())
            table, changed = results
            distance = float((changed - table).norm() / table.norm())
        return distance if distance == distance else float("inf")

    @torch.inference_mode()
    def close(self) -> None:
        """Gives all memory back, and leaves caches, tables and adapters as they were."""
        self._runner.stream.synchronize()
        self._graphs.clear()
        self._first = None
        if self.adapters:
            self._lora.pretend(0)
        self._cache.stacked.pages.view(torch.uint8).zero_()
        for scales in (self._cache.stacked.scales, self._cache.conv, self._cache.recurrent):
            if scales is not None:
                scales.zero_()
        if self._cache.waiting is not None:
            self._cache.waiting.clear()
        self._runner.place_decodes(1, [])
        self._runner.stream.synchronize()
        torch.cuda.empty_cache()

    def _begin(self, rows: int, choice: Choice, forward: DeviceForward, *, adapters: bool) -> list[Future[str | None]]:
        self._place(rows, long=False, adapters=False)
        put(self._kernels.tuned, [rows], choice)
        with self._runner.stream.active():
            return self._compiling.begin(lambda: self._launch(rows, forward, adapters))

    def _launch(self, rows: int, forward: DeviceForward, adapters: bool) -> None:
        self._runner.run_decodes(rows, forward, adapters=adapters)

    def _captured(self, rows: int, choice: Choice, adapters: bool) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        key = (rows, frozenset(choice.items()), adapters)
        if key not in self._graphs:
            try:
                self._graphs[key] = self._capture(rows, choice, adapters)
            except Exception as error:  # whatever a driver can raise
                raise Unfit(_line(error)) from error
            while len(self._graphs) > _KEPT:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return self._graphs[key]

    def _capture(self, rows: int, choice: Choice, adapters: bool) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        put(self._kernels.tuned, [rows], choice)
        forward = self._runner.forward
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with self._runner.stream.active():
            self._runner.run_decodes(rows, self._few, adapters=adapters)  # loads its kernels
            self._runner.stream.synchronize()
            with capturing(graph, self._pool):
                logits = self._runner.run_decodes(rows, forward, adapters=adapters)
        self._first = self._first or graph
        return graph, logits

    def _place(self, rows: int, *, long: bool, adapters: bool) -> None:
        """Sends the integers of a step. Before any launch: what another number of rows has at the same places are no
        slots and positions."""
        key = (rows, long, adapters)
        if self._placed == key:
            return
        if key not in self._chunks:
            self._chunks[key] = [self._decode(row, self._contexts[long], adapters=adapters) for row in range(rows)]
        self._runner.place_decodes(rows, self._chunks[key])
        self._placed = key

    def _decode(self, row: int, context: int, *, adapters: bool) -> Chunk:
        pin = AdapterPin()
        if adapters:
            slot = 1 + row % min(_ADAPTERS, self._lora.num_slots - 1)
            pin = AdapterPin(f"tuning@{slot}", f"tuning-{slot}", slot)
        request = Request("tuning", (0,), SamplingParams(), pin)
        place = 1 + row % (self._cache.num_slots - 1)
        return Chunk(request, (7919 * row % _VOCABULARY,), context - 1, self._held(row), place, True, [], 0)

    def _held(self, row: int) -> list[int]:
        """Blocks of a row: scattered over the pool, and some are of several rows if it is small."""
        if not self._blocks:
            free = self._cache.stacked.pages.shape[2] - 1
            order = (torch.randperm(free, generator=torch.Generator().manual_seed(0)) + 1).tolist()
            each = -(-self._contexts[True] // self._cache.block_size)
            rows = max(self._runner.decode_sizes)
            order *= -(-rows * each // free)
            self._blocks = [order[row * each : (row + 1) * each] for row in range(rows)]
        return self._blocks[row]

    def _fill(self, rows: int) -> None:
        """Same numbers each time in the states and pages that the placed rows use."""
        cache, slots = self._cache, min(1 + rows, self._cache.num_slots)
        random = torch.Generator(cache.conv.device).manual_seed(0)
        each = -(-self._contexts[False] // cache.block_size)
        blocks = sorted({block for row in range(rows) for block in self._held(row)[:each]})
        with self._runner.stream.active():
            used = torch.tensor(blocks, device=cache.conv.device)
            cache.conv[:, :slots].normal_(generator=random)
            cache.recurrent[:, :slots].normal_(std=0.1, generator=random)
            if cache.waiting is not None:
                cache.waiting.clear()
            for pages in cache.pages:
                shape = (len(used), *pages.keys.shape[1:])
                for pool, scales in ((pages.keys, pages.key_scales), (pages.values, pages.value_scales)):
                    numbers = torch.randn(shape, generator=random, device=used.device)
                    if scales is None:
                        pool[used] = numbers.to(pool.dtype)
                    else:
                        pool.view(torch.uint8)[used] = (64 * numbers).to(pool.dtype).view(torch.uint8)
                        scales[used] = 1 / 64

    def _seconds(self, launch: Callable[[], None], count: int) -> float:
        launch()
        times: list[float] = []
        for _ in range(count):
            begin, end = self._event(), self._event()
            begin.record()
            launch()
            end.record()
            end.synchronize()
            times.append(1e-3 * begin.elapsed_time(end))
        return statistics.median(times)

    def _event(self) -> Any:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


_VOCABULARY = 256
"""Tokens that rows have: every vocabulary is larger."""


def _line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
