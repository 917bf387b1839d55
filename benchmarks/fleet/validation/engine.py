"""A real engine for the comparison: the tiny model on a CPU over gRPC, which tells its steps when asked.

`python -m benchmarks.fleet.validation.engine STEP_MS DECODE_MS TOKEN_MS` waits after each step until it has taken as
long as on a slower device: four engines then share two cores without waiting for each other. Zeros: no wait.
Prints a line of its configuration, one with its port, and for each line that it reads one of the steps since the last.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.gateway.http.engine_server import serve
from benchmarks.lib.in_process import InProcessEngine, only_warnings, settings_for
from services.engine.observability.events import EngineEvent, EventStream, StepDone

_MODEL = Path(__file__).resolve().parents[3] / "models" / "tiny"
_PAUSE = 0.02
"""Longest time between two steps that counts to the second: longer, the engine had nothing to do."""


class Steps:
    """Lets steps take as long as they do on the device, and notes decodes, prompt tokens and seconds of each.

    Args:
        step, decode, token: seconds of the device for any step, and for each decode and each prompt token in it.
    """

    def __init__(self, step: float, decode: float, token: float) -> None:
        self.noted: list[tuple[int, int, float]] = []
        self._device = step, decode, token
        self._ended = float("-inf")

    def note(self, event: EngineEvent) -> None:
        """Called by the loop's thread before it publishes a step's tokens."""
        if not isinstance(event, StepDone):
            return
        computed = time.perf_counter()
        # What the loop did since the step before is part of this one's time.
        follows = computed - self._ended < event.compute_seconds + _PAUSE
        began = self._ended if follows else computed - event.compute_seconds
        step, decode, token = self._device
        time.sleep(max(0.0, began + step + decode * event.decodes + token * event.prefill_tokens - computed))
        self._ended = time.perf_counter()
        self.noted.append((event.decodes, event.prefill_tokens, self._ended - began))

    def tell(self) -> None:
        """Answers each line that is read."""
        for _ in sys.stdin:
            noted, self.noted = self.noted, []
            _print(noted)


def _print(told: object) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serves until the process is ended."""
    only_warnings()
    step, decode, token = (float(argument) / 1e3 for argument in sys.argv[1:])
    steps = Steps(step, decode, token)
    settings = settings_for(_MODEL, "cpu", torch_threads=1)
    engine = InProcessEngine(settings, events=EventStream(steps.note), prefix_cache=True)
    config = asdict(engine.engine.loop.config)
    config["eos_token_ids"] = sorted(config["eos_token_ids"])
    _print({"config": config, "depth": engine.pipeline._runner.depth, "vocab_size": engine.vocab_size})
    threading.Thread(target=steps.tell, daemon=True).start()
    try:
        asyncio.run(serve(engine))
    finally:
        engine.stop()


if __name__ == "__main__":
    main()
