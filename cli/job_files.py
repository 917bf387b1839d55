"""From files and options to a job specification, checked here, before anything is sent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from cli.output import CliError, ExitCode
from services.common.jobs import (
    JOBS,
    DistillPrompt,
    DpoExample,
    GrpoGroup,
    KtoExample,
    ScoredCompletion,
    SftExample,
)
from services.common.validation.errors import problem

_EXAMPLES: Mapping[str, type[BaseModel]] = {"sft": SftExample, "dpo": DpoExample, "kto": KtoExample}
"""A line of the JSONL data of each kind whose data are examples."""


def read_job(file: Path) -> dict[str, Any]:
    """A job from a JSON file with `kind`."""
    job = _parse(_read(file), str(file))
    if not isinstance(job, dict) or job.get("kind") not in JOBS:
        kinds = ", ".join(f'"{kind}"' for kind in JOBS)
        raise CliError(f'{file}: a job is a JSON object with a "kind", which is one of {kinds}', ExitCode.USAGE)
    return job


def data_kinds() -> list[str]:
    """The kinds that `data` reads."""
    return [*_EXAMPLES, "grpo", "opd"]


def data(kind: str, file: Path) -> dict[str, Any]:
    """The data fields of a job from a JSONL file, every line checked.

    Raises:
        CliError: a line is not what the kind learns from; the message has its number.
    """
    rows = read_lines(file)
    if kind == "grpo":
        return _grpo_data(file, rows)
    if kind == "opd":
        for index, (number, row) in enumerate(rows):
            _check_row(DistillPrompt, row, f"{file}:{number}", f"prompts[{index}]")
        return {"prompts": [row for _, row in rows]}
    for index, (number, row) in enumerate(rows):
        _check_row(_EXAMPLES[kind], row, f"{file}:{number}", f"examples[{index}]")
    return {"examples": [row for _, row in rows]}


def read_lines(file: Path) -> list[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file with their line numbers; blank lines are skipped. Lines end with a line feed and
    nothing else: the other line ends of Unicode may stand inside of strings."""
    rows = []
    text = _read(file)
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
    """What to do about a file that is JSON as a whole."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    if isinstance(whole, list):
        return "; the file is one JSON array: write its objects one a line (jq -c '.[]' FILE > FILE.jsonl)"
    return "; the file is one JSON value over several lines: write each object on a line (jq -c . FILE > FILE.jsonl)"


def _grpo_data(file: Path, rows: Sequence[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """Lines {"completion_id", "reward"}, or groups {"prompt", "completions", "rewards"}, or groups as the API has them.

    A group's completions may be plain strings with `rewards` beside them, or objects that bring their own reward.
    """
    by_id = ["completion_id" in row for _, row in rows]
    if all(by_id):
        for index, (number, row) in enumerate(rows):
            _check_row(ScoredCompletion, row, f"{file}:{number}", f"rollouts[{index}]")
        return {"rollouts": [row for _, row in rows]}
    if any(by_id):
        raise CliError(
            f"{file}: lines with completion_id and lines with completions cannot be mixed in one job", ExitCode.USAGE
        )
    groups = []
    for index, (number, row) in enumerate(rows):
        group = _group(row, f"{file}:{number}")
        _check_row(GrpoGroup, group, f"{file}:{number}", f"groups[{index}]")
        groups.append(group)
    return {"groups": groups}


def _group(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A group of the API. What the simple form has beside its completions becomes theirs."""
    group = dict(row)
    beside = {name: group.pop(name) for name in ("rewards", "truncated", "temperature") if name in group}
    if not beside:
        return group
    completions = group.get("completions")
    if not isinstance(completions, list):
        raise CliError(f"{where}: completions must be a list", ExitCode.USAGE)
    members = [dict(one) if isinstance(one, dict) else {"text": one} for one in completions]
    for name, value in beside.items():
        values = [value] * len(members) if name == "temperature" else value
        if not isinstance(values, list) or len(values) != len(members):
            raise CliError(f"{where}: completions and {name} must be lists of the same length", ExitCode.USAGE)
        for member, one in zip(members, values, strict=True):
            member["reward" if name == "rewards" else name] = one
    group["completions"] = members
    return group


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


def _read(file: Path) -> str:
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
