"""Random traffic on an engine for a long time: `python -m benchmarks.prefix_cache.soak --seconds 3600`.

The loop, its scheduler, the prefix cache and the tiny model on the CPU, with few blocks and slots and 8 MiB of the
host's memory below them (`--tiers no`: none): chats that go on, branch, are repeated, cancelled, cut at a stop string
or late for their deadline, of three salts. `--seconds` are of CPU time. What must hold, to the token:
- the books agree (check_integrity between steps), and when all is over nothing is in use, and nothing cached once the
  cache is emptied
- a request says that as many tokens came from the cache as the runner was not given of it: its first chunk begins
  there
- its chunks follow each other without a gap but where it was preempted, and, if nobody ended it, the last one ends
  before the last token of the answer: what was computed is the prompt less the cached tokens, the answer less its last
  token, and what preemptions made it compute again
- all steps, as the metrics are told, have as many tokens as all chunks
- the process does not grow by more than --growth MiB behind the first quarter

One JSON line; the exit status is 1 if something did not hold.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from random import Random
from typing import Any

import psutil
import torch
from rich.progress import Progress

from benchmarks.lib.environment import ROOT, environment
from benchmarks.lib.in_process import only_warnings
from benchmarks.lib.recorder import put_line
from benchmarks.serving.host_step import BaseOnly
from services.common.errors import DeadlineExceeded
from services.engine.compute_sharing.host_lock import SliceGate
from services.engine.executors.cpu.cache_transfer import CpuCacheTransfer
from services.engine.executors.cpu.runner import ModelRunner
from services.engine.executors.runner import OpenStep, Runner, StepHandle
from services.engine.kv_offload.manager import TierConfig, TierManager
from services.engine.loop.loop import EngineLoop
from services.engine.loop.rollout_buffer import RolloutBuffer
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.observability.events import EngineEvent, EventStream, StepDone, StepFailed
from services.engine.observability.status import Counts
from services.engine.requests.adapter import AdapterChoice
from services.engine.requests.outputs import Finished, SequenceUpdate
from services.engine.requests.request import FinishReason
from services.engine.requests.sampling_params import SamplingParams
from services.engine.requests.submission import Submission
from services.engine.scheduler.config import SchedulerConfig
from services.engine.scheduler.step_plan import StepPlan

_MIB = 2**20
_HOST_BYTES = 8 * _MIB
_LONGEST = 200
"""Tokens of a prompt."""
_MOST_OUTPUT = 16
_IN_FLIGHT = 24
_HISTORIES = 48
"""Histories that requests go on behind."""
_STUCK_SECONDS = 60.0
_LISTED = 10
"""Findings listed in the output."""


@dataclass(slots=True)
class _Work:
    """Tokens of one request that the runner was given."""

    first: int
    """Position at which its first chunk begins."""
    end: int
    computed: int = 0
    again: int = 0
    """Tokens computed again; negative if more came from the cache than had been computed."""
    jumps: int = 0


class TokenAudit:
    """Compares what requests say with what was computed for them. Of the loop's thread alone."""

    def __init__(self) -> None:
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.computed = 0
        self.again = 0
        self.preemptions = 0
        self.loaded_tokens = 0
        """Cached tokens that came from a tier."""
        self.cut: set[str] = set()
        """Requests that somebody may end before their time; from any thread."""
        self.problems: list[str] = []
        self._works: dict[str, _Work] = {}

    def launched(self, plan: StepPlan) -> None:
        """Takes in a step."""
        for chunk in plan.chunks:
            name, count = chunk.request.request_id, len(chunk.token_ids)
            work = self._works.get(name)
            if work is None:
                work = self._works[name] = _Work(chunk.start, chunk.start)
            if chunk.start != work.end:
                work.jumps += 1
                work.again += work.end - chunk.start
            work.computed += count
            work.end = chunk.start + count
            self.computed += count

    def ended(self, finished: Finished) -> None:
        """Takes in the end of a request, of which no step is in flight."""
        request, cached, outputs = finished.request, finished.cached_tokens, len(finished.output_ids)
        prompt = len(request.prompt_token_ids)
        work = self._works.pop(request.request_id, None) or _Work(0, 0)
        self.prompt_tokens += prompt
        self.cached_tokens += cached
        self.loaded_tokens += cached if finished.cached_from is not None else 0
        self.output_tokens += outputs
        self.again += work.again
        self.preemptions += finished.preemptions

        def check(ok: bool, what: str) -> None:
            if not ok:
                reason, again = finished.finish_reason.value, finished.preemptions
                self.problem(
                    f"{request.request_id}: {what}; {prompt} + {outputs} tokens, {cached} cached, {again} preemptions, "
                    f"{reason}, {work}"
                )

        check(work.first == cached, "another number of tokens came from the cache than it says")
        check(work.jumps <= finished.preemptions, "chunks do not follow each other")
        check(cached < prompt, "nothing of the prompt was computed")
        if request.request_id in self.cut:
            self.cut.remove(request.request_id)
        elif finished.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            wanted = prompt - cached + outputs - 1 + work.again
            check(work.computed == wanted, f"{work.computed} tokens were computed instead of {wanted}")
            check(work.end == prompt + outputs - 1, "the last token was sampled elsewhere")

    def problem(self, text: str) -> None:
        self.problems.append(text)

    @property
    def open(self) -> int:
        """Requests of which something was computed and that have not ended."""
        return len(self._works)


