"""`temper up`: the whole system on one machine, one process a part.

Standard output gets exactly one line, when everything is ready; progress and trouble go to standard error, the
output of the parts to <data dir>/logs.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape

from cli.local.gpus import spread, visible_gpus
from cli.local.health import grpc_ready, http_ready
from cli.local.model_directory import DEFAULT_MODEL
from cli.local.ports import port_is_free
from cli.local.private_tls import PrivateTls
from cli.local.process import DirectoryLock, private_files, rotate_log
from cli.local.signing_key import signing_key
from cli.local.store_settings import Ports, Secrets, engine_name, gateway_name, redis_url, seaweed, valkey
from cli.local.supervisor import Event, Phase, RestartPolicy, Service, ServiceFailed, Supervisor
from cli.output import CleanConsole
from cli.settings import UpSettings, inherited_environment, read
from services.common.errors import Conflict, InvalidRequest, TemperError

ROOT = Path(__file__).resolve().parents[2]
EXIT_FAILED = 1
_LISTENS = re.compile(r"(.*://\*:)(\d+)")
_ALIVE_SECONDS = 5.0
"""Timeout for an answer of a process that works: as long as the chart's probes give it."""


@dataclass(frozen=True, slots=True)
class UpOptions:
    """The command line of `temper up`. ``host``/``port``: where the gateway listens; the rest stays on 127.0.0.1."""

    model: Path | str = DEFAULT_MODEL
    """Checkpoint directory, or s3://bucket/prefix."""
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8420
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    data_dir: Path = Path(".temper")
    as_json: bool = False
    no_keys: bool = False
    """Others than this machine may reach the gateway, and need no API key."""
    engines: int = 1
    """Engines behind the gateway, each with a GPU of its own where there are any."""
    gateways: int = 0
    """Processes of the gateway, which share its port; 0: one, or as many as engines where those have GPUs."""

    def __post_init__(self) -> None:
        if self.gateways < 0:
            raise InvalidRequest(f"gateways must be at least 0, got {self.gateways}", param="gateways")
        if self.engines < 1:
            raise InvalidRequest(f"engines must be at least 1, got {self.engines}", param="engines")
        if not 1 <= self.port <= 65535:
            raise InvalidRequest(f"port must be 1 to 65535, got {self.port}", param="port")

    @property
    def exposed(self) -> bool:
        """True if other machines may reach the gateway."""
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host != "localhost"

    @property
    def url(self) -> str:
        """URL at which a client on this machine reaches the gateway."""
        host = {"127.0.0.1": "localhost", "0.0.0.0": "localhost", "::": "localhost", "": "localhost"}.get(
            self.host, self.host
        )
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def run_up(options: UpOptions) -> int:
    """Runs until a stop signal (returns 0) or until a part turns out not to start (returns 1)."""
    console = Terminal(stderr=True)
    try:
        _check_model(options.model)
        _examine(options, console)
        settings = read(UpSettings)
        _check_exposure(options, settings, console)
        data_dir = options.data_dir.absolute()
        with private_files(data_dir), DirectoryLock(data_dir):
            _check_port(options)
            return _run(options, settings, data_dir, console)
    except (TemperError, ServiceFailed) as error:
        message = error.message if isinstance(error, TemperError) else str(error)
        console.print(f"[red]error:[/] {escape(message)}", soft_wrap=True)
        return EXIT_FAILED
    except OSError as error:
        console.print(f"[red]error:[/] {escape(str(error))}", soft_wrap=True)
        return EXIT_FAILED


def _run(options: UpOptions, settings: UpSettings, data_dir: Path, console: Console) -> int:
    for log in (data_dir / "logs").glob("*.log"):
        rotate_log(log)
    # Claimed until this returns: the engine listens seconds after its port is chosen.
    several = options.engines > 1 and options.device != "cpu"
    gpus = visible_gpus(inherited_environment()) if several else []
    # What two GPUs generate is more than one process passes on.
    gateways = options.gateways or (options.engines if gpus else 1)
    numbers = {"gateway_port": options.port, "engines": options.engines, "gateways": gateways}
    ports = Ports.load_or_choose(data_dir / "ports.json", **numbers)
    services, used = compose(options, data_dir, settings, ports, gpus)
    told = Told(console, data_dir / "state.json", {"url": options.url, "pid": os.getpid(), "ports": used})
    supervisor = Supervisor(
        services, base_env=inherited_environment(), report=lambda event: told(event, supervisor.pids())
    )

    def announce() -> None:
        line = {"url": options.url, "data_dir": str(data_dir), "pids": supervisor.pids()}
        sys.stdout.write((json.dumps(line) if options.as_json else f"Temper is ready on {options.url}") + "\n")
        sys.stdout.flush()

    try:
        supervisor.run(announce)
    finally:
        told.forget()
    return 0


