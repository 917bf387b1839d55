"""A running server, asked as a client asks it."""

from __future__ import annotations

import json
import time
from typing import Any

from cli.doctor.findings import Finding, NotHere, failure, ok, warning
from cli.doctor.place import Place
from cli.http.client import Client
from cli.output import CliError, ExitCode
from services.common.telemetry.process import installed_version

_SECONDS = 10.0
"""Longest wait for an answer that is not streamed: from a server that is frozen there is none."""
_START = "start one with `temper up`, or name it with --url or TEMPER_URL"


def ready(place: Place) -> Finding:
    """The server answers, and its engine, Redis and object store work."""
    with _client(place) as client:
        try:
            health: Any = client.get("/healthz")
        except CliError as error:
            if place.url is None and error.code is ExitCode.UNREACHABLE:
                raise NotHere(f"no server answers at {client.url}: --url names one") from error
            return failure(error.message, _START)
        if not isinstance(health, dict) or "object_store" not in health:
            return failure(f"what answers at {client.url} is no Temper", _START)
    broken = [f"{part} {health[part]}" for part in ("redis", "object_store") if health[part] != "ok"]
    engines = health.get("engines", [])
    if not any(engine.get("ready") for engine in engines):
        reasons = ", ".join(f"{engine['address']}: {engine.get('error') or 'not ready'}" for engine in engines)
        broken.append(f"no engine is ready ({reasons or 'none is known'})")
    if broken:
        return failure(
            f"the server at {client.url} is degraded: {'; '.join(broken)}", "look at its logs: `temper logs`"
        )
    return ok(f"the server at {client.url} works with {len(engines)} engine(s)")


def version(place: Place) -> Finding:
    """The server is of the same version as this command."""
    here = installed_version()
    with _client(place) as client:
        there = str(_asked(client, "/version").get("version"))
    if there != here:
        return warning(
            f"the server is Temper {there}, this command {here}", f"pip install temper=={there}, or upgrade the server"
        )
    return ok(f"server and command are Temper {here}")


def request(place: Place) -> Finding:
    """A whole streamed completion comes back."""
    with _client(place) as client:
        models = _asked(client, "/v1/models")["data"]
        model = next((entry["id"] for entry in models), "")
        body = {"model": model, "prompt": "Good day", "max_tokens": 4, "stream": True, "temperature": 0}
        began = time.perf_counter()
        first, answered = 0.0, False
        try:
            for event in client.events("POST", "/v1/completions", body, patience=60.0):
                first = first or time.perf_counter() - began
                answered = answered or (event.data != "[DONE]" and "choices" in json.loads(event.data))
                if event.data.startswith('{"error"'):
                    return failure(f"a completion failed: {event.data[:200]}", "look at the logs: `temper logs`")
        except (CliError, ValueError) as error:
            return failure(f"a completion failed: {error}", "look at the logs: `temper logs`")
    if not answered:
        return failure("a completion ended without a token", "look at the logs: `temper logs`")
    whole = time.perf_counter() - began
    return ok(f"{model} answered: the first token after {1e3 * first:,.0f} ms, the whole after {1e3 * whole:,.0f} ms")


def _client(place: Place) -> Client:
    patience = min(_SECONDS, place.client.request_timeout)
    return Client(place.url, place.client.model_copy(update={"request_timeout": patience}))


def _asked(client: Client, path: str) -> Any:
    try:
        return client.get(path)
    except CliError as error:
        if error.code is ExitCode.UNREACHABLE:
            raise NotHere(f"no server answers at {client.url}") from error
        raise
