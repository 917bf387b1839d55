"""Keys of Triton's cache of compiled kernels that depend on nothing but the kernel."""

from __future__ import annotations

from typing import Any

from triton.runtime.jit import DependenciesFinder


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
