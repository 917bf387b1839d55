"""All coding agents against a Temper of their own, one after the other, as a table:
`python -m tests.conformance.clients [AGENT…]`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.conformance.clients.agents import AGENTS
from tests.conformance.clients.lessons import taught
from tests.conformance.clients.loop import run_loop
from tests.stack import Stack


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("agents", nargs="*", default=list(AGENTS), metavar="AGENT", help=", ".join(AGENTS))
    parser.add_argument("--word", default="temper")
    options = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch, Stack(Path(scratch, "data")) as stack:
        taught(stack.url)
        print(
            "| agent | version | requests | longest prompt | seconds | refused | result |", "|---" * 7 + "|", sep="\n"
        )
        for name in options.agents:
            loop = run_loop(name, options.word, stack.url, Path(scratch, name), seconds=1800)
            right = loop.status == 0 and loop.written == f"{options.word}\n" and not loop.refusals
            wrong += not right
            told = "to its end" if right else f"status {loop.status}, wrote {loop.written!r}: {loop.output[-500:]}"
            print(
                f"| {name} | {AGENTS[name].version} | {len(loop.requests)} | {loop.longest_prompt} | "
                f"{loop.seconds:.0f} | {len(loop.refusals)} | {told} |",
                flush=True,
            )
            for refusal in loop.refusals:
                print(f"refused: {refusal}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
