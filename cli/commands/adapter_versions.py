"""`temper adapters rollback|prune|merge|extract|convert`: what is done with versions that exist."""

from __future__ import annotations

import contextlib
import enum
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.commands.adapters import attach_version, published, save, split
from cli.http.chat_stream import served_model
from cli.http.client import Client, path
from cli.http.job_events import conclude, watch
from cli.job_files import read_text
from cli.local.external_tool import run_tool
from cli.options import Json, Url, connected
from cli.output import CliError, ExitCode, Output, guarded
from cli.reports import receipt as receipts
from cli.reports.verification import PROMPTS, Movement, over_bounds, verification
from cli.settings import CliSettings, read
from services.common.adapters.receipts import Receipt
from services.common.security.signature import read_public_key

_ALTERNATIVES = 20
"""Likeliest tokens of each position that are compared."""


class Dtype(enum.StrEnum):
    """Element type of an extracted checkpoint."""

    BASE = "base"
    FLOAT32 = "float32"


class Form(enum.StrEnum):
    """Form of the keys in adapter_model.safetensors."""

    TEXT = "text"
    MULTIMODAL = "multimodal"


Source = Annotated[
    str,
    typer.Argument(
        metavar="NAME[@VERSION]|DIRECTORY",
        help="An adapter of a running Temper, or a directory with PEFT's files, written with a slash: ./polite-3.",
    ),
]


