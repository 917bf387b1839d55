"""Comparison of answers with and without the prefix cache: `python -m benchmarks.prefix_cache.exact --workloads 2000`.

Random trees of requests (benchmarks.prefix_cache.workloads) go through scheduler, cache, runner and a small random
model in float32 on the CPU, with little memory and many at a time; then each request alone, without a cache. It is done
in three ways, of which `tests/parity/test_prefix_exact.py` does some hundred.

token by token: the plans are the scheduler's, but the runner is given each chunk as chunks of one token, in both runs.
So the same numbers go through the same instructions, whatever was cut, batched, preempted or cached, and tokens and
log-probabilities must be equal to the bit. Slots and blocks are whole cache lines here, so that not even an alignment
differs.

with tiers: the same, with a little of the host's memory, a disk and an object store below the device. Whenever two
requests have ended the device forgets everything, and in two of three cases so does the host, in one the disk as well,
so that only the store has it. Each of the four must have answered, also to a prompt that leaves a history inside of
it, or the run has failed.

in chunks: as an engine does it. Float32 products round by their number of rows, so how a prompt was cut shows in the
last bits: `--splits` measures by how much, without any cache. The second run is forced to the first one's tokens. At
each of them the log-probabilities must be within BOUND, and a greedy token must be the most likely one there, or
within twice BOUND of it (a tie, which is counted).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich.progress import Progress

from benchmarks.lib.environment import environment
from benchmarks.lib.in_process import only_warnings
from benchmarks.lib.memory_store import MemoryStore
from benchmarks.lib.random_model import RandomWeights, random_adapter
from benchmarks.lib.recorder import put_line
from benchmarks.prefix_cache.token_by_token import TokenByToken
from benchmarks.prefix_cache.workloads import ADAPTERS, VOCAB, Workload, make_workload
from services.engine.executors.cpu.cache_transfer import CpuCacheTransfer
from services.engine.executors.cpu.runner import ModelRunner
from services.engine.kv_cache.keys import Tier
from services.engine.kv_offload.manager import TierConfig, TierManager
from services.engine.models.batch import CacheBuffers
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.observability.events import CopyEvicted, EngineEvent, EventStream
from services.engine.requests.outputs import Finished, SampledToken
from services.engine.requests.request import Request
from services.engine.requests.sampling_params import SamplingParams
from services.engine.scheduler.config import SchedulerConfig
from services.engine.scheduler.scheduler import Scheduler
from services.engine.scheduler.step_plan import StepPlan, StepResult

CONFIG = Qwen3_5Config(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    layer_types=("linear_attention", "linear_attention", "full_attention", "linear_attention"),
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    rotary_dim=4,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    linear_key_heads=1,
    linear_value_heads=2,
    linear_key_dim=16,
    linear_value_dim=16,
    conv_kernel=4,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
)
_WAYS = ("tokens", "tiers", "chunks")
BOUND = 1e-4
"""Largest difference of log-probabilities in chunks."""
_MOST_STEPS = 5_000
"""Most steps of one workload; more means that somebody starves."""
PLACES = ("device", *(tier.value for tier in Tier))
"""Places that cached tokens come from."""
_HOST_BYTES, _DISK_BYTES, _STORE_BYTES = 96 * 1024, 192 * 1024, 512 * 1024
"""Sizes of the tiers: some eight entries, twice as many and some forty."""
_PATIENCE = 30.0
"""Seconds for a load."""
_ALONE = 256
"""Blocks, and tokens of a step, for a request alone."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a request."""

    finished: Finished
    tokens: Sequence[SampledToken]


