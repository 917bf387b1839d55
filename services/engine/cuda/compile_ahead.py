"""Compiles the kernels of an engine on all cores, instead of one after the other as they are first launched.

A first start launches about a hundred variants, which take minutes on one core. Triton's cache hook says which ones a
run would compile; other processes compile them for the same device into Triton's cache on disk, where this process then
finds them. Those processes never touch the device.
"""

from __future__ import annotations

import hashlib
import importlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel and what Triton compiles it for."""

    module: str
    name: str
    source: str
    """Triton's hash of the kernel's source and what it calls."""
    specialization: str
    """What JITFunction.preload() takes."""


@contextmanager
def recorded() -> Iterator[list[Variant]]:
    """Inside, a launch of a kernel that is not compiled yet is written down and does not happen."""
    found: dict[str, Variant] = {}

    def hook(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        name = f"{fn.module}.{fn.name} {key}"
        if name not in found:
            source = fn.jit_function.cache_key
            found[name] = Variant(fn.module, fn.name, source, compile["specialization_data"])
        return True

    variants: list[Variant] = []
    before = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = hook
    try:
        yield variants
    finally:
        triton.knobs.runtime.jit_cache_hook = before
        variants += found.values()


def compile_ahead(launch: Callable[[], None], pool: Executor | None = None) -> int:
    """Compiles what ``launch`` would compile, unless an earlier start has.

    Args:
        launch: launches kernels; nothing it computes is used.
        pool: of compiler_pool(); None: one for this call.

    Returns:
        How many kernels were compiled. A kernel that fails to compile here fails again, and loudly, when it is
        launched.
    """
    with recorded() as variants:
        launch()
    target = driver.active.get_current_target()
    marker = _marker(variants, target)
    if not variants or marker.exists():
        return 0
    jobs = [(target.backend, target.arch, target.warp_size, variant) for variant in variants]
    try:
        if pool is not None:
            done = list(pool.map(_compile, jobs))
        else:
            with compiler_pool(len(jobs)) as own:
                done = list(own.map(_compile, jobs))
    except BrokenProcessPool as error:
        log.warning("kernels compile one by one: a compiling process died", error=str(error), kernels=len(jobs))
        return 0
    if all(done):
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    return sum(done)


def compiler_pool(most: int = 64) -> ProcessPoolExecutor:
    """Processes that compile: one a core, at most ``most``."""
    cores = len(os.sched_getaffinity(0))
    return ProcessPoolExecutor(min(cores, most), mp_context=multiprocessing.get_context("spawn"))


def _marker(variants: Sequence[Variant], target: GPUTarget) -> Path:
    """A file that exists once these variants are compiled: checking each in the cache would take seconds."""
    digest = hashlib.sha256(f"{triton.__version__} {target}".encode())
    for variant in sorted(variants, key=lambda each: (each.module, each.name, each.specialization)):
        digest.update(f"{variant.module} {variant.name} {variant.source} {variant.specialization}".encode())
    return Path(triton.knobs.cache.dir) / f"compiled-{digest.hexdigest()[:32]}"


class _Target:
    """The driver of a process that only compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:  # noqa: ARG002
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def _compile(job: tuple[str, int, int, Variant]) -> bool:
    *fields, variant = job
    driver.set_active(_Target(GPUTarget(*fields)))
    kernel = getattr(importlib.import_module(variant.module), variant.name)
    try:
        kernel.preload(variant.specialization)
    except Exception:  # whatever a compiler can raise: the launch will meet it again
        return False
    return True
