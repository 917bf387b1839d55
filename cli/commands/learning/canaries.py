"""`temper canary`: versions that answer a share of the requests until it is known whether they are better."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from cli.http.client import Client, path
from cli.job_files import apply_settings, read_object
from cli.options import Json, Url, connected
from cli.output import Output

app = typer.Typer(
    name="canary", help="Try versions on a share of the requests, and promote what is better.", no_args_is_help=True
)
_COLOURS = {"promoted": "green", "rolled_back": "red", "superseded": "yellow"}
Id = Annotated[str, typer.Argument(metavar="CANARY", help="Its id, as `temper canary list` shows it.")]


class Outcome(enum.StrEnum):
    """Decisions of a person."""

    PROMOTE = "promote"
    ROLL_BACK = "roll_back"


class InState(enum.StrEnum):
    """States of a canary."""

    RUNNING = "running"
    PROMOTING = "promoting"
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled_back"
    SUPERSEDED = "superseded"


@app.command()
def start(
    version: Annotated[str, typer.Argument(metavar="NAME@VERSION", help="The version to try.")],
    share: Annotated[float | None, typer.Option(help="Share of the requests that it answers.")] = None,
    gain: Annotated[float | None, typer.Option(help="Smallest gain in score that is worth a promotion.")] = None,
    policy: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="The whole policy, as the API has it.")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="One more setting of it, e.g. guardrails.length=null."),
    ] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Have a version answer a share of the requests."""

    def work(client: Client, output: Output) -> None:
        body: dict[str, Any] = {} if policy is None else read_object(policy)
        body |= {name: value for name, value in (("share", share), ("gain", gain)) if value is not None}
        apply_settings(body, setting or ())
        canary = client.post("/v1/canaries", {"version": version, "policy": body})
        text = (
            f"[green]{canary['id']}[/]: {escape(canary['candidate'])} answers {canary['policy']['share']:.0%} of the "
            f"requests for {_who(canary)}; follow it with: temper canary show {canary['id']}"
        )
        output.result(canary, text)

    connected(url, as_json, work)


@app.command("list")
def list_canaries(
    state: Annotated[InState | None, typer.Option(help="Only those.", show_default="all")] = None,
    adapter: Annotated[str | None, typer.Option(help="Only those of this adapter.", show_default="all")] = None,
    limit: Annotated[int, typer.Option(help="How many to list.", min=1, max=1000)] = 20,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Show canaries, newest first."""

    def work(client: Client, output: Output) -> None:
        wanted = {"state": None if state is None else state.value, "adapter": adapter}
        named = {name: value for name, value in wanted.items() if value is not None}
        found = client.get("/v1/canaries", limit=limit, **named)["data"]
        rows = [[one["id"], one["candidate"], one["current"], _plain(one), _effect(one), _why(one)] for one in found]
        output.table(found, ["canary", "candidate", "against", "state", "score", "why"], rows, empty="No canaries.")

    connected(url, as_json, work)


@app.command()
def show(canary: Id, url: Url = None, as_json: Json = False) -> None:
    """Show a canary with both of its arms."""

    def work(client: Client, output: Output) -> None:
        found = client.get(path("v1", "canaries", canary))
        output.result(found, f"{escape(found['candidate'])} against {escape(found['current'])}: {_told(found)}")
        told = found["evidence"]
        if told is not None and not output.as_json:
            arms = [told["current"], told["candidate"]]
            rows = [[name, *map(say, arms)] for name, say in _FIGURES.items()]
            output.table(found, ["", *(arm["version"] for arm in arms)], rows, empty="")

    connected(url, as_json, work)


@app.command()
def decide(
    canary: Id,
    decision: Annotated[Outcome, typer.Argument(help="Its end.")],
    reason: Annotated[str, typer.Option(help="Kept with the decision.")] = "",
    url: Url = None,
    as_json: Json = False,
) -> None:
    """End a canary by hand."""

    def work(client: Client, output: Output) -> None:
        body = {"decision": decision.value, "reason": reason}
        found = client.post(path("v1", "canaries", canary, "decide"), body)
        output.result(found, f"{escape(found['candidate'])}: {_state(found)}")

    connected(url, as_json, work)


def _rate(name: str) -> Any:
    def say(arm: dict[str, Any]) -> str:
        return f"{arm[name] / arm['answers']:.1%}" if arm["answers"] else ""

    return say


def _said_by(source: str) -> Any:
    def say(arm: dict[str, Any]) -> str:
        said = arm["others"].get(source)
        return "" if said is None or said["score"] is None else f"{said['score']:+.3f}"

    return say


def _mean(name: str, unit: str) -> Any:
    def say(arm: dict[str, Any]) -> str:
        whole = arm["answers"] - arm["errors"]
        return f"{arm[name] / whole:.3g}{unit}" if whole else ""

    return say


_FIGURES: dict[str, Any] = {
    "answers": lambda arm: str(arm["answers"]),
    "voices": lambda arm: str(arm["voices"]),
    "score": lambda arm: "" if arm["score"] is None else f"{arm['score']:+.3f}",
    "judge's score": _said_by("judge"),
    "errors": _rate("errors"),
    "cut off": _rate("cut_off"),
    "repetition": _rate("repetition"),
    "broken calls": _rate("broken_calls"),
    "refusals": _rate("refusals"),
    "tokens": _mean("tokens", ""),
    "time": _mean("seconds", " s"),
}


def _who(canary: dict[str, Any]) -> str:
    named = [] if canary["current"] == "base" else [escape(canary["adapter"])]
    return " and ".join([*named, *(["the base model's name"] if canary["attached"] else [])])


def _state(canary: dict[str, Any]) -> str:
    colour = _COLOURS.get(canary["state"], "cyan")
    return f"[{colour}]{_plain(canary)}[/]"


def _plain(canary: dict[str, Any]) -> str:
    return str(canary["state"]).replace("_", " ")


def _told(canary: dict[str, Any]) -> str:
    """State, score and reason in a few words."""
    told = [_state(canary)]
    if canary["evidence"] is not None:
        look = canary["evidence"]["look"]
        told.append(f"score {look['effect']:+.3f} ({look['low']:+.3f} to {look['high']:+.3f})")
        if canary["decision"] is None:
            told.append(f"{look['progress']:.0%} of the way to a decision")
    return "; ".join([*told, *([escape(_why(canary))] if canary["decision"] else [])])


def _effect(canary: dict[str, Any]) -> str:
    told = canary["evidence"]
    return "" if told is None else f"{told['look']['effect']:+.3f}"


def _why(canary: dict[str, Any]) -> str:
    return "" if canary["decision"] is None else str(canary["decision"]["detail"])
