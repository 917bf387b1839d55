"""Messages about invalid data, in the words of whoever wrote it: pydantic's errors without pydantic."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_LONGEST_NAME = 200
"""Characters that are told of a field's name. Names of fields that are unknown are the client's."""
_LONGEST_VALUE = 80
_WORD = re.compile(r"[A-Za-z_]\w*")


def contradiction(message: str, param: str) -> PydanticCustomError:
    """Error that a model's validator raises for fields that do not go together.

    Args:
        message: what is wrong, and the way out.
        param: the field to change, by its path in the model ("data[3].weights").
    """
    return PydanticCustomError("contradiction", "{message}", {"message": message, "param": param})


def suggestion(name: str, known: Iterable[str]) -> str:
    """`: did you mean 'prompt'?` if a known name looks like the given one, else nothing."""
    close = difflib.get_close_matches(name[:80], list(known), n=1, cutoff=0.6)
    return f": did you mean {close[0]!r}?" if close else ""


def dotted(path: Sequence[int | str]) -> str:
    """A place in JSON: `examples[0].prompt`. Names that are too long are cut off."""
    text = ""
    for segment in path:
        segment = segment[:_LONGEST_NAME] if isinstance(segment, str) else segment
        text += f"[{segment}]" if isinstance(segment, int) else f".{segment}" if text else segment
    return text


@dataclass(frozen=True, slots=True)
class Told:
    """The error that is told, of all that pydantic found."""

    error: Mapping[str, Any]
    path: Sequence[int | str]
    """Path of the value at fault, without the tags of unions."""

    @property
    def unknown(self) -> bool:
        """A field that the model does not have."""
        return self.error["type"] in _UNKNOWN and bool(self.path)

    @property
    def words(self) -> str:
        """The message, without what pydantic puts before a validator's own words, nor the whole of a value that was to
        say what the object is."""
        text = str(self.error["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
        tag = str((self.error.get("ctx") or {}).get("tag", ""))
        return text.replace(tag, f"{tag[:_LONGEST_VALUE]}…") if len(tag) > _LONGEST_VALUE else text

    def named(self, model: Any, body: Any) -> str | None:
        """The field that the message of an error of the whole body names, as of fields that do not go together: the
        first that was sent, or else the first; None: it names none."""
        known = fields_at(model, (), body)
        names = [word for word in _WORD.findall(self.words) if word in known]
        sent = body if isinstance(body, Mapping) else {}
        return next((name for name in names if name in sent), names[0] if names else None)

    def suggestion(self, model: Any, body: Any) -> str:
        """Suggestion for an unknown field, by the models that may stand in its place."""
        return suggestion(str(self.path[-1]), fields_at(model, self.path[:-1], body))


def most_telling(errors: Sequence[Mapping[str, Any]], body: Any, *, source: str = "body") -> Told | None:
    """Most telling error of a union: the one deepest in the body, of those the first of a value that has a type of the
    union.

    Args:
        source: what locations begin with that are places in the body; "" if all are.
    """
    best: tuple[tuple[int, bool], Told] | None = None
    for error in errors:
        location = list(error["loc"])
        first = location.pop(0) if source and location else source
        if error["type"] == "json_invalid":
            path: list[int | str] = []
        elif first == source:
            path = _walk(location, body, missing=error["type"] == "missing")
        else:
            path = location
        if str(error["type"]).startswith("union_tag"):
            path = [*path, str(error["ctx"]["discriminator"]).strip("'")]
        if extra := (error.get("ctx") or {}).get("param"):
            path = [*path, extra]
        rank = len(path), not str(error["type"]).endswith("_type")
        if best is None or rank > best[0]:
            best = rank, Told(error, path)
    return None if best is None else best[1]


def _walk(location: Sequence[int | str], body: Any, *, missing: bool) -> list[int | str]:
    """The part of a pydantic location that exists in the body: union and validator tags are left out."""
    path: list[int | str] = []
    for position, segment in enumerate(location):
        last = position == len(location) - 1
        in_object = isinstance(body, Mapping) and segment in body
        in_list = isinstance(body, list) and isinstance(segment, int) and 0 <= segment < len(body)
        if in_object and _is_tag(segment, body, location[position + 1 :]):
            continue
        if in_object or in_list:
            body = body[segment]
        elif not (last and missing):
            continue
        path.append(segment)
    return path


def _is_tag(segment: int | str, body: Mapping[Any, Any], rest: Sequence[int | str]) -> bool:
    """True if a segment that is a key, too, is a union's tag, as `text` of the blocks that have a `text`: nothing is
    inside that key, and the location goes on beside it."""
    return not isinstance(body[segment], Mapping | list) and any(later in body for later in rest)


def fields_at(model: Any, path: Sequence[int | str], value: Any) -> list[str]:
    """The fields that the object at a place may have.

    Args:
        model: a model, or any type that models are parts of.
        value: what was validated: models that say by a constant that it is another are left out.
    """
    found = _fitting(_models(model), value)
    for segment in path:
        value = _inside(value, segment)
        if isinstance(segment, str):
            fields = [field for one in found if (field := one.model_fields.get(segment)) is not None]
            found = [one for field in fields for one in _models(field.annotation)]
        found = _fitting(found, value)
    return sorted({field.alias or name for one in found for name, field in one.model_fields.items()})


def _inside(value: Any, segment: int | str) -> Any:
    try:
        return value[segment]
    except (TypeError, KeyError, IndexError):
        return None


def _fitting(models: list[type[BaseModel]], value: Any) -> list[type[BaseModel]]:
    """Models with which no constant in the object disagrees."""
    return [model for model in models if not isinstance(value, Mapping) or _agrees(model, value)]


def _agrees(model: type[BaseModel], value: Mapping[Any, Any]) -> bool:
    return all(
        get_origin(field.annotation) is not Literal or name not in value or value[name] in get_args(field.annotation)
        for name, field in model.model_fields.items()
    )


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models(argument)]


def problem(error: ValidationError, model: Any, data: Any) -> str:
    """Message about data that is no ``model``, with its place, and how much more there is."""
    errors = error.errors(include_url=False)
    told = most_telling(errors, data, source="")
    if told is None:
        return str(error)
    more = f" ({len(errors) - 1} more)" if len(errors) > 1 else ""
    *parents, last = told.path or ("",)
    place = f"{dotted(parents)}: " if parents else ""
    if told.unknown:
        return f"{place}unknown field {str(last)[:80]!r}{told.suggestion(model, data) or ': remove it'}{more}"
    if told.error["type"] == "missing":
        return f"{place}the field {str(last)!r} is missing{more}"
    if (told.error.get("ctx") or {}).get("param"):  # the message names it
        return f"{place}{told.words}{more}"
    where = dotted(told.path)
    return f"{where + ': ' if where else ''}{told.words}{more}"
