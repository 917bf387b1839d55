"""How fetching a checkpoint fails: always with the variable to change, and the chart's value beside it."""

from __future__ import annotations

from collections.abc import Iterable

from services.common.errors import TemperError

CHART_VALUES = {
    "TEMPER_MODEL_SOURCE": "engine.model.source",
    "TEMPER_MODEL_DIGEST": "engine.model.digest",
}


class SourceRejected(TemperError):
    """The checkpoint cannot be had as the settings say, and trying again would not help.

    Args:
        variable: the environment variable to change.
    """

    code = "model_source_rejected"

    def __init__(self, variable: str, message: str) -> None:
        super().__init__(f"{named(variable)}: {message}", param=variable.removeprefix("TEMPER_").lower())
        self.variable = variable
        self.reason = message


class SourceAway(SourceRejected):
    """The source does not answer, however often it is asked, or has no more to give: later it may."""

    code = "model_source_away"


class SourceBroken(Exception):
    """The source did not answer, or stopped in the middle: trying again may help."""


def named(variable: str) -> str:
    """ "TEMPER_MODEL_SOURCE (engine.model.source)"."""
    value = CHART_VALUES.get(variable)
    return f"{variable} ({value})" if value else variable


def broken(error: BaseException) -> SourceBroken:
    """A connection that ended in the middle."""
    return SourceBroken(f"the connection broke off: {one_line([error])}")


def one_line(texts: Iterable[object]) -> str:
    """Texts of others, in one short line."""
    return " ".join(" ".join(str(text).split()) for text in texts)[:300]
