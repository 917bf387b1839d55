"""Quality of forged models against their size: `python -m benchmarks.quality.forge --out forge.json`.

The tiny model loses MLP channels, half of its heads (it has two KV groups and two DeltaNet key heads, so a quarter
cannot go), both, or a layer: chosen by importance, or drawn as a control. Importance of layers is what leaving each out
costs, of other units what their activations are. What is left is distilled from the whole model on problems of its
recipe. All six shipped suites are answered before and after. Seeds draw the calibration data,
the control's units, and the order of the data.

Runs stay in --work and are not done again; one that was broken off goes on. `--no-new` sums up those that are there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.lib.environment import environment, gpu
from benchmarks.lib.random_checkpoint import TINY
from benchmarks.lib.recorder import describe
from benchmarks.quality.suites import Suite, scores
from models.tiny.recipe.data import training_items
from services.common.evaluation.statistics.comparison import compare
from services.common.evaluation.statistics.intervals import estimate
from services.common.evaluation.statistics.scores import Scores
from services.common.jobs import OptimizerSettings
from services.forge.importance.settings import Settings
from services.forge.recovery.recover import recover
from services.forge.recovery.settings import RecoverySettings
from services.forge.steps import compact_step, importance_step, prune_step
from services.forge.units import Kind

CUTS: dict[str, dict[Kind, str]] = {
    "mlp-10": {"mlp_channels": "10%"},
    "mlp-25": {"mlp_channels": "25%"},
    "mlp-40": {"mlp_channels": "40%"},
    "mlp-50": {"mlp_channels": "50%"},
    "heads-50": {"kv_groups": "50%", "key_heads": "50%"},
    "mlp-25-heads-50": {"mlp_channels": "25%", "kv_groups": "50%", "key_heads": "50%"},
    "layer": {"layers": "1"},
}
METHODS = ("importance", "random")
_SAMPLE_TOKENS = 8192
"""On which leaving layers out is measured."""
CALIBRATION, HELD_OUT = 512, 64
"""Examples."""


@dataclass(frozen=True, slots=True)
class Run:
    """One cut and its recovery."""

    cut: str
    method: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.cut}-{self.method}-{self.seed}"

    @property
    def importance(self) -> Settings:
        """How the units that go are found."""
        if self.method == "random":
            return Settings(method="random", seed=self.seed)
        if "layers" in CUTS[self.cut]:
            return Settings(method="leave_one_out", kinds=["layers"], sample_tokens=_SAMPLE_TOKENS)
        return Settings(method="activations")


@dataclass(frozen=True, slots=True)
class Plan:
    """What all runs share."""

    work: Path
    steps: int
    batch_tokens: int
    learning_rate: float
    items: int
    device: str

    def done(self, run: Run) -> dict[str, Any] | None:
        """Result of a run, if there is one."""
        file = self.work / f"{run.name}.json"
        return json.loads(file.read_text()) if file.exists() else None

    def execute(self, run: Run) -> dict[str, Any]:
        """Cuts, recovers and evaluates."""
        torch.set_num_threads(1)
        if (found := self.done(run)) is not None:
            return found
        calibration, data, held_out = self.data(run.seed)
        directory = self.work / run.name
        directory.mkdir(parents=True, exist_ok=True)
        files = {name: directory / name for name in ("scores.json", "cut.json", "cut", "recovered", "state")}
        if not files["scores.json"].exists():
            importance_step(TINY, files["scores.json"], run.importance, data=calibration, device=self.device)
        if not files["cut.json"].exists():
            prune_step(TINY, files["scores.json"], files["cut.json"], CUTS[run.cut])
        if not files["cut"].exists():
            compact_step(TINY, files["cut.json"], files["cut"])
        plan = json.loads((files["cut"] / "forge.json").read_text())["plan"]
        suites = Suite.shipped(self.items)
        before = scores(files["cut"], suites, device=self.device)
        report = recover(
            files["cut"],
            files["recovered"],
            RecoverySettings(
                method="distill",
                trains="neighbours",
                steps=self.steps,
                batch_tokens=self.batch_tokens,
                tokens_per_forward=min(self.batch_tokens, 1024 if self.device == "cpu" else 8192),
                optimizer=OptimizerSettings(
                    learning_rate=self.learning_rate, schedule="cosine", warmup_steps=min(10, self.steps // 4)
                ),
                eval_every=max(1, self.steps // 4),
                recompute="none",
                seed=run.seed,
                device=self.device,
                dtype="float32",
            ),
            data=data,
            held_out=held_out,
            teacher=TINY,
            state=files["state"],
        )
        if report is None:
            raise RuntimeError("nobody stops a recovery here")
        result = {
            **asdict(run),
            "gpu": None if (card := gpu()) is None else card["name"],
            "parameters": plan["parameters"],
            "parameters_after": plan["parameters_after"],
            "recovery": {key: value for key, value in report.summary().items() if key != "out"},
            "before": before,
            "after": scores(files["recovered"], suites, device=self.device),
        }
        (self.work / f"{run.name}.json").write_text(json.dumps(result))
        return result

    def tried(self, run: Run) -> tuple[Run, dict[str, Any] | str]:
        """The run with its result, or with what failed: the others are still wanted."""
        try:
            return run, self.execute(run)
        except Exception as error:
            return run, describe(error)

    def data(self, seed: int) -> tuple[Path, Path, Path]:
        """Files of a seed: calibration, what is learnt, what is held out."""
        return (
            self.work / f"calibration-{seed}.jsonl",
            self.work / f"learnt-{seed}.jsonl",
            self.work / f"held-out-{seed}.jsonl",
        )

    def prepare(self, seed: int) -> None:
        """Writes them."""
        counts = (CALIBRATION, self.steps * self.batch_tokens // 64, HELD_OUT)
        for file, count in zip(self.data(seed), counts, strict=True):
            rows = islice(examples(f"forge {file.stem}"), count)
            file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def examples(seed: str) -> Iterator[dict[str, Any]]:
    """Problems of the recipe that no suite has, with the answers that the tiny model was taught."""
    for item in training_items(seed):
        if not item.thinking:
            answer = {"role": "assistant", "content": item.completion()}
            yield {"messages": [*item.messages, answer]} | ({"tools": item.tools} if item.tools else {})


def flat(found: Mapping[str, list[float]]) -> list[float]:
    """Scores of all suites, one behind the other."""
    return [score for name in sorted(found) for score in found[name]]


def summary(runs: list[dict[str, Any]], base: Mapping[str, list[float]]) -> dict[str, Any]:
    """Of each cut: accuracies by seed, shares of the base's, and importance against random, item by item over all
    seeds."""
    whole = fmean(flat(base))
    found: dict[str, Any] = {"base": {"accuracy": whole, "suites": {name: fmean(base[name]) for name in sorted(base)}}}
    cuts: dict[str, Any] = {}
    for cut in CUTS:
        of = {method: [run for run in runs if (run["cut"], run["method"]) == (cut, method)] for method in METHODS}
        if not any(of.values()):
            continue
        one = next(run for several in of.values() for run in several)
        cuts[cut] = {"parameters_share": one["parameters_after"] / one["parameters"]}
        for method, several in of.items():
            if several:
                cuts[cut][method] = {stage: _stage(several, stage, whole) for stage in ("before", "after")} | {
                    "suites": {name: fmean(fmean(run["after"][name]) for run in several) for name in sorted(base)}
                }
        seeds = sorted({run["seed"] for run in of["importance"]} & {run["seed"] for run in of["random"]})
        for stage in ("before", "after") if seeds else ():
            common = {method: [run for run in several if run["seed"] in seeds] for method, several in of.items()}
            result = compare(_by_item(common["random"], stage), _by_item(common["importance"], stage))
            cuts[cut][f"importance_against_random_{stage}"] = {
                "effect": result.effect,
                "interval": [result.interval.low, result.interval.high],
                "p": result.p,
                "test": result.test,
                "seeds": seeds,
            }
    return found | {"cuts": cuts}


def _stage(runs: list[dict[str, Any]], stage: str, whole: float) -> dict[str, Any]:
    means = [fmean(flat(run[stage])) for run in runs]
    interval = estimate(_by_item(runs, stage)).interval
    return {
        "accuracy": fmean(means),
        "by_seed": {str(run["seed"]): mean for run, mean in zip(runs, means, strict=True)},
        "interval": [interval.low, interval.high],
        "share_of_base": fmean(means) / whole,
    }


def _by_item(runs: list[dict[str, Any]], stage: str) -> Scores:
    """Of each item the mean over the seeds."""
    return Scores([fmean(several) for several in zip(*(flat(run[stage]) for run in runs), strict=True)])


def main() -> None:
    """Runs what is missing and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("forge-runs"))
    parser.add_argument("--cuts", nargs="+", choices=CUTS, default=list(CUTS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--items", type=int, default=200, help="of each suite")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1, help="runs at once")
    parser.add_argument("--no-new", action="store_true", help="only sum up the runs that are there")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    plan = Plan(args.work, args.steps, args.batch_tokens, args.learning_rate, args.items, args.device)
    runs = [Run(cut, method, seed) for seed in args.seeds for cut in args.cuts for method in args.methods]
    if args.no_new:
        found = [done for run in runs if (done := plan.done(run)) is not None]
    else:
        for seed in args.seeds:
            plan.prepare(seed)
        with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
            found = []
            for run, result in pool.imap_unordered(plan.tried, runs):
                if isinstance(result, str):
                    print(f"{run.name} failed: {result}", flush=True)
                    continue
                before, after = (fmean(flat(result[stage])) for stage in ("before", "after"))
                seconds = round(result["recovery"]["seconds"])
                print(f"{run.name}: {before:.3f} → {after:.3f}, recovered in {seconds} s", flush=True)
                found.append(result)
    base = scores(TINY, Suite.shipped(args.items), device=args.device)
    settings = {key: value for key, value in vars(args).items() if key not in ("out", "work", "no_new")}
    kept = [{key: value for key, value in run.items() if key not in ("before", "after")} for run in found]
    content = {"environment": environment(), "settings": settings, **summary(found, base), "runs": kept}
    args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
