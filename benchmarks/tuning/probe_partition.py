"""Decode and training at once, each on a part of a GPU: `python -m benchmarks.tuning.probe_partition --sms 0,32,48,64`.

Between steps and pieces that take turns (`benchmarks.training.beside`) and streams that compete for everything lies a
device in two parts: green contexts (CUDA driver API, "Green Contexts"), each with multiprocessors of its own and the
memory's bandwidth in common. A step of --rows streams decodes behind 640 tokens, over and over from a captured graph
with two in flight; beside it a thread takes SFT steps of 1x2048, rank 16, captured in the other part. Weights are held
twice. One JSON line a division, written to --out as it comes:

- decode_sms, training_sms: multiprocessors of each; 0 in --sms: streams of two priorities on all of them
- confine: both; or training: decode may use the whole device
- decode_alone, decode: milliseconds between the ends of steps, p50 and p99, without and with training
- train_alone, train: tokens a second, without and with decode
- p99_times, share: p99 with training over that of decode alone on all; train over that of training alone on all. A line
  with 0 comes first, for these.
"""

from __future__ import annotations

import argparse
import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.cases import milliseconds
from benchmarks.lib.environment import environment
from benchmarks.lib.random_checkpoint import config_of
from benchmarks.lib.recorder import put_line
from benchmarks.training.steps import Case, Parts, Trainer, random_model
from benchmarks.tuning.step.decode_step import DecodeStep
from services.engine.models.cuda_graphs import capturing, no_collection
from services.engine.models.qwen3_5.config import Qwen3_5Config
from services.engine.models.training_arena import GraphMemory
from services.engine.models.training_forward import TrainableForward

_SHAPE = "qwen3.5-4b"
_CONTEXT = 640
_CASE = Case(1, 2048)
_SM_RESOURCE = 1
"""CU_DEV_RESOURCE_TYPE_SM."""
_NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING, which streams of green contexts must be; CU_GREEN_CTX_DEFAULT_STREAM has the same value."""


class _Resource(ctypes.Structure):
    """CUdevResource: a type, padding, and for multiprocessors their number. Longer than any driver's."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("_", ctypes.c_ubyte * 92),
        ("sms", ctypes.c_uint),
        ("__", ctypes.c_ubyte * 412),
    )


@dataclass(frozen=True, slots=True)
class Part:
    """A stream, and how many multiprocessors what is captured on it may use."""

    sms: int
    stream: torch.cuda.Stream


