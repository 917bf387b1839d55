"""How this process compiles kernels: under which keys they are kept, and by which assembler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime import driver
from triton.runtime.jit import DependenciesFinder

_HOPPER = 90


def prepare_compiler() -> None:
    """Prepares Triton to compile kernels in this process, for the device or target that is active: call it before the
    first launch. Does nothing the second time."""
    stable_keys()
    if driver.active.get_current_target().arch == _HOPPER:
        _newer_assembler()


def stable_keys() -> None:
    """Makes the keys that this process computes from now on the same in every process, whatever it launched before.

    Into a kernel's key go the global constants that it and the functions it calls use. Triton (3.6, 3.7) asks a called
    function for its constants before it makes sure that they are known, which they are once the function's own key has
    been computed: for another kernel that calls it too, or not at all. So a process that compiles kernels for others
    in another order than they launch them would leave them under keys that nobody asks for.
    """
    original = DependenciesFinder._update_hash
    if getattr(original, "knows_constants", False):
        return

    def update(self: DependenciesFinder, function: Any) -> None:
        _ = function.cache_key  # finds its constants
        original(self, function)

    update.knows_constants = True  # type: ignore[attr-defined]
    DependenciesFinder._update_hash = update


def _newer_assembler() -> None:
    """Has kernels for Hopper assembled by the newer of the two assemblers in Triton (3.6: 12.8 and 12.9, 3.7: 12.8 and
    13.1), which Triton itself takes for Blackwell only.

    12.8 makes products whose descriptor of shared memory is computed from a register that nothing has written: right
    while that happens to hold zero, an illegal access on another day. 12.9 and 13.1 assemble the same text correctly.
    An assembler that was chosen by TRITON_PTXAS_PATH stays, and one of a newer CUDA than torch's is not taken: drivers
    that torch runs on may not load what it makes.
    """
    tools = triton.knobs.nvidia
    usual, newer = tools.ptxas, tools.ptxas_blackwell
    chosen = Path(usual.path).parent != Path(newer.path).parent
    major = int((torch.version.cuda or newer.version).split(".")[0])
    if not chosen and _numbers(usual.version) < _numbers(newer.version) and _numbers(newer.version)[0] <= major:
        tools.ptxas = newer.path


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
