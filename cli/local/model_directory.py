"""The directory of a model that is named on the command line: a directory, or one that is fetched."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from cli.local.external_tool import run_tool
from cli.output import CliError, ExitCode, Output
from cli.settings import UpSettings, inherited_environment, read

DEFAULT_MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny"
UNCHECKED = "unchecked"
_MODULE = "services.model_source"
_SCHEMES = ("hf://", "s3://")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?:@[\w./-]+)?", re.ASCII)
_RECORD = ".source.json"
_OFFLINE = (
    "without internet: fetch it on a machine that has it (`temper pull`), copy the directory here and name it with "
    "--model; or set TEMPER_HF_ENDPOINT to a mirror, or HTTPS_PROXY to a proxy"
)


def source_of(text: str) -> str | None:
    """Where a model is fetched from: hf://organisation/name, its short form, or s3://bucket/prefix; None: the text is a
    directory."""
    if text.startswith(_SCHEMES):
        return text
    if not Path(text).exists() and _REPOSITORY.fullmatch(text) and not text.startswith("."):
        return f"hf://{text}"
    return None


def place_of(source: str) -> Path:
    """Directory in the cache for a source."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "--", source.partition("://")[2])
    scheme = source.partition("://")[0]
    return read(UpSettings).cache_dir.expanduser().absolute() / "models" / f"{scheme}--{name}"


def pull(output: Output, source: str, directory: Path, digest: str = UNCHECKED) -> dict[str, Any]:
    """Fetches a model, or what is missing of it, and checks it. Returns its digest and directory.

    Raises:
        CliError: with the way out.
    """
    env = {"TEMPER_LOG_FORMAT": "console"} | inherited_environment()
    env |= {
        "TEMPER_LOG_LEVEL": "error",
        "TEMPER_MODEL": str(directory.absolute()),
        "TEMPER_MODEL_SOURCE": source,
        "TEMPER_MODEL_DIGEST": digest,
    }
    try:
        return run_tool(output, ["--events"], module=_MODULE, env=env, amount="bytes")
    except CliError as error:
        away = source.startswith("hf://") and ("is away" in error.message or "gave up" in error.message)
        message = f"{error.message}; {_OFFLINE}" if away else error.message
        raise CliError(message, ExitCode.UNREACHABLE if away else error.code) from error


def model_directory(text: str | None, output: Output) -> Path:
    """Directory of the model that --model names; None: the tiny one. One that was fetched before is used as it is, also
    without internet.

    Raises:
        CliError: it cannot be fetched.
    """
    if text is None:
        return DEFAULT_MODEL
    source = source_of(text)
    if source is None:
        return Path(text)
    directory = place_of(source)
    if not (directory / _RECORD).is_file():
        try:
            pull(output, source, directory)
        except CliError as error:
            if source == text:
                raise
            message = f"there is no directory {text}, and as a repository of the hub: {error.message}"
            raise CliError(message, error.code) from error
    return directory
