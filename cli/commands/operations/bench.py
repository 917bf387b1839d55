"""`temper bench`: a load on any server with OpenAI's API, and how it answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cli.http.chat_stream import served_model
from cli.http.client import Client
from cli.http.load.figures import SHARES, figures
from cli.http.load.run import Target, send
from cli.http.load.shape import Range, Shape
from cli.http.load.streams import Answer
from cli.options import Json, Plot, Url
from cli.output import CliError, ExitCode, Output, guarded
from cli.settings import CliSettings, read

_ROWS = {"first_token_ms": "first token", "between_tokens_ms": "between tokens", "whole_ms": "whole answer"}


def bench(
    requests: Annotated[int, typer.Option("--requests", "-n", help="How many in all.", min=1)] = 64,
    concurrency: Annotated[
        int | None,
        typer.Option("--concurrency", "-c", help="Closed loop: so many at a time.", min=1, show_default="8"),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Open loop: so many begin a second, at random (Poisson).", min=0.001)
    ] = None,
    prompt_tokens: Annotated[str, typer.Option(help="Tokens of a prompt, N or LOW-HIGH.")] = "512",
    max_tokens: Annotated[str, typer.Option(help="Tokens of an answer, N or LOW-HIGH.")] = "128",
    shared_prefix: Annotated[int, typer.Option(help="Tokens that all prompts begin with.", min=0)] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Chats of words instead of completions of token ids.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="Answers may end before --max-tokens.")] = False,
    warm_up: Annotated[int, typer.Option(help="Requests before those that count.", min=0)] = 4,
    model: Annotated[str | None, typer.Option(help="Default: the server's first.")] = None,
    seed: Annotated[int, typer.Option(help="Of prompts and beginnings.", min=0)] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds that a request may take.", min=1)] = 600.0,
    plot: Plot = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Send a load to a server with OpenAI's API, and tell rates, and percentiles of the times to the first token and
    between tokens."""
    output = Output(as_json=as_json)
    with guarded(output):
        settings = read(CliSettings)
        with Client(url, settings) as client:
            named = model or served_model(client)
            address = client.url
        if rate is None and concurrency is None:
            concurrency = 8
        api: Literal["completions", "chat"] = "chat" if chat else "completions"

        def shape(count: int, seed: int) -> Shape:
            return Shape(
                requests=count,
                prompt_tokens=Range.parse(prompt_tokens),
                max_tokens=Range.parse(max_tokens),
                concurrency=concurrency,
                rate=rate,
                shared_prefix=shared_prefix,
                api=api,
                ignore_eos=not stop,
                seed=seed,
            )

        try:
            load = shape(requests, seed)
            target = Target(address, named, settings.key_for(url))
        except ValueError as error:
            raise CliError(str(error), ExitCode.USAGE) from error
        if warm_up:
            _send(output, target, shape(warm_up, seed + 1), timeout, "warming up")
        answers = _send(output, target, load, timeout, "measuring")
        found = {"url": address, "model": named, "concurrency": concurrency, "rate": rate, **figures(answers)}
        _tell(output, found)
        if plot is not None and "seconds" in found:
            _draw(answers, plot)
        if found["failed"]:
            raise typer.Exit(int(ExitCode.FAILED))


def _send(output: Output, target: Target, shape: Shape, timeout: float, what: str) -> list[Answer]:
    # Imported here: no other command needs it. What the client takes of the machine, the server may miss.
    import uvloop

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=output.err,
        disable=output.as_json or not output.err.is_terminal,
        # A redraw takes from what is measured.
        refresh_per_second=2,
    ) as progress:
        task = progress.add_task(what, total=shape.requests)
        return uvloop.run(send(target, shape, timeout=timeout, ended=lambda _: progress.advance(task)))


def _tell(output: Output, found: dict[str, Any]) -> None:
    if output.as_json:
        output.json(found)
        return
    for reason, count in found["failures"].items():
        output.err.print(f"[red]failed[/] {count}: {escape(reason)}", soft_wrap=True)
    if "seconds" not in found:
        return
    loop = f"{found['concurrency']} at a time" if found["rate"] is None else f"{found['rate']:g} a second"
    output.out.print(
        f"{escape(found['model'])} at {escape(found['url'])}: {found['requests']} requests, {loop}, "
        f"{found['failed']} failed\n"
        f"{found['requests_per_second']:,.2f} requests/s, {found['output_tokens_per_second']:,.1f} tokens/s "
        f"({found['output_tokens']:,} tokens in {found['seconds']:,.2f} s)"
    )
    columns = ["mean", *(f"p{100 * share:g}" for share in SHARES), "max"]
    rows = [
        [text, *(f"{found[name][column]:,.1f}" for column in columns)] for name, text in _ROWS.items() if found[name]
    ]
    output.table(found, ["ms", *columns], rows, empty="")


def _draw(answers: Sequence[Answer], file: Path) -> None:
    """Shares of requests by their time to the first token, and of pauses by their length."""
    # matplotlib takes a second to import, which no other command should wait for.
    from itertools import pairwise

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    good = [answer for answer in answers if not answer.status]
    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    series = {
        "to the first token, ms": [answer.first - answer.sent for answer in good],
        "between tokens, ms": [b - a for answer in good for a, b in pairwise(answer.times)],
    }
    for axes, (label, seconds) in zip(figure.subplots(1, 2), series.items(), strict=True):
        times = sorted(1e3 * value for value in seconds)
        axes.plot(times, [(rank + 1) / len(times) for rank in range(len(times))], drawstyle="steps-post")
        axes.set_xlabel(label)
        axes.set_ylim(0, 1.02)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("share that is as fast or faster")
    try:
        figure.savefig(file)
    except OSError as error:
        raise CliError(f"cannot write {file}: {error.strerror}") from error
