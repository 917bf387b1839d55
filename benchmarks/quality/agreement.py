"""Difference of sampler's and trainer's log-probabilities: `python -m benchmarks.quality.agreement`.

The engine samples completions by an adapter in a slot, token by token through recurrent states and paged KV; the
trainer reads the same tokens packed, in chunks. Both say log-probabilities of the sampled tokens at temperature 1. One
JSON line a kind of weights:

- mean_abs, p99_abs, max_abs: of trainer - engine, over the tokens; mean_abs_by_quarter: of each completion (an error of
  states would grow)
- engine_exact, trainer_exact: mean distance of each from the same weights computed in float32
- logprob_mean: of the sampled tokens, which says how sharp the model is

Random weights of the shape, each layer adding a little as in a trained model, with an adapter of rank 16 on all linear
layers that changes each by about the same part. --weights sharp: as likely as a trained model's answers are
(logprob_mean -0.5); flat: every token about as likely as any (-11.7). Or a checkpoint (--model).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.lib.environment import environment
from benchmarks.lib.in_process import only_warnings
from benchmarks.lib.random_checkpoint import SHAPES, TINY, config_of, write
from benchmarks.lib.recorder import put_line
from benchmarks.training.pod import training_pod
from services.common.jobs import LoraSettings
from services.common.jobs.documents import completion_document
from services.engine.models.interface import CausalLM
from services.engine.models.lora.trainable import LoraParams
from services.engine.models.qwen3_5.model import Qwen3_5
from services.pod.host import PodHost
from services.trainer.host.rollouts import RolloutRequest, RolloutSampling
from services.trainer.packing import Microbatch, pack

RANK = 16


SHARP = 0.3
"""Factor of the final norm: with a tied head the random model repeats its last token, so likely as this makes it."""
_OUTWARD = ("out_proj", "o_proj", "down_proj")
"""Modules whose random weights are small (benchmarks.lib.random_checkpoint, gentle)."""


def random_policy(host: PodHost) -> LoraParams:
    """An adapter on all linear layers that changes what the model says."""
    lora = LoraParams.create(host.model.config, LoraSettings(rank=RANK, alpha=2.0 * RANK), device=host.model.device)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for path, target in lora.targets.items():
            std = 1e-4 if path.endswith(_OUTWARD) else 1e-3
            target.b.copy_(torch.empty(target.b.shape).normal_(std=std, generator=generator))
    return lora


def measure(host: PodHost, exact: Qwen3_5, rollouts: int, prompt: int, new_tokens: int) -> dict[str, Any]:
    """Samples, reads and compares; the fields above.

    Args:
        exact: the same weights in float32.
    """
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
    found: dict[str, list[torch.Tensor]] = {"engine": [], "trainer": [], "exact": []}
    for microbatch in pack(documents, 2048, host.model.device):
        sizes = [document.num_trained for document in microbatch.documents]
        for name, model in (("trainer", host.model), ("exact", exact)):
            found[name] += torch.split(_read(host, model, lora, microbatch), sizes)
        found["engine"] += [torch.tensor(sampled[document.source].logprobs) for document in microbatch.documents]
    apart = [(one - other).abs() for one, other in zip(found["trainer"], found["engine"], strict=True)]
    engine, trainer, truth = (torch.cat(found[name]) for name in ("engine", "trainer", "exact"))
    everything = torch.cat(apart)

    def short(value: torch.Tensor) -> float:
        return float(f"{float(value):.3e}")

    return {
        "tokens": everything.numel(),
        "mean_abs": short(everything.mean()),
        "p99_abs": short(everything.quantile(0.99)),
        "max_abs": short(everything.max()),
        "mean_abs_by_quarter": [
            short(torch.cat([one.tensor_split(4)[part] for one in apart]).mean()) for part in range(4)
        ],
        "engine_exact": short((engine - truth).abs().mean()),
        "trainer_exact": short((trainer - truth).abs().mean()),
        "logprob_mean": round(float(engine.mean()), 3),
    }


def _read(host: PodHost, model: CausalLM, lora: LoraParams, microbatch: Microbatch) -> torch.Tensor:
    with host.gate.training(), torch.no_grad():
        hidden = model.forward_train(
            microbatch.token_ids, microbatch.lengths, lora, recompute="none", give_way=host.gate.give_way
        )
        return model.token_logprobs(hidden.index_select(0, microbatch.rows), microbatch.targets).cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=(*sorted(SHAPES), "tiny"), default="qwen3.5-4b")
    parser.add_argument("--model", type=Path, help="a checkpoint instead of random weights")
    parser.add_argument("--scratch", type=Path, help="where random checkpoints are written; default: /tmp")
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--weights", default="sharp,flat", help="any of sharp,flat")
    parser.add_argument("--out", type=Path, help="append the line to this file")
    options = parser.parse_args()
    only_warnings()
    longest = options.prompt + options.new_tokens
    for weights in ("given",) if options.model or options.shape == "tiny" else options.weights.split(","):
        with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
            path = options.model or (TINY if options.shape == "tiny" else Path(scratch, "model"))
            if path.parent == Path(scratch):
                write(path, config_of(options.shape) | {"tie_word_embeddings": weights == "sharp"}, gentle=True)
            # Half of a GPU, for the weights in float32 to have room.
            limits = {"max_lora_rank": RANK, "max_train_tokens": max(512, longest), "prefix_cache": False}
            with training_pod(path, options.device, memory_fraction=0.5, **limits) as pod:
                host = pod.host
                exact = Qwen3_5.from_directory(path, dtype=torch.float32, device=options.device)
                if weights == "sharp":
                    for model in (host.model, exact):
                        if isinstance(model, Qwen3_5):
                            model.weights.final_norm.mul_(SHARP)
                found = measure(host, exact, options.rollouts, options.prompt, options.new_tokens)
                del exact
        facts = {"model": str(options.model or options.shape), "weights": weights}
        put_line(found | facts | environment(), options.out)


if __name__ == "__main__":
    main()
