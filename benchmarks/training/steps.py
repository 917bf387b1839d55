"""Steps of training an adapter on a GPU: `python -m benchmarks.training.steps --cases 1x512,4x2048 --recompute
none,full`.

A case is documents x tokens each: one optimizer step of SFT on all of them, packed, with a loss on every token that has
a next one, rank 16 on all linear layers, AdamW. Random weights of the shape: speed does not depend on them. One JSON
line a case, written to --out as it comes:

- step_seconds: median wall time of a step, from the packed tokens to the applied update, the device waited for
- tokens_per_second: documents · tokens / step_seconds
- peak_gb: the most that the process held of the device, 10⁹ bytes: weights, what captured graphs keep, unused rests
- mfu: 4 · (weights a token passes through) · tokens, plus the attention's products, per second, over 989 TFLOP/s: what
  a forward and the backward in the activations need at least; what is computed again does not count
- parts: milliseconds of forward, head, backward and optimizer, on the device

What a step of each method spends its time on, rollouts and teachers included, is in benchmarks.training.methods;
training while the engine serves in benchmarks.training.beside.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.lib.environment import environment
from benchmarks.lib.random_checkpoint import SHAPES, config_of, family_config
from benchmarks.lib.random_model import RandomWeights
from benchmarks.lib.recorder import put_line
from services.common.jobs import LoraSettings, OptimizerSettings
from services.engine.models.config import ModelConfig
from services.engine.models.footprint import Quantization
from services.engine.models.interface import CausalLM, Recompute
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.models.qwen3_5.moe_config import Qwen3_5MoeConfig
from services.engine.models.training_arena import GraphMemory
from services.engine.models.training_forward import TrainableForward
from services.trainer.host.policy_host import ComputeGate
from services.trainer.losses import negative_log_likelihood
from services.trainer.optimizer import ScheduledOptimizer

_PEAK_FLOPS = 989e12
"""Peak rate of an H100 or H200 in bfloat16, dense, from NVIDIA's data sheet."""


@dataclass(frozen=True, slots=True)
class Case:
    """Documents of equal length in one microbatch."""

    documents: int
    tokens: int

    @classmethod
    def parse(cls, text: str) -> Case:
        """Case of the text "4x2048".

        Raises:
            ValueError: it is not two numbers, or a document has no token to predict.
        """
        numbers = [int(part) for part in text.split("x")]
        if len(numbers) != 2 or numbers[0] < 1 or numbers[1] < 2:
            raise ValueError(f"a case is DOCUMENTSxTOKENS with at least 2 tokens, got {text!r}")
        return cls(*numbers)

    @property
    def total(self) -> int:
        return self.documents * self.tokens


def model_flops(config: ModelConfig, case: Case) -> float:
    """Floating-point operations of a forward and of the backward in the activations, without what is computed again."""
    linear = sum(out * into for layer in range(config.num_layers) for out, into in config.linear_shapes(layer).values())
    if isinstance(config, Qwen3_5MoeConfig):
        passed = sum(out * into for _, out, into in config.expert_shapes(0).values()) * config.experts_per_token
        linear += config.num_layers * (passed + config.num_experts * config.hidden_size)
    weights = 4.0 * (linear + config.vocab_size * config.hidden_size) * case.total
    # Causal: half of all pairs. Two products forward, five backward (FlashAttention-2, arXiv 2307.08691, §3.1).
    pairs = case.documents * case.tokens**2 / 2
    return weights + 7 * 2 * pairs * config.query_size * config.cache_layout.kv_layers


@dataclass(slots=True)
class Parts:
    """Device time between marks."""

    events: dict[str, list[tuple[torch.Event, torch.Event]]] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        begin, end = torch.Event("cuda", enable_timing=True), torch.Event("cuda", enable_timing=True)
        begin.record()
        yield
        end.record()
        self.events.setdefault(name, []).append((begin, end))

    def milliseconds(self) -> dict[str, float]:
        """The median of each part."""
        torch.cuda.synchronize()
        return {
            name: round(statistics.median(begin.elapsed_time(end) for begin, end in pairs), 2)
            for name, pairs in self.events.items()
        }


class Alone:
    """The compute gate of a device without an engine (services.trainer.host.policy_host.ComputeGate)."""

    @contextmanager
    def training(self) -> Iterator[None]:
        yield

    def give_way(self) -> None:
        """Nobody waits."""


def random_model(shape: str, quantization: Quantization) -> Qwen3_5:
    """A model with random weights on the GPU."""
    config = family_config(config_of(shape))
    return Qwen3_5(config, RandomWeights(config, torch.device("cuda"), quantization, None).build())


