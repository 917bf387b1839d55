"""`temper serve`: gateway and engine on Redis and S3 that run already, as the images do."""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from cli.local.model_directory import model_directory
from cli.options import Device, Dtype, Host, InDtype, Model, OnDevice, Port, ServedModelName
from cli.output import CliError, ExitCode, Output, guarded
from cli.settings import UpSettings, inherited_environment, read

_STORES = {"redis_url": "TEMPER_REDIS_URL", "s3_endpoint": "TEMPER_S3_ENDPOINT"}


class Part(enum.StrEnum):
    """Processes of a Temper."""

    BOTH = "both"
    GATEWAY = "gateway"
    ENGINE = "engine"


def serve(
    part: Annotated[
        Part, typer.Argument(help="gateway and engine are one process each, in place of this one, as in the images.")
    ] = Part.BOTH,
    model: Model = None,
    served_model_name: ServedModelName = None,
    host: Host = "127.0.0.1",
    port: Port = 8420,
    device: OnDevice = Device.AUTO,
    dtype: InDtype = Dtype.AUTO,
    data_dir: Annotated[Path, typer.Option(help="Logs and checkpoints of both live here.")] = Path(".temper"),
    no_keys: Annotated[bool, typer.Option("--no-keys", help="As of `temper up`.")] = False,
) -> None:
    """Run gateway and engine, or one of them, on the servers of TEMPER_REDIS_URL and TEMPER_S3_ENDPOINT.

    A gateway finds its engines in TEMPER_ENGINES, an engine listens on TEMPER_GRPC_HOST and TEMPER_GRPC_PORT.
    """
    # Imported here: no other command waits for the clients of the stores.
    from cli.commands.up import UpOptions, run_up

    output = Output(as_json=False)
    with guarded(output):
        settings = read(UpSettings)
        missing = [variable for name, variable in _STORES.items() if getattr(settings, name) is None]
        if missing:
            raise CliError(
                f"{' and '.join(missing)} is not set: name servers that run, or use `temper up`, which starts its own",
                ExitCode.USAGE,
            )
        if part is Part.BOTH:
            options = UpOptions(
                model=model_directory(model, output),
                served_model_name=served_model_name,
                host=host,
                port=port,
                device=device.value,
                dtype=dtype.value,
                data_dir=data_dir,
                no_keys=no_keys,
            )
            raise typer.Exit(run_up(options))
        named = {} if served_model_name is None else {"TEMPER_SERVED_MODEL_NAME": served_model_name}
        if part is Part.GATEWAY:
            _become("services.gateway", named | {"TEMPER_HOST": host, "TEMPER_PORT": str(port)})
        directory = str(model_directory(model, output).absolute())
        chosen = {"TEMPER_MODEL": directory, "TEMPER_DEVICE": device.value, "TEMPER_DTYPE": dtype.value}
        _become("services.pod", named | chosen)


def _become(module: str, variables: Mapping[str, str]) -> None:
    """This process runs the module from now on: signals, exit status and standard streams are its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, "-m", module], inherited_environment() | dict(variables))
