"""What of a reward is code in another language, checked and compiled: patterns and JSON Schemas.

Both come from a client and run beside the thread that serves, so both must end soon whatever they are given: RE2 takes
time linear in the text, and a schema may refer to its own definitions only as long as writing them out would still be
a small schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import jsonschema_rs
import re2

from services.common.errors import InvalidRequest
from services.common.jobs.kinds.generate import GenerateSettings, RolloutPrompt
from services.common.scorers.base import ANSWER, JsonSchemaReward, RegexReward

MAX_ANSWER = 2000
"""Characters of an answer that becomes part of a pattern."""
_PATTERN_MEMORY = 8 * 2**20
"""Of one compiled pattern, bytes."""
_SCHEMA_BYTES = 64 * 1024
_SCHEMA_NODES = 20_000
"""Of a schema whose references are written out."""
_SCHEMA_DEPTH = 64
_ENGINE_BYTES = 2**20
"""Of one compiled pattern inside a schema."""
_REFUSED = ("$dynamicRef", "$recursiveRef", "$id", "$anchor", "$dynamicAnchor")
"""Ways to refer to something, or to be referred to, other than by #/$defs/NAME."""

Matcher = Callable[[str], bool]


def check_rewards(settings: GenerateSettings) -> None:
    """Compiles every pattern with every answer, and every schema.

    Raises:
        InvalidRequest: one cannot be used; names it.
    """
    for index, reward in enumerate(settings.reward):
        where = f"generate.reward[{index}]"
        if isinstance(reward, RegexReward):
            _check_pattern(reward, settings, where)
        elif isinstance(reward, JsonSchemaReward):
            schema_validator(reward, where)


def matcher(reward: RegexReward, answer: str | None, where: str) -> Matcher:
    """The compiled pattern for a prompt with this answer.

    Raises:
        InvalidRequest: it is no RE2 pattern, or too large.
    """
    pattern = reward.pattern
    if reward.needs_answer:
        pattern = pattern.replace(ANSWER, f"(?:{re2.escape(answer or '')})")
    options = re2.Options()
    options.log_errors = False
    options.max_mem = _PATTERN_MEMORY
    try:
        compiled = re2.compile(pattern, options)
    except re2.error as error:
        raise InvalidRequest(
            f"{where}.pattern is no RE2 pattern (there is no lookaround and no backreference): {_text(error)}",
            param=f"{where}.pattern",
        ) from error
    match = compiled.search if reward.match == "search" else compiled.fullmatch
    return lambda text: match(text) is not None


def _check_pattern(reward: RegexReward, settings: GenerateSettings, where: str) -> None:
    matcher(reward, "", where)
    if not reward.needs_answer:
        return
    for field, prompts in (("prompts", settings.prompts), ("eval_prompts", settings.eval_prompts)):
        _check_answers(reward, prompts, f"generate.{field}", where)


def _check_answers(reward: RegexReward, prompts: Iterable[RolloutPrompt], field: str, where: str) -> None:
    for index, prompt in enumerate(prompts):
        if len(prompt.answer or "") > MAX_ANSWER:
            raise InvalidRequest(
                f"{field}[{index}].answer has over {MAX_ANSWER} characters, too many for {where}.pattern",
                param=f"{field}[{index}].answer",
            )
        matcher(reward, prompt.answer, where)


def schema_validator(reward: JsonSchemaReward, where: str) -> Callable[[Any], bool]:
    """Whether a value is valid; the compiled schema.

    Raises:
        InvalidRequest: it is no JSON Schema, too large, recursive, or refers to something outside itself.
    """
    param = f"{where}.json_schema"
    try:
        if len(json.dumps(reward.json_schema)) > _SCHEMA_BYTES:
            raise ValueError(f"it has over {_SCHEMA_BYTES} bytes")
        _Expansion(reward.json_schema).check()
        validator = jsonschema_rs.validator_for(
            reward.json_schema,
            # Linear time, like RE2; the default engine backtracks.
            pattern_options=jsonschema_rs.RegexOptions(size_limit=_ENGINE_BYTES, dfa_size_limit=_ENGINE_BYTES),
            offline=True,
        )
    except (ValueError, RecursionError, jsonschema_rs.ReferencingError) as error:
        raise InvalidRequest(f"{param} cannot be used: {_text(error)}", param=param) from error
    return validator.is_valid


def _text(error: Exception) -> str:
    found = error.args[0] if error.args else error
    text = found.decode(errors="replace") if isinstance(found, bytes) else str(error)
    return text.splitlines()[0][:300] if text else type(error).__name__


class _Expansion:
    """How large a schema is with its references written out."""

    def __init__(self, schema: dict[str, Any]) -> None:
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
