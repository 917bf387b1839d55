"""`python -m services.model_source`: fetches the checkpoint that TEMPER_MODEL_SOURCE names into TEMPER_MODEL.
`python -m services.model_source --then MODULE`: the same, and then becomes `python -m MODULE`.
`python -m services.model_source --digest DIR`: prints what TEMPER_MODEL_DIGEST has to be for a good copy.
`python -m services.model_source --events`, for `temper pull`: one JSON object a line on standard output, as of
services.adapter_tools."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import ValidationError

from services.common.errors import InvalidRequest, TemperError
from services.common.telemetry.logging import configure_logging
from services.engine.models.checkpoint import checkpoint_digest
from services.model_source.errors import SourceRejected, named
from services.model_source.fetch import fetch
from services.model_source.settings import ModelSourceSettings


def main() -> int:
    """Returns the exit status: 0 when the checkpoint is there, 1 with one line on stderr when it is not.

    Raises:
        SystemExit: with status 143 at SIGTERM; what was fetched stays for the next time.
    """
    parser = argparse.ArgumentParser(prog="python -m services.model_source", description=__doc__)
    parser.add_argument(
        "--digest", type=Path, metavar="DIR", help="print the digest of a checkpoint directory and stop"
    )
    parser.add_argument("--then", metavar="MODULE", help="become this module's process once the checkpoint is there")
    parser.add_argument("--events", action="store_true", help="write progress and result as JSON to standard output")
    given = parser.parse_args()
    directory, events = given.digest, given.events

    def fail(message: str, **more: str) -> int:
        if events:
            _emit("error", message=message, **more)
        else:
            sys.stderr.write(f"temper model: {message}\n")
        return 1

    try:
        if directory is not None:
            sys.stdout.write(f"{checkpoint_digest(directory)}\n")
            return 0
        settings = ModelSourceSettings()
        configure_logging(settings, service="model-source")
        # Process 1 of a container ignores a signal that it has no handler for.
        signal.signal(signal.SIGTERM, _stop)
        if events:
            found = fetch(settings, lambda stage, done, total: _emit("progress", stage=stage, done=done, total=total))
            _emit("result", digest=found, directory=str(settings.model))
        else:
            fetch(settings)
        if given.then is not None:
            os.execv(sys.executable, [sys.executable, "-m", given.then])
    except ValidationError as error:
        problems = [
            f"{named('TEMPER_' + '_'.join(map(str, e['loc'])).upper())}: {e['msg']}"
            for e in error.errors(include_input=False, include_url=False)
        ]
        return fail("; ".join(problems), code=InvalidRequest.code)
    except SourceRejected as error:
        return fail(error.message, code=error.code, variable=error.variable, reason=error.reason)
    except TemperError as error:
        return fail(error.message, code=error.code)
    return 0


def _emit(event: str, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def _stop(signal_number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + signal_number)


if __name__ == "__main__":
    raise SystemExit(main())
