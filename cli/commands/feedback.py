"""`temper feedback`: what people say of answers, noted in a file and made into training data.

The server keeps the answers (`store`); a note has all that a job needs of one, which outlives them.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.markup import escape

from cli import job_files
from cli.http.client import Client, path
from cli.options import Json, Url, connected
from cli.output import CliError, ExitCode, Output, guarded

app = typer.Typer(
    name="feedback", help="Say which answers were good, and make training data of it.", no_args_is_help=True
)
File = Annotated[Path, typer.Option("--file", help="The notes, one a line.")]
_NOTES = Path("feedback.jsonl")
_OF_A_TURN = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
_SHOWN_CHARACTERS = 60


class Note(BaseModel):
    """One answer, and what is said of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    completion: str
    says: str
    """up, down, corrected or preferred."""
    messages: Annotated[Sequence[dict[str, Any]], Field(min_length=1)]
    """Those in front of the answer."""
    good: str | None = None
    bad: str | None = None

    @property
    def context(self) -> list[dict[str, Any]]:
        """The messages as a job takes them: nobody has said anything of the assistant's earlier turns."""
        return [{**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in self.messages]


class Kind(enum.StrEnum):
    """Jobs that learn from notes."""

    SFT = "sft"
    DPO = "dpo"
    KTO = "kto"


@app.command()
def give(
    completion: Annotated[str, typer.Argument(help="Id of a kept answer, as `temper chat --store` tells it.")],
    up: Annotated[bool, typer.Option("--up", help="It is good.")] = False,
    down: Annotated[bool, typer.Option("--down", help="It is bad.")] = False,
    correct: Annotated[str | None, typer.Option(metavar="TEXT", help="What it should have been.")] = None,
    over: Annotated[
        str | None, typer.Option(metavar="COMPLETION", help="It is better than this one, to the same messages.")
    ] = None,
    file: File = _NOTES,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Note what is good or bad about an answer, in place of what was noted of it before."""

    def work(client: Client, output: Output) -> None:
        if (up, down, correct is not None, over is not None).count(True) != 1:
            raise CliError("say one thing of the answer: --up, --down, --correct TEXT or --over ID", ExitCode.USAGE)
        notes = _read(file) if file.exists() else []
        messages, answer = _stored(client, completion)
        if up:
            note = Note(completion=completion, says="up", messages=messages, good=answer)
        elif down:
            note = Note(completion=completion, says="down", messages=messages, bad=answer)
        elif correct is not None:
            note = Note(completion=completion, says="corrected", messages=messages, good=correct, bad=answer)
        else:
            others, worse = _stored(client, str(over))
            if others != messages:
                raise CliError(f"{over} answers other messages than {completion}: only answers to the same compare")
            note = Note(completion=completion, says="preferred", messages=messages, good=answer, bad=worse)
        notes = [*(one for one in notes if one.completion != completion), note]
        _write(file, [one.model_dump(exclude_none=True) for one in notes])
        output.result(note.model_dump(), f"{escape(completion)}: {note.says}; {escape(str(file))} has {len(notes)}")

    connected(url, as_json, work)


@app.command("list")
def list_notes(file: File = _NOTES, as_json: Json = False) -> None:
    """Show what was noted."""
    output = Output(as_json=as_json)
    with guarded(output):
        notes = _read(file) if file.exists() else []
        rows = [
            [one.completion, one.says, *(_short(text) for text in (one.messages[-1].get("content"), one.good, one.bad))]
            for one in notes
        ]
        columns = ["COMPLETION", "SAYS", "TO", "GOOD", "BAD"]
        output.table([one.model_dump() for one in notes], columns, rows, empty=_nothing(file))


@app.command()
def export(
    kind: Annotated[Kind, typer.Argument(help="The kind of job that is to learn from it.")],
    data: Annotated[Path, typer.Argument(help="JSONL for `temper train submit KIND --data`.")],
    file: File = _NOTES,
    as_json: Json = False,
) -> None:
    """Write what a kind of job can learn from: sft good answers, dpo pairs of a good and a bad one, kto both kinds."""
    output = Output(as_json=as_json)
    with guarded(output):
        if not file.exists():
            raise CliError(_nothing(file), ExitCode.USAGE)
        make, missing = _LEARNERS[kind]
        found = [example for note in _read(file) for example in make(note)]
        labels = {example.get("label") for example in found}
        if not found or (kind is Kind.KTO and len(labels) < 2):
            raise CliError(f"{file}: {missing}", ExitCode.USAGE)
        _write(data, found)
        job_files.data(kind.value, data)  # what is written is what a job takes
        count = "1 example" if len(found) == 1 else f"{len(found)} examples"
        text = f"{count}: temper train submit {kind.value} --data {escape(str(data))} --adapter NAME"
        output.result({"kind": kind.value, "data": str(data), "examples": len(found)}, text)


def _sft(note: Note) -> list[dict[str, Any]]:
    if note.good is None:
        return []
    return [{"messages": [*note.context, {"role": "assistant", "content": note.good}]}]


def _dpo(note: Note) -> list[dict[str, Any]]:
    if note.good is None or note.bad is None or note.good == note.bad:
        return []
    return [{"messages": list(note.messages), "chosen": note.good, "rejected": note.bad}]


def _kto(note: Note) -> list[dict[str, Any]]:
    rated = [(note.good, True), (note.bad, False)]
    return [
        {"messages": list(note.messages), "completion": text, "label": label}
        for text, label in rated
        if text is not None
    ]


_LEARNERS: Mapping[Kind, tuple[Callable[[Note], list[dict[str, Any]]], str]] = {
    Kind.SFT: (_sft, "sft learns from good answers, and there are none: give --up, --correct or --over"),
    Kind.DPO: (_dpo, "dpo learns from pairs of a good and a bad answer, and there are none: give --correct or --over"),
    Kind.KTO: (_kto, "kto learns from good and bad answers, and there are not both: give --up and --down"),
}


def _stored(client: Client, completion: str) -> tuple[list[dict[str, Any]], str]:
    """Messages and text of a stored answer.

    Raises:
        CliError: it is not kept, or is no single text.
    """
    place = path("v1", "chat", "completions", completion)
    choices = client.get(place)["choices"]
    answer = choices[0]["message"]
    if len(choices) != 1 or answer.get("tool_calls") or not answer.get("content"):
        raise CliError(f"{completion} is not one answer in words, which jobs of ratings learn from")
    turns: list[dict[str, Any]] = []
    more = {"limit": 100}
    while True:
        page = client.get(f"{place}/messages", **more)
        turns += page["data"]
        if not page["has_more"]:
            break
        more = {"limit": 100, "after": page["last_id"]}
    return [{key: turn[key] for key in _OF_A_TURN if turn.get(key) is not None} for turn in turns], answer["content"]


def _read(file: Path) -> list[Note]:
    notes = []
    for number, row in job_files.read_lines(file):
        try:
            notes.append(Note.model_validate(row))
        except ValidationError as error:
            raise CliError(f"{file}:{number} is no note of `temper feedback give`", ExitCode.USAGE) from error
    return notes


def _write(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Whole, or as it was before."""
    scratch = file.with_name(f".{file.name}.new")
    try:
        scratch.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        scratch.replace(file)
    except OSError as error:
        raise CliError(f"cannot write {file}: {error.strerror}", ExitCode.USAGE) from error


def _nothing(file: Path) -> str:
    return f"{file} has no feedback: note some with `temper feedback give COMPLETION --up`"


def _short(text: str | None) -> str:
    line = " ".join((text or "").split())
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[: _SHOWN_CHARACTERS - 1]}…"
