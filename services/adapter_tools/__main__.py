"""`python -m services.adapter_tools`: long work on files of this machine, for `temper adapters extract` and `convert`.

One JSON object a line on standard output: {"event": "progress", "stage", "done", "total"}, at the end {"event":
"result", …} or {"event": "error", "message", "param"}. Exit status 0 or 1; SIGTERM leaves nothing behind.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from services.common.errors import InvalidRequest, TemperError

_EVERY_SECONDS = 0.1


class _Stopped(BaseException):
    """SIGTERM: unwinds, so that scratch directories are removed."""


class _Reporter:
    """Progress a few times a second."""

    def __init__(self) -> None:
        self._last = 0.0
        self._stage = ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage == self._stage and done < total and now - self._last < _EVERY_SECONDS:
            return
        self._last, self._stage = now, stage
        emit("progress", stage=stage, done=done, total=total)


def emit(event: str, **fields: Any) -> None:
    """Writes one line."""
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m services.adapter_tools")
    commands = parser.add_subparsers(dest="command", required=True)
    extract = commands.add_parser("extract")
    extract.add_argument("--adapter", type=Path, required=True)
    extract.add_argument("--base", type=Path, required=True)
    extract.add_argument("--out", type=Path, required=True)
    extract.add_argument("--any-base", action="store_true")
    extract.add_argument("--dtype", choices=("base", "float32"), default="base")
    extract.add_argument("--max-shard-bytes", type=int, default=5 * 10**9)
    convert = commands.add_parser("convert")
    convert.add_argument("--adapter", type=Path, required=True)
    convert.add_argument("--out", type=Path, required=True)
    convert.add_argument("--to", required=True)
    convert.add_argument("--base", type=Path)
    return parser.parse_args(argv)


def _extract(arguments: argparse.Namespace) -> dict[str, Any]:
    from services.adapter_tools.extract import extract
    from services.adapter_tools.files import AdapterDirectory

    adapter = AdapterDirectory.read(arguments.adapter)
    if adapter.manifest is None and not arguments.any_base:
        raise InvalidRequest(
            f"{arguments.adapter} has no manifest.json, so nobody knows which base it belongs to: take it from Temper "
            "(`temper adapters download`), or say --any-base, and only shapes are compared",
            param="any_base",
        )
    manifest = adapter.manifest
    result = extract(
        arguments.base,
        adapter.files,
        arguments.out,
        base_digest=manifest.base_digest if manifest is not None and not arguments.any_base else None,
        source=str(manifest.ref) if manifest is not None else arguments.adapter.name,
        dtype=arguments.dtype,
        max_shard_bytes=arguments.max_shard_bytes,
        progress=_Reporter(),
    )
    return result.summary()


def _convert(arguments: argparse.Namespace) -> dict[str, Any]:
    from services.adapter_tools.convert import convert, form_of
    from services.adapter_tools.files import AdapterDirectory
    from services.adapter_tools.output import whole_directory
    from services.common.adapters.manifest import WEIGHTS
    from services.engine.models.registry import read_config

    adapter = AdapterDirectory.read(arguments.adapter)
    config = read_config(arguments.base) if arguments.base is not None else None
    before = form_of(adapter.files[WEIGHTS])
    converted = adapter.with_files(convert(adapter.files, arguments.to, config))
    with whole_directory(arguments.out, converted.size_bytes) as scratch:
        converted.write(scratch)
    return {"out": str(arguments.out), "from": before, "to": arguments.to, "bytes": converted.size_bytes}


def _stop(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise _Stopped


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    arguments = _arguments(argv)
    signal.signal(signal.SIGTERM, _stop)
    try:
        result = _extract(arguments) if arguments.command == "extract" else _convert(arguments)
    except TemperError as error:
        emit("error", message=error.message, code=error.code, param=error.param)
        return 1
    except ModuleNotFoundError as error:
        emit(
            "error",
            message=f"{error.name} is not installed here: this command needs the engine's packages, "
            "pip install 'temper[engine]'",
            code="not_installed",
            param=None,
        )
        return 1
    except (_Stopped, KeyboardInterrupt):
        return 143
    emit("result", **result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
