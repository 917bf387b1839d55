"""`temper forge run|evaluate|importance|prune|compact|recover|quantize|verify`: a smaller model of a checkpoint, by
a recipe or step by step, on this machine's directories."""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from cli.commands import forge_jobs
from cli.local.external_tool import Amount, run_tool
from cli.options import Json
from cli.output import CliError, ExitCode, Output, guarded
from cli.reports.forge import forged, planned_recovery, planned_run, quality, recovered, sizes

app = typer.Typer(name="forge", help="Make a smaller model: by a recipe, or step by step.", no_args_is_help=True)
_MODULE = "services.forge"
_RUNS = "services.pod.forging"


class Method(enum.StrEnum):
    """Way to measure how important a unit is."""

    WEIGHTS = "weights"
    ACTIVATIONS = "activations"
    GRADIENTS = "gradients"
    LEAVE_ONE_OUT = "leave_one_out"
    RANDOM = "random"


class Kind(enum.StrEnum):
    """Kind of units that can be cut out."""

    LAYERS = "layers"
    KV_GROUPS = "kv_groups"
    KEY_HEADS = "key_heads"
    MLP_CHANNELS = "mlp_channels"


class Learn(enum.StrEnum):
    """What a recovery learns from."""

    DISTILL = "distill"
    SFT = "sft"


class Trains(enum.StrEnum):
    """What a recovery trains."""

    NEIGHBOURS = "neighbours"
    LORA = "lora"


class Schedule(enum.StrEnum):
    """Learning rate behind the warm-up."""

    COSINE = "cosine"
    LINEAR = "linear"
    CONSTANT = "constant"


class States(enum.StrEnum):
    """Form of AdamW's moments."""

    FLOAT32 = "float32"
    EIGHT_BIT = "8bit"


class Recompute(enum.StrEnum):
    """What the backward computes again."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class Device(enum.StrEnum):
    """Device that a model runs on."""

    CPU = "cpu"
    CUDA = "cuda"


Model = Annotated[Path, typer.Argument(help="Checkpoint directory.")]
Out = Annotated[Path, typer.Argument(help="Where the checkpoint goes; must not exist.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would come of it.")]
ShardSize = Annotated[float, typer.Option("--max-shard-size", help="Of one safetensors file, in GB.", min=0.01)]
Sign = Annotated[Path | None, typer.Option(help="Ed25519 private key (PEM) that forge.json is signed with.")]
_LEVEL = "a share (25%) or a number of them"


@app.command()
def run(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="Model, data, suites, and what is to go.")],
    work: Annotated[
        Path | None,
        typer.Option(help="Directory of what the stages make; it stays.", show_default="one beside the output"),
    ] = None,
    device: Annotated[Device, typer.Option(help="Where the model runs.")] = Device.CPU,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what it would take and what would come of it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make a smaller model by a recipe: evaluate, measure, cut, recover, evaluate, save.

    Run it again after a break, and it goes on where it was.
    """
    output = Output(as_json=as_json)
    with guarded(output):
        arguments = ["run", "--recipe", str(recipe), "--device", device.value]
        arguments += [] if work is None else ["--work", str(work)]
        arguments += ["--dry-run"] if dry_run else []
        result = run_tool(output, arguments, module=_RUNS, amount="count")
        output.result(result, planned_run(result) if dry_run else forged(result, result["out"]))


@app.command()
def evaluate(
    model: Model,
    suites: Annotated[
        list[Path],
        typer.Option("--suite", metavar="SUITE.jsonl", help="Suite, its settings beside it; or a directory of them."),
    ],
    baseline: Annotated[Path | None, typer.Option(help="Checkpoint directory to compare with, item by item.")] = None,
    work: Annotated[
        Path | None, typer.Option(help="Directory that keeps the answers; a run that was broken off goes on.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of sampled answers.", min=0)] = 0,
    device: Annotated[Device, typer.Option(help="Where the model runs.")] = Device.CPU,
    as_json: Json = False,
) -> None:
    """Run suites on a checkpoint directory, without a server."""
    arguments = ["evaluate", "--model", str(model), "--seed", str(seed), "--device", device.value]
    arguments += ["--suites", *map(str, suites)]
    arguments += [] if baseline is None else ["--baseline", str(baseline)]
    arguments += [] if work is None else ["--work", str(work)]
    _run(arguments, as_json, quality, module=_RUNS, amount="count")


app.command("submit")(forge_jobs.submit)
app.command("show")(forge_jobs.show)
app.command("list")(forge_jobs.list_runs)
app.command("delete")(forge_jobs.delete)


