"""Constraint compiler: compiles grammars on threads of its own, cached and bounded in time and number."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import structlog

from services.common.errors import InvalidRequest, Overloaded
from services.engine.constraints.grammars import CompiledGrammar, GrammarLimits, budget_matcher, compile_grammar
from services.engine.constraints.matcher import OutputMatcher
from services.engine.constraints.refusal import Refused
from services.engine.constraints.vocabulary import Vocabulary
from services.engine.observability.events import EventStream, GrammarDone
from services.engine.requests.sampling_params import Constraint, ConstraintKind, SamplingParams

_log = structlog.get_logger(__name__)
_Key = tuple[ConstraintKind, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class CompilerLimits:
    """Limits of compiling constraints."""

    grammar: GrammarLimits = field(default_factory=GrammarLimits)
    seconds: float = 5.0
    """Longest wait of a request for its turn, and then for its grammar to be compiled."""
    threads: int = 2
    waiting: int = 64
    """Most grammars that wait for their turn."""
    cache_entries: int = 256
    cache_bytes: int = 8 * 1024 * 1024
    """Most bytes of the sources of cached grammars."""

    def __post_init__(self) -> None:
        if self.seconds <= 0 or self.threads < 1 or min(self.waiting, self.cache_entries, self.cache_bytes) < 0:
            raise ValueError(f"limits of the compiler must be positive, got {self}")


class _Job:
    """Compilation of one grammar. Its thread cannot be stopped, but its work is bounded, and nobody has to wait for
    it."""

    def __init__(self, compiled: Callable[[], CompiledGrammar], pool: ThreadPoolExecutor) -> None:
        self.began = asyncio.Event()
        self.late = False
        """True if it took too long; other requests for the same grammar do not wait for it."""
        loop = asyncio.get_running_loop()

        def run() -> CompiledGrammar:
            # The event loop may have ended when the turn comes.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self.began.set)
            return compiled()

        self.future: Future[CompiledGrammar] = pool.submit(run)
        self.done: asyncio.Future[CompiledGrammar] = asyncio.wrap_future(self.future)


class ConstraintCompiler:
    """Compiles the constraints of requests. Used on the thread of one asyncio loop, which it never blocks.

    Equal constraints are compiled once, even when they come at the same time. A refusal is not cached, because it is
    quick.

    Args:
        events: stream for the result of each request's grammar.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        limits: CompilerLimits,
        events: EventStream,
        compile_one: Callable[[Vocabulary, Constraint, GrammarLimits], CompiledGrammar] = compile_grammar,
    ) -> None:
        self.vocabulary = vocabulary
        self._limits = limits
        self._events = events
        self._compile_one = compile_one
        self._pool = ThreadPoolExecutor(limits.threads, thread_name_prefix="grammar")
        self._cache: OrderedDict[_Key, CompiledGrammar] = OrderedDict()
        self._bytes = 0
        self._jobs: dict[_Key, _Job] = {}

    @property
    def cached(self) -> int:
        return len(self._cache)

    @property
    def cached_bytes(self) -> int:
        """Bytes of the sources of cached grammars."""
        return self._bytes

    async def matcher(self, sampling: SamplingParams) -> OutputMatcher | None:
        """Matcher for a request; None if nothing of it is masked.

        Raises:
            InvalidRequest: the constraint cannot be compiled within the limits; ``param`` is the constraint's.
            Overloaded: too many others are being compiled.
        """
        constraint = sampling.constraint
        if constraint is None:
            return budget_matcher(self.vocabulary, sampling) if sampling.masked else None
        return (await self._compiled(constraint)).matcher(sampling)

    def close(self) -> None:
        """Stops compiling; compilations that have begun end by themselves."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _compiled(self, constraint: Constraint) -> CompiledGrammar:
        key = constraint.key
        found = self._cache.get(key)
        if found is not None:
            self._cache.move_to_end(key)
            self._events.emit(GrammarDone("cached", 0.0))
            return found
        began = time.monotonic()
        try:
            job = self._jobs.get(key) or self._start(constraint)
            compiled = await self._wait(job)
        except Refused as error:
            self._events.emit(GrammarDone("refused", time.monotonic() - began))
            param = error.field or constraint.param
            raise InvalidRequest(f"{param}: {error}", param=param) from None
        except Overloaded:
            self._events.emit(GrammarDone("overloaded", time.monotonic() - began))
            raise
        self._events.emit(GrammarDone("compiled", time.monotonic() - began))
        return compiled

    def _start(self, constraint: Constraint) -> _Job:
        if sum(not job.began.is_set() for job in self._jobs.values()) >= self._limits.waiting + self._limits.threads:
            raise self._busy()
        job = _Job(lambda: self._compile_one(self.vocabulary, constraint, self._limits.grammar), self._pool)
        self._jobs[constraint.key] = job
        job.done.add_done_callback(lambda done: self._finished(constraint.key, job, done))
        return job

    def _finished(self, key: _Key, job: _Job, done: asyncio.Future[CompiledGrammar]) -> None:
        if self._jobs.get(key) is job:
            del self._jobs[key]
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            if not isinstance(error, Refused):
                _log.error("a grammar could not be compiled", exc_info=error)
        elif not job.late:
            self._keep(key, done.result())

    async def _wait(self, job: _Job) -> CompiledGrammar:
        """Waits for a compilation's turn, then for its end, each within the limit."""
        limit = self._limits.seconds
        if job.late:
            raise self._too_slow()
        try:
            await asyncio.wait_for(job.began.wait(), limit)
        except TimeoutError:
            if job.future.cancel():
                raise self._busy() from None
        try:
            return await asyncio.wait_for(asyncio.shield(job.done), limit)
        except TimeoutError:
            job.late = True
            raise self._too_slow() from None
        except asyncio.CancelledError:
            if job.done.cancelled():  # another request for the same grammar gave it up
                raise self._busy() from None
            raise

    def _too_slow(self) -> Refused:
        return Refused(
            f"it takes longer than {self._limits.seconds:g} s to compile (TEMPER_CONSTRAINT_COMPILE_SECONDS)"
        )

    def _busy(self) -> Overloaded:
        return Overloaded("the engine is compiling the grammars of other requests: retry later")

    def _keep(self, key: _Key, compiled: CompiledGrammar) -> None:
        limits = self._limits
        if compiled.size > limits.cache_bytes or not limits.cache_entries:
            return
        self._cache[key] = compiled
        self._bytes += compiled.size
        while len(self._cache) > limits.cache_entries or self._bytes > limits.cache_bytes:
            _, dropped = self._cache.popitem(last=False)
            self._bytes -= dropped.size
