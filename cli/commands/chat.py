"""`temper chat`: one answer, or a conversation, streamed."""

from __future__ import annotations

import sys
import uuid
from typing import Annotated, Any

import typer
from rich.markup import escape

from cli.http.chat_stream import Answer, served_model, stream_answer
from cli.http.client import Client
from cli.options import Json, Url
from cli.output import CliError, ExitCode, Output, guarded
from cli.settings import CliSettings, read


def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="One message; without it: a conversation. '-' reads stdin.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model or adapter name; default: the served model.")] = None,
    adapter: Annotated[str | None, typer.Option(help='"name", "name@3", "base", or several: "a@3*0.7+b".')] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.7,
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    session: Annotated[
        str | None, typer.Option(help="Session that it belongs to; a conversation has one of its own.")
    ] = None,
    think: Annotated[bool | None, typer.Option("--think/--no-think", help="Let the model reason first.")] = None,
    store: Annotated[
        bool, typer.Option("--store", help="Let the server keep the answers for `temper feedback`, and tell their ids.")
    ] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Talk to the served model; the answer is streamed and names the adapter version that gave it."""
    output = Output(as_json=as_json)
    with guarded(output), Client(url, read(CliSettings)) as client:
        options: dict[str, Any] = {"model": model or served_model(client), "temperature": temperature}
        options |= {
            key: value
            for key, value in {
                "adapter": adapter,
                "max_tokens": max_tokens,
                "seed": seed,
                "session_id": session,
            }.items()
            if value is not None
        }
        if store:
            options["store"] = True
        if think is not None:
            options["chat_template_kwargs"] = {"enable_thinking": think}
        messages = [{"role": "system", "content": system}] if system else []
        if prompt is None and not as_json and sys.stdin.isatty():
            _converse(client, output, options, messages)
            return
        text = sys.stdin.read() if prompt in (None, "-") else prompt
        if not text or not text.strip():
            raise CliError("the message is empty", ExitCode.USAGE)
        _one(client, output, options, [*messages, {"role": "user", "content": text}])


def _one(client: Client, output: Output, options: dict[str, Any], messages: list[dict[str, str]]) -> Answer:
    answer = Answer()
    for kind, piece in stream_answer(client, options, messages, answer):
        if not output.as_json:
            output.text(piece, style="dim" if kind == "reasoning" else "")
    if output.as_json:
        output.json(
            {
                "content": answer.text,
                "reasoning_content": answer.reasoning or None,
                "tool_calls": answer.tool_calls or None,
                "adapter": answer.adapter,
                "completion_id": answer.completion_id,
                "finish_reason": answer.finish_reason,
                "usage": answer.usage,
            }
        )
        return answer
    output.out.print()
    for call in answer.tool_calls:
        output.out.print(f"[cyan]{escape(call['name'])}({escape(call['arguments'])})[/]")
    kept = f" · {answer.completion_id}" if options.get("store") else ""
    output.err.print(f"[dim]{escape(answer.adapter or 'base model')} · {answer.finish_reason}{kept}[/]")
    return answer


def _converse(client: Client, output: Output, options: dict[str, Any], messages: list[dict[str, str]]) -> None:
    output.err.print("[dim]Ctrl-D or /quit ends, /reset starts over.[/]")
    history = list(messages)
    # What the model has computed of the conversation is kept for the next turn, however long one thinks about it.
    options = {"session_id": _new_session(), **options}
    while True:
        try:
            text = output.err.input("[bold green]> [/]").strip()
        except EOFError:
            output.err.print()
            return
        if text == "/quit":
            return
        if text == "/reset":
            history = list(messages)
            options = {**options, "session_id": _new_session()}
        elif text:
            turn = [*history, {"role": "user", "content": text}]
            try:
                answer = _one(client, output, options, turn)
            except CliError as error:
                output.err.print(f"[red]error:[/] {escape(error.message)}", soft_wrap=True)
                continue
            history = [*turn, {"role": "assistant", "content": answer.text}]


def _new_session() -> str:
    return f"chat-{uuid.uuid4().hex}"
