"""Times of a step's parts, method by method: `python -m benchmarks.training.methods --methods
sft,dpo,kto,grpo,generate,opd`.

Prepared jobs as a pod runs them, on an engine that is otherwise idle: Qwen3.5-4B's shape with random weights (for opd
it teaches the 0.8B's), rank 16 on all linear layers (opd: q and v), AdamW, microbatches of the default size.

- sft: 16 examples of 256 + 256 tokens a step
- dpo: 8 pairs of the same; the reference reads each pair, as in the first epoch of a job
- kto: 16 of the same; the reference point reads them once more, by policy and reference
- grpo: posted rollouts, 8 groups of 8, 256 + 256 tokens, with log-probabilities and a KL (beta 0.04)
- generate: grpo that samples them itself, 8 prompts x 8 completions x 256 new tokens a step, without KL
- opd: the real workload of benchmarks.training.opd

`--device cpu --shape tiny` does the same on the tiny model, in small. One JSON line a method, written to --out as it
comes:

- step_seconds: median wall time of a step, the device waited for
- parts: median seconds of what the job's metrics call swap, rollout, score, teacher, reference, forward, backward and
  optimizer (docs/guides/training.md), and other: what is in none of them
- tokens_per_step: inputs of the policy's forward and backward; tokens_per_second: of these
- peak_gb: the most that was allocated on the GPU, 10⁹ bytes, all of the engine included; on a CPU of this process

and of generate also

- end_to_end_seconds: from the beginning of a step until a request that names the adapter, without a version, has its
  first token from the version that the step made; its parts are those of the step and publish (the files into an object
  store in memory), serve (into a slot of the engine), first_token. Every step publishes.
- own_job_seconds, own_job: the same of a job of one step that continues the adapter, from the parsed request on: read
  (the version's files), prepare, step (with graphs captured anew on a GPU), publish, serve, first_token
- completion_length_mean, groups_with_spread: an end token ends a completion early, and a group whose rewards are all
  equal is not trained on. The reward is 1 for an even number of small letters, so chance gives nearly every group both.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.in_process import Prompt, only_warnings
from benchmarks.training.next_request import NextRequest, registry_in_memory
from benchmarks.training.opd import steps as opd
from benchmarks.training.opd.workloads import WORKLOADS
from benchmarks.training.pod import (
    Steps,
    TrainingPod,
    add_arguments,
    checkpoints,
    end_job,
    forget_peak,
    measure_steps,
    medians,
    parts_of,
    peak_gb,
    report_to,
    timed_step,
    training_pod,
    with_rest,
)
from services.common.jobs import JOBS, PublishingSpec
from services.common.text.tokenizer import TextCodec
from services.trainer.host.rollouts import RolloutRequest, RolloutSampling
from services.trainer.jobs import prepare_run

EXAMPLE_METHODS = ("sft", "dpo", "kto")
METHODS = (*EXAMPLE_METHODS, "grpo", "generate", "opd")
ADAPTER = "benchmark"
RANK = 16
EVEN = {"type": "regex", "match": "full", "pattern": "(?:[^a-z]*[a-z][^a-z]*[a-z])*[^a-z]*"}
"""A reward that chance gives to every other completion, whatever the model says."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a step."""

    examples: int
    prompt_tokens: int
    new_tokens: int
    prompts: int
    """Prompts of a step of GRPO."""
    completions: int
    """Completions of each prompt."""

    @property
    def longest(self) -> int:
        return self.prompt_tokens + self.new_tokens


REAL = Sizes(examples=16, prompt_tokens=256, new_tokens=256, prompts=8, completions=8)
SMALL = Sizes(examples=4, prompt_tokens=32, new_tokens=24, prompts=2, completions=4)


class RandomText:
    """Text and prompts of random words, each of them a token; the same for the same seed."""

    def __init__(self, codec: TextCodec, seed: int = 0) -> None:
        self._codec = codec
        self._random = np.random.default_rng(seed)
        pieces = [(token, codec.token_bytes(token)) for token in range(codec.vocab_size)]
        # With its space a word is a token of its own whatever it follows.
        self._words = [token for token, piece in pieces if piece[:1] == b" " and piece[1:].isalpha()]

    def prompt(self, tokens: int) -> Prompt:
        return tuple(self._random.choice(self._words, tokens).tolist())

    def text(self, tokens: int) -> str:
        return self._codec.decode(self.prompt(tokens))


