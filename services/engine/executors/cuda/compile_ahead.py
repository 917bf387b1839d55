"""Compiles the kernels of an engine on all cores, instead of one after the other as they are first launched.

A first start launches about a hundred variants, which take minutes on one core. Triton's cache hook says which ones a
run would compile; other processes compile them for the same device into Triton's cache on disk, where this process then
finds them. Those processes never touch the device.

What a kernel is compiled for travels as Python objects. JITFunction.preload() takes JSON, which turns tuples into lists
and drops the names of a named tuple's fields: such kernels would fail, or be kept under a key that no launch asks for.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import driver

from kernels.gpu.launch.compiler import prepare_compiler
from services.engine.executors.compiler_pool import CompilerPool
from services.engine.executors.kernel_archive import MARKER

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Variant:
    """Variant of a kernel: the kernel and what Triton compiles it for."""

    module: str
    name: str
    source: str
    """Triton's hash of the kernel's source and what it calls."""
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    """Options of the backend: warps, stages and so on."""

    def ast(self) -> ASTSource:
        """Source that triton.compile() takes; imports the kernel."""
        kernel = getattr(importlib.import_module(self.module), self.name)
        source = GluonASTSource if kernel.is_gluon() else ASTSource
        return source(kernel, self.signature, self.constants, self.attributes)

    def identity(self) -> str:
        """Identity of the variant, as a text that is the same in every process."""
        parts = (self.module, self.name, self.source, self.signature, self.constants, self.attributes, self.options)
        return repr(parts)


class _Nothing:
    """Stands for a kernel that is written down."""

    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None: ...

    def run(self, *_: object) -> None: ...


@contextmanager
def recorded() -> Iterator[list[Variant]]:
    """Inside, a launch of a kernel that is not compiled yet is written down and does not happen."""
    prepare_compiler()
    found: list[Variant] = []
    stand_ins: list[tuple[dict[str, Any], str]] = []

    def hook(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        described = json.loads(compile["specialization_data"])
        options = {name: _tuples(value) for name, value in described["options"].items()}
        (attributes,) = compile["configs"]
        found.append(
            Variant(
                fn.module,
                fn.name,
                fn.jit_function.cache_key,
                compile["signature"],
                compile["constants"],
                attributes,
                options,
            )
        )
        # Later launches of this variant find it at once: describing it again would take ten times as long.
        kernels = fn.jit_function.device_caches[compile["device"]][0]
        kernels[key] = _Nothing()
        stand_ins.append((kernels, key))
        return True

    before = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = hook
    try:
        yield found
    finally:
        triton.knobs.runtime.jit_cache_hook = before
        for kernels, key in stand_ins:
            del kernels[key]


def _tuples(value: Any) -> Any:
    """JSON's lists as the tuples that they were."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@contextmanager
def compiled_here() -> Iterator[list[str]]:
    """Names the kernels that this process compiles inside, because the cache on disk does not have them."""
    names: list[str] = []

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            names.append(src.name)

    before = triton.knobs.compilation.listener
    triton.knobs.compilation.listener = listen
    try:
        yield names
    finally:
        triton.knobs.compilation.listener = before


class Compiling:
    """Compiles variants of kernels in the background, each once.

    Args:
        pool: a CompilerPool.
    """

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        self._target = driver.active.get_current_target()
        self._begun: dict[str, Future[str | None]] = {}

    def begin(self, launch: Callable[[], None]) -> list[Future[str | None]]:
        """Begins to compile what ``launch`` would compile; each result is what went wrong, or None. Launches of kernels
        that are compiled happen."""
        with recorded() as variants:
            launch()
        target, found = self._target, []
        for variant in variants:
            identity = variant.identity()
            if identity not in self._begun:
                job = (target.backend, target.arch, target.warp_size, variant)
                self._begun[identity] = self._pool.submit(_compile, job)
            found.append(self._begun[identity])
        return found

    def wait(self, seconds: float) -> None:
        """Waits for the next of them, at most so long."""
        unfinished = [future for future in self._begun.values() if not future.done()]
        wait(unfinished, seconds, FIRST_COMPLETED)


def compile_ahead(launch: Callable[[], None], pool: Executor | None = None) -> int:
    """Compiles what ``launch`` would compile, unless an earlier start has.

    Args:
        launch: launches kernels; nothing it computes is used.
        pool: a CompilerPool; None: one for this call.

    Returns:
        How many kernels were compiled. A kernel that fails to compile here is warned of, and fails again when it is
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
            failures = list(pool.map(_compile, jobs))
        else:
            with CompilerPool(len(jobs)) as own:
                failures = list(own.map(_compile, jobs))
    except BrokenProcessPool as error:
        log.warning("kernels compile one by one: a compiling process died", error=str(error), kernels=len(jobs))
        return 0
    failed = [failure for failure in failures if failure is not None]
    if failed:
        log.warning("kernels did not compile ahead", kernels=len(failed), of=len(jobs), first=failed[0])
    else:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.write_text(str(target.arch))  # for whoever packs the kernels of one architecture
    return len(jobs) - len(failed)


def _marker(variants: Sequence[Variant], target: GPUTarget) -> Path:
    """A file that exists once these variants are compiled: checking each in the cache would take seconds."""
    digest = hashlib.sha256(f"{triton.__version__} {target}".encode())
    for identity in sorted(variant.identity() for variant in variants):
        digest.update(identity.encode())
    return Path(triton.knobs.cache.dir) / f"{MARKER}{digest.hexdigest()[:32]}"


class Target:
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


def _compile(job: tuple[str, int, int, Variant]) -> str | None:
    """Returns what went wrong."""
    *fields, variant = job
    target = GPUTarget(*fields)
    driver.set_active(Target(target))
    prepare_compiler()
    try:
        options = make_backend(target).parse_options(variant.options)
        triton.compile(variant.ast(), target=target, options=options.__dict__)
    except Exception as error:  # whatever a compiler can raise: the launch will meet it again
        return f"{variant.name}: {type(error).__name__}: {error}"
    return None