@app.command()
def importance(
    model: Model,
    scores: Annotated[Path, typer.Argument(help="Where the scores go; must not exist.")],
    method: Annotated[Method, typer.Option(help="What a unit's score is.")] = Method.ACTIVATIONS,
    data: Annotated[
        Path | None, typer.Option(help="JSONL with text, messages, or prompt and completion; not for weights, random.")
    ] = None,
    data_name: Annotated[str | None, typer.Option(help="Its name in records.", show_default="the file's")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Read so many tokens of it.", min=1)] = None,
    only: Annotated[list[Kind] | None, typer.Option(help="Kind of units; give it several times.")] = None,
    sample_tokens: Annotated[int, typer.Option(help="Tokens that leave_one_out compares losses on.", min=1)] = 1024,
    tokens_per_forward: Annotated[int, typer.Option(help="Tokens in memory at once.", min=1)] = 4096,
    seed: Annotated[int, typer.Option(help="Of random scores.", min=0)] = 0,
    device: Annotated[Device, typer.Option(help="Where the model runs.")] = Device.CPU,
    as_json: Json = False,
) -> None:
    """Measure how important each layer, head and MLP channel is."""
    arguments = ["importance", "--model", str(model), "--out", str(scores), "--method", method.value]
    arguments += ["--kinds", *(kind.value for kind in only or Kind)]
    arguments += ["--sample-tokens", str(sample_tokens), "--tokens-per-forward", str(tokens_per_forward)]
    arguments += ["--seed", str(seed), "--device", device.value]
    for name, value in (("--data", data), ("--data-name", data_name), ("--max-tokens", max_tokens)):
        arguments += [] if value is None else [name, str(value)]

    def tell(result: dict[str, Any]) -> str:
        on = f", measured on {result['data']['tokens']:,} tokens of {result['data']['name']}" if result["data"] else ""
        return f"wrote [green]{escape(str(scores))}[/]: {', '.join(result['kinds'])} by {result['method']}{escape(on)}"

    _run(arguments, as_json, tell, amount="count")


@app.command()
def prune(
    model: Model,
    scores: Annotated[Path, typer.Argument(help="Scores of `temper forge importance`.")],
    cut: Annotated[Path, typer.Argument(help="Where it goes which units stay; must not exist.")],
    layers: Annotated[str | None, typer.Option(help=f"Layers that go: {_LEVEL}.")] = None,
    kv_groups: Annotated[
        str | None, typer.Option(help=f"KV heads with their query heads that go, of each layer: {_LEVEL}.")
    ] = None,
    key_heads: Annotated[
        str | None, typer.Option(help=f"DeltaNet key heads with their value heads that go, of each layer: {_LEVEL}.")
    ] = None,
    mlp_channels: Annotated[str | None, typer.Option(help=f"MLP channels that go, of each layer: {_LEVEL}.")] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Choose the units that go: those with the lowest scores, in each layer as many as in the others."""
    arguments = ["prune", "--model", str(model), "--scores", str(scores), "--out", str(cut)]
    levels = {Kind.LAYERS: layers, Kind.KV_GROUPS: kv_groups, Kind.KEY_HEADS: key_heads}
    for kind, level in (levels | {Kind.MLP_CHANNELS: mlp_channels}).items():
        arguments += [] if level is None else [f"--{kind.value.replace('_', '-')}", level]
    _run(arguments, as_json, lambda result: _planned(result, cut), dry_run=dry_run)


@app.command()
def compact(
    model: Model,
    cut: Annotated[Path, typer.Argument(help="Cut of `temper forge prune`.")],
    out: Out,
    max_shard_size: ShardSize = 5.0,
    sign: Sign = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Write the checkpoint without the units that go; stock transformers loads it."""
    arguments = ["compact", "--model", str(model), "--cut", str(cut), "--out", str(out)]
    arguments += ["--max-shard-bytes", str(int(max_shard_size * 1e9)), *(["--sign", str(sign)] if sign else [])]
    _run(arguments, as_json, lambda result: _planned(result, out), dry_run=dry_run)


@app.command()
def recover(
    model: Model,
    out: Out,
    data: Annotated[Path, typer.Option(help="JSONL with text, messages, or prompt and completion.")],
    teacher: Annotated[
        Path | None, typer.Option(help="Checkpoint that distill learns from: the one before the cut.")
    ] = None,
    method: Annotated[Learn, typer.Option(help="Learn from a teacher's probabilities, or from the data.")] = (
        Learn.DISTILL
    ),
    trains: Annotated[
        Trains, typer.Option(help="All norms and what is next to the cut, or a low-rank update that is merged.")
    ] = Trains.NEIGHBOURS,
    steps: Annotated[int, typer.Option(help="Optimizer steps, at most.", min=1)] = 200,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of a step.", min=1)] = 4096,
    learning_rate: Annotated[float | None, typer.Option(help="Peak.", show_default="by the model's width")] = None,
    schedule: Annotated[Schedule, typer.Option(help="Of the learning rate, behind the warm-up.")] = Schedule.COSINE,
    warmup_steps: Annotated[int, typer.Option(help="Steps in which the rate rises.", min=0)] = 10,
    on_policy: Annotated[
        float, typer.Option(help="Share of completions that the student samples.", min=0.0, max=1.0)
    ] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of a sampled completion.", min=1)] = 128,
    lora_rank: Annotated[int, typer.Option(help="Rank of what lora trains.", min=1, max=256)] = 16,
    optimizer_states: Annotated[States, typer.Option(help="8bit: a byte for each of AdamW's moments.")] = (
        States.FLOAT32
    ),
    held_out: Annotated[
        Path | None, typer.Option(help="JSONL that is evaluated.", show_default="a tenth of the data")
    ] = None,
    eval_every: Annotated[int, typer.Option(help="Steps between two evaluations.", min=1)] = 25,
    patience: Annotated[
        int | None, typer.Option(help="Stop after so many evaluations without a lower loss.", min=1)
    ] = 4,
    state: Annotated[Path | None, typer.Option(help="Where it resumes from.", show_default="beside the output")] = None,
    save_every: Annotated[int, typer.Option(help="Steps between two states.", min=1)] = 25,
    tokens_per_forward: Annotated[int, typer.Option(help="Tokens in memory at once.", min=1)] = 2048,
    recompute: Annotated[Recompute, typer.Option(help="What the backward computes again.")] = Recompute.SELECTIVE,
    memory: Annotated[float | None, typer.Option(help="Of the device, in GB.", show_default="what is free")] = None,
    data_name: Annotated[str | None, typer.Option(help="Its name in records.", show_default="the file's")] = None,
    seed: Annotated[int, typer.Option(help="Of the data's order and of samples.", min=0)] = 0,
    device: Annotated[Device, typer.Option(help="Where the models run.")] = Device.CPU,
    max_shard_size: ShardSize = 5.0,
    sign: Sign = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what it would take.")] = False,
    as_json: Json = False,
) -> None:
    """Train what a cut has left, and write the checkpoint with the lowest held-out loss. Resumes after an end."""
    beside = state or out.absolute().with_name(f".{out.name}.recovery")
    given: dict[str, Any] = {
        "data": data,
        "data-name": data_name,
        "held-out": held_out,
        "teacher": teacher,
        "state": beside,
        "method": method.value,
        "trains": trains.value,
        "steps": steps,
        "batch-tokens": batch_tokens,
        "tokens-per-forward": tokens_per_forward,
        "max-new-tokens": max_new_tokens,
        "eval-every": eval_every,
        "save-every": save_every,
        "patience": patience,
        "learning-rate": learning_rate,
        "warmup-steps": warmup_steps,
        "schedule": schedule.value,
        "optimizer-states": optimizer_states.value,
        "lora-rank": lora_rank,
        "on-policy": on_policy,
        "recompute": recompute.value,
        "memory-bytes": None if memory is None else int(memory * 1e9),
        "seed": seed,
        "device": device.value,
        "max-shard-bytes": int(max_shard_size * 1e9),
        "sign": sign,
    }
    arguments = ["recover", "--model", str(model), "--out", str(out)]
    for name, value in given.items():
        arguments += [] if value is None else [f"--{name}", str(value)]

    tell = planned_recovery if dry_run else partial(recovered, where=str(out))
    _run(arguments, as_json, tell, dry_run=dry_run, amount="count")


@app.command()
def quantize(
    model: Model,
    out: Out,
    max_shard_size: ShardSize = 5.0,
    sign: Sign = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Write the checkpoint with its matrices in float8, in the format of the published float8 checkpoints."""
    arguments = ["quantize", "--model", str(model), "--out", str(out)]
    arguments += ["--max-shard-bytes", str(int(max_shard_size * 1e9)), *(["--sign", str(sign)] if sign else [])]
    _run(arguments, as_json, lambda result: _planned(result, out), dry_run=dry_run)


@app.command()
def verify(
    model: Annotated[Path, typer.Argument(help="Directory of a forged checkpoint.")],
    key: Annotated[Path, typer.Option(help="Ed25519 public key (PEM) that it must be signed with.")],
    as_json: Json = False,
) -> None:
    """Check a forged checkpoint: signature of its record, digest of each file, and no file beside."""

    def tell(result: dict[str, Any]) -> str:
        steps = " → ".join(result["steps"])
        return f"[green]{escape(str(model))}[/] is what was signed: {result['files']} files, made by {steps}"

    _run(["verify", "--model", str(model), "--key", str(key)], as_json, tell)


def _run(
    arguments: list[str],
    as_json: bool,
    tell: Callable[[dict[str, Any]], str],
    *,
    dry_run: bool = False,
    amount: Amount = "bytes",
    module: str = _MODULE,
) -> None:
    output = Output(as_json=as_json)
    with guarded(output):
        model = Path(arguments[arguments.index("--model") + 1])
        if not (model / "config.json").is_file():
            raise CliError(f"{model} is not a checkpoint directory: it has no config.json", ExitCode.USAGE)
        given = [*arguments, *(["--dry-run"] if dry_run else [])]
        result = run_tool(output, given, module=module, amount=amount)
        output.result(result, tell(result))


def _planned(result: dict[str, Any], out: Path) -> str:
    """Sizes before and after, a line each."""
    first = f"wrote [green]{escape(str(out))}[/]" if result["out"] else "nothing was written; it would be:"
    return "\n".join([first, *sizes(result["plan"])])
