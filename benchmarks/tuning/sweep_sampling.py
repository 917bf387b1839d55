"""Times sampling at the vocabulary of Qwen3.5-4B and checks its tokens: ``python -m benchmarks.tuning.sweep_sampling``.

Prints a table of microseconds on the device (a CUDA graph of several launches, so that the host costs nothing), the
fraction of the memory bandwidth at which one reading of the logits would take as long, and what the host spends on a
step. Every kind of row is compared with services/engine/executors/cpu/sampler.py on the CPU, and with itself.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.graph_timing import graph_times
from benchmarks.lib.precompile import precompile
from benchmarks.lib.recorder import Clock, Recorder, carry_on_or_start_again, describe
from kernels.gpu.sampling.sample import PARAMETER_WORDS, ROW_WORDS, SamplingBuffers, SamplingConfig, sample_rows
from services.engine.executors.cpu.sampler import Sampler
from services.engine.executors.cuda.sampling.sampler import CudaSampler
from services.engine.requests.request import Request
from services.engine.requests.sampling_params import SamplingParams
from services.engine.scheduler.step_plan import Chunk

_VOCAB = 248_320
_EOS = 7
_ROWS = (1, 8, 64, 256)
_BANDWIDTH = 4.49e12
"""Bytes a second that a kernel can read on an H200."""
_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0},
    "plain t=0.8": {"temperature": 0.8},
    "logprobs": {"temperature": 1.0, "top_logprobs": 20},
    "top_p": {"temperature": 1.0, "top_p": 0.95},
    "top_k": {"temperature": 1.0, "top_k": 20},
    "top_k, top_p": {"temperature": 0.7, "top_k": 20, "top_p": 0.95},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "penalties": {"temperature": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "penalties, top_p": {"temperature": 1.0, "frequency_penalty": 0.5, "top_p": 0.9},
}
_CONFIGS = [
    SamplingConfig(block, scan_warps=scan, select_warps=other, race_warps=other)
    for block in (1024, 2048, 4096)
    for scan, other in ((2, 4), (4, 4), (8, 8), (8, 4))
]


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of the logits' distribution: flat as random weights make them, peaked as a trained model's."""

    name: str
    scale: float


_FLAT, _PEAKED = Shape("flat", 1.0), Shape("peaked", 4.0)


@dataclass(slots=True)
class Checks:
    """Counts of what was compared and what differed."""

    rows: int = 0
    wrong: list[str] = field(default_factory=list)


