"""`temper train`: submit, look at, follow and cancel training jobs."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from cli import job_files
from cli.commands.adapter_versions import fetched
from cli.commands.adapters import split
from cli.http.client import Client, path
from cli.http.job_events import TERMINAL, conclude, watch
from cli.options import Json, Url, connected
from cli.output import CliError, ExitCode, Output
from cli.reports.dry_run import dry_run as dry_run_text
from cli.reports.receipt import differences
from services.common.adapters.receipts import Receipt, joined, parted
from services.common.jobs import JOBS

app = typer.Typer(name="train", help="Submit, watch and cancel training jobs.", no_args_is_help=True)

JobId = Annotated[str, typer.Argument(metavar="JOB", help="A job id.")]
Timeout = Annotated[float | None, typer.Option(help="Seconds to wait for the end; exit code 4 after that.", min=0)]


@app.command()
def submit(
    target: Annotated[
        str, typer.Argument(metavar=f"FILE|{'|'.join(JOBS)}", help='A JSON job with "kind", or a kind with its data.')
    ],
    data: Annotated[
        Path | None, typer.Option(help="JSONL: examples, scored completions (grpo), or prompts (opd).")
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(metavar="NAME[@VERSION]", help="A data set to learn from, in the place of --data."),
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="The adapter that gets a new version.")] = None,
    start_from: Annotated[str | None, typer.Option(help='"name", "name@3" or "base".')] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            show_default="at 4B: sft 2e-4, dpo and kto 2e-5, grpo 4e-5, opd and draft 1e-4; higher for smaller models"
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="sft and draft 3, or as many as make 30 steps; dpo and kto 1, or 20 steps; "
            "grpo and opd 1 a round",
        ),
    ] = None,
    attach: Annotated[bool | None, typer.Option("--attach/--no-attach", help="Answer with the result at once.")] = None,
    candidate: Annotated[
        bool, typer.Option("--candidate", help="Publish the result for a canary to try; nothing else answers with it.")
    ] = False,
    gain: Annotated[
        list[str] | None,
        typer.Option(metavar="SUITE[=MIN]", help="Publish only if it is better on this suite; repeatable."),
    ] = None,
    no_loss: Annotated[
        list[str] | None,
        typer.Option(metavar="SUITE=MAX", help="Publish only if it loses less than this there; repeatable."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any field, e.g. --set lora.rank=8.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only find out what it would do: data, masks, rewards, time, memory.")
    ] = False,
    idempotency_key: Annotated[str | None, typer.Option(help="The same key returns the same job.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow it to its end; exit code 1 if it fails.")] = False,
    timeout: Timeout = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Submit a training job."""

    def work(client: Client, output: Output) -> None:
        options = {
            "adapter": adapter,
            "dataset": dataset,
            "start_from": start_from,
            "learning_rate": learning_rate,
            "epochs": epochs,
            "attach": attach,
            **({"candidate": True, "attach": False} if candidate else {}),
            **({"dry_run": True} if dry_run else {}),
        }
        job = build(target, data, {key: value for key, value in options.items() if value is not None})
        if gain or no_loss:
            job["publish_if"] = {**(job.get("publish_if") or {}), **conditions(gain or (), no_loss or ())}
        job_files.apply_settings(job, settings or [])
        job_files.check(job)
        headers = {} if idempotency_key is None else {"idempotency-key": idempotency_key}
        kind = job.pop("kind")
        accepted = client.post(path("v1", "train", kind), job, headers=headers)
        if dry_run:
            done = watch(client, output, str(accepted["id"]), timeout=timeout)
            output.result(done, dry_run_text(done))
            return
        if not wait:
            output.result(accepted, f"{accepted['id']} queued; follow it with: temper train watch {accepted['id']}")
            return
        conclude(output, watch(client, output, str(accepted["id"]), timeout=timeout))

    connected(url, as_json, work)


