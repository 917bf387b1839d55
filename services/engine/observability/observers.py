"""Several observers of one engine."""

from __future__ import annotations

from services.engine.loop.ports import AdapterPhase, EngineObserver, LoadFailure, StepStats
from services.engine.requests.outputs import Finished


class Observers:
    """Tells each of them everything. Implements services.engine.loop.ports.EngineObserver."""

    def __init__(self, *observers: EngineObserver) -> None:
        self._observers = observers

    def step_done(self, stats: StepStats) -> None:
        """See LoopObserver."""
        for observer in self._observers:
            observer.step_done(stats)

    def step_failed(self, error: Exception) -> None:
        """See LoopObserver."""
        for observer in self._observers:
            observer.step_failed(error)

    def request_done(self, finished: Finished, submitted_at: float, now: float) -> None:
        """See LoopObserver."""
        for observer in self._observers:
            observer.request_done(finished, submitted_at, now)

    def grammar_done(self, result: str, seconds: float) -> None:
        """See GrammarObserver."""
        for observer in self._observers:
            observer.grammar_done(result, seconds)

    def adapter_phase(self, phase: AdapterPhase, seconds: float) -> None:
        """See AdapterObserver."""
        for observer in self._observers:
            observer.adapter_phase(phase, seconds)

    def adapter_failed(self, reason: LoadFailure) -> None:
        """See AdapterObserver."""
        for observer in self._observers:
            observer.adapter_failed(reason)
