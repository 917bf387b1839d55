"""Speed of the forge, and of the models that it makes: `python -m benchmarks.quality.forge_speed --shape qwen3.5-4b`.

Importance by activations, prune and compact of a checkpoint of the shape with random weights: seconds by step, and the
memory that importance took beside its plan. Two checkpoints come of it, one without a quarter of the layers and one
without a quarter of the MLP channels. Then engines of the three decode, each in a process of its own. One JSON line a
step; `--shape tiny --device cpu` only to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.cases import Case
from benchmarks.lib.environment import environment
from benchmarks.lib.random_checkpoint import SHAPES, TINY, checkpoint
from benchmarks.lib.recorder import put_line
from services.common.jobs.kinds.forge import ForgeImportance
from services.common.text.tokenizer import TextCodec
from services.engine.models.registry import read_config
from services.forge.importance.settings import Settings
from services.forge.pipeline.needs import importance_bytes
from services.forge.steps import compact_step, importance_step, prune_step
from services.forge.units import Kind

CUTS: dict[str, dict[Kind, str]] = {"layers": {"layers": "25%"}, "mlp": {"mlp_channels": "25%"}}
_WORDS = "the quick brown fox jumps over a lazy dog and 42 other animals while it rains. "


def calibration(file: Path, directory: Path, tokens: int, document_tokens: int) -> None:
    """Writes texts that together have as many tokens."""
    each = len(TextCodec.from_directory(directory).encode(_WORDS))
    text = json.dumps({"text": _WORDS * max(1, document_tokens // each)})
    documents = -(-tokens // (max(1, document_tokens // each) * each))
    file.write_text(f"{text}\n" * documents)


class Steps:
    """Seconds of steps, one JSON line each."""

    def __init__(self, common: dict[str, Any], out: Path | None) -> None:
        self._common, self._out = common, out

    @contextmanager
    def timed(self, step: str, **facts: Any) -> Iterator[dict[str, Any]]:
        """Tells how long the block took, with what it puts into the dict."""
        found: dict[str, Any] = {}
        began = time.perf_counter()
        yield found
        found["seconds"] = round(time.perf_counter() - began, 3)
        self.put(step, **facts, **found)

    def put(self, step: str, **facts: Any) -> None:
        put_line({"step": step, **facts, **self._common}, self._out)


def forged(base: Path, options: argparse.Namespace, steps: Steps) -> dict[str, Path]:
    """Makes the smaller checkpoints. Returns directories by name, the base's too."""
    work: Path = options.scratch / f"forged-{options.shape}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    data, scores, device = work / "data.jsonl", work / "scores.json", options.device
    calibration(data, base, options.tokens, options.document_tokens)
    settings = ForgeImportance(tokens_per_forward=options.tokens_per_forward)
    total = 0.0
    with steps.timed("importance") as told:
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        made = importance_step(
            base,
            scores,
            Settings(method="activations", tokens_per_forward=settings.tokens_per_forward),
            data=data,
            device=device,
        )
        told["tokens"] = made["data"]["tokens"]
        told["tokens_per_forward"] = settings.tokens_per_forward
        told["plan_bytes"] = importance_bytes(read_config(base), settings, device)
        told["peak_bytes"] = torch.cuda.max_memory_allocated() if device == "cuda" else None
    total += told["seconds"]
    if device == "cuda":
        torch.cuda.empty_cache()  # engines in other processes count what is free
    found = {"base": base}
    for name, levels in CUTS.items():
        with steps.timed("prune", cut=name) as pruned:
            prune_step(base, scores, work / f"{name}.json", levels)
        with steps.timed("compact", cut=name) as smaller:
            smaller["plan"] = compact_step(base, work / f"{name}.json", work / name)["plan"]
        steps.put("all", cut=name, seconds=round(total + pruned["seconds"] + smaller["seconds"], 3))
        found[name] = work / name
    return found


def decode(directory: str, device: str, cases: list[Case], results: Any) -> None:
    """Puts the figures of each case. Runs in a process of its own."""
    from benchmarks.lib.in_process import InProcessEngine, only_warnings, settings_for
    from services.pod.preflight import use_kernel_cache

    only_warnings()
    most = max(case.requests for case in cases) if device == "cpu" else 0
    settings = settings_for(Path(directory), device, max_num_seqs=most)
    use_kernel_cache(settings)
    from benchmarks.serving.rates import measure  # after Triton's cache is chosen

    engine = InProcessEngine(settings)
    try:
        results.put([measure(engine, case) for case in cases])
    finally:
        engine.stop()


def decoded(directories: dict[str, Path], options: argparse.Namespace, steps: Steps) -> None:
    """Measures engines of all, and how much faster than the base each is."""
    context = multiprocessing.get_context("spawn")
    base: list[dict[str, Any]] = []
    for name, directory in directories.items():
        results = context.Queue()
        process = context.Process(target=decode, args=(str(directory), options.device, options.cases, results))
        process.start()
        while process.is_alive() and results.empty():
            process.join(0.2)
        if results.empty():
            steps.put("decode", model=name, failed=f"its process ended with {process.exitcode}")
            continue
        figures = results.get()
        process.join()
        base = base or figures
        for before, after in zip(base, figures, strict=True):
            steps.put("decode", model=name, of_base=round(after["decode_tok_s"] / before["decode_tok_s"], 4), **after)


def main() -> None:
    """Measures all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("tiny", *SHAPES), default="qwen3.5-4b")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/temper-bench"), help="for checkpoints")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of calibration data")
    parser.add_argument("--document-tokens", type=int, default=2048)
    parser.add_argument("--tokens-per-forward", type=int, default=4096)
    parser.add_argument(
        "--cases", type=lambda text: [Case.parse(part) for part in text.split(",")], default="1x512x128,64x512x256"
    )
    parser.add_argument("--out", type=Path, help="file that lines are appended to")
    options = parser.parse_args()
    steps = Steps({"shape": options.shape, **environment()}, options.out)
    base = TINY if options.shape == "tiny" else checkpoint(options.shape, options.scratch)
    decoded(forged(base, options, steps), options, steps)


if __name__ == "__main__":
    main()
