"""What is wrong with data, in the words of whoever wrote it: pydantic's errors without pydantic."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")


def guess(name: str, known: Iterable[str]) -> str:
    """`: did you mean 'prompt'?` after what looks like a slip of the pen, else nothing."""
    close = difflib.get_close_matches(name[:80], list(known), n=1, cutoff=0.6)
    return f": did you mean {close[0]!r}?" if close else ""


def dotted(path: Sequence[int | str]) -> str:
    """A place in JSON: `examples[0].prompt`."""
    text = ""
    for segment in path:
        text += f"[{segment}]" if isinstance(segment, int) else f".{segment}" if text else segment
    return text


def fields_at(model: Any, location: Sequence[int | str], value: Any = None) -> list[str]:
    """The fields that the object at a place may have, by the models that may stand there.

    Args:
        model: a model, or any type that models are parts of.
        location: as in an error of pydantic; tags of unions are passed over.
        value: what was validated: a union's members that say by a constant that they are another are left out.
    """
    found = _models(model)
    for segment in location:
        value = _inside(value, segment)
        if isinstance(segment, int):
            continue
        within = [field for one in found if (field := one.model_fields.get(segment)) is not None]
        if within:
            found = [one for field in within for one in _models(field.annotation)]
    fitting = [one for one in found if _fits(one, value)]
    return sorted({field.alias or name for one in fitting or found for name, field in one.model_fields.items()})


def _inside(value: Any, segment: int | str) -> Any:
    if isinstance(value, Mapping):
        return value.get(segment, value)
    if isinstance(value, list) and isinstance(segment, int) and 0 <= segment < len(value):
        return value[segment]
    return value


def _fits(model: type[BaseModel], value: Any) -> bool:
    """Nothing in the object contradicts a constant of the model."""
    if not isinstance(value, Mapping):
        return True
    constants = {name: get_args(f.annotation) for name, f in model.model_fields.items() if _is_constant(f.annotation)}
    return all(name not in value or value[name] in allowed for name, allowed in constants.items())


def _is_constant(annotation: Any) -> bool:
    return get_origin(annotation) is Literal


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models(argument)]


def problem(error: ValidationError, model: Any, *, skip: int = 0) -> str:
    """The first of what is wrong, with its place, and how much more there is.

    Args:
        skip: leading parts of the place to leave out.
    """
    found = error.errors(include_url=False)
    first = found[0]
    location = tuple(first["loc"])
    path = [part for part in location[skip:] if not _is_tag(part)]
    if extra := (first.get("ctx") or {}).get("param"):
        path.append(str(extra))
    more = f" ({len(found) - 1} more)" if len(found) > 1 else ""
    if first["type"] in _UNKNOWN:
        *parents, name = path
        place = f"{dotted(parents)}: " if parents else ""
        known = fields_at(model, location[:-1])
        return f"{place}unknown field {str(name)[:80]!r}{guess(str(name), known) or ': remove it'}{more}"
    if first["type"] == "missing":
        *parents, name = path
        place = f"{dotted(parents)}: " if parents else ""
        return f"{place}the field {str(name)!r} is missing{more}"
    where = dotted(path)
    return f"{where + ': ' if where else ''}{words(first)}{more}"


def words(error: Mapping[str, Any]) -> str:
    """The message of one error, without what pydantic puts before a validator's own words."""
    return str(error["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")


def _is_tag(part: int | str) -> bool:
    """Names of union members and of validators that pydantic writes into places; fields have no such characters."""
    return isinstance(part, str) and (any(character in part for character in "[](),'") or part in ("str", "int", "float"))
