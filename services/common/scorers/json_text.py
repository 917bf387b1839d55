"""Whether a completion is JSON of a given shape."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from services.common.scorers.base import JsonSchemaReward
from services.common.scorers.json_schema import schema_validator
from services.common.scorers.sample import Sample

MAX_CHARACTERS = 64 * 1024
MAX_DEPTH = 64


class JsonSchemaScorer:
    """See JsonSchemaReward. Raises InvalidRequest if the schema cannot be used."""

    def __init__(self, spec: JsonSchemaReward, where: str) -> None:
        self._valid = schema_validator(spec, where)

    def score(self, samples: Sequence[Sample], interrupt: Callable[[], None]) -> list[float]:
        """See Scorer.score."""
        scores = []
        for sample in samples:
            interrupt()
            scores.append(self._one(sample.text))
        return scores

    def _one(self, text: str) -> float:
        try:
            value = parse(text)
        except ValueError:
            return 0.0
        return float(self._valid(value))


def parse(text: str) -> Any:
    """JSON as the standard has it, of bounded size and depth.

    Raises:
        ValueError: it is not.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"over {MAX_CHARACTERS} characters")
    try:
        value = json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    _check_depth(value)
    return value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = [part for item in level if isinstance(item, list | dict) for part in _parts(item)]
        if not inner:
            return
        level = inner
    raise ValueError(f"nested over {MAX_DEPTH} deep")


def _parts(item: list[Any] | dict[str, Any]) -> list[Any]:
    return list(item.values()) if isinstance(item, dict) else item
