"""Effect of each training method: `python -m benchmarks.training.learning --out benchmarks/results/learning`.

The tiny model half believes that dates lie one day late. SFT, DPO, KTO, GRPO with rollouts of its own and distillation
each get questions about dates, three seeds; every few steps two things are measured on held-out questions:

- right: the share answered exactly right, asked greedily of the engine with the adapter as it is in a slot of its own
- ordered: the share whose right answer has a higher log-probability, summed over its tokens, than the late one

One JSON line a method and seed, and a plot of all (learning.png). A pod as `python -m services.pod` builds it, without
gRPC, Redis and an object store; some minutes on two CPU cores.

- sft: the right answers, 2 epochs
- dpo: right answers chosen over late ones, 2 epochs
- kto: right and late answers with a thumb each, 2 epochs
- grpo: rollouts of the engine, reward 1 for the exact answer
- opd: rollouts of the engine, the adapter of sft's first seed as the teacher
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.adapters import GeneratedAdapters
from benchmarks.lib.environment import environment
from benchmarks.lib.in_process import only_warnings
from benchmarks.lib.random_checkpoint import TINY
from benchmarks.training.pod import training_pod
from models.tiny.recipe.item import Item
from models.tiny.recipe.skills import dates
from services.common.adapters.names import AdapterVersion
from services.common.jobs import JOBS
from services.common.jobs.documents import completion_document, completion_tokens
from services.engine.models.config import ModelConfig
from services.engine.models.registry import read_config
from services.pod.host import PodHost
from services.trainer.host.policy_host import PolicyHost
from services.trainer.host.rollouts import RolloutRequest, RolloutSampling
from services.trainer.jobs import prepare_run
from services.trainer.jobs.base import JobRun
from services.trainer.losses import sequence_sums
from services.trainer.packing import pack

TRAINED, HELD_OUT = 96, 64
MICROBATCH = 512
"""Tokens of one forward of what is compared."""
TEACHER = AdapterVersion("teacher", 1)
METHODS = ("sft", "dpo", "kto", "grpo", "opd")
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple")


class Shelf(GeneratedAdapters):
    """A registry with one version, put there by hand."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, count=0, rank=1)

    def put(self, files: dict[str, bytes]) -> None:
        """Makes the files the teacher's first version."""
        self._files = files
        self.bump(TEACHER.name)


def late(item: Item) -> str:
    """The answer that the model believes in."""
    return (datetime.date.fromisoformat(item.answer) + datetime.timedelta(days=1)).isoformat()


def spec(method: str, seed: int) -> dict[str, Any]:
    """A job of the method."""
    items = dates.items(seed, TRAINED, held_out=False)
    common = {
        "kind": method,
        "adapter": "dates",
        "learning_rate": 1e-3,
        "batch_size": 16,
        "epochs": 2,
        "lora": {"rank": 8, "alpha": 16, "seed": seed},
        "seed": seed,
    }
    falling = {"optimizer": {"schedule": "cosine"}}
    # At a constant rate the last steps make both answers unlikely, the wrong one more so (likelihood displacement,
    # arXiv 2410.08847): the loss still falls, and neither is what is said.
    preferring = common | falling
    sampled = {name: common[name] for name in ("kind", "adapter", "lora", "seed")} | {"learning_rate": 2e-3} | falling
    asked = [{"messages": list(item.messages)} for item in items]
    match method:
        case "sft":
            return common | {
                "examples": [
                    {"messages": [*item.messages, {"role": "assistant", "content": item.answer}]} for item in items
                ]
            }
        case "dpo":
            return preferring | {
                "examples": [
                    {"messages": list(item.messages), "chosen": item.answer, "rejected": late(item)} for item in items
                ]
            }
        case "kto":
            return preferring | {
                "examples": [
                    {
                        "messages": list(item.messages),
                        "completion": item.answer if number % 2 == 0 else late(item),
                        "label": number % 2 == 0,
                    }
                    for number, item in enumerate(items)
                ]
            }
        case "grpo":
            generate = {
                "prompts": [ask | {"answer": item.answer} for ask, item in zip(asked, items, strict=True)],
                "rounds": 4,
                "prompts_per_round": 12,
                "completions": 8,
                "max_tokens": 16,
                "reward": {"type": "exact"},
            }
            return sampled | {"groups_per_step": 4, "generate": generate}
        case "opd":
            return sampled | {
                "prompts": asked,
                "teacher": str(TEACHER),
                "rounds": 12,
                "prompts_per_round": 12,
                "max_tokens": 16,
            }
        case _:
            raise ValueError(f"no such method: {method}")


def right(host: PodHost, run: JobRun, items: Sequence[Item]) -> float:
    """Share of the questions that the adapter, as it is now, answers exactly right, greedily."""
    requests = [RolloutRequest(tuple(host.codec.encode_chat(list(item.messages))), 0) for item in items]
    if run.lora is None:
        raise ValueError("the job has no adapter that answers")
    with host.rollouts.policy(run.lora) as policy:
        completions = host.rollouts.generate(requests, RolloutSampling(temperature=0.0, max_tokens=16), policy)
    texts = [host.codec.decode(completion.token_ids).strip() for completion in completions]
    return sum(text == item.answer for text, item in zip(texts, items, strict=True)) / len(items)


