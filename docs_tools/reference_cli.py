"""The reference of the `temper` command, from the commands themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from cli.main import app
from docs_tools.paths import DOCS

TARGET = DOCS / "reference" / "cli.md"
_HEADER = """# Commands

<!-- Written by `python -m docs_tools.generate` from the commands; change their help, not this file. -->

`temper COMMAND --help` says the same. All client commands have the same
[exit codes](../guides/operations.md#exit-codes-of-the-client-commands). Each of these takes `--json` and `--url`,
and an API key from `TEMPER_API_KEY`.

"""


def render() -> str:
    """The whole page."""
    group = typer.main.get_command(app)
    commands = list(_commands(group, "temper"))
    summary = "| command | |\n|---|---|\n" + "".join(
        f"| [`{name}`](#{name.replace(' ', '-')}) | {_first(command.help)} |\n" for name, command in commands
    )
    return _HEADER + summary + "".join(_section(name, command) for name, command in commands)


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Commands that do something, depth first, with their whole names."""
    children = getattr(command, "commands", None)
    if not children:
        yield name, command
        return
    if getattr(command, "invoke_without_command", False) and name != "temper":
        yield name, command
    for child, below in children.items():
        yield from _commands(below, f"{name} {child}")


def _section(name: str, command: Any) -> str:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option" and not getattr(one, "hidden", False)]
    words = " ".join([name, *(_argument(one) for one in arguments)])
    parts = [f"\n## {name}\n\n{_plain(command.help)}\n\n```text\n{words}{' [OPTIONS]' if options else ''}\n```\n"]
    if command.epilog:
        _, *examples = command.epilog.split("\n\n")
        parts.append("\n```sh\n" + "\n".join(examples) + "\n```\n")
    rows = [*arguments, *options]
    if rows:
        parts.append("\n| | default | |\n|---|---|---|\n")
        parts += [f"| `{_name(one)}` | {_default(one)} | {_cell(getattr(one, 'help', None))} |\n" for one in rows]
    return "".join(parts)


def _argument(one: Any) -> str:
    name = (one.metavar or one.name.upper()) + (" …" if one.nargs == -1 else "")
    return str(name if one.required or name.startswith("[") else f"[{name}]")


def _name(one: Any) -> str:
    if one.param_type_name == "argument":
        return str(one.metavar or one.name.upper()).replace("|", "\\|")
    names = [name for name in (*one.opts, *one.secondary_opts) if name.startswith("-")]
    return ", ".join(names)


def _default(one: Any) -> str:
    shown = getattr(one, "show_default", None)
    value = shown if isinstance(shown, str) else one.default
    if callable(value) or value is None or value is False or value == () or "Sentinel" in type(value).__name__:
        return "required" if one.required else ""
    return f"`{getattr(value, 'value', value)}`"


def _first(text: str | None) -> str:
    return _cell((text or "").split("\n\n")[0])


def _plain(text: str | None) -> str:
    return "\n\n".join(" ".join(part.split()) for part in (text or "").replace("\f", "").split("\n\n"))


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")
