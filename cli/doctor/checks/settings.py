"""Variables and the file of settings."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator
from typing import TypeVar

from pydantic_settings import BaseSettings

from cli.doctor.findings import Finding, NotHere, failure, ok, warning
from cli.doctor.place import Place
from cli.settings import BadSettings, CliSettings, UpSettings, read
from services.common.settings import CONFIG_VARIABLE, config_file, read_config_file
from services.common.validation.settings import keys_of
from services.engine.settings import EngineSettings
from services.gateway.settings import GatewaySettings
from services.model_source.settings import ModelSourceSettings
from services.trainer.settings import TrainerSettings

SETTINGS: tuple[type[BaseSettings], ...] = (EngineSettings, TrainerSettings, GatewaySettings, UpSettings, CliSettings)
"""Settings of everything that reads variables; those of the model source are read by a start that fetches one."""
SECRETS = ("secret", "password", "key", "token", "url", "headers", "proxy")
"""Parts of names of settings that may be secret."""
_NAMED = 5
_OTHERS = 0o077
T = TypeVar("T")


def readable(_: Place) -> Finding:
    """Every variable and every line of temper.toml has a value that its service accepts."""
    wrong = unreadable()
    if wrong:
        return failure(
            f"settings cannot be used: {'; '.join(wrong)}", "set them to what docs/guides/configuration.md says"
        )
    return ok("every setting can be read")


def known(_: Place) -> Finding:
    """Every TEMPER_ variable and every line of temper.toml is a setting: a mistyped one does nothing."""
    texts = unknown()
    if not texts:
        return ok("every TEMPER_ variable and every line of temper.toml is a setting")
    more = len(texts) - _NAMED
    named = ", ".join(texts[:_NAMED]) + (f" and {more} more" if more > 0 else "")
    return warning(f"no setting has these names, so they do nothing: {named}", "correct them or remove them")


def private(_: Place) -> Finding:
    """A file of settings that has secrets is nobody else's to read."""
    file = config_file()
    if file is None:
        raise NotHere("there is no temper.toml")
    try:
        secrets = [key for key in read_config_file(file) if any(part in key for part in SECRETS)]
        open_to_others = file.stat().st_mode & _OTHERS
    except (ValueError, OSError) as error:
        raise NotHere("the file of settings cannot be read") from error
    if not secrets or not open_to_others:
        return ok(f"{file} is as private as it has to be")

    def close() -> str:
        file.chmod(0o600)
        return f"chmod 600 {file}"

    return warning(f"{file} has {', '.join(secrets)}, and others can read it", f"chmod 600 {file}", mend=close)


def unreadable() -> list[str]:
    """A text a setting that cannot be used."""
    wrong: list[str] = []
    for settings in SETTINGS:
        try:
            read(settings)
        except BadSettings as error:
            wrong += [text for text in error.message.split("; ") if text not in wrong]
    return wrong


def unknown() -> list[str]:
    """Names of variables and of lines of the file that are no settings, each with what it may have been meant to be."""
    classes: tuple[type[BaseSettings], ...] = (*SETTINGS, ModelSourceSettings)
    keys = {key: name for settings in classes for key, name in keys_of(settings).items()}
    variables = {*keys.values(), CONFIG_VARIABLE}
    texts = list(_unknown((name for name in os.environ if name.startswith("TEMPER_")), variables))
    file = config_file()
    if file is not None:
        try:
            texts += [f"{text} in {file.name}" for text in _unknown(read_config_file(file), keys)]
        except ValueError:
            return texts  # `readable` tells it
    return texts


def _unknown(names: Iterable[str], known: Iterable[str]) -> Iterator[str]:
    known = set(known)
    for name in sorted(set(names) - known):
        near = difflib.get_close_matches(name, known, n=1)
        yield f"{name} (is it {near[0]}?)" if near else name