def rollback(
    name: Annotated[str | None, typer.Argument(help="The adapter; without it: only what is attached moves.")] = None,
    to: Annotated[int | None, typer.Option(help="The version to go back to; default: the one before.", min=1)] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Go back to an earlier version: the adapter's current one, and what is attached if that is newer."""

    def work(client: Client, output: Output) -> None:
        if name is None:
            _attach_earlier(client, output, to)
            return
        plain, number = split(name)
        if number is not None:
            raise CliError(f"say it as: temper adapters rollback {plain} --to {number}", ExitCode.USAGE)
        answer = client.post(path("v1", "adapters", name, "rollback"), {} if to is None else {"version": to})
        attached = f", attached {answer['attached']}" if answer.get("attached") else ""
        output.result(answer, f"{answer['before']} → [green]{answer['current']}[/] is current{attached}")

    connected(url, as_json, work)


def _attach_earlier(client: Client, output: Output, to: int | None) -> None:
    """Attaches an earlier version of what is attached; which version is current stays."""
    attached = client.get("/v1/adapters").get("attached")
    if attached is None:
        raise CliError("nothing is attached: there is nothing to roll back; `temper adapters attach` chooses a version")
    now, number = split(attached)
    target = to
    if target is None:
        versions = client.get(path("v1", "adapters", now, "versions"))["data"]
        earlier = [one["version"] for one in versions if one["version"] < (number or 0)]
        if not earlier:
            raise CliError(f"{attached} is the first version of {now}; `temper adapters detach` goes back to the base")
        target = max(earlier)
    attach_version(client, output, now, target)


def prune(
    name: Annotated[str, typer.Argument(help="The adapter.")],
    keep: Annotated[int | None, typer.Option(help="Keep that many of the newest versions.", min=1)] = None,
    days: Annotated[float | None, typer.Option(help="Keep versions that are younger than this.", min=0)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Remove old versions: never the current one, an attached one, or one that an unfinished job needs."""

    def work(client: Client, output: Output) -> None:
        split(name)
        if keep is None and days is None:
            raise CliError("say what to keep: --keep VERSIONS, --days DAYS, or both", ExitCode.USAGE)
        body = {"keep": keep, "days": days, "dry_run": dry_run}
        answer = client.post(path("v1", "adapters", name, "prune"), {k: v for k, v in body.items() if v is not None})
        verb = "would remove" if dry_run else "removed"
        removed = ", ".join(answer["removed"]) or "nothing"
        lines = [f"{verb} [yellow]{removed}[/] ({answer['freed_bytes'] / 2**20:.1f} MiB)"]
        lines += [f"  kept {one['version']}: {one['reason']}" for one in answer["kept"]]
        output.result(answer, "\n".join(lines))

    connected(url, as_json, work)


def merge(
    name: Annotated[str, typer.Argument(help="The adapter that gets a new version.")],
    sources: Annotated[
        list[str], typer.Option("--from", metavar="NAME[@VERSION][:WEIGHT]", help="A parent; give it several times.")
    ],
    method: Annotated[str, typer.Option(help="weighted, svd, ties, dare_linear or dare_ties.")] = "weighted",
    rank: Annotated[int | None, typer.Option(help="Of the result; weighted is exact without.", min=1)] = None,
    density: Annotated[float | None, typer.Option(help="Share of entries kept (ties, dare_*).")] = None,
    scale: Annotated[float, typer.Option(help="The result times this.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of what dare_* drops.", min=0)] = 0,
    attach: Annotated[bool, typer.Option("--attach", help="Attach the result, too.")] = False,
    idempotency_key: Annotated[str | None, typer.Option(help="The same key returns the same job.")] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Follow it to its end.")] = True,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Merge several adapters into a new version: a job of the engine, followed to its end."""

    def work(client: Client, output: Output) -> None:
        split(name)
        body: dict[str, Any] = {"sources": [parse_source(source) for source in sources], "method": method}
        body |= {"scale": scale, "seed": seed, "attach": attach}
        body |= {key: value for key, value in (("rank", rank), ("density", density)) if value is not None}
        headers = {} if idempotency_key is None else {"idempotency-key": idempotency_key}
        job = client.post(path("v1", "adapters", name, "merge"), body, headers=headers)
        if not wait:
            output.result(job, f"{job['id']} queued; follow it with: temper train watch {job['id']}")
            return
        done = watch(client, output, str(job["id"]), timeout=None)
        conclude(output, done)
        worst, mean = (done.get("metrics", {}).get(f"merge_error_{which}") for which in ("max", "mean"))
        if worst is not None and mean is not None and not as_json:
            output.out.print(f"the rank cuts off {mean:.2%} of a layer's delta on average, {worst:.2%} at most")

    connected(url, as_json, work)


def parse_source(text: str) -> dict[str, Any]:
    """NAME[@VERSION][:WEIGHT] as the API takes it."""
    ref, colon, weight = text.partition(":")
    split(ref)
    if not colon:
        return {"adapter": ref}
    try:
        return {"adapter": ref, "weight": float(weight)}
    except ValueError as error:
        raise CliError(
            f"--from {text}: the weight {weight!r} is not a number, as in polite@3:0.7", ExitCode.USAGE
        ) from error


def receipt(
    ref: Annotated[str, typer.Argument(metavar="NAME[@VERSION]", help="A version that a job made.")],
    verify: Annotated[
        Path | None,
        typer.Option(
            metavar="KEY.pem",
            help="Check the signature with this public key, and the version's files by their digests.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write it to a file, for `temper train replay`.")] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Tell what a version was made of: base, parents, data, code, seeds, settings, device, and the signature."""

    def work(client: Client, output: Output) -> None:
        name, version = published(client, ref)
        document = fetched(client, name, version)
        found = Receipt.of(document)
        text = receipts.receipt(document)
        if verify is not None:
            found.check(read_public_key(verify))
            _check_files(client, name, version, found.content)
            text += "\n[green]verified[/]: the signature is of this key, and the files are those of the receipt"
        if out is not None:
            out.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            text += f"\nwritten to {out}"
        output.result(document, text)

    connected(url, as_json, work)


def fetched(client: Client, name: str, version: int) -> dict[str, Any]:
    """The receipt of a version with its signature. Raises CliError: it has none."""
    document: dict[str, Any] = client.get(path("v1", "adapters", name, "versions", str(version), "receipt"))
    return document


def _check_files(client: Client, name: str, version: int, content: Mapping[str, Any]) -> None:
    """Raises CliError: the receipt is another version's, or a file is not what it says."""
    if content["version"] != f"{name}@{version}":
        raise CliError(f"the receipt is that of {content['version']}, not of {name}@{version}")
    with tempfile.TemporaryDirectory(prefix="temper-") as scratch:
        saved = save(client, name, version, Path(scratch))
        found = {file: hashlib.sha256((Path(scratch) / file).read_bytes()).hexdigest() for file in saved}
    if found != content["files"]:
        raise CliError(f"the files of {name}@{version} are not those of its receipt")


def verify(
    ref: Annotated[str, typer.Argument(metavar="NAME[@VERSION]", help="A version of an adapter.")],
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts to answer, one a line; default: eight that stay the same.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of an answer, at most.", min=1, max=512)] = 32,
    max_kl: Annotated[float | None, typer.Option(help="Bound of the mean KL a token, in nats.", min=0)] = None,
    max_token_kl: Annotated[float | None, typer.Option(help="Bound of the largest KL of a token.", min=0)] = None,
    max_shift: Annotated[
        float | None, typer.Option(help="Bound of the largest shift of log-probability.", min=0)
    ] = None,
    max_norm: Annotated[float | None, typer.Option(help="Bound of the norm of all that it adds.", min=0)] = None,
    min_agreement: Annotated[
        float | None, typer.Option(help="Least share of tokens that are the likeliest of both.", min=0, max=1)
    ] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Tell how far a version moves the base model on fixed prompts; exit code 1 if it is over a bound."""

    def work(client: Client, output: Output) -> None:
        name, version = published(client, ref)
        asked = PROMPTS if prompts is None else tuple(filter(None, map(str.strip, read_text(prompts).splitlines())))
        try:
            figures: dict[str, Any] = dict(moved(client, f"{name}@{version}", asked, tokens).figures())
        except ValueError as error:
            raise CliError(f"{name}@{version}: {error}") from error
        with tempfile.TemporaryDirectory(prefix="temper-") as scratch:
            save(client, name, version, Path(scratch))
            figures |= run_tool(output, ["norms", "--adapter", scratch])
        answer = {"version": f"{name}@{version}", "prompts": len(asked), **figures}
        if not answer["finite"]:
            raise CliError(
                f"{name}@{version} has numbers that are not finite", error={"message": "not finite", **answer}
            )
        bounds = {
            "kl_mean": max_kl,
            "kl_max": max_token_kl,
            "largest_shift": max_shift,
            "norm": max_norm,
            "agreement": min_agreement,
        }
        over = over_bounds(figures, bounds)
        if over:
            if not as_json:
                output.out.print(verification(answer), soft_wrap=True)
            raise CliError("; ".join(over), error={"message": "; ".join(over), **answer})
        output.result(answer, verification(answer))

    connected(url, as_json, work)


def moved(client: Client, version: str, prompts: Sequence[str], tokens: int) -> Movement:
    """How far a version moves the base model, on what that answers greedily to each prompt.

    Raises:
        ValueError: see Movement.add.
    """
    found = Movement()
    model = served_model(client)
    for prompt in prompts:
        chat = {"messages": [{"role": "user", "content": prompt}], "return_token_ids": True}
        said = client.post(
            "/v1/chat/completions",
            {"model": model, "adapter": "base", "temperature": 0, "max_tokens": tokens, "n": 1, **chat},
        )
        asked, answered = said["prompt_token_ids"], said["choices"][0]["token_ids"]
        told = []
        for adapter in ("base", version):
            body = {"model": model, "adapter": adapter, "prompt": [*asked, *answered], "max_tokens": 1}
            choice = client.post("/v1/completions", {**body, "prompt_logprobs": _ALTERNATIVES})["choices"][0]
            places = choice["prompt_logprobs"][len(asked) :]
            told.append([{int(token): one["logprob"] for token, one in place.items()} for place in places])
        found.add(*told)
    return found


def extract(
    source: Source,
    out: Annotated[Path, typer.Argument(help="Where the checkpoint goes; must not exist.")],
    base: Annotated[Path, typer.Option(help="Directory of the base checkpoint, on this machine.")],
    dtype: Annotated[Dtype, typer.Option(help="base: as the base has it; float32: nothing is rounded.")] = Dtype.BASE,
    max_shard_size: Annotated[float, typer.Option(help="Of one safetensors file, in GB.", min=0.01)] = 5.0,
    any_base: Annotated[bool, typer.Option("--any-base", help="Compare shapes only, not the base's digest.")] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Write base model and adapter as one checkpoint that transformers loads without PEFT."""
    output = Output(as_json=as_json)
    with guarded(output), _directory(source, url) as directory:
        arguments = [
            "extract",
            "--adapter",
            str(directory),
            "--base",
            str(base),
            "--out",
            str(out),
            "--dtype",
            dtype.value,
        ]
        arguments += ["--max-shard-bytes", str(int(max_shard_size * 1e9))]
        result = run_tool(output, [*arguments, *(["--any-base"] if any_base else [])])
        text = (
            f"wrote [green]{out}[/]: {result['bytes'] / 1e9:.2f} GB in {result['shards']} shards, "
            f"{result['adapted_layers']} layers changed; rounding to its dtype takes "
            f"{result['rounding_mean']:.2%} of a layer's delta on average, {result['rounding_max']:.2%} at most"
        )
        output.result(result, text)


def convert(
    source: Source,
    out: Annotated[Path, typer.Argument(help="Where the PEFT files go; must not exist.")],
    to: Annotated[Form, typer.Option(help="text: AutoModelForCausalLM; multimodal: Qwen3_5ForConditionalGeneration.")],
    base: Annotated[
        Path | None, typer.Option(help="Directory of the base checkpoint, to check every tensor against.")
    ] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Rename an adapter's tensors for the other class that loads the model."""
    output = Output(as_json=as_json)
    with guarded(output), _directory(source, url) as directory:
        arguments = ["convert", "--adapter", str(directory), "--out", str(out), "--to", to.value]
        result = run_tool(output, [*arguments, *(["--base", str(base)] if base is not None else [])])
        output.result(result, f"wrote [green]{out}[/]: keys of the form {result['to']}, were {result['from']}")


@contextlib.contextmanager
def _directory(source: str, url: str | None) -> Iterator[Path]:
    """The directory that a source names, or one with the files of a version of a running Temper."""
    if os.sep in source or source in (".", ".."):
        yield Path(source)
        return
    name, version = split(source)
    with tempfile.TemporaryDirectory(prefix="temper-") as scratch, Client(url, read(CliSettings)) as client:
        save(client, name, version, Path(scratch))
        yield Path(scratch)