class Driver:
    """The calls of libcuda that torch has no binding for: its own green contexts all begin at the first multiprocessor,
    so two of them overlap."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._cuda, name)(*arguments):
            raise RuntimeError(f"{name} returned {code}")

    def divide(self, sms: int) -> tuple[Part, Part]:
        """Parts of the GPU: at least ``sms`` multiprocessors with a stream of high priority, and the others."""
        whole, part, rest, groups = _Resource(), _Resource(), _Resource(), ctypes.c_uint(1)
        self._call("cuDeviceGetDevResource", 0, ctypes.byref(whole), _SM_RESOURCE)
        self._call(
            "cuDevSmResourceSplitByCount",
            *(ctypes.byref(part), ctypes.byref(groups), ctypes.byref(whole), ctypes.byref(rest), 0, sms),
        )
        return self._part(part, -1), self._part(rest, 0)

    def _part(self, resource: _Resource, priority: int) -> Part:
        description, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuDevResourceGenerateDesc", ctypes.byref(description), ctypes.byref(resource), 1)
        self._call("cuGreenCtxCreate", ctypes.byref(context), description, 0, _NON_BLOCKING)
        self._call("cuGreenCtxStreamCreate", ctypes.byref(stream), context, _NON_BLOCKING, priority)
        return Part(resource.sms, torch.cuda.ExternalStream(stream.value))  # type: ignore[no-untyped-call]


class Decode:
    """Captured on a part of the device."""

    def __init__(self, step: DecodeStep, rows: int, part: Part) -> None:
        self._stream = stream = part.stream
        stream.wait_stream(torch.cuda.current_stream())
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            for _ in range(2):
                step.launch(rows)
            stream.synchronize()
            with no_collection(), capturing(self._graph, torch.cuda.graph_pool_handle()):
                step.launch(rows)
        torch.cuda.synchronize()

    def run(self, over: Callable[[], bool]) -> dict[str, float]:
        """Milliseconds between the ends of steps."""
        ends: list[torch.cuda.Event] = []
        with torch.cuda.stream(self._stream):
            while not over():
                self._graph.replay()
                ends.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
                ends[-1].record(self._stream)
                if len(ends) > 2:
                    ends[-3].synchronize()
        self._stream.synchronize()
        return milliseconds([a.elapsed_time(b) / 1e3 for a, b in pairwise(ends[20:])])


class Training:
    """Captured on a part of the device."""

    def __init__(self, trainer: Trainer, tokens: torch.Tensor, part: Part) -> None:
        self._trainer, self._tokens, self._stream = trainer, tokens, part.stream
        trainer.forwards.clear()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        with torch.cuda.stream(self._stream):
            memory = GraphMemory(self._stream)
            trainer.forwards["none"] = TrainableForward(trainer.model, trainer.lora, "none", memory)
            for _ in range(2):
                self._step()
        torch.cuda.synchronize()

    def _step(self) -> None:
        self._trainer.step(self._tokens, _CASE, "none", Parts())

    def run(self, over: Callable[[], bool]) -> float:
        """Tokens a second."""
        ends: list[float] = []
        with torch.cuda.stream(self._stream):
            while not over():
                self._step()
                ends.append(time.perf_counter())
        return _CASE.total * (len(ends) - 2) / (ends[-1] - ends[1])


def after(seconds: float) -> Callable[[], bool]:
    """Function that tells whether so much time has passed since this call."""
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() > end


def measure(decode: Decode, training: Training, seconds: float) -> dict[str, Any]:
    """Each alone, then both."""
    row: dict[str, Any] = {
        "decode_alone": decode.run(after(seconds / 2)),
        "train_alone": round(training.run(after(seconds / 2))),
    }
    over = after(seconds)

    def train() -> None:
        row["train"] = round(training.run(over))

    thread = threading.Thread(target=train)
    thread.start()
    time.sleep(0.2)
    row["decode"] = decode.run(over)
    thread.join()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sms", default="0,32,48,64", help="multiprocessors for decode; 0 first")
    parser.add_argument("--confine", choices=("both", "training"), default="both")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=2.5, help="of each measurement of both")
    parser.add_argument("--out", type=Path, help="append each line to this file")
    options = parser.parse_args()
    divisions = [int(text) for text in options.sms.split(",")]
    if divisions[0] != 0:
        parser.error("--sms begins with 0: shares are of the undivided device")
    device = torch.device("cuda")
    trainer = Trainer(random_model(_SHAPE, "none"), 16)
    config = Qwen3_5Config.from_dict(config_of(_SHAPE))
    step = DecodeStep(config, device, rows=options.rows, context=_CONTEXT)
    step.refresh()
    tokens = torch.randint(config.vocab_size, (_CASE.total,), device=device)
    every = torch.cuda.get_device_properties(device).multi_processor_count
    driver, facts = Driver(), environment()
    whole: dict[str, Any] = {}
    for sms in divisions:
        # A confined trainer takes turns with nobody; a decode that is not confined goes before it where they meet.
        first = Part(every, torch.cuda.Stream(device, priority=-1))  # type: ignore[no-untyped-call]
        second = Part(every, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        if sms:
            confined, second = driver.divide(sms)
            first = confined if options.confine == "both" else first
        row = measure(Decode(step, options.rows, first), Training(trainer, tokens, second), options.seconds)
        whole = whole or row
        row |= {
            "decode_sms": first.sms,
            "training_sms": second.sms,
            "confine": options.confine if sms else None,
            "p99_times": round(row["decode"]["p99"] / whole["decode_alone"]["p99"], 2),
            "share": round(row["train"] / whole["train_alone"], 3),
        }
        put_line(row | facts, options.out)


if __name__ == "__main__":
    main()
