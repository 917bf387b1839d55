"""The whole way of a checkpoint: is it there, what has the source, fetch, check, put into place."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import structlog

from services.common.errors import CheckpointRejected
from services.engine.models.checkpoint import checkpoint_digest
from services.model_source.download import Downloader
from services.model_source.errors import SourceRejected
from services.model_source.files import INDEX, Source, check_complete, without_strays
from services.model_source.hub import HubSource
from services.model_source.s3 import S3Source
from services.model_source.settings import UNCHECKED, ModelSourceSettings
from services.model_source.target import Target

log = structlog.get_logger(__name__)

_S3 = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(?P<prefix>[^?#]*))?")
_HUB = re.compile(
    r"hf://(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[A-Za-z0-9][\w./-]*))?", re.ASCII
)


def source_of(settings: ModelSourceSettings) -> Source:
    """What the settings name.

    Raises:
        SourceRejected: they name nothing that we know.
    """
    text = settings.model_source
    if match := _S3.fullmatch(text):
        return S3Source(settings, match["bucket"], match["prefix"] or "")
    if match := _HUB.fullmatch(text):
        return HubSource(settings, match["repository"], match["revision"] or "main")
    raise SourceRejected(
        "TEMPER_MODEL_SOURCE",
        f"{text!r} is neither s3://bucket/prefix nor hf://organisation/name nor hf://organisation/name@revision",
    )


def fetch(settings: ModelSourceSettings, told: Callable[[str, int, int], None] = lambda *_: None) -> str:
    """Puts the checkpoint into place, unless it is there. Returns its digest.

    Args:
        told: called with what is done, and how many bytes of how many are.

    Raises:
        SourceRejected: with the variable to change.
    """
    source = source_of(settings)
    target = Target(settings.model)
    began = time.monotonic()
    with target.locked():
        try:
            return _fetch(settings, source, target, began, told)
        except OSError as error:
            raise SourceRejected(
                "TEMPER_MODEL", f"{settings.model} cannot be written: {error.strerror or error} ({error.filename})"
            ) from error


def _fetch(
    settings: ModelSourceSettings, source: Source, target: Target, began: float, told: Callable[[str, int, int], None]
) -> str:
    wanted = settings.model_digest
    target.prepare()
    if wanted != UNCHECKED and (there := target.digest()) == wanted:
        # Without asking the source: who has what is wanted starts also while the source is away.
        target.clear()
        log.info("model_source_done", digest=there, fetched=False, seconds=round(time.monotonic() - began, 1))
        return wanted
    downloader = Downloader(
        source,
        target.staging,
        connections=settings.model_connections,
        attempts=settings.model_attempts,
        told=lambda done, total: told("fetching", done, total),
    )
    told("listing files", 0, 0)
    files = downloader.list_files()
    check_complete(files, str(source))
    small = [file for file in files if not file.name.endswith(".safetensors")]
    target.check_space(downloader.missing_bytes(small))
    downloader.fetch(small)
    indexed = any(file.name == INDEX for file in small)
    files = without_strays(files, target.staging / INDEX if indexed else None)
    if wanted == UNCHECKED and target.has(files, str(source)) and (there := target.digest()) is not None:
        target.clear()
        log.info("model_source_done", digest=there, fetched=False, seconds=round(time.monotonic() - began, 1))
        return there
    missing = downloader.missing_bytes(files)
    log.info("model_source_begins", source=str(source), files=len(files), missing_bytes=missing)
    target.check_space(missing)
    downloader.fetch(files)
    target.keep_only(files)
    size = sum(file.size for file in files)
    told("checking", size, size)
    digest = _check(settings, source, target)
    target.take(files, str(source))
    log.info("model_source_done", digest=digest, fetched=True, seconds=round(time.monotonic() - began, 1))
    return digest


def _check(settings: ModelSourceSettings, source: Source, target: Target) -> str:
    try:
        digest = checkpoint_digest(target.staging)
    except CheckpointRejected as error:
        raise SourceRejected("TEMPER_MODEL_SOURCE", f"{source} has no good checkpoint: {error.message}") from error
    if settings.model_digest == UNCHECKED:
        log.warning("model_source_unchecked", digest=digest, advice="set TEMPER_MODEL_DIGEST to it")
    elif digest != settings.model_digest:
        raise SourceRejected(
            "TEMPER_MODEL_DIGEST",
            f"is {settings.model_digest}, but what {source} has gives {digest}: correct the digest or the source "
            f"(what was fetched waits in {target.staging}, and is not fetched again while the source has the same)",
        )
    return digest
