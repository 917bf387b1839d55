"""Work of the prefix cache on the device: `python -m benchmarks.prefix_cache.device --out FILE`. Needs a GPU.

Random weights of a shape, the engine's own runner with its graphs, no engine around it. Results are checked before they
are timed: kernels against float64, snapshots against those of separate steps, payloads bit for bit. Milliseconds are
medians from a launch on an idle device until the host has the result.

- prefill: a prompt in one step, without and with snapshots inside of its chunk, where the engine's policy puts them for
  ends of messages, and where those are; and cut into steps at the first places
- copies: of blocks in all layers and of states, inside a CUDA graph
- transfer: of a prompt's blocks and its state to host memory and back, beside torch's copies of as many bytes between
  pinned memory and one tensor
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.lib.environment import environment
from benchmarks.lib.graph_timing import graph_times
from benchmarks.lib.random_checkpoint import SHAPES, config_of, family_config
from benchmarks.lib.random_model import RandomWeights
from benchmarks.lib.recorder import put_line
from kernels.gpu.delta.chunk import gated_delta_prefill
from kernels.gpu.delta.conv1d import conv_prefill
from kernels.gpu.linear.skinny import SplitWorkspace
from services.engine.executors.compiler_pool import CompilerPool
from services.engine.executors.cuda.cache_transfer import CudaCacheTransfer
from services.engine.executors.cuda.runner import CudaRunner, RunnerLimits, RunnerOptions
from services.engine.kv_cache.snapshot_policy import SnapshotPolicy
from services.engine.kv_offload.entry_format import WORD, checksum, weights
from services.engine.kv_offload.messages import Bytes
from services.engine.models.device_batch import DeviceCache
from services.engine.models.lora.slots import LoraSlots
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.requests.request import Request
from services.engine.requests.sampling_params import SamplingParams
from services.engine.scheduler.step_plan import Chunk, StateCopy, StepPlan, StepResult, segments
from services.pod.memory import WAITING_WRITES
from tests.kernels.gpu.delta.support import Chain, chain_segments, exact_conv, exact_delta, mixer

_BLOCK = 16
_SLOTS = 9
_SLOT, _FIRST_SNAPSHOT = 1, 3
_CHECKED_LAYERS = 2
_HOPPER = (9, 0)
_PIECES = (0, 2**21, 2**19)
"""Bytes of the pieces of host memory that a payload is in; 0: it is one."""


@dataclass(frozen=True, slots=True)
class Bench:
    """A runner with the caches of a few long prompts, and what moves them.

    Args:
        most: tokens of the longest prompt or transfer.
    """

    runner: CudaRunner
    cache: DeviceCache
    transfer: CudaCacheTransfer
    device: torch.device
    vocab: int

    @classmethod
    def build(
        cls,
        config: Qwen3_5Config,
        device: torch.device,
        *,
        most: int,
        float8_kv: bool = False,
        compilers: Executor | None = None,
    ) -> Bench:
        cuda = device.type == "cuda"
        dtype = torch.bfloat16 if cuda else torch.float32
        made = RandomWeights(config, device, "none", SplitWorkspace.allocate(device), dtype).build()
        model = Qwen3_5(config, made)
        cache = DeviceCache.allocate(
            config,
            dtype,
            device,
            num_blocks=1 + 2 * -(-most // _BLOCK),
            block_size=_BLOCK,
            num_slots=_SLOTS,
            kv_dtype=torch.float8_e4m3fn if float8_kv else None,
            waiting_writes=WAITING_WRITES,
        )
        pdl = cuda and torch.cuda.get_device_capability(device) >= _HOPPER
        runner = CudaRunner(
            model,
            cache,
            LoraSlots(config, 1, 16, dtype, device),
            RunnerLimits(4, most, 2 * most, largest_graph=4 if cuda else 0),
            RunnerOptions(pdl=pdl),
            eos_token_ids=[0],
        )
        transfer = CudaCacheTransfer(cache, runner.stream, "benchmark")
        if cuda:
            runner.warm_up(compilers)
        transfer.warm_up(compilers)
        return cls(runner, cache, transfer, device, config.vocab_size)

    def run(self, plans: Sequence[StepPlan]) -> StepResult:
        """The last one's result, all of them launched before the device has any."""
        return [self.runner.launch(plan) for plan in plans][-1].result()

    def prompt(self, tokens: int, snapshots: Sequence[int]) -> StepPlan:
        """One step."""
        ids = np.random.default_rng(tokens).integers(1, self.vocab, tokens).tolist()
        request = Request("prompt", tuple(ids), SamplingParams(temperature=0.0))
        places = [(position, _FIRST_SNAPSHOT + index) for index, position in enumerate(snapshots)]
        blocks = list(range(1, 1 + -(-tokens // _BLOCK)))
        return StepPlan([Chunk(request, ids, 0, blocks, _SLOT, True, [], 0, snapshots=places)])

    def states(self, slot: int) -> Tensor:
        """Recurrent ones of the first layers, [layers, values]: behind many random layers rounding is much."""
        return self.cache.recurrent[:_CHECKED_LAYERS, slot].float().flatten(1).clone()

    def fill(self) -> None:
        """Numbers as no two blocks or states have them."""
        for pool in (self.cache.stacked.pages, *self.cache.state_pools()):
            raw = pool.view(torch.uint8)
            for part in raw:
                part.random_(0, 120)
        _settle(self.device)


def in_steps(plan: StepPlan) -> list[StepPlan]:
    """A step for each link of the only chunk, and a copy of the state behind each but the last."""
    (whole,) = plan.chunks
    steps: list[StepPlan] = []
    for link in segments(whole):
        copied = [] if link.samples else [StateCopy(whole.slot, link.out_slot)]
        steps.append(StepPlan([link._replace(out_slot=0)], copies_after=copied))
    return steps


def snapshots_of(tokens: int, count: int) -> list[int]:
    """Positions that are no multiple of a tile, as ends of messages are not."""
    return [tokens * (place + 1) // (count + 1) + 7 * (place + 1) for place in range(count)]


def check_kernels(config: Qwen3_5Config, device: torch.device) -> dict[str, float]:
    """Largest relative errors of a chain's rows and states against float64, of one layer."""
    chain = Chain(5, 2, (64, 9, 70), (6, 7, 2))
    cuda = device.type == "cuda"
    layer = mixer(
        sum(chain.lengths),
        device,
        key_heads=config.linear_key_heads,
        heads=config.linear_value_heads,
        key_dim=config.linear_key_dim,
        value_dim=config.linear_value_dim,
        dtype=torch.bfloat16 if cuda else torch.float32,
    )
    state = torch.randn(9, layer.heads, layer.key_dim, layer.value_dim, device=device)
    past = torch.randn(9, 3, layer.conv_dim, device=device).to(layer.projected.dtype)
    known, before = state[chain.slot].double(), past[chain.slot].clone()
    segments = chain_segments([chain], device)
    mixed = conv_prefill(layer.projected, layer.conv, past, segments)
    exact, _ = exact_conv(layer.projected[:, : layer.conv_dim], layer.conv, before)
    out = gated_delta_prefill(mixed, layer.projected, *layer.parameters(), state, segments)
    errors = {"convolution": _error(mixed, exact), "rows": 0.0, "states": 0.0}
    begin = 0
    for length, target in zip(chain.lengths, chain.targets, strict=True):
        rows = slice(begin, begin + length)
        expected, known = exact_delta(layer, mixed[rows], layer.projected[rows], known)
        errors["rows"] = max(errors["rows"], _error(out[rows], expected))
        errors["states"] = max(errors["states"], _error(state[target], known))
        begin += length
    if not all(error < 0.02 for error in errors.values()):
        raise RuntimeError(f"a chain is not what float64 says: {errors}")
    return errors


def check_snapshots(bench: Bench, tokens: int) -> dict[str, float]:
    """Distance of the snapshots of a chunk from those of separate steps, relatively, beside how far the states behind
    the whole prompt in one step and in several are, which is rounding."""
    plan = bench.prompt(tokens, snapshots_of(tokens, 2))
    slots = [slot for _, slot in plan.chunks[0].snapshots]
    bench.run([plan])
    ours = [bench.states(slot) for slot in (*slots, _SLOT)]
    bench.run(in_steps(plan))
    theirs = [bench.states(slot) for slot in (*slots, _SLOT)]
    bench.run([bench.prompt(tokens, ())])
    rounding = _error(bench.states(_SLOT), theirs[-1])
    errors = [_error(one, other) for one, other in zip(ours, theirs, strict=True)]
    apart = _error(theirs[0], theirs[1])
    if not all(error <= 3 * rounding + 1e-3 and 10 * error < apart for error in errors):
        raise RuntimeError(f"snapshots differ by {errors} from those of separate steps, rounding is {rounding}")
    return {"snapshots": max(errors), "rounding": rounding}


def check_transfer(bench: Bench, tokens: int) -> None:
    """Checks a copy there and back, to other blocks and another slot."""
    bench.fill()
    transfer, layout = bench.transfer, bench.transfer.layout
    count = -(-tokens // _BLOCK)
    source, target = list(range(1, 1 + count)), list(range(2 * count, count, -1))
    memory = transfer.host_memory(count * layout.block_bytes + layout.slot_bytes)
    sums = transfer.save(source, 2, _cut(memory, 2**20 + 8), transfer.fence())
    size = layout.block_bytes
    weight = weights(max(size, layout.slot_bytes) // WORD)
    items = [memory[at : at + size] for at in range(0, count * size, size)] + [memory[count * size :]]
    if list(sums) != [checksum(item, weight) for item in items]:
        raise RuntimeError("checksums of the device are not those of the host")
    if list(transfer.load(_cut(memory, 2**19), target, 5, transfer.fence())) != list(sums):
        raise RuntimeError("checksums of a load are not those of its save")
    for pool in bench.cache.stacked.pools():
        if not torch.equal(pool[:, source], pool[:, target]):
            raise RuntimeError("blocks came back as others")
    for pool in bench.cache.state_pools():
        if not torch.equal(pool[:, 2].view(torch.uint8), pool[:, 5].view(torch.uint8)):
            raise RuntimeError("a state came back as another")


def prefill(bench: Bench, tokens: int, repeats: int) -> Iterator[dict[str, Any]]:
    """A prompt with and without snapshots, in turn."""
    plain = [bench.prompt(tokens, ())]
    ways: dict[tuple[int, str], list[StepPlan]] = {(0, "one step"): plain}
    for count in (1, 2):
        wanted = snapshots_of(tokens, count)
        policy = SnapshotPolicy(unit=1, gap=_BLOCK, interval=tokens)
        plan = bench.prompt(tokens, policy.positions(0, wanted[-1], wanted[::-1], ()))
        ways |= {(count, "one step"): [plan], (count, "steps"): in_steps(plan)}
        ways[count, "one step, nothing rounded"] = [bench.prompt(tokens, wanted)]
    replays: dict[tuple[int, str], int] = {}
    times: dict[tuple[int, str], list[float]] = {way: [] for way in ways}
    unmeasured = 2 if bench.device.type == "cuda" else 0
    for turn in range(unmeasured + repeats):
        for way, plans in ways.items():
            before, begin = bench.runner.replays, time.perf_counter()
            bench.run(plans)
            if turn >= unmeasured:
                times[way].append(1e3 * (time.perf_counter() - begin))
            replays[way] = bench.runner.replays - before
    alone = statistics.median(times[0, "one step"])
    for (count, kind), found in times.items():
        ms = statistics.median(found)
        yield {
            "what": "prefill",
            "tokens": tokens,
            "snapshots": count,
            "way": kind,
            "ms": round(ms, 3),
            "overhead_percent": round(100 * (ms / alone - 1), 2),
            "captured_steps": replays[count, kind],
        }


def copies(bench: Bench, repeats: int) -> Iterator[dict[str, Any]]:
    """Copies of blocks and of a state; on a GPU in a graph."""
    cache = bench.cache
    num_blocks = cache.stacked.pages.shape[2]
    for count in (1, 16, 256):
        if 2 * count >= num_blocks:
            continue
        pairs = _pairs([(1 + n, num_blocks - 1 - n) for n in range(count)], bench.device)
        size = 2 * count * bench.transfer.layout.block_bytes
        yield _copy("blocks", count, size, partial(cache.copy_blocks, pairs), bench.device, repeats)
    pairs = _pairs([(1, 2)], bench.device)
    size = 2 * bench.transfer.layout.slot_bytes
    yield _copy("states", 1, size, partial(cache.copy_states, pairs), bench.device, repeats)


def transfers(bench: Bench, tokens: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Blocks of so many tokens and a state, both ways, in pieces of several sizes."""
    transfer, layout = bench.transfer, bench.transfer.layout
    count = -(-tokens // _BLOCK)
    size = count * layout.block_bytes + layout.slot_bytes
    blocks = list(range(1, 1 + count))
    begin = time.perf_counter()
    memory = transfer.host_memory(size)
    pinned = time.perf_counter() - begin
    for piece in _PIECES:
        pieces = _cut(memory, piece or size)
        ways: dict[str, Callable[[], object]] = {
            "save": partial(_save, transfer, blocks, pieces),
            "load": partial(_load, transfer, blocks, pieces),
        }
        for way, run in ways.items():
            yield _moved(way, tokens, size, run, repeats) | {"piece_bytes": piece, "pieces": len(pieces)}
    there = torch.empty(size, dtype=torch.uint8, device=bench.device)
    here = torch.empty(size, dtype=torch.uint8, pin_memory=bench.device.type == "cuda")
    yield _moved("torch save", tokens, size, partial(_plain, there, here), repeats)
    yield _moved("torch load", tokens, size, partial(_plain, here, there), repeats)
    yield {"what": "pin", "bytes": size, "ms": round(1e3 * pinned, 1)}


def _save(transfer: CudaCacheTransfer, blocks: Sequence[int], pieces: Sequence[Bytes]) -> None:
    transfer.save(blocks, 2, pieces, transfer.fence())


def _load(transfer: CudaCacheTransfer, blocks: Sequence[int], pieces: Sequence[Bytes]) -> None:
    transfer.load(pieces, blocks, 2, transfer.fence())


def _plain(source: Tensor, target: Tensor) -> None:
    target.copy_(source, non_blocking=True)
    _settle(source.device if source.device.type == "cuda" else target.device)


def _moved(way: str, tokens: int, size: int, run: Callable[[], object], repeats: int) -> dict[str, Any]:
    times: list[float] = []
    for turn in range(repeats + 2):
        begin = time.perf_counter()
        run()
        if turn >= 2:
            times.append(time.perf_counter() - begin)
    seconds = statistics.median(times)
    return {
        "what": "transfer",
        "way": way,
        "tokens": tokens,
        "bytes": size,
        "ms": round(1e3 * seconds, 3),
        "worst_ms": round(1e3 * max(times), 3),
        "gb_s": round(1e-9 * size / seconds, 2),
    }


def _copy(
    kind: str, count: int, size: int, run: Callable[[], object], device: torch.device, repeats: int
) -> dict[str, Any]:
    if device.type == "cuda":
        microseconds = statistics.median(graph_times([run] * 8, repeats=repeats))
    else:
        begin = time.perf_counter()
        run()
        microseconds = 1e6 * (time.perf_counter() - begin)
    rate = round(1e-3 * size / microseconds, 1)
    return {"what": "copy", "kind": kind, "count": count, "us": round(microseconds, 2), "gb_s": rate}


def _cut(memory: Bytes, size: int) -> list[Bytes]:
    return [memory[at : at + size] for at in range(0, len(memory), size)]


def _pairs(pairs: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    return torch.tensor(pairs, dtype=torch.int32).to(device)


def _error(ours: Tensor, exact: Tensor) -> float:
    """Relative, in the norm."""
    return float((ours.double() - exact.double()).norm() / exact.double().norm())


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def results(
    bench: Bench, config: Qwen3_5Config, *, lengths: Sequence[int], moved: Sequence[int], repeats: int
) -> Iterator[dict[str, Any]]:
    """All lines; what is checked comes first."""
    with torch.inference_mode():
        yield {"what": "errors against float64"} | check_kernels(config, bench.device)
        yield {"what": "errors against separate steps"} | check_snapshots(bench, lengths[0])
        check_transfer(bench, min(moved))
        yield from copies(bench, repeats)
        for tokens in moved:
            yield from transfers(bench, tokens, repeats)
        bench.cache.recurrent.zero_()  # what was moved was no number
        _settle(bench.device)
        for tokens in lengths:
            yield from prefill(bench, tokens, repeats)


def row_of(line: Mapping[str, Any]) -> str:
    """A line of the table."""
    return "  ".join(f"{name} {value}" for name, value in line.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3.5-4b")
    parser.add_argument("--lengths", default="512,1024,2048,8192", help="prompts, tokens")
    parser.add_argument("--moved", default="1024,4096,8192", help="transfers, tokens")
    parser.add_argument("--kv", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, help="append JSON lines here")
    options = parser.parse_args()
    device = torch.device("cuda")
    config = family_config(config_of(options.shape))
    lengths, moved = ([int(part) for part in text.split(",")] for text in (options.lengths, options.moved))
    began = time.perf_counter()
    with CompilerPool() as pool:
        bench = Bench.build(config, device, most=max(*lengths, *moved), float8_kv=options.kv == "fp8", compilers=pool)
    facts = {"shape": options.shape, "kv": options.kv} | environment()
    print(f"built in {time.perf_counter() - began:.1f} s", flush=True)
    table: list[str] = []
    for line in results(bench, config, lengths=lengths, moved=moved, repeats=options.repeats):
        put_line(line | facts, options.out)
        table.append(row_of(line))
    bench.transfer.close()
    print("\n".join(table))


if __name__ == "__main__":
    main()
