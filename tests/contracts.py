"""What clients, operators and earlier releases rely on, as lines of text: `python -m tests.contracts [--write]`.

One file a surface under tests/fixtures/contracts: routes and schemas of the HTTP API (descriptions left out, which may
be improved at any time), messages and numbers of the gRPC API, metrics with their labels, settings with their defaults,
and commands with their options. A change of a line is a change that users see: it is made on purpose, with --write, and
told in CHANGELOG.md. What lies in Redis and in the object store is kept true by tests/integration/test_upgrade.py, with
data of earlier releases, and by test_formats.py beside it.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from pydantic_core import PydanticUndefined
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from cli.main import app as cli_app
from docs_tools.settings_page import SECTIONS
from observability.catalogue import exported
from services.common import pb
from services.gateway.server.app import create_app
from services.gateway.settings import GatewaySettings

PLACE = Path(__file__).resolve().parent / "fixtures" / "contracts"
_TEXT = ("description", "summary")


def http() -> Iterator[str]:
    """Routes and schemas of the OpenAPI document."""
    document = create_app(GatewaySettings()).openapi()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path} {_plain(operation)}"
    for name, schema in document["components"]["schemas"].items():
        yield f"schema {name} {_plain(schema)}"


def _plain(part: Any) -> str:
    return json.dumps(_without_text(part), sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _without_text(part: Any, *, names: bool = False) -> Any:
    """``part`` without its descriptions; ``names``: its keys are names of fields, of which one may be "description"."""
    if isinstance(part, Mapping):
        return {
            key: _without_text(value, names=key in ("properties", "$defs") and not names)
            for key, value in part.items()
            if names or key not in _TEXT or not isinstance(value, str)
        }
    return [_without_text(item) for item in part] if isinstance(part, list) else part


def grpc() -> Iterator[str]:
    """Fields and methods of every message and service in services/common/pb."""
    for found in pkgutil.iter_modules(pb.__path__):
        if not found.name.endswith("_pb2"):
            continue
        file: FileDescriptor = importlib.import_module(f"{pb.__name__}.{found.name}").DESCRIPTOR
        for service in file.services_by_name.values():
            for method in service.methods:
                streams = f"{'stream ' * method.client_streaming}in, {'stream ' * method.server_streaming}out"
                yield f"{method.full_name} {method.input_type.full_name} {method.output_type.full_name} {streams}"
        for message in file.message_types_by_name.values():
            yield from _fields(message)
        for enum in file.enum_types_by_name.values():
            yield from (f"{enum.full_name}.{value.name} = {value.number}" for value in enum.values)


def _fields(message: Descriptor) -> Iterator[str]:
    for field in message.fields:
        kind = field.message_type or field.enum_type
        name = kind.full_name if kind is not None else _SCALARS[field.type]
        among = f" in {field.containing_oneof.name}" if field.containing_oneof is not None else ""
        yield f"{field.full_name} = {field.number} {'repeated ' * field.is_repeated}{name}{among}"
    for nested in message.nested_types:
        yield from _fields(nested)
    for enum in message.enum_types:
        yield from (f"{enum.full_name}.{value.name} = {value.number}" for value in enum.values)


_SCALARS = {
    getattr(FieldDescriptor, name): name.removeprefix("TYPE_").lower()
    for name in vars(FieldDescriptor)
    if name.startswith("TYPE_")
}


def metrics() -> Iterator[str]:
    """Series of a gateway and of an engine with its trainer."""
    for metric in exported():
        yield f"{metric.service} {metric.kind} {metric.name} {','.join(metric.labels)} {metric.bounds or ''}".rstrip()


def settings() -> Iterator[str]:
    """Variables that services and commands read."""
    for title, model, _, _ in SECTIONS:
        for name, field in model.model_fields.items():
            default = "required" if field.default is PydanticUndefined else repr(field.default)
            if field.default_factory is not None:
                default = f"{getattr(field.default_factory, '__name__', 'computed')}()"
            prefix = model.model_config.get("env_prefix", "")
            yield f"{title}: {field.validation_alias or (prefix + name).upper()} = {default}"


def commands() -> Iterator[str]:
    """The `temper` command's subcommands, arguments and options."""
    root = get_command(cli_app)
    assert isinstance(root, TyperGroup)
    yield from _commands(root, "temper")


def _commands(command: TyperCommand | TyperGroup, name: str) -> Iterator[str]:
    for parameter in command.params:
        assert isinstance(parameter, TyperArgument | TyperOption)
        kind = "argument" if isinstance(parameter, TyperArgument) else "option"
        default = "" if callable(parameter.default) else repr(parameter.default)
        names = "/".join((*parameter.opts, *parameter.secondary_opts))
        needed = " required" * parameter.required + " several" * parameter.multiple
        yield f"{name} {kind} {names}{needed} {default}".rstrip()
    for child, nested in getattr(command, "commands", {}).items():
        yield f"{name} {child}"
        yield from _commands(nested, f"{name} {child}")


SURFACES: Mapping[str, Callable[[], Iterator[str]]] = {
    surface.__name__: surface for surface in (http, grpc, metrics, settings, commands)
}


def changes(surface: str) -> list[str]:
    """Lines that are new ("+ …") or gone ("- …") beside what was written."""
    then = (PLACE / f"{surface}.txt").read_text().splitlines()
    return [line for line in difflib.ndiff(then, sorted(SURFACES[surface]())) if line[0] in "+-"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="take what is there now")
    if parser.parse_args().write:
        PLACE.mkdir(parents=True, exist_ok=True)
        for surface, lines in SURFACES.items():
            (PLACE / f"{surface}.txt").write_text("".join(f"{line}\n" for line in sorted(lines())))
        return 0
    found = [f"{surface}: {line}" for surface in SURFACES for line in changes(surface)]
    print(*found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
