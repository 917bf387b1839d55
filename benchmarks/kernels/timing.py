"""Time of a kernel inside a CUDA graph, and the ceilings of the device it runs on."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

import torch
from torch import Tensor

from benchmarks.lib.graph_timing import graph_times

L2_BYTES = 256 * 2**20
"""Case inputs rotate over at least so many bytes, several times an H200's L2 of 60 MB."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured on this device, in this run."""

    copy: float
    """Bytes a second, read and written, of a copy of 2 GiB."""
    matmul: float
    """bfloat16 FLOP a second of a product of 8192 x 8192 x 8192."""


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel at one shape, ready to run."""

    runs: Sequence[Callable[[], Tensor]]
    """Runs of the same work on different memory, so that nothing is found in L2 that would not be there in a step."""
    bytes: int
    """Read and written once each, by the algorithm."""
    flops: int = 0
    check: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    """Maps the first run's result to (what is compared of it, the same in float64)."""
    rivals: dict[str, Callable[[], object]] = field(default_factory=dict)
    """Other implementations of the same work by name."""


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel, a shape, and how to prepare it on a device. On the CPU ``make`` only has to be able to launch."""

    kernel: str
    shape: str
    make: Callable[[Tensors], Work]

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.shape}"

    def launch(self, device: torch.device) -> object:
        """Launches the kernel once, for benchmarks.lib.precompile."""
        return self.make(Tensors(device)).runs[0]()


class Tensors:
    """Makes inputs: random on a GPU, unset memory on the CPU, where only shapes matter."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self.device = device
        self._generator = torch.Generator(device).manual_seed(seed) if device.type == "cuda" else None

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        if self._generator is None:
            return torch.empty(shape, dtype=dtype, device=self.device)
        made = torch.empty(shape, dtype=dtype, device=self.device)
        return made.normal_(std=scale, generator=self._generator)

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)

    def copies(self, nbytes: int, *, most: int = 16) -> int:
        """Number of copies of inputs of this size that exceed L2."""
        return max(1, min(most, -(-L2_BYTES // max(1, nbytes)))) if self.device.type == "cuda" else 1


def microseconds(runs: Sequence[Callable[[], object]], *, launches: int = 24, repeats: int = 7) -> float:
    """Median over replays of a CUDA graph of ``launches`` launches, a launch. What a captured step pays for one."""
    for run in runs[:2]:
        run()
    launches = max(launches, len(runs))
    return statistics.median(graph_times(list(islice(cycle(runs), launches)), repeats=repeats))


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a copy of 2 GiB on this GPU."""
    source = torch.empty(2**30, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    # A multiplication: of a copy a graph makes a node for the copy engine, which has 2.8 TB/s where kernels have 4.
    seconds = 1e-6 * microseconds([lambda: torch.mul(source, 1.0, out=target)], launches=4)
    return 2 * source.numel() * 2 / seconds


def measure_ceilings() -> Ceilings:
    """Both in well under a second."""
    copy = copy_bandwidth()
    a, b = (torch.empty(8192, 8192, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2))
    out = torch.empty_like(a)
    seconds = 1e-6 * microseconds([lambda: torch.mm(a, b, out=out)], launches=4)
    return Ceilings(copy, 2 * 8192**3 / seconds)


def errors(actual: Tensor, exact: Tensor) -> dict[str, float]:
    """Largest absolute error, and the error's norm over the exact result's."""
    difference = actual.double() - exact
    return {
        "max_error": float(difference.abs().max()),
        "relative_error": float(difference.norm() / exact.norm().clamp_min(1e-30)),
    }
