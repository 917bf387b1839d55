"""How far sampler and trainer are apart: `python -m benchmarks.agreement`.

The engine samples completions by an adapter in a slot, token by token through recurrent states and paged KV; the
trainer reads the same tokens packed, in chunks. Both say log-probabilities of the sampled tokens at temperature 1. One
JSON line: mean, 99th percentile and most of |trainer - engine| over the tokens, the mean of the sampled tokens'
log-probabilities (how sharp the model is), and means by quarter of the completion (a state's error would grow).

Random weights of the shape, each layer adding a little as in a trained model, or a checkpoint (--model); an adapter of
rank 16 on all linear layers with random numbers.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.adapters import GeneratedAdapters
from benchmarks.environment import environment
from benchmarks.in_process import only_warnings, settings_for
from benchmarks.random_checkpoint import SHAPES, TINY, config_of, write
from services.common.jobs import LoraSettings
from services.engine.model.config import ModelConfig
from services.engine.model.lora import LoraParams
from services.pod.engine import build_engine, settle, use_threads
from services.pod.host import PodHost
from services.pod.training import pod_host
from services.trainer.data import completion_document, pack
from services.trainer.rollouts import RolloutRequest, RolloutSampling
from services.trainer.settings import TrainerSettings

RANK = 16


def random_policy(host: PodHost) -> LoraParams:
    """An adapter on all linear layers that changes what the model says."""
    lora = LoraParams.create(host.model.config, LoraSettings(rank=RANK, alpha=2.0 * RANK), device=host.model.device)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for target in lora.targets.values():
            target.b.copy_(torch.empty(target.b.shape).normal_(std=0.01, generator=generator))
    return lora


def measure(host: PodHost, rollouts: int, prompt: int, new_tokens: int) -> dict[str, Any]:
    """Samples, reads and compares; the fields above."""
    random = np.random.default_rng(0)
    vocab = min(host.codec.vocab_size, host.model.config.vocab_size)
    prompts = [tuple(random.integers(0, vocab, prompt).tolist()) for _ in range(rollouts)]
    lora = random_policy(host)
    requests = [RolloutRequest(ids, number) for number, ids in enumerate(prompts)]
    with host.rollouts.policy(lora) as policy:
        sampled = host.rollouts.generate(requests, RolloutSampling(1.0, new_tokens), policy)
    documents = [
        completion_document(list(ids), list(completion.token_ids), number)
        for number, (ids, completion) in enumerate(zip(prompts, sampled, strict=True))
    ]
    apart: list[torch.Tensor] = []
    said: list[torch.Tensor] = []
    for microbatch in pack(documents, 2048, host.model.device):
        with host.gate.training(), torch.no_grad():
            hidden = host.model.forward_train(
                microbatch.token_ids, microbatch.lengths, lora, recompute="none", give_way=host.gate.give_way
            )
            logprobs = host.model.token_logprobs(hidden.index_select(0, microbatch.rows), microbatch.targets).cpu()
        sizes = [document.num_trained for document in microbatch.documents]
        for document, part in zip(microbatch.documents, torch.split(logprobs, sizes), strict=True):
            engine = torch.tensor(sampled[document.source].logprobs)
            apart.append((part - engine).abs())
            said.append(engine)
    everything = torch.cat(apart)
    quarters = [torch.cat([one.tensor_split(4)[part] for one in apart]).mean().item() for part in range(4)]
    return {
        "tokens": everything.numel(),
        "mean_abs": float(f"{everything.mean():.3e}"),
        "p99_abs": float(f"{everything.quantile(0.99):.3e}"),
        "max_abs": float(f"{everything.max():.3e}"),
        "logprob_mean": round(float(torch.cat(said).mean()), 3),
        "mean_abs_by_quarter": [float(f"{value:.3e}") for value in quarters],
    }


@contextmanager
def pod(model: Path, device: str, longest: int, **options: Any) -> Iterator[PodHost]:
    """A running engine without gRPC, Redis and an object store."""
    settings = settings_for(
        model, device, max_lora_rank=RANK, max_train_tokens=max(512, longest), prefix_cache=False, **options
    )
    use_threads(settings)
    registry = GeneratedAdapters(ModelConfig.from_directory(model), count=0, rank=1)
    engine = build_engine(settings, registry, None)
    settle()
    engine.start()
    try:
        yield pod_host(settings, TrainerSettings(), engine)
    finally:
        engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=(*sorted(SHAPES), "tiny"), default="qwen3.5-4b")
    parser.add_argument("--model", type=Path, help="a checkpoint instead of random weights")
    parser.add_argument("--scratch", type=Path, help="where random checkpoints are written; default: /tmp")
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--state-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--out", type=Path, help="append the line to this file")
    options = parser.parse_args()
    only_warnings()
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        model = options.model or (TINY if options.shape == "tiny" else Path(scratch, "model"))
        if model.parent == Path(scratch):
            write(model, config_of(options.shape), gentle=True)
        longest = options.prompt + options.new_tokens
        with pod(model, options.device, longest, state_dtype=options.state_dtype) as host:
            found = measure(host, options.rollouts, options.prompt, options.new_tokens)
    facts = {"model": str(options.model or options.shape), "state_dtype": options.state_dtype}
    line = json.dumps(found | facts | environment())
    print(line)
    if options.out is not None:
        with options.out.open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
