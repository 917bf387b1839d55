"""Files and options that become requests: job specifications, checked here, before anything is sent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from cli.output import CliError, ExitCode
from services.common.errors import InvalidRequest
from services.common.jobs import JOBS
from services.common.validation.errors import problem


def read_job(file: Path) -> dict[str, Any]:
    """A job from a JSON file with `kind`."""
    job = _parse(read_text(file), str(file))
    if not isinstance(job, dict) or job.get("kind") not in JOBS:
        kinds = ", ".join(f'"{kind}"' for kind in JOBS)
        raise CliError(f'{file}: a job is a JSON object with a "kind", which is one of {kinds}', ExitCode.USAGE)
    return job


def data(kind: str, file: Path) -> dict[str, Any]:
    """The data fields of a job from a JSONL file, every line checked.

    Raises:
        CliError: a line is not what the kind learns from; the message has its number.
    """
    rows = read_lines(file)
    try:
        form = JOBS[kind].data_rows([row for _, row in rows])
    except InvalidRequest as error:
        raise CliError(f"{file}: {error.message}", ExitCode.USAGE) from error
    elements = []
    for index, (number, row) in enumerate(rows):
        line = f"{file}:{number}"
        try:
            element = form.element(row)
        except InvalidRequest as error:
            raise CliError(f"{line}: {error.message}", ExitCode.USAGE) from error
        _check_row(form.model, element, line, f"{form.field}[{index}]")
        elements.append(element)
    return {form.field: elements}


def read_lines(file: Path) -> list[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file with their line numbers; blank lines are skipped. Lines end with a line feed and
    nothing else: the other line ends of Unicode may stand inside of strings."""
    rows = []
    text = read_text(file)
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                row = _parse(line, f"{file}:{number}")
            except CliError as error:
                raise CliError(f"{error}{_other_form(text)}", ExitCode.USAGE) from error
            if not isinstance(row, dict):
                raise CliError(f"{file}:{number}: every line must be a JSON object{_other_form(text)}", ExitCode.USAGE)
            rows.append((number, row))
    if not rows:
        raise CliError(f"{file} is empty: there is nothing to learn from", ExitCode.USAGE)
    return rows


def _other_form(text: str) -> str:
    """Advice for a file that is JSON as a whole."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    if isinstance(whole, list):
        return "; the file is one JSON array: write its objects one a line (jq -c '.[]' FILE > FILE.jsonl)"
    return "; the file is one JSON value over several lines: write each object on a line (jq -c . FILE > FILE.jsonl)"


def apply_settings(job: dict[str, Any], settings: Sequence[str]) -> None:
    """`--set optimizer.schedule=cosine`: dotted keys; values are JSON, or text where they are not."""
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise CliError(f"--set {setting!r}: write it as key=value", ExitCode.USAGE)
        *parents, last = key.split(".")
        place = job
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise CliError(f"--set {key}: {parent} is not an object", ExitCode.USAGE)
        try:
            place[last] = json.loads(text)
        except ValueError:
            place[last] = text


def check(job: Mapping[str, Any]) -> None:
    """Refuses what the server would refuse, naming the field."""
    model = JOBS[job["kind"]]
    try:
        model.model_validate(job)
    except ValidationError as error:
        raise CliError(f"the job is not valid: {problem(error, model, job)}", ExitCode.USAGE) from error


def _check_row(model: type[BaseModel], row: Mapping[str, Any], line: str, place: str) -> None:
    try:
        model.model_validate(row)
    except ValidationError as error:
        raise CliError(f"{line}: {place}: {problem(error, model, row)}", ExitCode.USAGE) from error


def read_object(file: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    found = _parse(read_text(file), str(file))
    if not isinstance(found, dict):
        raise CliError(f"{file}: must be a JSON object", ExitCode.USAGE)
    return found


def read_text(file: Path) -> str:
    """Text of a file in UTF-8."""
    try:
        return file.read_bytes().decode("utf-8-sig")  # with the byte order mark that Windows puts there, or without
    except OSError as error:
        raise CliError(f"cannot read {file}: {error.strerror}", ExitCode.USAGE) from error
    except UnicodeDecodeError as error:
        raise CliError(f"{file} is not UTF-8 text: save it as UTF-8", ExitCode.USAGE) from error


def _parse(text: str, where: str) -> Any:
    try:
        value = json.loads(text)
        if "\\u" in text:  # an escape may be half of a character, which no request can carry
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise CliError(
            f"{where} has half of a character (a lone surrogate, \\ud800 to \\udfff): write the whole one",
            ExitCode.USAGE,
        ) from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise CliError(f"{where} is not JSON: {error}", ExitCode.USAGE) from error
    except ValueError as error:  # Python's limit on the digits of integers
        raise CliError(f"{where} has an integer of too many digits: shorten it", ExitCode.USAGE) from error
    return value
