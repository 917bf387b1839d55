"""Serving and training within a part of a card: `python -m benchmarks.training.memory_limit`.

An engine as a pod builds it, held to so many bytes of the GPU (TEMPER_DEVICE_MEMORY): a plan that promises more than it
keeps runs out of memory here. It serves requests at once, alone and while its trainer takes the steps of an SFT job of
the pod's own. Random weights of the model's shape. One JSON line a limit:

- plan: GiB by purpose; sequences, context (tokens that the pages hold), token_budget
- decode_tok_s: generated tokens a second of all requests, from first submission to last token; beside_tok_s: with the
  job
- job: steps taken, tokens a second, documents x tokens of a microbatch; refused: what the pod says of such a job
- torch_gb, driver_gb: the most that torch's allocator held, and what the card is short of in all, 10⁹ bytes
- failed: what went wrong, if anything did

A limit is BYTES[/QUANTIZATION][/FIELD=VALUE...]; each runs in a process of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from benchmarks.lib.cases import Case
from benchmarks.lib.environment import environment
from benchmarks.lib.random_checkpoint import config_of, without_weights
from benchmarks.lib.recorder import put_line

if TYPE_CHECKING:
    from benchmarks.lib.in_process import InProcessEngine
    from services.engine.settings import EngineSettings

_GIB = 2**30
_STEPS = 200


def measure(limit: str, options: argparse.Namespace) -> dict[str, Any]:
    """All of one limit, in the fields above."""
    from services.pod.preflight import use_kernel_cache

    size, *rest = limit.split("/")
    given = {name or "quantization": value for name, _, value in (part.rpartition("=") for part in rest)}
    directory = without_weights(options.scratch / f"{options.model}-config", config_of(options.model))
    # Imported after Triton's cache is chosen.
    from benchmarks.lib.in_process import InProcessEngine, only_warnings, settings_for
    from benchmarks.serving.random_engine import made_on_the_device
    from services.engine.kv_cache.memory_plan import MemoryPlan
    from services.pod.memory import plan as make_plan

    settings = settings_for(directory, "cuda", device_memory=size, **({"tiers": ""} | given))
    use_kernel_cache(settings)
    plans: list[tuple[EngineSettings, MemoryPlan]] = []

    def noted(*args: Any) -> tuple[EngineSettings, MemoryPlan]:
        plans.append(make_plan(*args))
        return plans[-1]

    free, _ = torch.cuda.mem_get_info()
    with made_on_the_device(), patch("services.pod.engine.plan", noted):
        engine = InProcessEngine(settings, trainer=True)
    only_warnings()
    (chosen, plan) = plans[0]
    found: dict[str, Any] = {
        "limit": limit,
        "case": str(options.case),
        "plan": {name: round(size / _GIB, 2) for name, size in plan.parts().items() if size},
        "sequences": chosen.max_num_seqs,
        "context": plan.capacity_tokens,
        "token_budget": chosen.token_budget,
    }
    try:
        found["decode_tok_s"] = _serve(engine, options.case)
        found |= _beside(engine, chosen, options)
    except Exception as error:  # whatever goes wrong is the result
        found["failed"] = f"{type(error).__name__}: {error}"[:500]
    found["torch_gb"] = round(torch.cuda.max_memory_reserved() / 1e9, 2)
    found["driver_gb"] = round((free - torch.cuda.mem_get_info()[0]) / 1e9, 2)
    engine.stop()
    return found


def _serve(engine: InProcessEngine, case: Case) -> float:
    run = engine.generate(engine.prompts(case.requests, case.prompt_tokens), case.new_tokens)
    return round(case.requests * case.new_tokens / run.seconds, 1)


def _beside(engine: InProcessEngine, settings: EngineSettings, options: argparse.Namespace) -> dict[str, Any]:
    """A job of microbatches of options.job, beside the same requests."""
    from benchmarks.training.methods import RandomText, job
    from services.common.errors import DoesNotFit
    from services.pod.training.thread import pod_host
    from services.trainer.jobs import prepare_run
    from services.trainer.settings import TrainerSettings

    documents, tokens = options.job.documents, options.job.tokens
    host = pod_host(settings, TrainerSettings(), engine.engine)
    texts = RandomText(host.codec)
    example = {"prompt": texts.text(tokens // 4), "completion": texts.text(tokens - tokens // 4)}
    spec = job(
        "sft",
        examples=[example] * (documents * _STEPS),
        batch_size=documents,
        epochs=1,
        prompt_format="raw",
        max_tokens_per_microbatch=documents * (tokens + 8),
        recompute=options.recompute,
    )
    try:
        run = prepare_run(spec, host, None)
    except DoesNotFit as refusal:
        return {"refused": refusal.message}
    stop, ends, errors = threading.Event(), [], list[Exception]()

    def train() -> None:
        try:
            for index in range(run.total_steps):
                if stop.is_set():
                    return
                run.step(index)
                ends.append(time.perf_counter())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    while not ends and not errors:  # the first step captures and compiles
        time.sleep(0.05)
    served = _serve(engine, options.case)
    stop.set()
    thread.join()
    if errors:
        raise errors[0]
    steps = len(ends) - 1
    rate = steps * documents * tokens / (ends[-1] - ends[0]) if steps else 0.0
    return {"beside_tok_s": served, "job": {"of": str(options.job), "steps": len(ends), "tok_s": round(rate)}}


def main() -> None:
    from benchmarks.training.steps import Case as JobCase

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3.5-4b", help="a shape")
    parser.add_argument("--limits", default="22GB/max_num_seqs=64,14GB/int4")
    parser.add_argument("--case", type=Case.parse, default=Case.parse("64x512x256"))
    parser.add_argument(
        "--job", type=JobCase.parse, default=JobCase(1, 1024), help="documents x tokens of a microbatch"
    )
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="full", help="of the job")
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/temper-bench"))
    parser.add_argument("--out", type=Path, help="append each line to this file")
    options = parser.parse_args()
    limits = options.limits.split(",")
    if len(limits) == 1:
        put_line(measure(limits[0], options) | environment(), options.out)
        return
    for limit in limits:
        subprocess.run(
            [sys.executable, "-m", "benchmarks.training.memory_limit", *sys.argv[1:], "--limits", limit], check=False
        )


if __name__ == "__main__":
    main()
