"""`python -m services.pod.forging run|evaluate`: what `temper forge run` and `evaluate` do on this machine.

Its output: services.adapter_tools.events.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

import structlog

from services.adapter_tools.events import Reporter, run_to_the_end


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m services.pod.forging")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("--recipe", type=Path, required=True)
    run.add_argument("--work", type=Path)
    run.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    run.add_argument("--dry-run", action="store_true")
    evaluate = commands.add_parser("evaluate")
    evaluate.add_argument("--model", type=Path, required=True)
    evaluate.add_argument("--suites", type=Path, nargs="+", required=True)
    evaluate.add_argument("--baseline", type=Path)
    evaluate.add_argument("--work", type=Path)
    evaluate.add_argument("--seed", type=int, default=0)
    evaluate.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    given = _arguments(argv)
    # Standard output is for events.
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )

    def work() -> dict[str, Any]:
        # Imported here: without the engine's packages this is what fails, with a message.
        from services.pod.forging import local

        if given.command == "run":
            return local.run(given.recipe, given.work, given.device, dry_run=given.dry_run, progress=Reporter())
        return local.evaluate_directory(
            given.model,
            given.suites,
            given.baseline,
            given.work,
            given.device,
            seed=given.seed,
            progress=Reporter(),
        )

    return run_to_the_end(work)


if __name__ == "__main__":
    raise SystemExit(main())
