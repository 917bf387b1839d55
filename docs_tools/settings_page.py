"""The page docs/guides/configuration.md, from the settings classes.

Names, types, defaults and limits come from the classes, descriptions from the docstring under each field.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ByteSize, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from pydantic_settings import BaseSettings

from cli.settings import CliSettings, UpSettings
from docs_tools.paths import DOCS
from services.common.settings import CommonSettings
from services.common.validation.settings import variable_of
from services.engine.settings import EngineSettings
from services.gateway.settings import GatewaySettings
from services.model_source.settings import ModelSourceSettings
from services.trainer.settings import TrainerSettings

TARGET = DOCS / "guides" / "configuration.md"

HEADER = """# Configuration

<!-- Written by `python -m docs_tools.generate`; change the settings classes, not this file. -->

Every setting is an environment variable, or a line of `temper.toml`. A service reads them once, at its start, and
refuses a value that it cannot use with a line that names the variable. `temper up` sets those of its own stores and of
the data directory, puts its options before their variables (`temper up --help` names them), and passes all others on,
so `TEMPER_MAX_NUM_SEQS=128 temper up` works as expected.

What no variable says may stand in one file: `temper.toml` in the working directory, or the one that `TEMPER_CONFIG`
names. Its keys are the names below in small letters without `TEMPER_` ([the command line](cli.md#settings)).
One that nobody named does not say where secrets of the environment go.
"""

SECTIONS: tuple[tuple[str, type[BaseSettings], type[BaseSettings] | None, str], ...] = (
    ("Every service", CommonSettings, None, "Both the gateway and the engine read these."),
    ("Gateway", GatewaySettings, CommonSettings, "`python -m services.gateway`"),
    ("Engine", EngineSettings, CommonSettings, "`python -m services.pod`"),
    ("Trainer", TrainerSettings, CommonSettings, "The trainer thread of `python -m services.pod`."),
    (
        "Model source",
        ModelSourceSettings,
        CommonSettings,
        "`python -m services.model_source`, before an engine starts.",
    ),
    ("`temper up`", UpSettings, None, "Read by the supervisor, besides its options."),
    ("Client commands", CliSettings, None, "`temper chat`, `temper train`, `temper adapters`, `temper batch`."),
)


def render() -> str:
    """The whole page."""
    parts = [HEADER]
    for title, settings, base, intro in SECTIONS:
        own = {
            name: field for name, field in settings.model_fields.items() if base is None or _is_new(name, field, base)
        }
        texts = _descriptions(settings)
        parts.append(f"\n## {title}\n\n{intro}\n\n| variable | type | default | |\n|---|---|---|---|\n")
        for name, field in own.items():
            cells = (f"`{variable_of(name, field)}`", _type(field.annotation), _default(field), texts.get(name, ""))
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(parts)


def _is_new(name: str, field: FieldInfo, base: type[BaseSettings]) -> bool:
    inherited = base.model_fields.get(name)
    return inherited is None or inherited.default != field.default


def _descriptions(settings: type[BaseSettings]) -> dict[str, str]:
    """Field → the string literal right below it, of the class and its bases."""
    found: dict[str, str] = {}
    for cls in reversed(settings.__mro__):
        if not issubclass(cls, BaseSettings) or cls is BaseSettings:
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        if not isinstance(body, ast.ClassDef):
            continue
        for field, below in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                found[field.target.id] = " ".join(below.value.value.split())
    return found


def _type(annotation: Any) -> str:
    if annotation in (SecretStr, Path, ByteSize):
        return {SecretStr: "secret", Path: "path", ByteSize: "bytes"}[annotation]
    origin = get_origin(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if origin is Union or type(annotation).__name__ == "UnionType":
        return " or ".join(_type(part) for part in get_args(annotation) if part is not type(None))
    return str(getattr(annotation, "__name__", annotation))


def _default(field: FieldInfo) -> str:
    value = field.default
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "unset"
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if isinstance(value, bool):
        value = str(value).lower()
    return f"`{value}`"
