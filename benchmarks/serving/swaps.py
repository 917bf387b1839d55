"""Time between tokens while adapters are loaded, beside the same work without."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.lib.cases import Case
    from benchmarks.lib.in_process import InProcessEngine

_NAME = "bench-live"
_SYNC_SECONDS = 60.0
_MOST_WAVES = 8
"""Most waves without swaps: enough for a p99."""


def measure_swaps(engine: InProcessEngine, case: Case, swaps: int, *, seconds: float = float("inf")) -> dict[str, Any]:
    """Keeps the case's requests decoding while ``swaps`` versions of one adapter are loaded one after the other, then
    decodes again without, as long or as long as the figures need.

    Args:
        seconds: for all of it, at most: then fewer versions are loaded.

    Returns:
        Milliseconds between tokens with and without swaps, their p99 ratio, and how long a swap took.
    """
    from benchmarks.lib.cases import milliseconds

    took: list[float] = []
    captures = engine.captures

    end = time.perf_counter() + 0.7 * seconds

    def swap() -> None:
        while len(took) < swaps and time.perf_counter() < end:
            began = time.perf_counter()
            engine.engine.adapters.sync(engine.registry.bump(_NAME), _SYNC_SECONDS)
            took.append(time.perf_counter() - began)

    swapping = threading.Thread(target=swap, name="swaps", daemon=True)
    with_swaps: list[float] = []
    waves = 0
    swapping.start()
    while swapping.is_alive():
        run = engine.generate(engine.prompts(case.requests, case.prompt_tokens), case.new_tokens)
        with_swaps += run.latencies()[1]
        waves += 1
    if len(took) < swaps and time.perf_counter() < end:
        raise RuntimeError(f"swap {len(took) + 1} of {swaps} failed; the log above has the reason")
    without: list[float] = []
    for _ in range(min(waves, _MOST_WAVES)):
        run = engine.generate(engine.prompts(case.requests, case.prompt_tokens), case.new_tokens)
        without += run.latencies()[1]
    loaded, quiet = milliseconds(with_swaps), milliseconds(without)
    return {
        "swaps": len(took),
        "waves": waves,
        "itl_ms_with": loaded,
        "itl_ms_without": quiet,
        "p99_ratio": round(loaded["p99"] / quiet["p99"], 3),
        "swap_ms": milliseconds(took),
        "recaptured_graphs": engine.captures - captures,
    }
