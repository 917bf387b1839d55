"""What agents learn in our environments:
`python -m benchmarks.training.environments.learning --out benchmarks/results/environments`.

The tiny model plays the guessing game, and uses the calculator with the hidden memory, by GRPO on episodes: three seeds
each, which decide the adapter, what is sampled and the hidden numbers. Before the first round and every few rounds it
plays greedily from seeds that no round has: `eval_success` is the share of these episodes that earn all there is.

One JSON line an environment and seed, and a plot (environments.png). A pod as `python -m services.pod` builds it,
without gRPC, Redis and an object store, and the environment's server in a thread; some minutes a run on two CPU cores.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.lib.environment import environment
from benchmarks.lib.in_process import only_warnings
from benchmarks.lib.random_checkpoint import TINY
from benchmarks.training.environments.serving import serving
from benchmarks.training.pod import end_job, training_pod
from services.common.jobs import GrpoJob
from services.environments.registry import ENVIRONMENTS
from services.pod.host import PodHost
from services.trainer.jobs import prepare_run
from services.trainer.settings import TrainerSettings


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a job in an environment."""

    reset: Mapping[str, int]
    """What the environment's reset gets, beside a seed."""
    groups: int
    """Groups of eight episodes each, an optimizer step together."""
    rounds: int
    temperature: float
    max_tokens: int
    max_turns: int
    most_tokens: int
    held_out: int
    """Episodes that are played before, in the middle and behind."""
    learning_rate: float


SHAPES: Mapping[str, Shape] = {
    "guess": Shape({"lowest": 1, "numbers": 3, "guesses": 3}, 16, 16, 2.0, 4, 3, 160, 64, 1.5e-3),
    "calculator": Shape({"tasks": 1}, 6, 6, 1.0, 36, 3, 320, 32, 3e-3),
}
NAMES = tuple(SHAPES)
_FIRST_HELD_OUT = 10**6
"""Seeds from here on are those of held-out episodes."""


def spec(name: str, url: str, seed: int, rounds: int | None = None, held_out: int | None = None) -> dict[str, Any]:
    """A job in one of the environments."""
    kind, chosen = ENVIRONMENTS[name], SHAPES[name]
    prompt: dict[str, Any] = {"prompt": "{observation}", "reset": dict(chosen.reset)}
    if kind.tools:
        prompt["tools"] = [dict(tool) for tool in kind.tools]
    held_out = held_out or chosen.held_out
    seeds = range(_FIRST_HELD_OUT + held_out * seed, _FIRST_HELD_OUT + held_out * (seed + 1))
    return {
        "kind": "grpo",
        "adapter": name,
        "learning_rate": chosen.learning_rate,
        "lora": {"rank": 8, "alpha": 16, "seed": seed},
        "optimizer": {"schedule": "cosine"},
        "seed": seed,
        "generate": {
            "prompts": [prompt] * chosen.groups,
            "rounds": rounds or chosen.rounds,
            "completions": 8,
            "temperature": chosen.temperature,
            "max_tokens": chosen.max_tokens,
            "reward": {
                "type": "environment",
                "url": url,
                "max_turns": chosen.max_turns,
                "max_trajectory_tokens": chosen.most_tokens,
                "concurrency": 128,
            },
            "eval_prompts": [prompt | {"reset": {**chosen.reset, "seed": at}} for at in seeds],
            "eval_every": chosen.rounds // 2,
        },
    }


@dataclass(frozen=True, slots=True)
class Run:
    """One run."""

    environment: str
    seed: int
    success: tuple[tuple[int, float], ...]
    """Rounds so far and the share of held-out episodes that succeed."""
    history: tuple[dict[str, float], ...]
    seconds: float

    @property
    def gain(self) -> float:
        return self.success[-1][1] - self.success[0][1]


def learn(host: PodHost, name: str, url: str, seed: int, **fields: Any) -> Run:
    """Runs a job."""
    run = prepare_run(GrpoJob.model_validate(spec(name, url, seed, **fields)), host, None)
    began = time.perf_counter()
    points: list[tuple[int, float]] = [(0, run.evaluate()["eval_success"])]
    history = []
    for index in range(run.total_steps):
        metrics = run.step(index)
        history.append(metrics)
        if "eval_success" in metrics:
            points.append((int(metrics["round"]), metrics["eval_success"]))
    return Run(name, seed, tuple(points), tuple(history), time.perf_counter() - began)


def plot(runs: Sequence[Run], path: Path) -> None:
    """A panel an environment, a line a seed."""
    names = [name for name in NAMES if any(run.environment == name for run in runs)]
    figure = Figure(figsize=(6.5 * len(names), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for name, axes in zip(names, panels, strict=True):
        for run in (run for run in runs if run.environment == name):
            rounds, shares = zip(*run.success, strict=True)
            axes.plot(rounds, shares, marker=".", label=f"seed {run.seed}")
        axes.set(title=name, xlabel="rounds", ylabel="held-out episodes that succeed, greedily", ylim=(0, 1.02))
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", default=",".join(NAMES))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--out", type=Path, required=True, help="directory for environments.jsonl and environments.png")
    options = parser.parse_args()
    only_warnings()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    runs: list[Run] = []
    with (options.out / "environments.jsonl").open("w") as file:
        for name in options.environments.split(","):
            with (
                serving(ENVIRONMENTS[name]) as url,
                training_pod(
                    TINY,
                    "cpu",
                    trainer=TrainerSettings(reward_webhooks=url),
                    max_num_seqs=64,
                    token_budget=1024,
                    num_blocks=4097,
                    max_train_tokens=512,
                    state_snapshots=256,
                ) as made,
            ):
                for seed in map(int, options.seeds.split(",")):
                    run = learn(made.host, name, url, seed, rounds=options.rounds)
                    end_job(made.host)
                    runs.append(run)
                    line = {
                        "environment": name,
                        "seed": seed,
                        "success": [run.success[0][1], run.success[-1][1]],
                        "gain": round(run.gain, 3),
                        "seconds": round(run.seconds, 1),
                        "points": run.success,
                        "turns": [round(step["environment_turns"], 2) for step in run.history],
                        "rewards": [round(step["environment_reward"], 3) for step in run.history],
                    } | environment()
                    file.write(json.dumps(line) + "\n")
                    file.flush()
                    print(json.dumps(line)[:300], flush=True)
    plot(runs, options.out / "environments.png")


if __name__ == "__main__":
    main()
