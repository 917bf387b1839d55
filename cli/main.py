"""The `temper` command: its tree of commands. What they do is in a module each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from cli.agent.command import agent
from cli.agent.command import run as run_agent
from cli.commands import adapter_versions as adapter_tools
from cli.commands import adapters, batch, forge, keys, sessions, train
from cli.commands.chat import chat
from cli.commands.evaluation import runs as evaluation
from cli.commands.learning import canaries, datasets, environments, feedback, learners
from cli.commands.operations import config, engine, kernels, webhooks
from cli.commands.operations import context as contexts
from cli.commands.operations.bench import bench
from cli.commands.operations.doctor import doctor
from cli.commands.operations.examples import add_examples
from cli.commands.operations.logs import logs
from cli.commands.operations.ps import ps
from cli.commands.operations.pull import pull_model
from cli.commands.operations.serve import serve
from cli.commands.tune import tune
from cli.local.model_directory import in_own_store, model_directory
from cli.options import Device, Dtype, Host, InDtype, Json, Model, OnDevice, Port, ServedModelName, defaults
from cli.output import Output, guarded
from services.common.telemetry.process import installed_version


def _print_version(asked: bool) -> None:
    if asked:
        Output(as_json=False).out.print(installed_version())
        raise typer.Exit


class _Commands(TyperGroup):
    """The tree of commands. With --json an error of the command line is a document, as errors of commands are."""

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **extra: Any) -> Any:
        given = list(args)
        with _errors_of(given):
            context = super().make_context(info_name, args, *more, **extra)
        context.meta[__name__] = given
        return context

    def invoke(self, ctx: Any) -> Any:
        with _errors_of(ctx.meta[__name__]):
            return super().invoke(ctx)


@contextlib.contextmanager
def _errors_of(arguments: list[str]) -> Iterator[None]:
    try:
        yield
    except TyperException as error:
        if "--json" in arguments:
            Output(as_json=True).json({"error": {"message": error.format_message()}})
        raise


app = typer.Typer(
    name="temper",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def options(
    context: typer.Context,
    url: Annotated[
        str | None, typer.Option(help="The gateway, for every command that talks to one.", show_default="TEMPER_URL")
    ] = None,
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Serve Qwen3.5 and keep learning while serving."""
    output = Output(as_json=False)
    with guarded(output):
        context.default_map = defaults(context.command, url)


@app.command()
def up(
    model: Model = None,
    served_model_name: ServedModelName = None,
    host: Host = "127.0.0.1",
    port: Port = 8420,
    device: OnDevice = Device.AUTO,
    dtype: InDtype = Dtype.AUTO,
    data_dir: Annotated[Path, typer.Option(help="Stores, logs and checkpoints live here.")] = Path(".temper"),
    engines: Annotated[
        int, typer.Option(help="Engines behind the gateway, each with a GPU of its own.", min=1, max=16)
    ] = 1,
    gateways: Annotated[
        int,
        typer.Option(
            help="Gateways on the one port; 0: one, or as many as engines where those have GPUs.", min=0, max=16
        ),
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the ready line as JSON.")] = False,
    no_keys: Annotated[
        bool, typer.Option("--no-keys", help="Let everybody who reaches --host do everything, without API keys.")
    ] = False,
) -> None:
    """Start Valkey, S3, engine and gateway; stop them all with Ctrl-C."""
    from cli.commands.up import UpOptions, run_up

    output = Output(as_json=as_json)
    with guarded(output):
        # The engine's process fetches it there, once the store runs.
        directory = model if model and in_own_store(model) else model_directory(model, output)
    options = UpOptions(
        model=directory,
        served_model_name=served_model_name,
        host=host,
        port=port,
        device=device.value,
        dtype=dtype.value,
        data_dir=data_dir,
        as_json=as_json,
        no_keys=no_keys,
        engines=engines,
        gateways=gateways,
    )
    raise typer.Exit(run_up(options))


for command in (serve, ps, logs, doctor, bench):
    app.command()(command)
app.command("pull")(pull_model)
app.command()(tune)
app.command()(chat)
app.command()(agent)
app.command("run")(run_agent)


@app.command()
def demo(
    loop: Annotated[
        bool, typer.Option("--loop", help="Watch it learn from simulated visitors by itself, and refuse what is bad.")
    ] = False,
    rounds: Annotated[
        int | None,
        typer.Option(help="Rounds of reinforcement, without --loop.", min=1, max=50, show_default="5"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the questions, the samples and the new adapters.", min=0)] = 1,
    output: Annotated[
        Path, typer.Option(help="Where the report and its plot go: demo-report.*, with --loop demo-loop.*.")
    ] = Path(),
    as_json: Json = False,
) -> None:
    """Watch the tiny model learn while it serves: everything starts, learns, reports and stops."""
    if loop:
        if rounds is not None:
            raise typer.BadParameter("--loop has no rounds of reinforcement", param_hint="--rounds")
        from cli.demo.loop.command import run_loop

        run_loop(seed=seed, output=output, as_json=as_json)
    else:
        from cli.demo.command import run_demo

        run_demo(rounds=rounds or 5, seed=seed, output=output, as_json=as_json)


app.add_typer(train.app)
app.add_typer(feedback.app)
app.add_typer(datasets.app)
app.add_typer(canaries.app)
app.add_typer(learners.app)
app.add_typer(environments.app)
app.add_typer(evaluation.app)
app.add_typer(forge.app)
app.add_typer(batch.app)
app.add_typer(sessions.app)
for tool in (
    adapter_tools.rollback,
    adapter_tools.prune,
    adapter_tools.merge,
    adapter_tools.receipt,
    adapter_tools.verify,
    adapter_tools.extract,
    adapter_tools.convert,
):
    adapters.app.command()(tool)
app.add_typer(adapters.app)
app.add_typer(keys.app)
app.add_typer(config.app)
app.add_typer(kernels.app)
app.add_typer(engine.app)
app.add_typer(contexts.app)
app.add_typer(webhooks.app)


@app.command("version")
def version(as_json: Json = False) -> None:
    """Print the version."""
    number = installed_version()
    Output(as_json=as_json).result({"version": number}, number)


add_examples(app)


def run() -> None:
    """Entry point of the console script."""
    app(prog_name="temper")
