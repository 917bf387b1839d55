"""What it saves to read the beginning of branches once: `python -m benchmarks.training.branches --out FILE`.

A step is groups x branches trajectories, a microbatch a group: a prompt in common, then turns of observation and
action, with a loss on every action token. It is timed with the prompt shared and apart, rank 16 on all linear layers,
random weights of the shape. One JSON line, appended to --out:

- shared, apart: tokens computed, step_seconds (median), tokens_per_second (of the trajectories, whatever is shared),
  peak_gb
- faster: seconds apart over seconds shared
- gradients_apart_by: |shared − apart| / |apart| of the gradients of the last step timed
- check: |found − exact| / |exact| of log-probabilities and of the gradients of A and B, for a smaller group, shared and
  apart, against float32 in plain torch; within: whether no error of shared is over √2 times that of apart

The bar is where it is because both compute the same sums with roundings of the same type at the same places, except
that gradients which branches send to their beginning are added to a number that is rounded already: that is rounded
twice where it would be once, and the variance of the error at most doubled.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.lib.environment import environment
from benchmarks.lib.random_checkpoint import SHAPES, TINY, config_of, family_config
from benchmarks.lib.random_model import RandomWeights
from benchmarks.lib.recorder import put_line
from services.common.jobs import LoraSettings
from services.common.jobs.documents import Document
from services.engine.models.interface import Recompute
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.qwen3_5.model import Qwen3_5
from services.engine.models.qwen3_5.training import plain
from services.engine.models.qwen3_5.weights import (
    AttentionWeights,
    DeltaNetWeights,
    ExpertWeights,
    LayerWeights,
    ModelWeights,
)
from services.engine.models.weights.matrix import DenseMatrix
from services.trainer.losses import negative_log_likelihood
from services.trainer.packing import Microbatch

_OBSERVED, _ACTED = 200, 128
"""Tokens of a turn."""
_PARTS = (AttentionWeights, DeltaNetWeights, ExpertWeights, LayerWeights, ModelWeights, DenseMatrix)
_BAR = 2**0.5


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Trajectories that begin with the same prompt."""

    branches: int
    prompt: int
    turns: int

    def documents(self, vocabulary: int, seed: int) -> list[Document]:
        generator = torch.Generator().manual_seed(seed)

        def text(count: int) -> list[int]:
            return torch.randint(vocabulary, (count,), generator=generator).tolist()

        prompt, acted = text(self.prompt), [False] * _OBSERVED + [True] * _ACTED
        flags = [False] * self.prompt + acted * self.turns
        return [Document(prompt + text(len(acted) * self.turns), flags, one) for one in range(self.branches)]


