"""Fleet simulator: `python -m benchmarks.fleet --engines 256 --out DIR`.

Plays traces of published shapes (benchmarks/fleet/traces.py) against simulated engines behind the gateway's own code,
in virtual time. Each SCENARIO is a line of DIR/fleet.jsonl and of the table that is printed: a trace against its ideal
by the trace's name, `scale`, `load`, `failure`, `growth`, `spread`. `validation`, only where it is asked for, plays a
trace against four real engines on this machine, too, and compares. `--plot` draws such a file. Equal seeds give equal
figures, but of real engines.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.fleet import scenarios
from benchmarks.fleet.report import draw, line
from benchmarks.fleet.scenarios import Options
from benchmarks.fleet.subject import subject
from benchmarks.fleet.traces import SHAPES
from benchmarks.fleet.validation.comparison import validate
from benchmarks.lib.environment import environment

_SCENARIOS: dict[str, Callable[[Options], dict[str, Any]]] = {
    **{name: partial(scenarios.trace, name=name) for name in SHAPES},
    "scale": scenarios.scale,
    "load": scenarios.load,
    "failure": scenarios.failure,
    "growth": scenarios.growth,
    "spread": scenarios.spread,
}
_VALIDATION = "validation"


def main() -> int:
    """Runs scenarios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=", ".join((*_SCENARIOS, _VALIDATION)))
    parser.add_argument("--engines", type=int, default=256)
    parser.add_argument("--gateways", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30.0, help="of traffic, in virtual time")
    parser.add_argument("--load", type=float, default=0.5, help="share of the engines' time that the trace takes")
    parser.add_argument("--subject", choices=("27b-h100", "4b-h200"), default="27b-h100")
    parser.add_argument(
        "--store-link", type=float, metavar="GB", help="that the object store sends a second, by default 12.5"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--traces", type=int, default=1, help="validation: traces that are compared, one after the other"
    )
    parser.add_argument(
        "--unstretched",
        action="store_true",
        help="validation: steps as fast as they are, for a machine with six quiet cores",
    )
    parser.add_argument("--out", type=Path, help="directory for figures; without it they are only printed")
    parser.add_argument(
        "--plot", type=Path, metavar="RESULTS", help="only draw a file of figures, to RESULTS with .svg"
    )
    options = parser.parse_args()
    if options.plot is not None:
        draw([json.loads(row) for row in options.plot.read_text().splitlines()], options.plot.with_suffix(".svg"))
        return 0
    run = _SCENARIOS | {
        _VALIDATION: lambda asked: validate(asked.seed, traces=options.traces, stretched=not options.unstretched)
    }
    unknown = [name for name in options.scenarios if name not in run]
    if unknown:
        parser.error(f"no scenario {', '.join(unknown)}; there are {', '.join(run)}")
    modelled = subject(options.subject)
    if options.store_link is not None:
        modelled = replace(modelled, store_link=options.store_link * 1e9)
    simulated = Options(modelled, options.engines, options.gateways, options.seconds, options.load, options.seed)
    shared = {
        "benchmark": "fleet",
        "command": f"python -m benchmarks.fleet {' '.join(sys.argv[1:])}",
        "subject": options.subject,
        "cost_error": round(simulated.subject.cost_error, 4),
        "engines": options.engines,
        "gateways": options.gateways,
        "seconds": options.seconds,
        "load": options.load,
        "store_bytes_per_s": modelled.store_link,
        "seed": options.seed,
    }
    for name in options.scenarios or _SCENARIOS:
        found = shared | run[name](simulated)
        print(line(found), flush=True)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            with (options.out / "fleet.jsonl").open("a") as file:
                file.write(json.dumps(found | environment()) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