@dataclass(slots=True)
class Totals:
    """Totals of all workloads that were compared."""

    workloads: int = 0
    requests: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_from: Counter[str] = field(default_factory=Counter)
    """Cached tokens by the tier that they came from: the slowest, if a prompt's came from several."""
    branched_from: Counter[str] = field(default_factory=Counter)
    """Cached tokens, likewise by tier, of prompts that leave what they go on from before its end."""
    evicted: Counter[str] = field(default_factory=Counter)
    """Copies that tiers gave up; those that they were told to forget count as well."""
    preemptions: int = 0
    largest: float = 0.0
    """Difference of two log-probabilities of the same token."""
    ties: int = 0
    """Greedy tokens that are not the most likely one of the run without a cache, but within twice BOUND of it."""
    differences: int = 0
    """Tokens or log-probabilities that are not what they must be."""
    first: str = ""
    """The first of them."""

    def figures(self) -> dict[str, Any]:
        """All fields; asdict() would not make a Counter of a Counter."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def missing(self, places: Sequence[str]) -> list[str]:
        """Places that did not answer, or to no prompt that branches."""
        return [place for place in places if not self.cached_from[place] or not self.branched_from[place]]


class Bench:
    """A small random model with two adapters, and what runs on it.

    Args:
        tiers: a directory for the disk that is below the device in runs with a cache, beside the host's memory and a
            store; None: there is nothing below.
        damage: changes each plan of the runs with a cache before it is executed, for tests of the comparison itself.
    """

    def __init__(
        self,
        *,
        token_by_token: bool,
        tiers: Path | None = None,
        damage: Callable[[StepPlan], StepPlan] = lambda plan: plan,
    ) -> None:
        self.token_by_token = token_by_token
        self._tiers = tiers
        self._damage = damage
        torch.manual_seed(0)
        device = torch.device("cpu")
        self.model = Qwen3_5(CONFIG, RandomWeights(CONFIG, device, "none", None, torch.float32).build())
        self._lora = LoraSlots(CONFIG, len(ADAPTERS), 4, torch.float32, device)
        for pin in ADAPTERS[1:]:
            self._lora.load(pin.slot, random_adapter(CONFIG, rank=4))
        self._alone: dict[int, ModelRunner] = {}

    def compare(self, workload: Workload, totals: Totals) -> None:
        """Runs it with the cache, and each of its requests without; adds to the totals."""
        answers = self.serve(workload, totals.evicted)
        totals.workloads += 1
        seen: dict[object, Answer] = {}
        for number, answer in enumerate(answers):
            request, output = answer.finished.request, answer.finished.output_ids
            name = (request.prompt_token_ids, request.sampling.seed, request.pin, tuple(output))
            if name not in seen:
                seen[name] = self.alone(request, workload.config.block_size, output)
            totals.requests += 1
            totals.output_tokens += len(output)
            totals.prompt_tokens += len(request.prompt_token_ids)
            if cached := answer.finished.cached_tokens:
                tier = answer.finished.cached_from
                place = "device" if tier is None else tier.value
                totals.cached_tokens += cached
                totals.cached_from[place] += cached
                if workload.branches(number):
                    totals.branched_from[place] += cached
            totals.preemptions += answer.finished.preemptions
            self._compare(answer, seen[name], totals)

    def _compare(self, answer: Answer, alone: Answer, totals: Totals) -> None:
        pairs = zip(answer.tokens, alone.tokens, strict=True)
        for number, (token, other) in enumerate(pairs):
            distance = abs(token.sampling_logprob - other.sampling_logprob)
            right = token.token_id == other.token_id and distance <= (0.0 if self.token_by_token else BOUND)
            if right and not self.token_by_token and answer.finished.request.sampling.greedy:
                behind = other.top_logprobs[0] - (other.logprob or 0.0)
                right = behind <= 2 * BOUND
                totals.ties += behind > 0 and right
            if token.token_id == other.token_id:
                totals.largest = max(totals.largest, distance)
            if not right:
                totals.differences += 1
                totals.first = totals.first or (
                    f"{answer.finished.request.request_id}, token {number}: {token}, alone {other}; "
                    f"{answer.finished.cached_tokens} of {len(answer.finished.request.prompt_token_ids)} cached"
                )

    def serve(self, workload: Workload, evicted: Counter[str] | None = None) -> list[Answer]:
        """All requests of a workload through one scheduler; the answers in their order.

        Args:
            evicted: gets what tiers gave up, by tier.

        Raises:
            RuntimeError: it does not end.
        """
        config = workload.config
        cache = self._cache(config.num_blocks, config.block_size, config.num_slots)
        if self._tiers is None:
            return self._serve(workload, config, cache, None, threading.Event())
        woken = threading.Event()
        with tempfile.TemporaryDirectory(dir=self._tiers) as directory:
            limits = TierConfig(
                True,
                _HOST_BYTES,
                1e9,
                _PATIENCE,
                Path(directory),
                _DISK_BYTES,
                store=True,
                store_bytes=_STORE_BYTES,
                store_poll_seconds=3600.0,
                store_after_uses=0,
            )

            def count(event: EngineEvent) -> None:
                if isinstance(event, CopyEvicted) and evicted is not None:
                    evicted[event.tier.value] += 1

            tiers = TierManager(CpuCacheTransfer(cache, "exact"), limits, EventStream(count), woken.set, MemoryStore())
            tiers.start()
            try:
                # Whatever is computed takes longer than any load.
                config = replace(config, token_seconds=1.0, load_patience=_PATIENCE)
                answers = self._serve(workload, config, cache, tiers, woken)
                _rest(tiers)
                tiers.check()
                return answers
            finally:
                tiers.close(0.0)

    def _serve(
        self,
        workload: Workload,
        config: SchedulerConfig,
        cache: CacheBuffers,
        tiers: TierManager | None,
        woken: threading.Event,
    ) -> list[Answer]:
        execute = self._executor(self._runner(cache, config.num_slots))
        scheduler = Scheduler(config, tiers=tiers)
        coming = deque(range(len(workload.asks)))
        prompts: dict[int, tuple[int, ...]] = {}
        answers: dict[str, Answer] = {}
        tokens: dict[str, list[SampledToken]] = {}
        forgets, ended = deque(workload.forgets), 2
        for _ in range(_MOST_STEPS):
            for number in list(coming)[: workload.arrivals]:
                ask, history = workload.asks[number], tuple[int, ...]()
                if ask.behind is not None:
                    answer = answers.get(f"r{ask.behind}")
                    known = prompts.get(ask.behind, ())
                    history = known if answer is None else (*known, *answer.finished.output_ids)
                    if len(history) < ask.keep:
                        continue
                coming.remove(number)
                prompts[number] = ask.prompt(history)
                scheduler.add(ask.request(number, prompts[number]))
            woken.clear()
            plan = scheduler.schedule(time.monotonic())
            if plan is not None:
                for update in scheduler.update(plan, execute(self._damage(plan)), time.monotonic()):
                    if update.token is not None:
                        tokens.setdefault(update.request_id, []).append(update.token)
                    if update.finished is not None:
                        answers[update.request_id] = Answer(update.finished, tokens[update.request_id])
            if tiers is not None:
                if plan is None:
                    woken.wait(0.01)
                scheduler.take_events(tiers.take_events())
                tiers.submit(scheduler.take_commands())
                while forgets and len(answers) >= ended:
                    ended += 2
                    _forget(scheduler, tiers, forgets.popleft())
            scheduler.check_integrity()
            if not coming and not scheduler.has_work:
                return [answers[f"r{number}"] for number in range(len(workload.asks))]
        raise RuntimeError(f"{len(workload.asks) - len(answers)} requests have no answer after {_MOST_STEPS} steps")

    def alone(self, request: Request, block_size: int, output: Sequence[int], budget: int = _ALONE) -> Answer:
        """Answer to a request alone and without a cache; in chunks it is forced to ``output``.

        Args:
            budget: tokens of a step: 1 to compute the prompt in pieces.
        """
        sampling = request.sampling
        if not self.token_by_token:
            forced = SamplingParams.forcing(tuple(output), sampling.temperature)
            sampling = replace(forced, top_logprobs=1)
        config = SchedulerConfig(
            max_num_seqs=1,
            token_budget=budget,
            block_size=block_size,
            num_blocks=_ALONE,
            num_slots=2,
            max_model_len=_ALONE,
            prefix_cache=False,
        )
        runner = self._alone.get(block_size)
        if runner is None:
            cache = self._cache(config.num_blocks, block_size, config.num_slots)
            runner = self._alone[block_size] = self._runner(cache, config.num_slots)
        execute = self._executor(runner)
        scheduler = Scheduler(config)
        scheduler.add(replace(request, sampling=sampling))
        tokens: list[SampledToken] = []
        while plan := scheduler.schedule(0.0):
            for update in scheduler.update(plan, execute(plan), 0.0):
                if update.token is not None:
                    tokens.append(update.token)
                if update.finished is not None:
                    return Answer(update.finished, tokens)
        raise RuntimeError(f"{request.request_id} has no answer")

    def _executor(self, runner: ModelRunner) -> Callable[[StepPlan], StepResult]:
        return TokenByToken(runner).execute if self.token_by_token else runner.execute

    def _cache(self, num_blocks: int, block_size: int, num_slots: int) -> CacheBuffers:
        """Cache as others may have left it."""
        cache = self.model.allocate_cache(num_blocks, block_size, num_slots)
        spoil(cache)
        return cache

    def _runner(self, cache: CacheBuffers, num_slots: int) -> ModelRunner:
        return ModelRunner(self.model, cache, self._lora, num_slots=num_slots, eos_token_ids=())


def _rest(tiers: TierManager) -> None:
    if not tiers.wait_idle(_PATIENCE):
        raise RuntimeError("the tiers do not come to rest")


def _forget(scheduler: Scheduler, tiers: TierManager, count: int) -> None:
    """Waits until all is saved that is to be; then the device and the first tiers forget everything."""
    _rest(tiers)
    # A save that has ended lets the scheduler ask for the next one.
    while events := tiers.take_events():
        scheduler.take_events(events)
        tiers.submit(scheduler.take_commands())
        _rest(tiers)
    scheduler.clear_cache()
    index = tiers._index
    with index.lock:
        if count > 0:
            # As for an entry that is as large.
            run = index.take_room(index.arena.limit)
            if run is None:
                raise RuntimeError("the host cannot forget: its memory is still read or written")
            index.arena.give_back(run)
        if count > 1:
            while index.evict(Tier.DISK, None):
                pass
    _rest(tiers)
    scheduler.take_events(tiers.take_events())


def spoil(cache: CacheBuffers) -> None:
    """Fills it with large numbers."""
    for pool in (*cache.keys, *cache.values, *cache.conv_states, *cache.recurrent_states):
        pool.normal_(0, 100)


def splits(bench: Bench, workload: Workload, draw: Random) -> float:
    """Change of a log-probability if a prompt is computed in pieces instead of at once, without any cache:
    the most of all requests of a workload."""
    most = 0.0
    for answer in bench.serve(workload):
        request, output, size = answer.finished.request, answer.finished.output_ids, workload.config.block_size
        whole = bench.alone(request, size, output)
        cut = bench.alone(request, size, output, budget=draw.randint(1, len(request.prompt_token_ids)))
        pairs = zip(whole.tokens, cut.tokens, strict=True)
        most = max(most, *(abs(one.sampling_logprob - other.sampling_logprob) for one, other in pairs))
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=int, default=2000, help="of each way")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the next one has the next")
    parser.add_argument("--ways", nargs="+", choices=_WAYS, default=list(_WAYS))
    parser.add_argument("--splits", type=int, default=0, metavar="N", help="only measure splits of N workloads")
    parser.add_argument("--out", type=Path, help="file to append the results to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    only_warnings()
    right = True
    with Progress(disable=not sys.stderr.isatty()) as progress, tempfile.TemporaryDirectory() as directory:
        if options.splits:
            put_line(_splits(options.splits, options.seed, progress), options.out)
            return
        for way in options.ways:
            tiers = Path(directory) if way == "tiers" else None
            bench, totals, began = Bench(token_by_token=way != "chunks", tiers=tiers), Totals(), time.perf_counter()
            for seed in progress.track(range(options.seed, options.seed + options.workloads), description=way):
                bench.compare(make_workload(Random(seed)), totals)
            facts = {"benchmark": "prefix_exact", "way": way, "seed": options.seed}
            bound = 0.0 if bench.token_by_token else BOUND
            seconds = round(time.perf_counter() - began, 1)
            put_line(facts | {"bound": bound, **totals.figures(), "seconds": seconds} | environment(), options.out)
            missing = totals.missing(PLACES if tiers else PLACES[:1])
            if missing:
                sys.stderr.write(f"{way}: nothing came from {', '.join(missing)}, or to no prompt that branches\n")
            right = right and not totals.differences and not missing
    sys.exit(0 if right else 1)


def _splits(count: int, seed: int, progress: Progress) -> dict[str, Any]:
    bench, found = Bench(token_by_token=False), list[float]()
    for number in progress.track(range(seed, seed + count), description="splits"):
        draw = Random(number)
        found.append(splits(bench, make_workload(draw), draw))
    ordered = sorted(found)
    return {
        "benchmark": "prefix_exact",
        "way": "splits",
        "workloads": count,
        "seed": seed,
        "largest": ordered[-1],
        "median": ordered[len(ordered) // 2],
        **environment(),
    }


if __name__ == "__main__":
    main()
