"""Kernels that ask for more of a GPU than it has, told in words. Needs no Triton."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from kernels.gpu.launch.device import named

_KERNELS = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Excess:
    """What a kernel asks for beyond the GPU's limit.

    Args:
        launch: function that launches the kernel.
        module: module of that function below kernels/gpu: "linear/skinny.py".
        resource: Triton's name: "shared memory" (bytes), "threads" (as many as registers are left for) or "tensor
            memory" (columns).
        required: of a block, as `limit`.
    """

    launch: str
    module: str
    resource: str
    required: int
    limit: int

    @property
    def smaller_cuts(self) -> bool:
        """True if there are cuts for cards with less of it."""
        return self.resource == "shared memory" and self.limit > named("sm89").shared_memory

    @property
    def package(self) -> str:
        """Package of the kernel below kernels/gpu: "linear"."""
        return self.module.partition("/")[0]

    def __str__(self) -> str:
        return (
            f"the kernel of {self.launch} (kernels/gpu/{self.module}) asks for {self.required:,} of {self.resource} a "
            f"block, and this GPU has {self.limit:,}"
        )


def excess_of(error: BaseException) -> Excess | None:
    """What a launch has failed of; None: the error is another one."""
    errors = sys.modules.get("triton.runtime.errors")  # whoever raises its error has imported it
    if errors is None or not isinstance(error, errors.OutOfResources):
        return None
    launch, module = "an unknown launch", "?"
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if path.is_relative_to(_KERNELS):
            launch, module = frame.name, path.relative_to(_KERNELS).as_posix()
    return Excess(launch, module, error.name, error.required, error.limit)
