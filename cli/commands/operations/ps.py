"""`temper ps`: what runs."""

from __future__ import annotations

import datetime
import json
import time
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from cli.http.client import Client, is_local
from cli.options import Json, Url
from cli.output import CliError, ExitCode, Output, guarded
from cli.settings import CliSettings, read

DataDir = Annotated[Path, typer.Option(help="As of `temper up`.")]


def ps(data_dir: DataDir = Path(".temper"), url: Url = None, as_json: Json = False) -> None:
    """Show the processes of this machine's Temper with their memory, and the server's version, engines and adapter.
    With --url of another machine: its server alone."""
    output = Output(as_json=as_json)
    with guarded(output):
        state = read_state(data_dir) if url is None else None
        processes = [] if state is None else _processes(state)
        settings, written = read(CliSettings), (state or {}).get("url")
        if written is not None and not is_local(written):
            # Whoever can write in the directory could be sent it.
            settings = settings.model_copy(update={"api_key": None})
        with Client(url or written, settings) as client:
            try:
                server = _server(client)
            except CliError as error:
                if state is None:
                    raise
                # It runs, so that the advice to start one would lead astray.
                away = f"the gateway at {client.url} does not answer yet, or not any more: `temper logs gateway`"
                server = {
                    "url": client.url,
                    "error": away if error.code is ExitCode.UNREACHABLE and error.error is None else error.message,
                }
        _tell(output, processes, server)


def read_state(data_dir: Path) -> dict[str, Any] | None:
    """What `temper up` says of itself in its data directory; None: none runs there."""
    try:
        state: dict[str, Any] = json.loads((data_dir / "state.json").read_text())
        there = psutil.pid_exists(int(state["pid"])) and {"ports", "pids"} <= state.keys()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CliError(
            f"{data_dir}/state.json is not what `temper up` writes: {error!r}; name another --data-dir", ExitCode.USAGE
        ) from error
    return state if there else None


def _processes(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Processes with their memory in bytes, children included, and the time since their start in seconds."""
    found = []
    names = {"redis": "valkey"}
    ports = {names.get(part, part): port for part, port in state["ports"].items()}
    for name, pid in {"up": state["pid"], **state["pids"]}.items():
        entry: dict[str, Any] = {"process": name, "pid": pid, "port": ports.get(name)}
        try:
            process = psutil.Process(int(pid))
            below = [] if name == "up" else process.children(recursive=True)
            entry["memory"] = sum(one.memory_info().rss for one in (process, *below))
            entry["seconds"] = round(time.time() - process.create_time())
        except psutil.NoSuchProcess:
            entry |= {"memory": None, "seconds": None}
        found.append(entry)
    return found


def _server(client: Client) -> dict[str, Any]:
    health, version = client.get("/healthz"), client.get("/version")
    try:
        told = {name: health[name] for name in ("status", "model", "engines")}
        return {"url": client.url, "version": version["version"], **told}
    except (KeyError, TypeError) as error:
        raise CliError(
            f"what answers at {client.url} is no Temper: name one with --url", ExitCode.UNREACHABLE
        ) from error


def _tell(output: Output, processes: list[dict[str, Any]], server: dict[str, Any]) -> None:
    if output.as_json:
        output.json({"processes": processes, "server": server})
        return
    if processes:
        rows = [
            [
                entry["process"],
                str(entry["pid"]),
                "" if entry["port"] is None else str(entry["port"]),
                "gone" if entry["memory"] is None else f"{entry['memory'] / 2**20:,.0f} MiB",
                "" if entry["seconds"] is None else str(datetime.timedelta(seconds=entry["seconds"])),
            ]
            for entry in processes
        ]
        output.table(processes, ["PROCESS", "PID", "PORT", "MEMORY", "UP"], rows, empty="")
    if "error" in server:
        output.err.print(server["error"], markup=False, soft_wrap=True)
        return
    output.out.print(
        f"Temper {server['version']} at {server['url']} is {server['status']} and serves {server['model']}",
        markup=False,
    )
    rows = [
        [
            str(engine["address"]),
            "ready" if engine["ready"] else str(engine.get("error") or "not ready"),
            str(engine.get("running", "")),
            str(engine.get("waiting", "")),
            str(engine.get("attached_adapter") or "-"),
            str(engine.get("job_id") or "-"),
        ]
        for engine in server["engines"]
    ]
    output.table(server, ["ENGINE", "STATE", "RUNNING", "WAITING", "ADAPTER", "JOB"], rows, empty="no engine")
