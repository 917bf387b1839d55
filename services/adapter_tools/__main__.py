"""`python -m services.adapter_tools`: long work on files of this machine, for `temper adapters extract`, `convert`
and `verify`.

Its output: services.adapter_tools.events.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from services.adapter_tools.events import Reporter, run_to_the_end
from services.common.errors import InvalidRequest


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
    norms = commands.add_parser("norms")
    norms.add_argument("--adapter", type=Path, required=True)
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
        progress=Reporter(),
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


def _norms(arguments: argparse.Namespace) -> dict[str, Any]:
    from services.adapter_tools.files import AdapterDirectory
    from services.adapter_tools.norms import norms

    return norms(AdapterDirectory.read(arguments.adapter).files)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    arguments = _arguments(argv)
    work = {"extract": _extract, "convert": _convert, "norms": _norms}[arguments.command]
    return run_to_the_end(lambda: work(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
