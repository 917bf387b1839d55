"""Training while serving: `python -m benchmarks.training.beside --model qwen3.5-4b --streams 0,8,64`.

An engine as a pod builds it decodes for so many streams, alone and while a trainer thread takes optimizer steps on the
same weights through the engine's compute gate. One JSON line a number of streams:

- itl_alone, itl_training: milliseconds between two tokens of a stream, p50 and p99, without and with training
- tokens_per_second, share: trained tokens a second beside the streams, and of those with nobody else there
- decode_share: tokens a second of the streams with training, of those without

Random weights, 512 prompt tokens, temperature 1, prefix cache off; SFT steps of --case on rank 16, as in
benchmarks.training.steps.
"""

from __future__ import annotations

import argparse
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch

from benchmarks.lib.cases import milliseconds
from benchmarks.lib.environment import environment
from benchmarks.lib.random_checkpoint import checkpoint
from benchmarks.lib.recorder import put_line
from benchmarks.training.steps import Case, Parts, Trainer
from services.engine.models.interface import Recompute

if TYPE_CHECKING:
    from benchmarks.lib.in_process import InProcessEngine

_PROMPT = 512


class Background:
    """Takes optimizer steps in a thread of its own until stopped.

    Args:
        trainer: on the engine's gate.
    """

    def __init__(self, trainer: Trainer, case: Case, recompute: Recompute) -> None:
        self._trainer, self._case, self._recompute = trainer, case, recompute
        self._tokens = torch.randint(trainer.config.vocab_size, (case.total,), device=trainer.model.device)
        self._stop = threading.Event()
        self._error: Exception | None = None
        self.ends: list[float] = []
        """perf_counter() seconds at the end of each step."""
        self._thread = threading.Thread(target=self._run, name="trainer")

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._trainer.step(self._tokens, self._case, self._recompute, Parts())
                self.ends.append(time.perf_counter())
        except Exception as error:  # raised again by stop()
            self._error = error

    def __enter__(self) -> Background:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def rate(self) -> float:
        """Trained tokens a second between the first and the last end of a step."""
        if len(self.ends) < 2:
            return 0.0
        return self._case.total * (len(self.ends) - 1) / (self.ends[-1] - self.ends[0])


def decode(engine: InProcessEngine, streams: int, seconds: float) -> tuple[dict[str, float], float]:
    """Milliseconds between tokens, and tokens a second, of steady decodes of so many streams."""
    window: list[float] = []

    def wait() -> None:
        time.sleep(0.3)
        window.append(time.perf_counter())
        time.sleep(seconds)
        window.append(time.perf_counter())

    run = engine.generate(engine.prompts(streams, _PROMPT), 100_000, decoding=wait)
    begin, end = window
    last: dict[str, float] = {}
    between: list[float] = []
    count = 0
    for now, updates in run.steps:
        for update in updates:
            if update.token is None:
                continue
            if begin < now < end:
                count += 1
                if update.request_id in last:
                    between.append(now - last[update.request_id])
            last[update.request_id] = now
    return milliseconds(between), count / (end - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3.5-4b", help="a shape (random weights) or a directory")
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/temper-bench"), help="for random checkpoints")
    parser.add_argument("--streams", default="0,8,64")
    parser.add_argument("--case", type=Case.parse, default=Case(1, 2048))
    parser.add_argument("--recompute", choices=get_args(Recompute), default="none")
    parser.add_argument("--goal-ms", default="6", help="TEMPER_TPOT_SLO_MS, one or several")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--out", type=Path, help="append each line to this file")
    options = parser.parse_args()
    from services.pod.preflight import use_kernel_cache

    directory = checkpoint(options.model, options.scratch)
    # Imported after Triton's cache is chosen.
    from benchmarks.lib.in_process import InProcessEngine, only_warnings, settings_for

    settings = settings_for(directory, "cuda", train_memory_bytes=30 * 2**30)
    use_kernel_cache(settings)
    engine = InProcessEngine(settings)
    only_warnings()
    try:
        gate = engine.engine.gate
        trainer = Trainer(engine.engine.model, 16, gate)
        warm = torch.randint(trainer.config.vocab_size, (options.case.total,), device=trainer.model.device)
        trainer.step(warm, options.case, options.recompute, Parts())
        with Background(trainer, options.case, options.recompute) as alone:
            time.sleep(options.seconds)
        standalone = alone.rate()
        facts = {"case": f"{options.case.documents}x{options.case.tokens}", "recompute": options.recompute}
        for streams in (int(text) for text in options.streams.split(",")):
            row: dict[str, Any] = {"streams": streams, "standalone": round(standalone)} | facts
            if streams == 0:
                put_line(row | environment(), options.out)
                continue
            decode(engine, streams, 0.3)
            row["itl_alone"], before = decode(engine, streams, options.seconds)
            for goal in (float(text) for text in options.goal_ms.split(",")):
                gate.tpot_goal_seconds = goal / 1e3
                with Background(trainer, options.case, options.recompute) as beside:
                    row["itl_training"], after = decode(engine, streams, options.seconds)
                row |= {
                    "goal_ms": goal,
                    "tokens_per_second": round(beside.rate()),
                    "share": round(beside.rate() / standalone, 3),
                    "decode_share": round(after / before, 3),
                }
                put_line(row | environment(), options.out)
    finally:
        engine.stop()


if __name__ == "__main__":
    main()
