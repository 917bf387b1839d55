"""`temper keys`: the file of API keys that gateways read. Nothing is sent; a running gateway sees the change."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import ValidationError

from cli.options import Json
from cli.output import CliError, ExitCode, Output, guarded
from services.common.errors import InvalidRequest
from services.common.security.api_keys import (
    ApiKey,
    KeyFile,
    KeyLimits,
    Scope,
    dump_keys,
    new_entry,
    new_key,
    parse_keys,
)

app = typer.Typer(name="keys", help="Make, list and revoke API keys.", no_args_is_help=True)
T = TypeVar("T")
File = Annotated[
    Path,
    typer.Option("--file", help="The key file, as gateways have it.", envvar="TEMPER_API_KEYS_FILE"),
]
_NO_LIMIT = "Default: the gateway's; 0: none."


@app.command()
def create(
    file: File,
    name: Annotated[str, typer.Option(help="For people: who or what uses the key.")],
    scopes: Annotated[
        str, typer.Option(help="Any of inference, train, attach, admin, separated by commas.")
    ] = "inference",
    requests_per_minute: Annotated[int | None, typer.Option(help=_NO_LIMIT)] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(help=f"Prompts and completions. {_NO_LIMIT}")] = None,
    concurrent_requests: Annotated[int | None, typer.Option(help=_NO_LIMIT)] = None,
    expires_days: Annotated[float | None, typer.Option(help="Default: never.", min=0)] = None,
    as_json: Json = False,
) -> None:
    """Make a key, print it, once, and write its digest into the file."""

    def work(output: Output) -> None:
        key = new_key()
        now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        try:
            limits = KeyLimits(
                requests_per_minute=requests_per_minute,
                tokens_per_minute=tokens_per_minute,
                concurrent_requests=concurrent_requests,
            )
            expires = None if expires_days is None else now + datetime.timedelta(days=expires_days)
            entry = new_entry(key, name=name, scopes=_scopes(scopes), limits=limits, expires_at=expires)
        except (ValidationError, OverflowError) as error:
            raise CliError(_first(error), ExitCode.USAGE) from error
        with _changing(file, create=True) as change:
            change(lambda keys: (*keys, entry))
        output.err.print(f"key {entry.id} for {', '.join(entry.scopes)}; it is not shown again", markup=False)
        output.result({"id": entry.id, "key": key, **_shown(entry)}, key)

    _run(work, as_json)


@app.command("list")
def list_keys(file: File, as_json: Json = False) -> None:
    """Every key, without the key."""

    def work(output: Output) -> None:
        keys = _read(file).keys
        rows = [
            [entry.id, entry.name, ", ".join(entry.scopes), _limits(entry), str(_shown(entry)["state"])]
            for entry in keys
        ]
        value = [{"id": entry.id, **_shown(entry)} for entry in keys]
        output.table(value, ["id", "name", "scopes", "limits", "state"], rows, empty="no keys")

    _run(work, as_json)


@app.command()
def revoke(
    file: File, key_id: Annotated[str, typer.Argument(metavar="ID", help="As `list` shows it.")], as_json: Json = False
) -> None:
    """End a key. Gateways refuse it within seconds; what it has begun runs to its end."""

    def work(output: Output) -> None:
        now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)

        def change(keys: tuple[ApiKey, ...]) -> tuple[ApiKey, ...]:
            found = next((entry for entry in keys if entry.id == key_id), None)
            if found is None:
                raise CliError(f"{file} has no key {key_id!r}: `temper keys list` shows their ids")
            if found.revoked_at is not None:
                raise CliError(f"{key_id} has been revoked already, at {found.revoked_at.isoformat()}")
            return tuple(entry.model_copy(update={"revoked_at": now}) if entry is found else entry for entry in keys)

        with _changing(file, create=False) as apply:
            apply(change)
        output.result({"id": key_id, "revoked_at": now.isoformat()}, f"{key_id} is revoked")

    _run(work, as_json)


def _run(work: Callable[[Output], None], as_json: bool) -> None:
    output = Output(as_json=as_json)
    with guarded(output):
        work(output)


def _scopes(text: str) -> tuple[Scope, ...]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    known = {scope.value for scope in Scope}
    wrong = next((name for name in names if name not in known), None)
    if wrong is not None or not names:
        raise CliError(f"--scopes takes {', '.join(Scope)}, got {wrong or text!r}", ExitCode.USAGE)
    return tuple(scope for scope in Scope if scope.value in names)


def _first(error: ValidationError | OverflowError) -> str:
    if isinstance(error, OverflowError):
        return "--expires-days is too far away"
    first = error.errors(include_input=False)[0]
    return f"--{'-'.join(map(str, first['loc'])).replace('_', '-')}: {first['msg']}"


def _shown(entry: ApiKey) -> dict[str, Any]:
    refusal = entry.refusal(datetime.datetime.now(datetime.UTC))
    kept = entry.model_dump(mode="json", exclude={"id", "sha256"}, exclude_none=True)
    return {**kept, "state": "valid" if refusal is None else refusal.removeprefix("has ").removeprefix("been ")}


def _limits(entry: ApiKey) -> str:
    given = entry.limits.model_dump(exclude_none=True)
    short = {"requests_per_minute": "requests/min", "tokens_per_minute": "tokens/min", "concurrent_requests": "at once"}
    return ", ".join(f"{value or 'no limit of'} {short[name]}" for name, value in given.items())


def _read(file: Path) -> KeyFile:
    try:
        return parse_keys(file.read_bytes())
    except OSError as error:
        raise CliError(f"{file} cannot be read: {error.strerror}", ExitCode.USAGE) from error
    except InvalidRequest as error:
        raise CliError(f"{file} is not a key file: {error.message}", ExitCode.USAGE) from error


Change = Callable[[tuple[ApiKey, ...]], tuple[ApiKey, ...]]


@contextlib.contextmanager
def _changing(file: Path, *, create: bool) -> Iterator[Callable[[Change], None]]:
    """One writer at a time; a reader sees the file as it was or as it is."""
    target = file.resolve()
    try:
        directory = os.open(target.parent, os.O_RDONLY)
    except OSError as error:
        raise CliError(f"{target.parent} cannot be opened: {error.strerror}", ExitCode.USAGE) from error
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        new = create and not target.exists()
        old = KeyFile() if new else _read(target)
        mode = 0o600 if new else target.stat().st_mode & 0o777

        def apply(change: Change) -> None:
            _replace(target, dump_keys(KeyFile(keys=change(old.keys))), mode)

        yield apply
    finally:
        os.close(directory)


def _replace(target: Path, data: bytes, mode: int) -> None:
    try:
        handle, scratch = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fchmod(stream.fileno(), mode)
                os.fsync(stream.fileno())
            Path(scratch).replace(target)
        finally:
            Path(scratch).unlink(missing_ok=True)
    except OSError as error:
        raise CliError(f"{target} cannot be written: {error.strerror}", ExitCode.USAGE) from error