def job(kind: str, **fields: Any) -> PublishingSpec:
    """A request as the trainer gets it."""
    return JOBS[kind].model_validate(
        {"kind": kind, "adapter": ADAPTER, "learning_rate": 1e-4, "lora": {"rank": RANK, "alpha": 2.0 * RANK}} | fields
    )


def examples_job(method: str, codec: TextCodec, sizes: Sizes, steps: int) -> PublishingSpec:
    """sft, dpo or kto, with examples of its own for each step."""
    texts = RandomText(codec)
    count = sizes.examples // 2 if method == "dpo" else sizes.examples

    def example(number: int) -> dict[str, Any]:
        asked = {"prompt": texts.text(sizes.prompt_tokens)}
        said = [texts.text(sizes.new_tokens) for _ in range(2)]
        match method:
            case "sft":
                return asked | {"completion": said[0]}
            case "dpo":
                return asked | {"chosen": said[0], "rejected": said[1]}
            case "kto":
                return asked | {"completion": said[0], "label": number % 2 == 0}
            case _:
                raise ValueError(f"{method} does not learn from examples")

    return job(
        method,
        examples=[example(number) for number in range(steps * count)],
        batch_size=count,
        epochs=1,
        prompt_format="raw",
    )


def posted_job(pod: TrainingPod, sizes: Sizes, steps: int) -> PublishingSpec:
    """grpo on rollouts of the base model, each of them in every step."""
    texts = RandomText(pod.host.codec)
    prompts = [texts.prompt(sizes.prompt_tokens) for _ in range(sizes.prompts)]
    requests = [RolloutRequest(prompt, seed) for prompt in prompts for seed in range(sizes.completions)]
    found = pod.host.rollouts.generate(requests, RolloutSampling(1.0, sizes.new_tokens), None)
    completions = [
        {"token_ids": list(one.token_ids), "logprobs": one.logprobs.tolist(), "reward": number % 2}
        for number, one in enumerate(found)
    ]
    size = sizes.completions
    groups = [
        {"prompt_token_ids": list(prompt), "completions": completions[place * size : (place + 1) * size]}
        for place, prompt in enumerate(prompts)
    ]
    return job("grpo", groups=groups, epochs=steps, beta=0.04)


def generate_job(codec: TextCodec, sizes: Sizes, rounds: int, seed: int = 0) -> PublishingSpec:
    """grpo that samples itself, one step a round, prompts of its own for each."""
    texts = RandomText(codec, seed)
    prompts = [{"prompt_token_ids": list(texts.prompt(sizes.prompt_tokens))} for _ in range(rounds * sizes.prompts)]
    return job(
        "grpo",
        generate={
            "prompts": prompts,
            "rounds": rounds,
            "prompts_per_round": sizes.prompts,
            "completions": sizes.completions,
            "max_tokens": sizes.new_tokens,
            "reward": EVEN,
        },
    )


def measure(pod: TrainingPod, method: str, sizes: Sizes, steps: int, warm_up: int) -> dict[str, Any]:
    """A job of the method, in the fields above."""
    if method == "generate":
        return measure_generate(pod, sizes, steps, warm_up)
    total = steps + warm_up
    spec = posted_job(pod, sizes, total) if method == "grpo" else examples_job(method, pod.host.codec, sizes, total)
    run = prepare_run(spec, pod.host, None)
    return {"method": method} | _line(measure_steps(pod.host, run, warm_up))