@app.command()
def replay(
    source: Annotated[
        str, typer.Argument(metavar="FILE|NAME@VERSION", help="A receipt in a file, or a version that has one.")
    ],
    data: Annotated[
        Path | None,
        typer.Option(help="What the job learnt from, unless a data set: JSONL, or the job as a JSON file."),
    ] = None,
    adapter: Annotated[
        str | None, typer.Option(help="The adapter that gets the new version; default: the receipt's.")
    ] = None,
    timeout: Timeout = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Do a job again by its receipt, and compare: exit code 1 if the weights are not the same bit by bit.

    The result is a candidate: nothing answers with it unless it is named.
    """

    def work(client: Client, output: Output) -> None:
        before = _receipt(client, source)
        job = replayed(before, data)
        if adapter is not None:
            job["adapter"] = adapter
        job_files.check(job)
        kind = job.pop("kind")
        accepted = client.post(path("v1", "train", kind), job)
        done = watch(client, output, str(accepted["id"]), timeout=timeout)
        name, number = split(str(done["result_adapter"]))
        after = Receipt.of(fetched(client, name, number or 0)).content
        same, told = before["digest"] == after["digest"], differences(before, after)
        answer = {"replayed": before["version"], "as": after["version"], "same": same, "differences": told}
        if same:
            output.result(answer, f"[green]the same[/]: {after['version']} has the weights of {before['version']}")
            return
        lines = "".join(f"\n  {one}" for one in told) or "\n  nothing that the receipts tell"
        raise CliError(
            f"{after['version']} is not {before['version']} ({after['digest'][:12]}, {before['digest'][:12]}); "
            f"different between them:{lines}",
            error={"message": "the weights differ", **answer},
        )

    connected(url, as_json, work)


def _receipt(client: Client, source: str) -> dict[str, Any]:
    if Path(source).is_file():
        return dict(Receipt.read(Path(source).read_bytes()).content)
    name, number = split(source)
    if number is None:
        raise CliError(f"{source} is no file, and no version either: say it as NAME@VERSION", ExitCode.USAGE)
    return dict(Receipt.of(fetched(client, name, number)).content)


def replayed(receipt: dict[str, Any], data: Path | None) -> dict[str, Any]:
    """The job that a receipt is of, with its data, to be published as a candidate.

    Raises:
        CliError: it was no training job, or its data are missing.
    """
    spec = dict(receipt["job"]["spec"])
    if (kind := spec.get("kind")) not in JOBS:
        raise CliError(f"{receipt['version']} came of a job of kind {kind}: only training is done again")
    for name in ("publish_if", "attach_if", "draft", "dataset_digest"):
        spec.pop(name, None)
    parents = [one["version"] for one in receipt["parents"]]
    spec |= {"attach": False, "candidate": True, "start_from": parents[0] if parents else "base"}
    if (learnt := receipt["data"]["dataset"]) is not None:
        if data is not None:
            raise CliError(f"the job learnt from {learnt['version']}: leave --data out", ExitCode.USAGE)
        return {**spec, "dataset": learnt["version"]}
    if data is None:
        raise CliError("a receipt has no data of the job's own: give --data what it learnt from", ExitCode.USAGE)
    rows = job_files.data(str(kind), data) if data.suffix == ".jsonl" else parted(job_files.read_job(data))[1]
    return joined(spec, rows)


def conditions(gain: Sequence[str], no_loss: Sequence[str]) -> dict[str, Any]:
    """Conditions of a job on suites, as the command line has them.

    Raises:
        CliError: one has no number, or something else in its place.
    """
    found: dict[str, Any] = {}
    for field, bound, texts in (("gain", "min_gain", gain), ("no_loss", "max_loss", no_loss)):
        for text in texts:
            suite, given, number = text.partition("=")
            if not given and field == "no_loss":
                raise CliError(f"--no-loss {text} needs the loss to rule out, as in {suite}=0.03", ExitCode.USAGE)
            try:
                limits = {bound: float(number)} if given else {}
            except ValueError as error:
                raise CliError(f"{text}: {number!r} is no number, as in {suite}=0.03", ExitCode.USAGE) from error
            found.setdefault(field, []).append({"suite": suite, **limits})
    return found


def build(target: str, data: Path | None, options: dict[str, Any]) -> dict[str, Any]:
    """The job of a command line: a file, or a kind with a data file. Options win over the file.

    Raises:
        CliError: they do not make a job.
    """
    if target in JOBS:
        if data is not None and "dataset" in options:
            raise CliError("--data and --dataset exclude each other: both are what is learnt from", ExitCode.USAGE)
        if data is None and "dataset" not in options:
            raise CliError(f"temper train submit {target} needs --data FILE.jsonl or --dataset NAME", ExitCode.USAGE)
        if "adapter" not in options:
            raise CliError(f"temper train submit {target} needs --adapter NAME", ExitCode.USAGE)
        return {"kind": target, **({} if data is None else job_files.data(target, data)), **options}
    if data is not None:
        kinds = ", ".join(JOBS)
        what = "a job file has its own data" if Path(target).exists() else f"{target!r} is none"
        raise CliError(f"--data goes with a kind ({kinds}); {what}", ExitCode.USAGE)
    return {**job_files.read_job(Path(target)), **options}


@app.command()
def status(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="A job id; without it: the newest jobs.")] = None,
    limit: Annotated[int, typer.Option(help="How many jobs to list.", min=1, max=1000)] = 20,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """One job, or the newest ones."""

    def work(client: Client, output: Output) -> None:
        if job is not None:
            one = client.get(path("v1", "train", "jobs", job))
            output.result(one, _describe(one))
            return
        answer = client.get("/v1/train/jobs", limit=limit)
        rows = [
            [one["id"], one["kind"], one["adapter"], one["state"], _steps(one), one.get("result_adapter") or ""]
            for one in answer["data"]
        ]
        columns = ["job", "kind", "adapter", "state", "steps", "result"]
        output.table(answer, columns, rows, empty="No jobs yet: submit one with `temper train submit`.")

    connected(url, as_json, work)


def _steps(job: dict[str, Any]) -> str:
    progress = job.get("progress") or {}
    return f"{progress.get('step', 0)}/{progress.get('total_steps', 0)}"


def _describe(job: dict[str, Any]) -> str:
    colour = {"succeeded": "green", "failed": "red", "cancelled": "yellow"}.get(job["state"], "cyan")
    state = f"{job['state']}, paused" if job.get("paused") else job["state"]
    lines = [f"[bold]{job['id']}[/]  {job['kind']} → {job['adapter']}  [{colour}]{state}[/]"]
    lines.append(f"  steps     {_steps(job)}, attempt {job.get('attempts', 0)}")
    created = datetime.datetime.fromtimestamp(job["created_at"]).strftime("%Y-%m-%d %H:%M:%S")
    lines.append(f"  created   {created}")
    if job.get("settings"):
        lines.append("  settings  " + "  ".join(f"{key} {value:.4g}" for key, value in job["settings"].items()))
    if job.get("dataset"):
        lines.append(f"  learns    {job['dataset']} ({str(job['dataset_digest'])[:12]})")
    if job.get("parent"):
        lines.append(f"  from      {job['parent']}")
    if job.get("metrics"):
        lines.append("  metrics   " + "  ".join(f"{key} {value:.4g}" for key, value in job["metrics"].items()))
    if job.get("evaluation"):
        lines.append(f"  gates     temper eval show {job['evaluation']}")
    if job.get("result_adapter"):
        lines.append(f"  result    {job['result_adapter']}")
    if job.get("reason"):
        lines.append(f"  reason    {job['reason']}")
    lines.extend(f"  note      {note}" for note in job.get("notes") or ())
    return "\n".join(lines)


@app.command("watch")
def watch_job(job: JobId, timeout: Timeout = None, url: Url = None, as_json: Json = False) -> None:
    """Follow a job to its end; exit code 1 if it fails or is cancelled."""

    def work(client: Client, output: Output) -> None:
        conclude(output, watch(client, output, job, timeout=timeout))

    connected(url, as_json, work)


@app.command()
def cancel(job: JobId, url: Url = None, as_json: Json = False) -> None:
    """Cancel a job: a queued one at once, a running one after its present step."""

    def work(client: Client, output: Output) -> None:
        answer = client.post(path("v1", "train", "jobs", job, "cancel"))
        state = answer["state"]
        text = f"{job} is {state}" if state in TERMINAL else f"{job} is {state}; it stops after its present step"
        output.result(answer, text)

    connected(url, as_json, work)


@app.command()
def pause(job: JobId, url: Url = None, as_json: Json = False) -> None:
    """Pause a job: it keeps its checkpoint, and leaves the engine to others."""

    def work(client: Client, output: Output) -> None:
        answer = client.post(path("v1", "train", "jobs", job, "pause"))
        text = "is paused" if answer["state"] == "queued" else "pauses after its present step"
        output.result(answer, f"{job} {text}; go on with: temper train resume {job}")

    connected(url, as_json, work)


@app.command()
def resume(job: JobId, url: Url = None, as_json: Json = False) -> None:
    """Let a paused job go on from its checkpoint."""

    def work(client: Client, output: Output) -> None:
        answer = client.post(path("v1", "train", "jobs", job, "resume"))
        output.result(answer, f"{job} is {answer['state']}")

    connected(url, as_json, work)
