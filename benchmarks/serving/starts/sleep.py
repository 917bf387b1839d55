"""Sleep and wake of an engine in this process: `python -m benchmarks.serving.starts.sleep --model qwen3.5-4b --random
--scratch DIRECTORY`. One JSON line a level and turn.

Seconds of giving memory back (behind the drain) and, of waking, of taking it again, of wiring the engine anew, and from
then to the first token. The greedy answers before and behind are compared. ``free`` is what the driver says of the
device, in GB, before, during and behind the sleep: the rest of it is CUDA's context, kernels, graphs and workspaces.
"""

from __future__ import annotations

import argparse
import gc
import threading
import time
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch

from benchmarks.lib.environment import environment
from benchmarks.lib.random_checkpoint import add_model, check_model, config_of, without_weights
from benchmarks.lib.recorder import put_line
from services.common.shutdown import SleepLevel

if TYPE_CHECKING:
    from benchmarks.lib.in_process import InProcessEngine
    from services.engine.requests.outputs import SequenceUpdate

_REQUESTS, _PROMPT, _TOKENS = 8, 512, 32


def answers(engine: InProcessEngine, seed: int) -> tuple[float, dict[str, list[int]]]:
    """Seconds to the first token, and the greedy tokens of each request; prompts of a seed that were not asked before
    are computed, and not found in the cache."""
    from benchmarks.lib.in_process import submit_together
    from services.engine.requests.adapter import AdapterChoice
    from services.engine.requests.sampling_params import SamplingParams
    from services.engine.requests.submission import Submission

    found: dict[str, list[int]] = {f"r{number}": [] for number in range(_REQUESTS)}
    left, done, first = len(found), threading.Event(), 0.0

    def sink(updates: list[SequenceUpdate]) -> None:
        nonlocal left, first
        first = first or time.perf_counter()
        for update in updates:
            if update.token is not None:
                found[update.request_id].append(update.token.token_id)
            left -= update.finish_reason is not None
        if not left:
            done.set()

    sampling = SamplingParams(temperature=0.0, max_tokens=_TOKENS, ignore_eos=True)
    prompts = torch.randint(0, engine.vocab_size, (_REQUESTS, _PROMPT), generator=torch.Generator().manual_seed(seed))
    began = time.perf_counter()
    submit_together(
        engine.engine.loop,
        [
            Submission(name, tuple(prompt), sampling, AdapterChoice())
            for name, prompt in zip(found, prompts.tolist(), strict=True)
        ],
        sink,
    )
    done.wait()
    return first - began, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--levels", nargs="+", choices=get_args(SleepLevel)[:-1], default=["cache", "weights"])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--quant", choices=("none", "fp8", "int4"), default="none")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--out", type=Path, help="append each line to this file")
    options = parser.parse_args()
    check_model(parser, options)
    # Imported after Triton's cache is chosen.
    from services.pod.preflight import use_kernel_cache

    directory = Path(options.model)
    if options.random:
        directory = without_weights(options.scratch / f"{options.model}-config", config_of(options.model))
    from benchmarks.lib.in_process import InProcessEngine, only_warnings, settings_for
    from benchmarks.serving.random_engine import made_on_the_device

    settings = settings_for(directory, options.device, quantization=options.quant)
    use_kernel_cache(settings)
    with made_on_the_device() if options.random else nullcontext():
        engine = InProcessEngine(settings, prefix_cache=True)
    only_warnings()
    loaded = engine.engine.loaded
    answers(engine, 0)  # what is compiled at first use
    _, expected = answers(engine, 1)
    for level in options.levels * options.turns:
        free = [_free()]
        engine.stop()
        del engine
        gc.unfreeze()
        gc.collect()
        times = [time.perf_counter()]
        loaded.sleeping.give_back(level)
        free.append(_free())
        times.append(time.perf_counter())
        loaded.sleeping.take_back()
        times.append(time.perf_counter())
        engine = InProcessEngine(settings, prefix_cache=True, loaded=loaded)
        times.append(time.perf_counter())
        first, found = answers(engine, 1)
        free.append(_free())
        give, take, wire = (round(after - before, 3) for before, after in pairwise(times))
        line = {
            "model": options.model,
            "quant": options.quant,
            "level": level,
            "give_back_s": give,
            "take_back_s": take,
            "wire_s": wire,
            "first_token_s": round(first, 3),
            "awake_s": round(take + wire + first, 3),
            "free_gb": free,
            "same_answers": found == expected,
        }
        put_line({**line, **environment()}, options.out)
    engine.stop()


def _free() -> float:
    """Free memory of the device; 0 on a CPU."""
    return round(torch.cuda.mem_get_info()[0] / 1e9, 2) if torch.cuda.is_available() else 0.0


if __name__ == "__main__":
    main()