class Terminal(CleanConsole):
    """A terminal without which work goes on: rich would end the process when nobody reads any more."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Told:
    """Reporter of the processes' states: a line on the terminal for each change, and the file that says what runs now.

    A full disk ends nothing that works.
    """

    def __init__(self, console: Console, state_file: Path, facts: Mapping[str, object]) -> None:
        self._console = console
        self._file = state_file
        self._facts = facts
        self._failed = False

    def __call__(self, event: Event, pids: Mapping[str, int]) -> None:
        colours = {Phase.READY: "green", Phase.RESTARTING: "bold red" if event.alarming else "yellow"}
        seconds = f" {event.seconds:.1f} s" if event.phase is Phase.READY else ""
        detail = f" {escape(event.detail)}" if event.detail else ""
        colour = colours.get(event.phase, "dim")
        self._print(f"[{colour}]{event.service:9} {event.phase.value}{seconds}[/]{detail}")
        scratch = self._file.with_suffix(".tmp")
        try:
            scratch.write_text(json.dumps({**self._facts, "pids": dict(pids)}, indent=1) + "\n")
            scratch.replace(self._file)
            self._failed = False
        except OSError as error:
            if not self._failed:
                self._print(f"[yellow]{self._file} is out of date: {escape(str(error))}[/]")
            self._failed = True

    def forget(self) -> None:
        """Nothing runs any more."""
        self._file.unlink(missing_ok=True)

    def _print(self, line: str) -> None:
        with suppress(OSError):
            self._console.print(line, soft_wrap=True)


def compose(
    options: UpOptions, data_dir: Path, settings: UpSettings, ports: Ports, gpus: Sequence[str] = ()
) -> tuple[list[Service], dict[str, int]]:
    """The services of one machine and which ports they use.

    Args:
        gpus: for several engines, as of visible_gpus().

    Raises:
        InvalidRequest: an external store is named without its credentials, or there are fewer GPUs than engines.
    """
    credentials = Secrets.load_or_create(data_dir / "secrets.json")
    services: list[Service] = []
    used = {"gateway": options.port}
    used |= {engine_name(index): claim.number for index, claim in enumerate(ports.engines)}
    used |= {f"{gateway_name(index)} alone": claim.number for index, claim in enumerate(ports.gateways)}
    env: dict[str, str] = {}
    if options.served_model_name is not None:
        env["TEMPER_SERVED_MODEL_NAME"] = options.served_model_name
    if settings.redis_url is None:
        services.append(valkey(data_dir, ports, credentials))
        used["redis"] = ports.redis.number
        env["TEMPER_REDIS_URL"] = redis_url(ports, credentials)
    if settings.s3_endpoint is None:
        services.append(seaweed(data_dir, ports, credentials, gateway_port=options.port))
        used["s3"] = ports.s3.number
        env |= {
            "TEMPER_S3_ENDPOINT": f"127.0.0.1:{ports.s3.number}",
            "TEMPER_S3_ACCESS_KEY": credentials.s3_access_key,
            "TEMPER_S3_SECRET_KEY": credentials.s3_secret_key,
            "TEMPER_S3_SECURE": "false",
        }
    elif settings.s3_access_key is None or settings.s3_secret_key is None:
        raise InvalidRequest("TEMPER_S3_ENDPOINT needs TEMPER_S3_ACCESS_KEY and TEMPER_S3_SECRET_KEY as well")
    stores = tuple(service.name for service in services)
    tls = PrivateTls.create(data_dir / "tls")
    env |= _mutual_tls(tls)
    own = _own_settings(options, data_dir, settings, gpus)
    engines = [
        _engine(options, data_dir, settings, engine_name(index), claim.number, {**env, **own[index]}, tls, stores)
        for index, claim in enumerate(ports.engines)
    ]
    addresses = [f"127.0.0.1:{claim.number}" for claim in ports.engines]
    alone = [claim.number for claim in ports.gateways] or [0]
    gateways = [
        _gateway(options, data_dir, settings, gateway_name(index), port, addresses, env, stores)
        for index, port in enumerate(alone)
    ]
    return [*services, *engines, *gateways], used


def _own_settings(
    options: UpOptions, data_dir: Path, settings: UpSettings, gpus: Sequence[str]
) -> list[dict[str, str]]:
    """What each of several engines has for itself: a GPU, or its share of the cores, a name, directories and ports.

    Raises:
        InvalidRequest: there are fewer GPUs than engines.
    """
    if options.engines == 1:
        return [{}]
    own = spread(options.engines, gpus)
    for index, found in enumerate(own):
        name = engine_name(index)
        found["TEMPER_ENGINE_NAME"] = name
        if index:
            found["TEMPER_CHECKPOINT_DIR"] = str(data_dir / name / "checkpoints")
            found["TEMPER_FORGE_DIR"] = str(data_dir / name / "forge")
            found["TEMPER_TIER_DISK_DIR"] = str(data_dir / name / "prefix-cache")
            found |= _next_ports(settings, index)
        if not gpus and not settings.torch_threads:
            found["TEMPER_TORCH_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // options.engines))
    return own


def _next_ports(settings: UpSettings, index: int) -> dict[str, str]:
    """Where an engine listens that has ``index`` others before it."""
    ports = {"TEMPER_METRICS_PORT": settings.metrics_port, "TEMPER_HEALTH_PORT": settings.health_port}
    found = {name: str(port + index) for name, port in ports.items() if port}
    addresses = {"TEMPER_KV_EVENTS": settings.kv_events, "TEMPER_KV_EVENTS_REPLAY": settings.kv_events_replay}
    for name, address in addresses.items():
        if listens := _LISTENS.fullmatch(address):
            found[name] = f"{listens[1]}{int(listens[2]) + index}"
    return found


def _engine(
    options: UpOptions,
    data_dir: Path,
    settings: UpSettings,
    name: str,
    port: int,
    env: Mapping[str, str],
    tls: PrivateTls,
    stores: tuple[str, ...],
) -> Service:
    stored = isinstance(options.model, str)
    return Service(
        name=name,
        argv=[sys.executable, "-m", *(["services.model_source", "--then"] if stored else []), "services.pod"],
        log=data_dir / "logs" / f"{name}.log",
        health=grpc_ready(f"127.0.0.1:{port}", "engine", tls),
        alive=grpc_ready(f"127.0.0.1:{port}", "liveness", tls, _ALIVE_SECONDS),
        env={
            "TEMPER_CHECKPOINT_DIR": str(data_dir / "checkpoints"),
            "TEMPER_FORGE_DIR": str(data_dir / "forge"),
            **env,
            **_model(options.model, data_dir, settings.model_digest),
            "TEMPER_DEVICE": options.device,
            "TEMPER_DTYPE": options.dtype,
            "TEMPER_RECEIPT_KEY_FILE": env.get("TEMPER_RECEIPT_KEY_FILE")
            or str(signing_key(data_dir / "receipts.pem")),
            "TEMPER_GRPC_HOST": "127.0.0.1",
            "TEMPER_GRPC_PORT": str(port),
            "TEMPER_DRAIN_SECONDS": str(settings.drain_seconds),
        },
        cwd=ROOT,
        after=stores,
        stop_stage=1,
        start_timeout=600.0,
        stop_timeout=settings.drain_seconds + 30.0,
    )


def _gateway(
    options: UpOptions,
    data_dir: Path,
    settings: UpSettings,
    name: str,
    own_port: int,
    engines: Sequence[str],
    env: Mapping[str, str],
    stores: tuple[str, ...],
) -> Service:
    url = f"http://127.0.0.1:{own_port}" if own_port else _local_url(options)
    return Service(
        name=name,
        argv=[sys.executable, "-m", "services.gateway"],
        log=data_dir / "logs" / f"{name}.log",
        health=http_ready(f"{url}/readyz"),
        alive=http_ready(f"{url}/livez", _ALIVE_SECONDS),
        env={
            **env,
            "TEMPER_ENGINES": ",".join(engines),
            "TEMPER_HOST": options.host,
            "TEMPER_PORT": str(options.port),
            "TEMPER_OWN_PORT": str(own_port),
            "TEMPER_SHUTDOWN_GRACE_SECONDS": str(settings.shutdown_grace_seconds),
            "TEMPER_DRAIN_DELAY_SECONDS": "0",
            **_files(settings),
        },
        cwd=ROOT,
        after=stores,
        stop_stage=2,
        start_timeout=600.0,
        stop_timeout=settings.shutdown_grace_seconds + 5.0,
        restart=RestartPolicy(start_attempts=2),
    )


def _mutual_tls(tls: PrivateTls) -> dict[str, str]:
    """Settings of gateway and engine, whatever the environment says for others: an engine asks for no API key, so
    nobody but this gateway may reach it, not even on this machine."""
    return {
        "TEMPER_GRPC_TLS_CERT": str(tls.certificate),
        "TEMPER_GRPC_TLS_KEY": str(tls.key),
        "TEMPER_GRPC_TLS_CA": str(tls.certificate),
        "TEMPER_GRPC_TLS_SERVER_NAME": "",
    }


def _files(settings: UpSettings) -> dict[str, str]:
    """Files that settings name: the gateway works in another directory."""
    named = {"TEMPER_API_KEYS_FILE": settings.api_keys_file, "TEMPER_AUDIT_LOG_FILE": settings.audit_log_file}
    return {variable: str(Path(file).absolute()) for variable, file in named.items() if file}


def _local_url(options: UpOptions) -> str:
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1", "localhost": "127.0.0.1"}.get(
        options.host, options.host
    )
    return f"http://[{host}]:{options.port}" if ":" in host else f"http://{host}:{options.port}"


def _model(model: Path | str, data_dir: Path, digest: str) -> dict[str, str]:
    """Settings of the engine's model. One of an object store is fetched into a directory of its own before the engine
    starts.

    Args:
        digest: that it must have, or "unchecked".
    """
    if isinstance(model, Path):
        return {"TEMPER_MODEL": str(model.absolute())}
    name = hashlib.sha256(model.encode()).hexdigest()[:16]
    return {
        "TEMPER_MODEL": str(data_dir / "models" / name),
        "TEMPER_MODEL_SOURCE": model,
        "TEMPER_MODEL_DIGEST": digest,
    }


def _check_model(model: Path | str) -> None:
    if isinstance(model, str):
        return
    if not (model / "config.json").is_file():
        raise InvalidRequest(
            f"{model} is not a checkpoint directory (it has no config.json): name one with --model", param="model"
        )


def _examine(options: UpOptions, console: Console) -> None:
    """The quick checks of `temper doctor`: warnings are told, the first failure ends the start."""
    # Imported here: other commands need none of it.
    from cli.doctor.findings import Status
    from cli.doctor.place import Place
    from cli.doctor.quick import problems

    model = options.model if isinstance(options.model, Path) else None
    place = Place(model or DEFAULT_MODEL, options.data_dir, host=options.host, port=options.port)
    for entry in problems(place, fetched=model is not None):
        text = f"{entry.finding.message}: {entry.finding.way_out}"
        if entry.finding.status is Status.FAILURE:
            raise InvalidRequest(f"{text} (`temper doctor` looks at more)")
        console.print(f"[yellow]warning:[/] {escape(text)}", soft_wrap=True)


def _check_exposure(options: UpOptions, settings: UpSettings, console: Console) -> None:
    if not options.exposed or settings.api_keys_file:
        return
    who = f"everybody who reaches {options.host}:{options.port} may use, train and administrate this Temper"
    if not options.no_keys:
        raise InvalidRequest(
            f"with --host {options.host} and no API keys {who}: make a key (temper keys create --name me --scopes "
            "inference,train,admin --file keys.json) and set TEMPER_API_KEYS_FILE=keys.json, or say --no-keys",
            param="host",
        )
    console.print(f"[bold red]warning:[/] no API keys: {escape(who)}", soft_wrap=True)


def _check_port(options: UpOptions) -> None:
    if not port_is_free(options.host, options.port):
        raise Conflict(
            f"port {options.port} on {options.host} is in use or cannot be bound: stop what listens there or choose "
            "another with --port"
        )
