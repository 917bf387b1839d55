"""Scorer that validates the completion as JSON against a JSON Schema.

The schema comes from a client and runs beside the thread that serves, so it must end soon whatever it is given: it may
refer to its own definitions only as long as writing them out would still be a small schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from services.common.errors import InvalidRequest
from services.common.jobs.scorers.base import SampleScorerSpec, ScorerSpec
from services.common.jobs.scorers.grants import Grants
from services.common.jobs.scorers.sample import Reference, Sample, error_text

MAX_CHARACTERS = 64 * 1024
MAX_DEPTH = 64
_SCHEMA_BYTES = 64 * 1024
_SCHEMA_NODES = 20_000
"""Most nodes of a schema whose references are written out."""
_SCHEMA_DEPTH = 64
_ENGINE_BYTES = 2**20
"""Most memory of one compiled pattern inside a schema."""
_REFUSED = ("$dynamicRef", "$recursiveRef", "$id", "$anchor", "$dynamicAnchor")
"""Ways to refer to something, or to be referred to, other than by #/$defs/NAME."""


class JsonSchemaReward(ScorerSpec):
    """1 if the completion is JSON and valid against the schema, else 0."""

    type: Literal["json_schema"] = "json_schema"
    json_schema: dict[str, Any]
    """Draft 2020-12 unless it names another. `$ref` only to its own definitions, and without recursion."""

    def check(self, where: str, answers: Iterable[tuple[str, str | None]]) -> None:
        """See ScorerSpec: the schema is compiled."""
        del answers
        schema_validator(self, where)

    def scorer(self, where: str, grants: Grants) -> JsonSchemaScorer:
        """See ScorerSpec."""
        del grants
        return JsonSchemaScorer(self, where)


class ItemSchemaSpec(SampleScorerSpec):
    """1 if the answer is JSON and valid against the `json_schema` of its item, else 0. Of suites only."""

    type: Literal["item_schema"] = "item_schema"

    def wrong_item(self, reference: Reference) -> str | None:
        """See ScorerSettings: the schema is compiled."""
        if reference.json_schema is None:
            return "json_schema: is missing, and the item_schema scorer validates against it"
        try:
            compiled(reference.json_schema)
        except SchemaRefused as error:
            return f"json_schema: cannot be used: {error}"
        return None

    def scorer(self, where: str, grants: Grants) -> ItemSchemaScorer:
        """See SampleScorerSpec."""
        del where, grants
        return ItemSchemaScorer()


class ItemSchemaScorer:
    """See ItemSchemaSpec."""

    def score(self, samples: Sequence[Sample], interrupt: Callable[[], None]) -> list[float]:
        """See Scorer.score."""
        scores = []
        for sample in samples:
            interrupt()
            schema = sample.reference.json_schema
            scores.append(0.0 if schema is None else valid_json(sample.text, compiled(schema)))
        return scores


class JsonSchemaScorer:
    """See JsonSchemaReward. Raises InvalidRequest if the schema cannot be used."""

    def __init__(self, spec: JsonSchemaReward, where: str) -> None:
        self._valid = schema_validator(spec, where)

    def score(self, samples: Sequence[Sample], interrupt: Callable[[], None]) -> list[float]:
        """See Scorer.score."""
        scores = []
        for sample in samples:
            interrupt()
            scores.append(valid_json(sample.text, self._valid))
        return scores


def valid_json(text: str, valid: Callable[[Any], bool]) -> float:
    """1 if a text is JSON that a compiled schema takes, else 0."""
    try:
        value = parse(text)
    except ValueError:
        return 0.0
    return float(valid(value))


def parse(text: str) -> Any:
    """JSON as the standard has it, of bounded size and depth.

    Raises:
        ValueError: it is not.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"over {MAX_CHARACTERS} characters")
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    _check_depth(value)
    check_json(value)
    return value


def check_json(value: Any) -> None:
    """Checks a value that a parser made for what JSON has not, though parsers of it take it. Validators and other
    servers do not.

    Raises:
        ValueError: it holds NaN, an infinity (of a number like 1e999) or half of a surrogate pair, or is nested too
            deep to be written.
    """
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError as error:
        raise ValueError("nested too deep") from error


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


def schema_validator(reward: JsonSchemaReward, where: str) -> Callable[[Any], bool]:
    """Whether a value is valid; the compiled schema.

    Raises:
        InvalidRequest: it is no JSON Schema, too large, recursive, or refers to something outside itself.
    """
    param = f"{where}.json_schema"
    try:
        return compiled(reward.json_schema)
    except SchemaRefused as error:
        raise InvalidRequest(f"{param} cannot be used: {error}", param=param) from error


class SchemaRefused(Exception):
    """A schema that is none, or that could take long; says why."""


def compiled(schema: Mapping[str, Any]) -> Callable[[Any], bool]:
    """Whether a value is valid; the compiled schema.

    Raises:
        SchemaRefused: it is no JSON Schema, too large, recursive, or refers to something outside itself.
    """
    import jsonschema_rs

    try:
        if len(json.dumps(schema)) > _SCHEMA_BYTES:
            raise ValueError(f"it has over {_SCHEMA_BYTES} bytes")
        _Expansion(schema).check()
        validator = jsonschema_rs.validator_for(
            dict(schema),
            # Linear time, like RE2; the default engine backtracks.
            pattern_options=jsonschema_rs.RegexOptions(size_limit=_ENGINE_BYTES, dfa_size_limit=_ENGINE_BYTES),
            offline=True,
        )
    except (ValueError, RecursionError, jsonschema_rs.ReferencingError) as error:
        raise SchemaRefused(error_text(error)) from error
    return validator.is_valid


class _Expansion:
    """Size of a schema with its references written out."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._sizes: dict[str, int] = {}
        self._open: set[str] = set()

    def check(self) -> None:
        """Raises ValueError if it is too large, recursive or refers to something outside itself."""
        if self._size(self._schema, 0) > _SCHEMA_NODES:
            raise ValueError(f"with its references written out it has over {_SCHEMA_NODES} parts")

    def _size(self, node: Any, depth: int) -> int:
        if depth > _SCHEMA_DEPTH:
            raise ValueError(f"it is nested over {_SCHEMA_DEPTH} deep")
        if isinstance(node, list):
            return 1 + sum(self._size(item, depth + 1) for item in node)
        if not isinstance(node, dict):
            return 1
        for name in _REFUSED:
            if isinstance(node.get(name), str):
                raise ValueError(f"{name} is not supported")
        if "draft-04" in str(node.get("$schema")):
            raise ValueError("draft 4 is not supported: use draft 6 or later")
        total = 1 + sum(self._size(value, depth + 1) for value in node.values())
        reference = node.get("$ref")
        return total + self._referred(reference, depth) if isinstance(reference, str) else total

    def _referred(self, reference: str, depth: int) -> int:
        if reference in self._open:
            raise ValueError(f"{reference!r} refers to itself, and a recursive schema is not supported")
        if reference not in self._sizes:
            self._open.add(reference)
            self._sizes[reference] = self._size(self._target(reference), depth + 1)
            self._open.discard(reference)
        return self._sizes[reference]

    def _target(self, reference: str) -> Any:
        node: Any = self._schema
        head, *names = reference.split("/")
        if head != "#" or len(names) != 2 or names[0] not in ("$defs", "definitions"):
            raise ValueError(f"$ref {reference[:80]!r} must be #/$defs/NAME")
        for name in names:
            node = node.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(node, dict) else None
        if node is None:
            raise ValueError(f"$ref {reference[:80]!r} refers to nothing")
        return node