def make_logits(rows: int, shape: Shape, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator(device).manual_seed(rows)
    return (torch.randn(rows, _VOCAB, device=device, generator=generator) * shape.scale).to(dtype)


def make_chunks(rows: int, fields: dict[str, Any]) -> list[Chunk]:
    output = [5, 5, 900, 40_000]
    return [
        Chunk(
            Request(f"r{row}", (1, 2, 3, 77), SamplingParams(seed=row, max_tokens=99, **fields)),
            [1],
            4,
            [1],
            row + 1,
            True,
            output,
            len(output),
        )
        for row in range(rows)
    ]


def make_sampler(rows: int, device: torch.device, config: SamplingConfig | None = None) -> CudaSampler:
    return CudaSampler([_EOS], rows + 1, _VOCAB, rows, device, config=config)


def time_case(logits: Tensor, fields: dict[str, Any], config: SamplingConfig | None = None) -> float:
    """Microseconds."""
    rows = logits.shape[0]
    sampler = make_sampler(rows, logits.device, config)
    prepared = sampler.prepare(make_chunks(rows, fields))
    step = torch.from_numpy(prepared.step).to(logits.device)
    return min(graph_times([lambda: sampler.launch(logits, prepared, step)] * 10))


def check(fields: dict[str, Any], name: str, logits: Tensor, checks: Checks) -> None:
    """Against the CPU's sampler, and a second sampler of the GPU to the bit."""
    chunks = make_chunks(logits.shape[0], fields)
    words = []
    for _ in range(2):
        sampler = make_sampler(len(chunks), logits.device)
        words.append(sampler.launch(logits, sampler.prepare(chunks)).words.cpu())
    if not torch.equal(words[0], words[1]):
        checks.wrong.append(f"{name}: two runs differ")
    expected = Sampler([_EOS], torch.device("cpu")).sample(logits.float().cpu(), chunks)
    for row, (mine, theirs) in enumerate(zip(sampler.read(words[0]), expected, strict=True)):
        checks.rows += 1
        if mine.token_id != theirs.token_id or mine.error != theirs.error:
            checks.wrong.append(f"{name}, row {row}: {mine.token_id} instead of {theirs.token_id}")
        if abs(mine.sampling_logprob - theirs.sampling_logprob) > 1e-4:
            checks.wrong.append(f"{name}, row {row}: logprob {mine.sampling_logprob} not {theirs.sampling_logprob}")
        if list(mine.top_ids) != list(theirs.top_ids):
            checks.wrong.append(f"{name}, row {row}: alternatives {mine.top_ids} not {theirs.top_ids}")


def host_seconds(rows: int, fields: dict[str, Any], device: torch.device) -> dict[str, float]:
    """Time that the loop thread spends on a step with the same requests as before: prepare, launch, read."""
    logits = make_logits(rows, _FLAT, device)
    sampler = make_sampler(rows, device)
    chunks = make_chunks(rows, fields)
    spent = {"prepare": float("inf"), "launch": float("inf"), "read": float("inf")}
    for _ in range(20):
        began = time.perf_counter()
        prepared = sampler.prepare(chunks)
        ready = time.perf_counter()
        words = sampler.launch(logits, prepared).words
        launched = time.perf_counter()
        host = words.cpu()
        arrived = time.perf_counter()
        sampler.read(host)
        done = time.perf_counter()
        chunks = [c._replace(output_ids=[*c.output_ids, 0], output_count=c.output_count + 1) for c in chunks]
        for name, value in (("prepare", ready - began), ("launch", launched - ready), ("read", done - arrived)):
            spent[name] = min(spent[name], value)
    return spent


def _compile(config: SamplingConfig, dtype: torch.dtype) -> Callable[[torch.device], object]:
    """Launches every variant of the kernels on a row of padding."""

    def launch(device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        logits, words, biases = zeros(1, _VOCAB, dtype=dtype), zeros(1, _VOCAB), zeros(1, _VOCAB, dtype=torch.float32)
        buffers = SamplingBuffers.allocate(1, _VOCAB, device, config)
        table, results = zeros(2, PARAMETER_WORDS), zeros(1, ROW_WORDS)
        for edits in ((None, None), (words, None), (words, biases)):
            sample_rows(
                logits,
                zeros(3, 1),
                table,
                buffers,
                zeros(2),
                results,
                words=edits[0],
                biases=edits[1],
                nucleus=True,
                selections=1,
                filters=True,
                alternatives=True,
            )

    return launch


class Sweep:
    """Figures and comparisons, each on disk as it comes; what fails says so and ends nothing else."""

    def __init__(self, recorder: Recorder, clock: Clock) -> None:
        self._recorder, self._clock = recorder, clock
        self.checks = Checks()

    def check(self, name: str, fields: dict[str, Any], logits: Tensor) -> None:
        if self._clock.over or self._recorder.done({"check": name}):
            return
        before = len(self.checks.wrong)
        row: dict[str, Any] = {"check": name}
        try:
            check(fields, name, logits, self.checks)
            row["wrong"] = self.checks.wrong[before:]
        except Exception as error:  # one kind that does not run must not end the others
            row["failed"] = describe(error)
        self._add(row)

    def time(
        self, key: dict[str, Any], logits: Tensor, fields: dict[str, Any], config: SamplingConfig | None = None
    ) -> str:
        """Returns microseconds and the share of the bandwidth, for people."""
        if self._clock.over:
            return f"{'-':>17}"
        if not self._recorder.done(key):
            row = dict(key)
            try:
                row["us"] = round(time_case(logits, fields, config), 2)
            except Exception as error:  # as above
                row["failed"] = describe(error)
            self._add(row)
        micros = next((row["us"] for row in self._recorder.rows if "us" in row and key.items() <= row.items()), None)
        if micros is None:
            return f"{'failed':>17}"
        return f"{micros:>10.1f} ({logits.nbytes / _BANDWIDTH / micros * 1e6:>4.0%})"

    def host(self, kind: str, device: torch.device) -> None:
        if self._clock.over or self._recorder.done({"host": kind}):
            return
        row: dict[str, Any] = {"host": kind}
        try:
            row |= {name: round(s * 1e6, 1) for name, s in host_seconds(256, _KINDS[kind], device).items()}
            print(f"host, 256 rows, {kind}, us: {row}", flush=True)
        except Exception as error:  # as above
            row["failed"] = describe(error)
        self._add(row)

    def _add(self, row: dict[str, Any]) -> None:
        self._recorder.add(row)
        if "failed" in row:
            print(f"failed: {row}", flush=True)
            carry_on_or_start_again("benchmarks.tuning.sweep_sampling")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--configs", action="store_true", help="sweep block sizes and warps as well")
    parser.add_argument("--seconds", type=float, default=120.0, help="most time to spend on the device")
    parser.add_argument("--resume", action="store_true", help="leave out what --json has already")
    options = parser.parse_args()
    configs = _CONFIGS if options.configs else [SamplingConfig()]
    launches = [_compile(config, torch.float32) for config in {*configs, SamplingConfig()}]
    compiling = precompile([*launches, _compile(SamplingConfig(), torch.bfloat16)])
    device = torch.device("cuda")
    clock = Clock(options.seconds)
    sweep = Sweep(Recorder(options.json, resume=options.resume), clock)
    print(f"compiled in {compiling:.1f} s\n{'microseconds':<26}" + "".join(f"{f'R={r}':>17}" for r in _ROWS))
    batches = {(shape.name, rows): make_logits(rows, shape, device) for shape in (_FLAT, _PEAKED) for rows in _ROWS}
    # bfloat16 is what the model's head gives.
    half = {rows: make_logits(rows, _FLAT, device, torch.bfloat16) for rows in _ROWS}
    for shape in (_FLAT, _PEAKED):
        for kind, fields in _KINDS.items():
            sweep.check(f"{kind} {shape.name}", fields, batches[shape.name, 8])
            line = f"{kind + ' ' + shape.name:<26}"
            for rows in _ROWS:
                key = {"kind": kind, "logits": shape.name, "rows": rows}
                line += sweep.time(key, batches[shape.name, rows], fields)
            print(line, flush=True)
    for kind in ("plain", "top_p"):
        sweep.check(f"{kind} bfloat16", _KINDS[kind], half[8])
        line = f"{kind + ' bfloat16':<26}"
        for rows in _ROWS:
            line += sweep.time({"kind": kind, "logits": "bfloat16", "rows": rows}, half[rows], _KINDS[kind])
        print(line, flush=True)
    for config in configs if options.configs else ():
        line = f"{config!s:<90}"
        for rows in (1, 64):
            for kind in ("plain", "top_p", "top_k"):
                key = {"config": str(config), "kind": kind, "rows": rows}
                line += sweep.time(key, batches["flat", rows], _KINDS[kind], config)
        print(line, flush=True)
    for kind in ("plain", "top_k, top_p", "penalties"):
        sweep.host(kind, device)
    if clock.over:
        print("out of time")
    print(f"{sweep.checks.rows} rows checked, {len(sweep.checks.wrong)} wrong", *sweep.checks.wrong, sep="\n")
    if sweep.checks.wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
