"""Sends the requests of a multi-turn workload to an engine in this process, and sums up what they say."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from benchmarks.lib.multiturn_workloads import Workload
from cli.http.load.figures import percentile

if TYPE_CHECKING:
    from benchmarks.lib.in_process import InProcessEngine
    from services.engine.requests.outputs import Finished, SequenceUpdate

_STUCK_SECONDS = 120.0
"""Longest time without the end of any request."""


@dataclass(slots=True)
class Sent:
    """One request; times are on the loop's clock."""

    session: int
    turn: int
    prompt: tuple[int, ...]
    at: float
    first: float = 0.0
    """Time at which its first token was told."""
    finished: Finished | None = None
    error: Exception | None = None
    ended: float = 0.0


class Traffic:
    """Sends a workload's requests as it says. Used by one thread, beside the loop's.

    Args:
        marks: tell where messages end, and whose session it is.
    """

    def __init__(self, engine: InProcessEngine, workload: Workload, run: str, *, marks: bool) -> None:
        self._engine = engine
        self._workload = workload
        self._run = run
        self._marks = marks
        self._ended: SimpleQueue[Sent] = SimpleQueue()
        self._flying: dict[str, Sent] = {}
        self._lock = threading.Lock()
        self._histories: dict[int, tuple[int, ...]] = {}
        self._turns: dict[int, int] = defaultdict(int)
        """Turns of each session that were sent."""

    def run(self) -> list[Sent]:
        """All requests, in the order in which they were sent.

        Raises:
            RuntimeError: one failed, or none has ended for long.
        """
        pending, sent, busy = deque(self._workload.order), list[Sent](), set[int]()
        while pending or busy:
            while (session := self._next(pending, busy)) is not None:
                busy.add(session)
                sent.append(self._send(session))
            try:
                done = self._ended.get(timeout=_STUCK_SECONDS)
            except Empty:
                raise RuntimeError(f"none of {len(busy)} requests has ended for {_STUCK_SECONDS:.0f} s") from None
            busy.remove(done.session)
            if done.error is not None or done.finished is None:
                raise RuntimeError(f"a request failed: {done.error}")
            self._histories[done.session] = (*done.prompt, *done.finished.output_ids)
        return sent

    def _next(self, pending: deque[int], busy: set[int]) -> int | None:
        """Takes the next session that may send its next turn now from those that wait."""
        if len(busy) >= self._workload.concurrency:
            return None
        for session in pending:
            if self._workload.together and any(self._turns[other] <= self._turns[session] for other in busy):
                return None
            if session not in busy:
                pending.remove(session)
                return session
        return None

    def _send(self, number: int) -> Sent:
        from services.engine.requests.adapter import AdapterChoice
        from services.engine.requests.conversation_session import SessionName
        from services.engine.requests.sampling_params import SamplingParams
        from services.engine.requests.submission import Submission

        session, turn = self._workload.sessions[number], self._turns[number]
        self._turns[number] += 1
        prompt = (*self._histories.get(number, ()), *session.turns[turn].new)
        name = f"{self._run}-{number}-{turn}"
        sampling = SamplingParams(temperature=1.0, max_tokens=session.turns[turn].out, ignore_eos=True)
        submission = Submission(name, prompt, sampling, AdapterChoice())
        if self._marks:
            whose = SessionName("", f"{self._run}-{number}")
            submission = replace(submission, boundaries=session.marks(turn), session=whose)
        sent = Sent(number, turn, prompt, time.monotonic())
        with self._lock:
            self._flying[name] = sent
        self._engine.engine.loop.submit(submission, self._sink)
        return sent

    def _sink(self, updates: list[SequenceUpdate]) -> None:
        now = time.monotonic()
        for update in updates:
            if update.cached_tokens is None and update.finish_reason is None:
                continue
            with self._lock:
                sent = self._flying[update.request_id]
            sent.first = sent.first or now
            if update.finish_reason is not None:
                sent.finished, sent.error, sent.ended = update.finished, update.error, now
                self._ended.put(sent)


def report(workload: Workload, sent: Sequence[Sent]) -> dict[str, Any]:
    """Figures of a workload's requests."""
    first, last = min(each.at for each in sent), max(each.ended for each in sent)
    out = sum(len(each.finished.output_ids) for each in sent if each.finished)
    prompts = sum(len(each.prompt) for each in sent)
    ideal = sum(_reusable(workload, each) for each in sent)
    cached = sum(_cached(each) for each in sent)
    times: dict[str, list[float]] = {"cold": [], "warm": []}
    turns: dict[int, list[Sent]] = defaultdict(list)
    tiers: Counter[str] = Counter()
    for each in sent:
        times["warm" if _reusable(workload, each) else "cold"].append(each.first - each.at)
        turns[each.turn].append(each)
        if each.finished and each.finished.cached_tokens:
            tier = each.finished.cached_from
            tiers["device" if tier is None else tier.value] += each.finished.cached_tokens
    return {
        "requests": len(sent),
        "seconds": round(last - first, 3),
        "out_tokens": out,
        "out_tok_s": round(out / (last - first), 1),
        "ttft_ms": {kind: _milliseconds(values) for kind, values in times.items() if values},
        "prompt_tokens": prompts,
        "from": dict(sorted(tiers.items())),
        "cached": cached,
        "ideal": ideal,
        "new": prompts - ideal,
        "preemptions": sum(each.finished.preemptions for each in sent if each.finished),
        "turns": [
            {
                "seconds": round(max(each.ended for each in turn) - min(each.at for each in turn), 3),
                "cached": round(sum(map(_cached, turn)) / sum(len(each.prompt) for each in turn), 4),
            }
            for _, turn in sorted(turns.items())
        ],
    }


def _reusable(workload: Workload, sent: Sent) -> int:
    return workload.sessions[sent.session].reusable(sent.turn)


def _cached(sent: Sent) -> int:
    return sent.finished.cached_tokens if sent.finished else 0


def _milliseconds(values: Sequence[float]) -> dict[str, float]:
    shares = (("p50", 0.5), ("p95", 0.95))
    return {name: round(1e3 * percentile(values, share), 2) for name, share in shares} | {"of": len(values)}