class CountedRunner:
    """A runner whose steps an audit sees."""

    def __init__(self, runner: Runner, audit: TokenAudit) -> None:
        self._runner = runner
        self._audit = audit
        self.depth, self.costs = runner.depth, runner.costs

    def launch(self, plan: StepPlan) -> StepHandle:
        self._audit.launched(plan)
        return self._runner.launch(plan)

    def open(self, plan: StepPlan) -> OpenStep:
        self._audit.launched(plan)
        return self._runner.open(plan)


class _Steps:
    """Adds up the tokens of steps."""

    def __init__(self) -> None:
        self.tokens = 0
        self.failures: list[str] = []

    def listen(self, event: EngineEvent) -> None:
        if isinstance(event, StepDone):
            self.tokens += event.decodes + event.prefill_tokens
        elif isinstance(event, StepFailed):
            self.failures.append(repr(event.error))


@dataclass(slots=True)
class Outcome:
    """Result of the traffic."""

    requests: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    checks: int = 0
    rss_mib: list[float] = field(default_factory=list)
    """Resident memory at a hundred even points of the CPU time of a run."""
    growth_mib: float = 0.0
    """Peak memory behind the first quarter less the peak in it."""
    problems: list[str] = field(default_factory=list)


class Soak:
    """One engine under random traffic. For one thread; ``stop`` ends the engine's.

    Args:
        tiers: whether the host keeps what the device does not.
        load_share: see SchedulerConfig: how much of a computation's time a load from there may take.
    """

    def __init__(self, model: Path, seed: int, *, tiers: bool, load_share: float = 0.75) -> None:
        self.config = SchedulerConfig(
            max_num_seqs=6,
            token_budget=96,
            block_size=16,
            num_blocks=96,
            num_slots=20,
            max_model_len=_LONGEST + _MOST_OUTPUT + 1,
            mixed_prefill_tokens=64,
            load_share=load_share,
        )
        loaded = Qwen3_5.from_directory(model, dtype="float32", device=torch.device("cpu"))
        self._vocab = loaded.config.vocab_size
        config = self.config
        cache = loaded.allocate_cache(config.num_blocks, config.block_size, config.num_slots)
        self._tiers: TierManager | None = None
        if tiers:
            limits = TierConfig(True, _HOST_BYTES, 5e9, 2.0)
            transfer = CpuCacheTransfer(cache, "soak")
            self._tiers = TierManager(transfer, limits, EventStream(), lambda: self.loop.wake())
        runner = ModelRunner(
            loaded,
            cache,
            LoraSlots(loaded.config, 1, 4, loaded.dtype, loaded.device),
            num_slots=config.num_slots,
            eos_token_ids=(),
        )
        self.audit = TokenAudit()
        self._steps = _Steps()
        self.loop = EngineLoop(
            config,
            CountedRunner(runner, self.audit),
            BaseOnly(),
            SliceGate(0.05),
            RolloutBuffer(64, 60.0),
            max_waiting=4 * _IN_FLIGHT,
            events=EventStream(self._steps.listen),
            tiers=self._tiers,
        )
        self._random = Random(seed)
        self._ended: SimpleQueue[Finished | SequenceUpdate] = SimpleQueue()
        self._histories: deque[tuple[str, tuple[int, ...]]] = deque(maxlen=_HISTORIES)
        """Salts and what was said under them."""
        self._in_flight: list[str] = []
        self.outcome = Outcome()
        self.loop.start()
        if self._tiers is not None:
            self._tiers.start()

    def stop(self) -> None:
        self.loop.stop()
        if self._tiers is not None:
            self._tiers.close(0.0)

    def run(self, cpu_seconds: float, progress: Progress | None = None) -> Outcome:
        """Traffic for so long, then the end of all of it and the last checks; may be called again, to go on."""
        process, began = psutil.Process(), time.process_time()
        task = progress.add_task("traffic", total=100) if progress else None
        outcome = self.outcome
        before = len(outcome.rss_mib)
        while (spent := (time.process_time() - began) / cpu_seconds) < 1:
            self._operate()
            if len(outcome.rss_mib) - before < 100 * spent:
                outcome.rss_mib.append(round(process.memory_info().rss / _MIB, 1))
                self._check()
                if progress is not None and task is not None:
                    progress.update(task, completed=100 * spent)
        while self._in_flight:
            self._await_end()
        self._check_empty()
        quarter = max(1, len(outcome.rss_mib) // 4)
        first, rest = outcome.rss_mib[:quarter], outcome.rss_mib[quarter:]
        outcome.growth_mib = round(max(rest, default=0.0) - max(first), 1) if rest else 0.0
        outcome.problems = [*self.audit.problems, *self._steps.failures]
        return outcome

    # Traffic.

    def _operate(self) -> None:
        """Sends, cancels or cuts a request, or waits for the end of one."""
        random = self._random
        if len(self._in_flight) >= random.randint(1, _IN_FLIGHT):
            self._await_end()
            return
        kind = random.random()
        if kind < 0.12 and self._in_flight:
            name = random.choice(self._in_flight)
            self.audit.cut.add(name)
            self.loop.abort(name, keep_tokens=random.choice((0, 0, 1, 3)))
        elif kind < 0.14:
            self._check()
        else:
            self._send()

    def _send(self) -> None:
        random, outcome = self._random, self.outcome
        outcome.requests += 1
        salt, prompt = self._prompt()
        name = f"r{outcome.requests}"
        sampling = SamplingParams(
            temperature=random.choice((0.0, 1.0)),
            max_tokens=random.randint(1, _MOST_OUTPUT),
            ignore_eos=True,
            stop_token_ids=frozenset(random.sample(range(self._vocab), 20)),
        )
        late = random.random() < 0.08
        submission = Submission(
            name,
            prompt,
            sampling,
            AdapterChoice(),
            deadline=time.monotonic() + random.uniform(0.0, 0.4) if late else None,
            cache_salt=salt,
            priority=random.choice((0, 0, 0, 0, -1, 1)),
        )
        self._in_flight.append(name)
        self.loop.submit(submission, self._sink)

    def _prompt(self) -> tuple[str, tuple[int, ...]]:
        """A new one, or one that goes on behind what was said, all of it or a part, with the same salt mostly."""
        random = self._random
        salt, history = random.choice(("", "", "x", "y")), tuple[int, ...]()
        if self._histories and random.random() < 0.8:
            whose, history = random.choice(self._histories)
            salt = whose if random.random() < 0.95 else salt
            if random.random() < 0.4:
                history = history[: random.randint(1, len(history))]
        own = random.choice((0, 1, 8, 16, random.randint(1, 80))) if history else random.randint(1, _LONGEST)
        prompt = (*history, *(random.randrange(self._vocab) for _ in range(own)))
        return salt, prompt[:_LONGEST]

    def _sink(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            if update.finished is not None:
                self.audit.ended(update.finished)
                if update.error is not None and not isinstance(update.error, DeadlineExceeded):
                    self.audit.problem(f"{update.request_id}: {update.error}")
            if update.finish_reason is not None:
                self._ended.put(update.finished or update)

    def _await_end(self) -> None:
        try:
            ended = self._ended.get(timeout=_STUCK_SECONDS)
        except Empty:
            raise RuntimeError(f"none of {len(self._in_flight)} requests ended in {_STUCK_SECONDS:.0f} s") from None
        if isinstance(ended, SequenceUpdate):
            raise RuntimeError(f"{ended.request_id} never reached the scheduler: {ended.error}")
        request, reason = ended.request, ended.finish_reason
        self._in_flight.remove(request.request_id)
        self.outcome.ends[reason.value] = self.outcome.ends.get(reason.value, 0) + 1
        if ended.output_ids:
            self._histories.append((request.cache_salt, (*request.prompt_token_ids, *ended.output_ids)))

    # Checks.

    def _check(self) -> None:
        """The books, between two steps."""
        self.outcome.checks += 1
        counts = self.loop.call_at_boundary(self._books).result(_STUCK_SECONDS)
        if counts.blocks_used + counts.blocks_cached > counts.blocks_total:
            self.audit.problem(f"more blocks than there are: {counts}")
        if counts.slots_used + counts.slots_cached > counts.slots_total:
            self.audit.problem(f"more slots than there are: {counts}")

    def _books(self) -> Counts:
        scheduler = self.loop._pipeline.scheduler
        scheduler.check_integrity()
        return scheduler.counts()

    def _check_empty(self) -> None:
        """Checks that nothing is left."""
        audit = self.audit
        if self._tiers is not None:
            # What is being saved is held; a save that ends lets the loop ask for the next one.
            for _ in range(3):
                if not self._tiers.wait_idle(_STUCK_SECONDS):
                    audit.problem("the tiers do not come to rest")
                self.loop.call_at_boundary(self.loop._pipeline.serve_tiers).result(_STUCK_SECONDS)
            self._tiers.check()
        counts = self.loop.call_at_boundary(self._books).result(_STUCK_SECONDS)
        if counts.running or counts.waiting or counts.blocks_used or counts.slots_used or audit.open:
            audit.problem(f"something is left: {counts}, {audit.open} requests")
        if self._steps.tokens != audit.computed:
            audit.problem(f"steps had {self._steps.tokens} tokens, chunks {audit.computed}")

        def clear() -> Counts:
            self.loop._pipeline.scheduler.clear_cache()
            return self._books()

        counts = self.loop.call_at_boundary(clear).result(_STUCK_SECONDS)
        if counts.blocks_cached or counts.slots_cached:
            audit.problem(f"an emptied cache has something: {counts}")


def summary(soak: Soak) -> dict[str, Any]:
    """The result as it is printed."""
    outcome, audit = soak.outcome, soak.audit
    return {
        "requests": outcome.requests,
        "ends": outcome.ends,
        "checks": outcome.checks,
        "prompt_tokens": audit.prompt_tokens,
        "cached_tokens": audit.cached_tokens,
        "loaded_tokens": audit.loaded_tokens,
        "output_tokens": audit.output_tokens,
        "computed": audit.computed,
        "computed_again": audit.again,
        "preemptions": audit.preemptions,
        "rss_mib": _thinned(outcome.rss_mib, 20),
        "growth_mib": outcome.growth_mib,
        "problems": len(outcome.problems),
        "first_problems": outcome.problems[:_LISTED],
    }


def _thinned(values: Sequence[float], count: int) -> list[float]:
    return list(values[:: max(1, len(values) // count)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny")
    parser.add_argument("--seconds", type=float, default=600.0, help="of CPU time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiers", choices=("yes", "no"), default="yes")
    parser.add_argument("--growth", type=float, default=32.0, help="of the process, MiB, at most")
    parser.add_argument("--out", type=Path, help="file to append the result to")
    options = parser.parse_args()
    only_warnings()
    torch.set_num_threads(1)
    soak = Soak(options.model, options.seed, tiers=options.tiers == "yes")
    try:
        with Progress(disable=not sys.stderr.isatty()) as progress:
            outcome = soak.run(options.seconds, progress)
    finally:
        soak.stop()
    facts = {"benchmark": "prefix_soak", "seed": options.seed, "cpu_seconds": options.seconds, "tiers": options.tiers}
    put_line(facts | summary(soak) | environment(), options.out)
    sys.exit(1 if outcome.problems or outcome.growth_mib > options.growth else 0)


if __name__ == "__main__":
    main()
