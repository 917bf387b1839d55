"""`temper feedback`: what people say of answers, kept by the server and made into training data.

Examples come from answers that the server keeps (`store`). Data sets (`temper dataset`) make them of the request log.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from cli import job_files
from cli.http.client import Client, path
from cli.options import Json, Url, connected
from cli.output import CliError, ExitCode, Output

app = typer.Typer(
    name="feedback", help="Say which answers were good, and make training data of it.", no_args_is_help=True
)
_OF_A_TURN = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
_PAGE = 1000
_SHOWN_CHARACTERS = 60
_SAID = ("thumb", "score", "correction", "preferred_over", "label", "comment")
_ANSWER = "Id of a completion, a response or a message, as answers have it."


@dataclass(frozen=True, slots=True)
class Rated:
    """One answer that the server keeps, with what is said of it."""

    messages: Sequence[dict[str, Any]]
    """Those in front of the answer."""
    good: str | None = None
    bad: str | None = None

    @property
    def context(self) -> list[dict[str, Any]]:
        """The messages as a job takes them: nobody has said anything of the assistant's earlier turns."""
        return [{**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in self.messages]


class Kind(enum.StrEnum):
    """Jobs that learn from feedback."""

    SFT = "sft"
    DPO = "dpo"
    KTO = "kto"


@app.command()
def give(
    answers: Annotated[
        list[str], typer.Argument(metavar="ANSWER...", help=f"{_ANSWER} Several completions are rated as one work.")
    ],
    up: Annotated[bool, typer.Option("--up", help="It is good.")] = False,
    down: Annotated[bool, typer.Option("--down", help="It is bad.")] = False,
    score: Annotated[float | None, typer.Option(help="How good it is.", min=-1, max=1)] = None,
    correct: Annotated[str | None, typer.Option(metavar="TEXT", help="What it should have been.")] = None,
    over: Annotated[
        str | None, typer.Option(metavar="ANSWER", help="It is better than this one, to the same messages.")
    ] = None,
    label: Annotated[str | None, typer.Option(help="A word of your own.")] = None,
    comment: Annotated[str | None, typer.Option(metavar="TEXT", help="Anything else.")] = None,
    user: Annotated[str | None, typer.Option(help="Who says it. Each has one opinion of an answer.")] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Say what is good or bad about an answer, in place of what the same user has said of it before.

    Several completions, in their order, are one piece of work: `temper dataset` makes a trajectory of them.
    """

    def work(client: Client, output: Output) -> None:
        if up and down:
            raise CliError("--up and --down contradict each other: give one", ExitCode.USAGE)
        said = {
            "thumb": "up" if up else "down" if down else None,
            "score": score,
            "correction": correct,
            "preferred_over": over,
            "label": label,
            "comment": comment,
        }
        said = {name: value for name, value in said.items() if value is not None}
        if not said:
            raise CliError("say something of the answer: --up, --down, --correct TEXT, …", ExitCode.USAGE)
        if len(answers) > 1:
            named: dict[str, Any] = {"completion_ids": answers}
        else:
            kind = {"resp": "response_id", "msg": "message_id"}.get(answers[0].partition("_")[0].partition("-")[0])
            named = {kind or "completion_id": answers[0]}
        body = {**named, "user": user, **said}
        made = client.post("/v1/feedback", {name: value for name, value in body.items() if value is not None})
        output.result(made, f"[green]{made['id']}[/]  {escape(_target(made))}: {escape(_words(made))}")

    connected(url, as_json, work)


@app.command("list")
def list_feedback(
    answer: Annotated[str | None, typer.Argument(help="Of this answer.", show_default="of all")] = None,
    user: Annotated[str | None, typer.Option(help="What this user has said.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most of it, newest first.")] = 100,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Show what was said, newest first."""

    def work(client: Client, output: Output) -> None:
        found = list(_each(client, limit, answer=answer, user=user))
        rows = [[one["id"], _target(one), one["user"] or "", _short(_words(one))] for one in found]
        output.table(found, ["ID", "ANSWER", "USER", "SAYS"], rows, empty=_NOTHING)

    connected(url, as_json, work)


@app.command()
def delete(
    feedback: Annotated[str, typer.Argument(metavar="ID", help="As `temper feedback list` tells it.")],
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Remove an opinion."""

    def work(client: Client, output: Output) -> None:
        gone = client.delete(path("v1", "feedback", feedback))
        output.result(gone, f"{escape(feedback)} is removed")

    connected(url, as_json, work)


@app.command()
def export(
    kind: Annotated[Kind, typer.Argument(help="The kind of job that is to learn from it.")],
    data: Annotated[Path, typer.Argument(help="JSONL for `temper train submit KIND --data`.")],
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Write what a kind of job can learn from, of answers that the server keeps (`temper chat --store`).

    sft learns good answers, dpo pairs of a good and a bad one, kto both kinds.
    """

    def work(client: Client, output: Output) -> None:
        rated: dict[str, dict[str, Any]] = {}
        for one in _each(client, None):
            rated.setdefault(_target(one), one)  # the newest opinion of an answer counts
        if not rated:
            raise CliError(_NOTHING, ExitCode.USAGE)
        make, lacking = _LEARNERS[kind]
        kept = [known for one in rated.values() if (known := _rated(client, one)) is not None]
        found = [example for one in reversed(kept) for example in make(one)]
        left_out = len(rated) - len(kept)
        labels = {example.get("label") for example in found}
        if not found or (kind is Kind.KTO and len(labels) < 2):
            told = f" ({left_out} answers are not kept, or no single text)" if left_out else ""
            raise CliError(f"{lacking}{told}", ExitCode.USAGE)
        _write(data, found)
        job_files.data(kind.value, data)  # what is written is what a job takes
        count = "1 example" if len(found) == 1 else f"{len(found)} examples"
        told = f"; {left_out} answers are left out: not kept, or no single text" if left_out else ""
        text = f"{count}{told}: temper train submit {kind.value} --data {escape(str(data))} --adapter NAME"
        output.result({"kind": kind.value, "data": str(data), "examples": len(found), "left_out": left_out}, text)

    connected(url, as_json, work)


def _sft(rated: Rated) -> list[dict[str, Any]]:
    if rated.good is None:
        return []
    return [{"messages": [*rated.context, {"role": "assistant", "content": rated.good}]}]


def _dpo(rated: Rated) -> list[dict[str, Any]]:
    if rated.good is None or rated.bad is None or rated.good == rated.bad:
        return []
    return [{"messages": list(rated.messages), "chosen": rated.good, "rejected": rated.bad}]


def _kto(rated: Rated) -> list[dict[str, Any]]:
    texts = [(rated.good, True), (rated.bad, False)]
    return [
        {"messages": list(rated.messages), "completion": text, "label": label}
        for text, label in texts
        if text is not None
    ]


_LEARNERS: Mapping[Kind, tuple[Callable[[Rated], list[dict[str, Any]]], str]] = {
    Kind.SFT: (_sft, "sft learns from good answers, and there are none: give --up, --correct or --over"),
    Kind.DPO: (_dpo, "dpo learns from pairs of a good and a bad answer, and there are none: give --correct or --over"),
    Kind.KTO: (_kto, "kto learns from good and bad answers, and there are not both: give --up and --down"),
}


def _each(client: Client, limit: int | None, **chosen: str | None) -> Iterator[dict[str, Any]]:
    """Feedback, newest first."""
    wanted = {name: value for name, value in chosen.items() if value is not None}
    left, more = limit, dict[str, str]()
    while left is None or left > 0:
        page = client.get("/v1/feedback", limit=_PAGE if left is None else min(left, _PAGE), **wanted, **more)
        yield from page["data"]
        if not page["has_more"]:
            return
        left = None if left is None else left - len(page["data"])
        more = {"after": page["data"][-1]["id"]}


def _rated(client: Client, said: Mapping[str, Any]) -> Rated | None:
    """An answer with what is said of it; None: it is not kept, or nothing can be learnt from it."""
    if (kept := _stored(client, said["completion_id"])) is None:
        return None
    messages, answer = kept
    rating = said["score"] if said["score"] is not None else {"up": 1.0, "down": -1.0}.get(said["thumb"], 0.0)
    if said["correction"] is not None:
        return Rated(messages, good=said["correction"], bad=answer)
    if said["preferred_over"] is not None:
        other = _stored(client, said["preferred_over"])
        return None if other is None or other[0] != messages else Rated(messages, good=answer, bad=other[1])
    return Rated(messages, good=answer) if rating > 0 else Rated(messages, bad=answer) if rating < 0 else None


def _stored(client: Client, completion: str | None) -> tuple[list[dict[str, Any]], str] | None:
    """Messages and text of a stored answer; None: it is not kept, or is no single text."""
    if completion is None:
        return None
    place = path("v1", "chat", "completions", completion)
    if (found := client.find(place)) is None:
        return None
    choices = found["choices"]
    answer = choices[0]["message"]
    if len(choices) != 1 or answer.get("tool_calls") or not answer.get("content"):
        return None
    turns: list[dict[str, Any]] = []
    more = {"limit": 100}
    while True:
        page = client.get(f"{place}/messages", **more)
        turns += page["data"]
        if not page["has_more"]:
            break
        more = {"limit": 100, "after": page["last_id"]}
    return [{key: turn[key] for key in _OF_A_TURN if turn.get(key) is not None} for turn in turns], answer["content"]


def _write(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Whole, or as it was before."""
    scratch = file.with_name(f".{file.name}.new")
    try:
        scratch.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        scratch.replace(file)
    except OSError as error:
        raise CliError(f"cannot write {file}: {error.strerror}", ExitCode.USAGE) from error


def _target(said: Mapping[str, Any]) -> str:
    """Id of what is spoken of."""
    if said["session_id"] is not None:
        return f"session {said['session_id']}"
    one = said["completion_id"] or said["response_id"] or said["message_id"]
    return str(one or " ".join(said["completion_ids"]))


def _words(said: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {said[name]}" for name in _SAID if said[name] is not None)


_NOTHING = "no feedback: give some with `temper feedback give ANSWER --up`"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[: _SHOWN_CHARACTERS - 1]}…"
