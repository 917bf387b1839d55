"""Variables and the configuration file."""

from __future__ import annotations

import difflib

from pydantic import ValidationError
from pydantic_settings import BaseSettings

from cli.doctor.findings import Finding, failure, ok, warning
from cli.doctor.place import Place
from cli.settings import CliSettings, UpSettings, inherited_environment
from services.common.validation.settings import variables_of, wrong_settings
from services.engine.settings import EngineSettings
from services.gateway.settings import GatewaySettings
from services.model_source.settings import ModelSourceSettings
from services.trainer.settings import TrainerSettings

SETTINGS: tuple[type[BaseSettings], ...] = (EngineSettings, TrainerSettings, GatewaySettings, UpSettings, CliSettings)
"""Settings of everything that reads variables."""

_NAMED = 5
_ELSEWHERE = frozenset({"TEMPER_CONFIG"})
"""Variables that are read by the settings classes themselves."""


def readable(_: Place) -> Finding:
    """Every variable has a value that its service accepts."""
    wrong: list[str] = []
    for settings in SETTINGS:
        try:
            settings()
        except ValidationError as error:
            wrong += [text for text in wrong_settings(error) if text not in wrong]
    if wrong:
        return failure(
            f"settings cannot be used: {'; '.join(wrong)}", "set them to what docs/guides/configuration.md says"
        )
    return ok("every setting can be read")


def known(_: Place) -> Finding:
    """No variable that starts with TEMPER_ is unknown: a mistyped one does nothing."""
    names = {name for settings in (*SETTINGS, ModelSourceSettings) for name in variables_of(settings)} | _ELSEWHERE
    unknown = sorted(name for name in inherited_environment() if name.startswith("TEMPER_") and name not in names)
    if not unknown:
        return ok("every TEMPER_ variable is a setting")
    texts = []
    for name in unknown[:_NAMED]:
        near = difflib.get_close_matches(name, names, n=1)
        texts.append(f"{name} (is it {near[0]}?)" if near else name)
    more = len(unknown) - len(texts)
    named = ", ".join(texts) + (f" and {more} more" if more else "")
    return warning(f"variables do nothing, for no setting has their name: {named}", "correct their names or unset them")
