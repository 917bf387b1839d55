"""`temper context`: servers that client commands know by a name."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from cli.options import Json
from cli.output import CliError, ExitCode, Output, guarded
from cli.settings import Context, Contexts, contexts_file, read_contexts

app = typer.Typer(name="context", help="Save servers under names, and choose one.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="Name of the context.")]


def _saved() -> list[str]:
    """Names, for the shell."""
    try:
        return list(read_contexts().contexts)
    except ValueError:
        return []


SavedName = Annotated[str, typer.Argument(help="Name of the context.", autocompletion=_saved)]


@app.command()
def add(
    name: Name,
    url: Annotated[str, typer.Argument(help="Of the gateway.")],
    key_file: Annotated[
        Path | None, typer.Option(help="File with the API key; '-': standard input.", show_default="no key")
    ] = None,
    as_json: Json = False,
) -> None:
    """Save a server under a name, in place of what had it, and use it from now on."""

    def change(saved: Contexts) -> Contexts:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise CliError(f"{url!r} is not an http:// or https:// URL", ExitCode.USAGE)
        context = Context(url=url.rstrip("/"), api_key=_key(key_file))
        return Contexts(current=name, contexts={**saved.contexts, name: context})

    _change(change, f"{name} is {url}, and used from now on", as_json)


@app.command()
def use(name: SavedName, as_json: Json = False) -> None:
    """Use a saved server in every command that says no other."""

    def change(saved: Contexts) -> Contexts:
        _check(saved, name)
        return saved.model_copy(update={"current": name})

    _change(change, f"{name} is used from now on", as_json)


@app.command()
def remove(name: SavedName, as_json: Json = False) -> None:
    """Forget a saved server and its key."""

    def change(saved: Contexts) -> Contexts:
        _check(saved, name)
        others = {other: context for other, context in saved.contexts.items() if other != name}
        return Contexts(current=None if saved.current == name else saved.current, contexts=others)

    _change(change, f"{name} is forgotten", as_json)


@app.command("list")
def list_contexts(as_json: Json = False) -> None:
    """Show the saved servers; * is the one that is used."""
    output = Output(as_json=as_json)
    with guarded(output):
        saved = _read()
        value = [
            {"name": name, "url": context.url, "has_key": context.api_key is not None, "current": name == saved.current}
            for name, context in saved.contexts.items()
        ]
        rows = [
            ["*" if one["current"] else "", str(one["name"]), str(one["url"]), "yes" if one["has_key"] else ""]
            for one in value
        ]
        output.table(value, ["", "NAME", "URL", "KEY"], rows, empty="no contexts: `temper context add NAME URL`")


def _read() -> Contexts:
    try:
        return read_contexts()
    except ValueError as error:
        raise CliError(str(error), ExitCode.USAGE) from error


def _check(saved: Contexts, name: str) -> None:
    if name not in saved.contexts:
        raise CliError(f"there is no context {name!r}: there are {', '.join(saved.contexts) or 'none'}", ExitCode.USAGE)


def _change(change: Callable[[Contexts], Contexts], text: str, as_json: bool) -> None:
    # Imported here: no other command waits for grpc.
    from cli.local.private_tls import write_private

    output = Output(as_json=as_json)
    with guarded(output):
        new = change(_read())
        file = contexts_file()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            scratch = file.with_name(f".{file.name}.{os.getpid()}")
            write_private(scratch, new.model_dump_json(indent=1, exclude_none=True) + "\n")
            scratch.replace(file)
        except OSError as error:
            raise CliError(f"{file} cannot be written: {error.strerror}") from error
        output.result({"current": new.current, "contexts": list(new.contexts)}, text)


def _key(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"{file} cannot be read: {error}", ExitCode.USAGE) from error
    if not text.strip():
        raise CliError(f"{file} has no key", ExitCode.USAGE)
    return text.strip()
