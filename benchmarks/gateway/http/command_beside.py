"""`temper bench` beside this package's client, one after the other on the same server:
`python -m benchmarks.gateway.http.command_beside --url http://127.0.0.1:8420 --cases 8x64x64 --rounds 20`.

A round is this client, the command, and this client again, each with the same shape of load and prompts of its own; how
far the two runs of this client are apart is what a difference means nothing below. One JSON line a case: the better
quartile of the rounds, for others on the machine only ever slow one down, and differences in percent. With --steady-ms
the engine has no model, and nothing is noise but the clients and the gateway.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.gateway.http.client import Load, run_load
from benchmarks.gateway.http.rates import Stack, seconds_of, stack_of
from benchmarks.lib.cases import Case, milliseconds
from benchmarks.lib.environment import environment
from benchmarks.lib.recorder import put_line

Figures = dict[str, float]


def of_this_client(stack: Stack, case: Case, seed: int, clients: int) -> Figures:
    """As benchmarks.gateway.http.rates counts."""
    load = Load(
        *(stack.host, stack.port, stack.model, case.prompt_tokens, case.new_tokens, stack.vocab_size),
        usage=True,  # as the command asks: it costs the gateway a little for every token
    )
    answers = run_load(load, case.requests, processes=clients, seed=seed)
    seconds = seconds_of(answers)
    return {
        "requests_s": case.requests / seconds,
        "tok_s": case.requests * case.new_tokens / seconds,
        **_named("ttft_ms", milliseconds([answer.first - answer.sent for answer in answers])),
        **_named("itl_ms", milliseconds([b - a for answer in answers for a, b in pairwise(answer.times)])),
    }


def of_the_command(stack: Stack, case: Case, seed: int) -> Figures:
    """As it prints them."""
    shape = {
        "requests": case.requests,
        "concurrency": case.requests,
        "prompt-tokens": case.prompt_tokens,
        "max-tokens": case.new_tokens,
        "warm-up": 0,
        "seed": seed,
        "url": f"http://{stack.host}:{stack.port}",
    }
    words = [word for name, value in shape.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "cli", "bench", "--json", *words]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return {
        "requests_s": found["requests_per_second"],
        "tok_s": found["output_tokens_per_second"],
        **_named("ttft_ms", found["first_token_ms"]),
        **_named("itl_ms", found["between_tokens_ms"]),
    }


def _named(name: str, found: dict[str, float]) -> Figures:
    return {f"{name}_{share}": found[share] for share in ("p50", "p99")}


def measure(stack: Stack, case: Case, rounds: int, clients: int) -> dict[str, Any]:
    """Figures of the rounds, behind one that does not count."""
    runs: dict[str, list[Figures]] = {"http": [], "command": [], "http_again": []}
    for number in range(rounds + 1):
        now = {
            "http": of_this_client(stack, case, 2 * number + 1, clients),
            "command": of_the_command(stack, case, number),
            "http_again": of_this_client(stack, case, 2 * number + 2, clients),
        }
        for name, found in now.items():
            runs[name] += [found] if number else []
    both = [*runs["http"], *runs["http_again"]]
    return {
        **{name: _rounded(_good(found)) for name, found in runs.items()},
        "command_apart_percent": _rounded(_apart(_good(runs["command"]), _good(both))),
        "http_apart_percent": _rounded(_apart(_good(runs["http_again"]), _good(runs["http"]))),
    }


def _good(found: Sequence[Figures]) -> Figures:
    """The better quartile of each figure: rates are better when they are high."""
    return {
        key: statistics.quantiles([one[key] for one in found], n=4)[2 if key.endswith("_s") else 0] for key in found[0]
    }


def _apart(one: Figures, other: Figures) -> Figures:
    return {key: 100 * (one[key] / other[key] - 1) for key in one}


def _rounded(found: Figures) -> Figures:
    return {key: round(value, 2) for key, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a running gateway")
    parser.add_argument("--steady-ms", type=float, default=10.0, help="without --url: an engine without a model")
    parser.add_argument("--cases", default="1x64x64,8x64x64")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--clients", type=int, default=1, help="processes of this package's client")
    parser.add_argument("--out", type=Path, help="file that gets the lines, too")
    options = parser.parse_args()
    with ExitStack() as scope:
        stack = stack_of(options, scope)
        for case in [Case.parse(part) for part in options.cases.split(",")]:
            found = measure(stack, case, options.rounds, options.clients)
            steady = {} if options.url else {"steady_ms": options.steady_ms}
            shape = {"c": case.requests, "in": case.prompt_tokens, "out": case.new_tokens, "rounds": options.rounds}
            put_line({**shape, **steady, **found, **environment()}, options.out)


if __name__ == "__main__":
    main()