class Trainer:
    """An adapter of a model in training, with its optimizer.

    Args:
        gate: shares the device with an engine.
        modules: linear layers to adapt; None: all.
    """

    def __init__(
        self, model: CausalLM, rank: int, gate: ComputeGate | None = None, *, modules: list[str] | None = None
    ) -> None:
        self.model, self.config = model, model.config
        self._gate: ComputeGate = gate or Alone()
        self.lora = LoraParams.create(
            self.config, LoraSettings(rank=rank, alpha=2.0 * rank, target_modules=modules), device=model.device
        )
        self.lora.link_gradients()
        self._optimizer = ScheduledOptimizer(
            [self.lora.flat_a, self.lora.flat_b], OptimizerSettings(), peak=1e-4, total_steps=1_000_000
        )
        self._steps = 0
        self.forwards: dict[Recompute, TrainableForward] = {}

    def _forward(self, recompute: Recompute) -> TrainableForward:
        if recompute not in self.forwards:
            self.forwards.clear()  # and the memory of its graphs
            torch.cuda.empty_cache()
            memory = GraphMemory.on_demand(self.model.device)
            self.forwards[recompute] = TrainableForward(self.model, self.lora, recompute, memory)
        return self.forwards[recompute]

    def step(self, tokens: torch.Tensor, case: Case, recompute: Recompute, parts: Parts) -> float:
        """One optimizer step on random documents; returns the loss."""
        rows = torch.arange(case.total, device=tokens.device).view(case.documents, -1)[:, :-1].flatten()
        give_way = self._gate.give_way
        with self._gate.training(), torch.autograd.set_multithreading_enabled(False):
            self._optimizer.zero_grad()
            with parts.timed("forward"):
                hidden = self._forward(recompute)(tokens, [case.tokens] * case.documents, give_way)
            with parts.timed("head"):
                hidden = hidden.index_select(0, rows)
                scores = self.model.token_scores(hidden, tokens[rows + 1], give_way=give_way)
                loss = negative_log_likelihood(scores.logprobs, len(rows))
            with parts.timed("backward"):
                torch.autograd.backward(loss)
        with self._gate.training(), parts.timed("optimizer"):
            self._optimizer.step(self._steps)
        self._steps += 1
        return float(loss.detach())


def measure(trainer: Trainer, case: Case, recompute: Recompute, repeats: int, warm_up: int = 2) -> dict[str, Any]:
    """Measures one case, in the fields above."""
    tokens = torch.randint(trainer.config.vocab_size, (case.total,), device="cuda")
    for _ in range(warm_up):
        trainer.step(tokens, case, recompute, Parts())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    parts, seconds, losses = Parts(), [], []
    for _ in range(repeats):
        began = time.perf_counter()
        losses.append(trainer.step(tokens, case, recompute, parts))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    step = statistics.median(seconds)
    return {
        "case": f"{case.documents}x{case.tokens}",
        "recompute": recompute,
        "step_seconds": round(step, 4),
        "tokens_per_second": round(case.total / step),
        "peak_gb": round(torch.cuda.max_memory_reserved() / 1e9, 2),
        "mfu": round(model_flops(trainer.config, case) / step / _PEAK_FLOPS, 3),
        "parts": parts.milliseconds(),
        "losses": [round(loss, 3) for loss in losses[:3]],
    }


def profile(trainer: Trainer, case: Case, recompute: Recompute, rows: int) -> None:
    """Prints which kernels a step spends its time in."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recording

    tokens = torch.randint(trainer.config.vocab_size, (case.total,), device="cuda")
    trainer.step(tokens, case, recompute, Parts())
    with recording(activities=[ProfilerActivity.CUDA]) as recorded:
        trainer.step(tokens, case, recompute, Parts())
        torch.cuda.synchronize()
    table = sorted(recorded.key_averages(), key=lambda entry: -entry.device_time_total)
    total = sum(entry.device_time_total for entry in table)
    print(f"{case.documents}x{case.tokens} {recompute}: {total / 1e3:.1f} ms of kernels", file=sys.stderr)
    for entry in table[:rows]:
        print(f"{entry.device_time_total / 1e3:9.2f} ms {entry.count:6d}x  {entry.key[:110]}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3.5-4b")
    parser.add_argument("--cases", default="1x512,1x2048,4x2048,1x8192")
    parser.add_argument("--recompute", default="none", help=f"any of {','.join(get_args(Recompute))}")
    parser.add_argument("--quant", choices=get_args(Quantization), default="none")
    parser.add_argument("--float8", action="store_true", help="products with the frozen weights (TEMPER_TRAIN_FLOAT8)")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them")
    parser.add_argument("--profile", type=int, default=0, metavar="ROWS", help="print the kernels of each case, too")
    parser.add_argument("--out", type=Path, help="append each line to this file")
    options = parser.parse_args()
    model = random_model(options.shape, options.quant)
    if options.float8:
        model.train_in_float8()
    trainer = Trainer(model, options.rank)
    torch.cuda.empty_cache()  # what making random weights took
    facts = {"shape": options.shape, "quantization": options.quant, "float8": options.float8, "rank": options.rank}
    facts |= environment()
    for case in (Case.parse(text) for text in options.cases.split(",")):
        for recompute in options.recompute.split(","):
            put_line(measure(trainer, case, recompute, options.repeats, options.warm_up) | facts, options.out)
            if options.profile:
                profile(trainer, case, recompute, options.profile)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
