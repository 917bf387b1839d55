"""The directory of a model that is named on the command line: a directory, or one that is fetched."""

from __future__ import annotations

import hashlib
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
_NAMED_BY_US = {"TEMPER_MODEL_SOURCE": "", "TEMPER_MODEL": "", "TEMPER_MODEL_DIGEST": "the digest "}
"""Variables that `pull` sets for its process: whoever runs a command has set none of them."""
_AWAY = {
    "hf": "without internet: fetch it on a machine that has it (`temper pull`), copy the directory here and name it "
    "with --model; or set TEMPER_HF_ENDPOINT to a mirror, or HTTPS_PROXY to a proxy",
    "s3": "start it, or name another with TEMPER_MODEL_S3_ENDPOINT or TEMPER_S3_ENDPOINT",
}


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
    scheme, _, name = source.partition("://")
    settings = read(UpSettings)
    server = "" if scheme == "hf" else settings.model_s3_endpoint or settings.s3_endpoint or ""
    # Names that differ in what a file's name cannot have, and buckets of two servers, are not the same model.
    mark = hashlib.sha256(f"{server} {source}".encode()).hexdigest()[:8]
    readable = re.sub(r"[^A-Za-z0-9._-]+", "--", name)
    return settings.cache_dir.expanduser().absolute() / "models" / f"{scheme}--{readable}-{mark}"


def in_own_store(text: str) -> bool:
    """Whether --model is in the bucket of the store that `temper up` is about to start."""
    if not text.startswith("s3://"):
        return False
    settings = read(UpSettings)
    return not (settings.s3_endpoint or settings.model_s3_endpoint)


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
        told = error.error or {}
        named = _NAMED_BY_US.get(told.get("variable", ""))
        message = error.message if named is None else f"{named}{told['reason']}"
        if told.get("code") != "model_source_away":
            raise CliError(message, error.code) from error
        way_out = f"{_AWAY[source.partition('://')[0]]}; what has come is kept"
        raise CliError(f"{message}; {way_out}", ExitCode.UNREACHABLE) from error


def model_directory(text: str | None, output: Output, *, fetch: bool = True) -> Path:
    """Directory of the model that --model names; None: the tiny one. One that was fetched before, and has the digest
    that is asked for, is used as it is, also without internet.

    Args:
        fetch: False: where it is or would be.

    Raises:
        CliError: it cannot be fetched.
    """
    if text is None:
        return DEFAULT_MODEL
    source = source_of(text)
    if source is None:
        return Path(text)
    directory = place_of(source)
    digest = read(UpSettings).model_digest
    if fetch and (digest != UNCHECKED or not (directory / _RECORD).is_file()):
        try:
            pull(output, source, directory, digest)
        except CliError as error:
            if source == text:
                raise
            message = f"there is no directory {text}, and as a repository of the hub: {error.message}"
            raise CliError(message, error.code) from error
    return directory