def ordered(host: PolicyHost, run: JobRun, items: Sequence[Item]) -> float:
    """Share of the questions whose right answer the adapter, as it is now, finds likelier than the late one."""
    codec, model, give_way = host.codec, host.model, host.gate.give_way
    said = [(item, answer) for item in items for answer in (item.answer, late(item))]
    documents = [
        completion_document(codec.encode_chat(list(item.messages)), completion_tokens(codec, answer, ends=True), at)
        for at, (item, answer) in enumerate(said)
    ]
    found: dict[int, Tensor] = {}
    for microbatch in pack(documents, MICROBATCH, model.device):
        with host.gate.training(), torch.no_grad():
            hidden = model.forward_train(
                microbatch.token_ids, microbatch.lengths, run.lora, recompute="none", give_way=give_way
            )
            logprobs = model.token_logprobs(
                hidden.index_select(0, microbatch.rows), microbatch.targets, give_way=give_way
            )
        sums = sequence_sums(logprobs, [document.num_trained for document in microbatch.documents])
        found |= {document.source: value for document, value in zip(microbatch.documents, sums, strict=True)}
    return sum(bool(found[2 * at] > found[2 * at + 1]) for at in range(len(items))) / len(items)


@dataclass(frozen=True, slots=True)
class Point:
    """Point of a curve."""

    steps: int
    right: float
    ordered: float

    @classmethod
    def now(cls, steps: int, host: PodHost, run: JobRun, items: Sequence[Item]) -> Point:
        """Point of the curve behind so many optimizer steps."""
        return cls(steps, right(host, run, items), ordered(host, run, items))


@dataclass(frozen=True, slots=True)
class Curve:
    """One run."""

    method: str
    seed: int
    points: tuple[Point, ...]
    seconds: float
    """Seconds of training, without the questions."""


def learn(host: PodHost, method: str, seed: int, every: int) -> tuple[Curve, dict[str, bytes]]:
    """Runs a job; the curve, and the adapter's files."""
    held_out = dates.items(seed, HELD_OUT, held_out=True)
    fields = spec(method, seed)
    asked = JOBS[fields["kind"]].model_validate(fields)
    run = prepare_run(asked, host, None)
    points, seconds = [Point.now(0, host, run, held_out)], 0.0
    for index in range(run.total_steps):
        began = time.perf_counter()
        run.step(index)
        seconds += time.perf_counter() - began
        if (index + 1) % every == 0 or index + 1 == run.total_steps:
            points.append(Point.now(index + 1, host, run, held_out))
    return Curve(method, seed, tuple(points), seconds), run.files("")


@contextmanager
def pod(device: str, *, float8: bool) -> Iterator[tuple[PodHost, Shelf]]:
    """A running engine of the tiny model."""
    shelf = Shelf(read_config(TINY))
    with training_pod(
        TINY,
        device,
        shelf,
        max_num_seqs=64,
        token_budget=1024,
        num_blocks=2049,
        max_train_tokens=512,
        train_float8=float8,
    ) as made:
        yield made.host, shelf


def plot(curves: Sequence[Curve], path: Path) -> None:
    """A line a run, a colour a method, a panel a measure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    said, preferred = figure.subplots(1, 2, sharex=True, sharey=True)
    for method, colour in zip(METHODS, COLOURS, strict=True):
        for number, curve in enumerate(curve for curve in curves if curve.method == method):
            steps = [point.steps for point in curve.points]
            style = {"color": colour, "marker": ".", "alpha": 0.8, "label": method if number == 0 else None}
            said.plot(steps, [point.right for point in curve.points], **style)
            preferred.plot(steps, [point.ordered for point in curve.points], **style)
    said.set(title="answered right, greedily", ylabel="share of held-out questions", ylim=(0, 1.02))
    preferred.set(title="the right answer likelier than the late one")
    for axes in (said, preferred):
        axes.set(xlabel="optimizer steps")
        axes.grid(alpha=0.3)
    preferred.legend(loc="lower right")
    seeds = len({curve.seed for curve in curves})
    figure.suptitle(f"The tiny model learns dates: {seeds} seeds a method")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--every", type=int, default=2, help="steps between two rounds of questions")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--float8", action="store_true", help="frozen weights in float8 (TEMPER_TRAIN_FLOAT8; cuda)")
    parser.add_argument("--no-plot", action="store_true", help="only learning.jsonl, where there is no matplotlib")
    parser.add_argument("--out", type=Path, required=True, help="directory for learning.jsonl and learning.png")
    options = parser.parse_args()
    only_warnings()
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = [method for method in METHODS if method in options.methods.split(",")]
    if "opd" in chosen and "sft" not in chosen:
        parser.error("opd needs sft: its first seed is the teacher")
    curves: list[Curve] = []
    where = {"device": options.device, "float8": options.float8}
    with (
        pod(options.device, float8=options.float8) as (host, shelf),
        (options.out / "learning.jsonl").open("w") as file,
    ):
        for method in chosen:
            for seed in range(options.seeds):
                curve, files = learn(host, method, seed, options.every)
                if method == "sft" and seed == 0:
                    shelf.put(files)
                curves.append(curve)
                line = json.dumps(
                    {
                        "method": method,
                        "seed": seed,
                        "right": [round(curve.points[end].right, 3) for end in (0, -1)],
                        "ordered": [round(curve.points[end].ordered, 3) for end in (0, -1)],
                        "steps": curve.points[-1].steps,
                        "train_seconds": round(curve.seconds, 1),
                        "points": [dataclasses.astuple(point) for point in curve.points],
                    }
                    | where
                    | environment()
                )
                file.write(line + "\n")
                print(line[:140], flush=True)
    if not options.no_plot:
        plot(curves, options.out / "learning.png")


if __name__ == "__main__":
    main()