def in_float32(value: Any) -> Any:
    """Weights of the same numbers in float32."""
    if isinstance(value, Tensor):
        return value.float()
    if isinstance(value, tuple):
        return tuple(map(in_float32, value))
    if isinstance(value, _PARTS):
        changed = {field.name: in_float32(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **changed)
    return value


def adapter(model: Qwen3_5, rank: int) -> LoraParams:
    """An adapter that changes something: B is not zero."""
    lora = LoraParams.create(model.config, LoraSettings(rank=rank, alpha=2.0 * rank), device=model.device)
    with torch.no_grad():
        values = torch.randn(lora.flat_b.shape, generator=torch.Generator().manual_seed(1))
        lora.flat_b.copy_(values.mul_(0.02))
    lora.link_gradients()
    return lora


def step(model: Qwen3_5, lora: LoraParams, batches: Sequence[Microbatch], recompute: Recompute) -> Tensor:
    """Adds the gradients of a step; returns all log-probabilities."""
    found, total = [], sum(len(batch.rows) for batch in batches)
    with torch.autograd.set_multithreading_enabled(False):
        for batch in batches:
            hidden = model.forward_train(
                batch.token_ids,
                batch.lengths,
                lora,
                recompute=recompute,
                give_way=lambda: None,
                parents=batch.parents,
            ).index_select(0, batch.rows)
            logprobs = model.token_scores(hidden, batch.targets, give_way=lambda: None).logprobs
            torch.autograd.backward(negative_log_likelihood(logprobs, total))
            found.append(logprobs.detach())
    return torch.cat(found)


def exact_step(model: Qwen3_5, lora: LoraParams, batch: Microbatch) -> Tensor:
    """The same of one microbatch in plain torch, in the dtype of the weights."""
    hidden = plain.forward_packed(
        batch.token_ids,
        batch.lengths,
        model.config,
        model.weights,
        model.rotation,
        lora,
        recompute="full",
        give_way=lambda: None,
    ).index_select(0, batch.rows)
    scores = F.linear(hidden, model.weights.head.dense()).log_softmax(-1)
    logprobs = scores.gather(1, batch.targets[:, None]).squeeze(1)
    torch.autograd.backward(negative_log_likelihood(logprobs, len(batch.rows)))
    return logprobs.detach()


def gradients(lora: LoraParams) -> dict[str, Tensor]:
    """Copies of the gradients, which are zero from then on."""
    found = {}
    for name, flat in (("a", lora.flat_a), ("b", lora.flat_b)):
        if flat.grad is None:
            raise ValueError("the adapter has no gradients")
        found[name] = flat.grad.clone()
        flat.grad.zero_()
    return found


def apart_by(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def check(model: Qwen3_5, lora: LoraParams, group: Group) -> dict[str, Any]:
    """See above. The order of the rows is that of the documents, shared or apart."""
    documents = group.documents(model.config.vocab_size, seed=99)
    shared, apart = (Microbatch.of(documents, model.device, shared=shared) for shared in (True, False))
    results: dict[str, dict[str, Tensor]] = {}
    for name, batch in (("shared", shared), ("apart", apart)):
        logprobs = step(model, lora, [batch], "full")
        results[name] = gradients(lora) | {"logprobs": logprobs}
    precise = Qwen3_5(model.config, in_float32(model.weights))
    exact = exact_step(precise, lora, apart)
    expected = gradients(lora) | {"logprobs": exact}
    errors = {
        name: {key: apart_by(found[key], value) for key, value in expected.items()} for name, found in results.items()
    }
    within = all(errors["shared"][key] <= _BAR * errors["apart"][key] for key in expected)
    return {"tokens": {"shared": shared.num_tokens, "apart": apart.num_tokens}, **errors, "within": within}


def measure(
    model: Qwen3_5, lora: LoraParams, batches: Sequence[Microbatch], tokens: int, recompute: Recompute, repeats: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Figures of a step, and its gradients."""
    cuda = model.device.type == "cuda"
    step(model, lora, batches[:1], recompute)
    gradients(lora)
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds, found = [], {}
    for _ in range(repeats):
        began = time.perf_counter()
        step(model, lora, batches, recompute)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        found = gradients(lora)
    median = statistics.median(seconds)
    return {
        "tokens": sum(batch.num_tokens for batch in batches),
        "step_seconds": round(median, 4),
        "tokens_per_second": round(tokens / median),
        "peak_gb": round(torch.cuda.max_memory_reserved() / 1e9, 2) if cuda else 0.0,
    }, found


def prepare(model: Qwen3_5, lora: LoraParams, batches: Sequence[Microbatch], recompute: Recompute) -> None:
    """Compiles the kernels of these steps on all cores."""
    # Imported here: only machines with a GPU have Triton.
    from services.engine.executors.cuda.compile_ahead import compile_ahead

    def launch() -> None:
        for batch in batches:
            step(model, lora, [batch], recompute)

    compile_ahead(launch)
    gradients(lora)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The line."""
    device, tiny = torch.device(options.device), options.shape == "tiny"
    config = family_config(json.loads((TINY / "config.json").read_text()) if tiny else config_of(options.shape))
    model = Qwen3_5(config, RandomWeights(config, device, "none", None).build())
    lora = adapter(model, options.rank)
    size = Group(options.branches, options.prompt, options.turns)
    groups = [size.documents(config.vocab_size, seed) for seed in range(options.groups)]
    tokens = sum(document.length - 1 for group in groups for document in group)
    ways = {
        name: [Microbatch.of(group, device, shared=name == "shared") for group in groups]
        for name in ("shared", "apart")
    }
    small = Group(min(4, size.branches), size.prompt, min(2, size.turns))
    if device.type == "cuda":
        checked = [Microbatch.of(small.documents(config.vocab_size, 99), device, shared=way) for way in (True, False)]
        prepare(model, lora, [*(batches[0] for batches in ways.values()), *checked], options.recompute)
    line: dict[str, Any] = {
        "case": f"{options.groups}x{options.branches}x({options.prompt}+{options.turns}*{_OBSERVED + _ACTED})",
        "recompute": options.recompute,
    }
    found = {}
    for name, batches in ways.items():
        line[name], found[name] = measure(model, lora, batches, tokens, options.recompute, options.repeats)
    line["faster"] = round(line["apart"]["step_seconds"] / line["shared"]["step_seconds"], 3)
    line["gradients_apart_by"] = {key: apart_by(found["shared"][key], value) for key, value in found["apart"].items()}
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return line | {"check": check(model, lora, small)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*sorted(SHAPES), "tiny"], default="qwen3.5-4b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--branches", type=int, default=8, help="of a group")
    parser.add_argument("--prompt", type=int, default=512, help="tokens that the branches of a group begin with")
    parser.add_argument("--turns", type=int, default=6, help=f"of {_OBSERVED} observed and {_ACTED} action tokens")
    parser.add_argument("--recompute", choices=get_args(Recompute), default="selective")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="append the line to this file")
    options = parser.parse_args(arguments)
    facts = {"shape": options.shape, "rank": options.rank} | environment()
    put_line(run(options) | facts, options.out)


if __name__ == "__main__":
    main()
