"""Options that several commands share, and the connection of those that talk to a gateway."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from cli.http.client import Client
from cli.output import CliError, ExitCode, Output, guarded
from cli.settings import CliSettings, read
from services.common.settings import config_file, read_config_file

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

D = TypeVar("D", bound="DataclassInstance")
_KEYWORD = inspect.Parameter.KEYWORD_ONLY

Url = Annotated[
    str | None, typer.Option("--url", help="The gateway; also TEMPER_URL.", show_default="http://localhost:8420")
]
Model = Annotated[
    str | None,
    typer.Option(
        help="Checkpoint directory, or what `temper pull` takes: organisation/name of the hub, s3://bucket/prefix.",
        show_default="models/tiny",
        envvar="TEMPER_MODEL",
    ),
]
ServedModelName = Annotated[
    str | None,
    typer.Option(help="What clients put in `model`.", show_default="qwen3.5", envvar="TEMPER_SERVED_MODEL_NAME"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


class Device(enum.StrEnum):
    """Device that the engine computes on."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(enum.StrEnum):
    """Element type of weights and activations."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


Host = Annotated[str, typer.Option(help="Address the HTTP API listens on.", envvar="TEMPER_HOST")]
Port = Annotated[int, typer.Option(help="Port of the HTTP API.", min=1, max=65535, envvar="TEMPER_PORT")]
OnDevice = Annotated[Device, typer.Option(help="auto: cuda if there is one.", envvar="TEMPER_DEVICE")]
InDtype = Annotated[Dtype, typer.Option(help="auto: bfloat16 on cuda, float32 on cpu.", envvar="TEMPER_DTYPE")]
Wait = Annotated[bool, typer.Option("--wait", help="Follow the run, and print its result.")]
Timeout = Annotated[float | None, typer.Option(help="Seconds to wait at most; the run goes on.", min=0)]


def _png(file: Path | None) -> Path | None:
    """Refuses a plot that could not be written, before anything is measured for it."""
    if file is not None and file.suffix.lower() != ".png":
        raise typer.BadParameter(f"{file}: the plot is a PNG, give a name that ends in .png")
    if file is not None and not file.absolute().parent.is_dir():
        raise typer.BadParameter(f"{file}: there is no directory {file.absolute().parent}")
    return file


Plot = Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw what is told, too.", callback=_png)]


def with_options(shared: type[D], **changed: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes the fields of a dataclass options of a command, in front of its own. The command's first parameter gets an
    instance, the others are keywords.

    Args:
        changed: defaults that are other ones for this command.
    """
    hints = get_type_hints(shared, include_extras=True)
    fields = [
        inspect.Parameter(
            field.name, _KEYWORD, default=changed.get(field.name, field.default), annotation=hints[field.name]
        )
        for field in dataclasses.fields(shared)
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

        @functools.wraps(command)
        def called(**values: Any) -> None:
            options = shared(**{one.name: values.pop(one.name) for one in fields})
            command(options, **values)

        parameters = sorted([*fields, *own], key=lambda one: one.default is not inspect.Parameter.empty)
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {one.name: one.annotation for one in parameters}
        return called

    return decorate


def defaults(command: Any, url: str | None) -> dict[str, Any]:
    """Defaults of all options below a command: what the file of settings says of those that have a variable, and the
    URL that was given before the command's name.

    Raises:
        CliError: the file cannot be read.
    """
    file = config_file()
    try:
        lines = {} if file is None else read_config_file(file)
    except ValueError as error:
        raise CliError(str(error), ExitCode.USAGE) from error
    return _defaults(command, {f"TEMPER_{key.upper()}": value for key, value in lines.items()}, url)


def _defaults(command: Any, lines: Mapping[str, Any], url: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        option.name: lines[option.envvar]
        for option in command.params
        if isinstance(option.envvar, str) and option.envvar in lines
    }
    if url is not None and any(option.name == "url" for option in command.params):
        found["url"] = url
    for name, below in getattr(command, "commands", {}).items():
        if inner := _defaults(below, lines, url):
            found[name] = inner
    return found


def connected(url: str | None, as_json: bool, work: Callable[[Client, Output], None]) -> None:
    """Runs one command's work with a client and its output."""
    output = Output(as_json=as_json)
    with guarded(output), Client(url, read(CliSettings)) as client:
        work(client, output)