def measure_generate(pod: TrainingPod, sizes: Sizes, steps: int, warm_up: int) -> dict[str, Any]:
    """Job that samples its completions itself, in the fields above, and the way of each step to the next request."""
    next_request = NextRequest(pod, ADAPTER, RandomText(pod.host.codec, 1).prompt(sizes.prompt_tokens))
    run = prepare_run(generate_job(pod.host.codec, sizes, steps + warm_up), pod.host, None)
    seconds: list[float] = []
    history: list[dict[str, float]] = []
    ways: list[dict[str, float]] = []
    for index in range(run.total_steps):
        if index == warm_up:
            forget_peak(pod.host)
        took, metrics = timed_step(pod.host, run, index)
        way = next_request(run, metrics)
        if index >= warm_up:
            seconds.append(took)
            history.append(metrics)
            ways.append(with_rest(took, parts_of(metrics)) | way)
    found = Steps(seconds, history, peak_gb(pod.host))
    whole = medians([{"seconds": sum(way.values())} for way in ways])["seconds"]
    del run
    end_job(pod.host)
    own = own_job(pod, sizes, next_request)
    return {
        "method": "generate",
        "prompts": sizes.prompts,
        "completions": sizes.completions,
        **_line(found),
        "end_to_end_seconds": whole,
        "end_to_end": medians(ways),
        "own_job_seconds": round(sum(own.values()), 4),
        "own_job": medians([own]),
        "completion_length_mean": round(found.mean("completion_length_mean"), 1),
        "groups_with_spread": round(sizes.prompts - found.mean("groups_skipped"), 2),
        "rollout_tokens_per_second": round(found.mean("rollout_tokens_per_second")),
    }


def own_job(pod: TrainingPod, sizes: Sizes, next_request: NextRequest) -> dict[str, float]:
    """Seconds of a job of one step that continues the adapter, by part."""
    spec = generate_job(pod.host.codec, sizes, 1, seed=2)
    began = time.perf_counter()
    files = pod.registry.files(pod.registry.current(ADAPTER))
    read = time.perf_counter()
    run = prepare_run(spec, pod.host, files)
    prepared = time.perf_counter()
    took, metrics = timed_step(pod.host, run, 0)
    return {"read": read - began, "prepare": prepared - read, "step": took} | next_request(run, metrics)


def _line(found: Steps) -> dict[str, Any]:
    tokens = [step["tokens_per_second"] * step["train_seconds"] for step in found.history]
    # A round without spread has no loss.
    losses = [round(step["loss"], 4) for step in found.history if "loss" in step]
    return {
        **found.figures(),
        "tokens_per_step": round(sum(tokens) / len(tokens)),
        "tokens_per_second": round(sum(tokens) / sum(found.seconds)),
        "loss": losses[:: max(1, len(losses) - 1)],
    }


@contextmanager
def methods_pod(model: Path, device: str, sizes: Sizes) -> Iterator[TrainingPod]:
    """A running engine with room for all rollouts of a step, and a registry."""
    with training_pod(
        model,
        device,
        registry_in_memory(),
        max_num_seqs=sizes.prompts * sizes.completions,
        max_lora_rank=RANK,
        max_train_tokens=sizes.longest + 1,  # the token that ends a completion
    ) as pod:
        yield pod


def measure_together(options: argparse.Namespace, methods: Sequence[str], student: Path, teacher: Path) -> None:
    """Methods that share a pod: all but opd, or opd. Reports each."""
    only_warnings()
    report = report_to(options)
    small = options.shape == "tiny"
    if "opd" in methods:
        workload = WORKLOADS["real"].on_the_tiny_model() if small else WORKLOADS["real"]
        with opd.pod(student, teacher, options.device, workload.longest + workload.new_tokens) as host:
            report({"method": "opd"} | opd.measure(host, workload, options.steps, options.warm_up))
        return
    sizes = SMALL if small else REAL
    with methods_pod(student if small else teacher, options.device, sizes) as pod:
        for method in methods:
            report(measure(pod, method, sizes, options.steps, options.warm_up))
            end_job(pod.host)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS), help=f"any of {','.join(METHODS)}")
    add_arguments(parser)
    parser.add_argument("--steps", type=int, default=6, help="measured")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them: compiled kernels, captured graphs")
    options = parser.parse_args()
    asked = options.methods.split(",")
    if unknown := sorted(set(asked) - set(METHODS)):
        parser.error(f"no method {', '.join(unknown)}; there are {', '.join(METHODS)}")
    shared = [method for method in METHODS if method in asked and method != "opd"]
    with checkpoints(options) as (student, teacher):
        for methods in filter(None, (shared, ["opd"] if "opd" in asked else [])):
            # In a process of its own: an engine that has stopped does not leave the device as it was.
            process = multiprocessing.get_context("spawn").Process(
                target=measure_together, args=(options, methods, student, teacher)
            )
            process.start()
            process.join()
            if process.exitcode != 0:
                raise SystemExit(f"{', '.join(methods)} failed")


if __name__ == "__main__":
    main()
