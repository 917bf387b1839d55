"""Sources of adapters that are loaded by path: a directory that the operator allows, prefixes in S3, versions."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

from services.common.adapters.manifest import CONFIG, FILES, WEIGHTS, instead_of
from services.common.adapters.names import AdapterVersion, parse_adapter_ref
from services.common.adapters.registry import AdapterRegistry
from services.common.errors import AdapterRejected, InvalidRequest, ModelNotFound
from services.common.storage.object_store import ObjectNotFound, ObjectStore
from services.gateway.api.adapters.files import MAX_CONFIG_BYTES
from services.gateway.settings import GatewaySettings

_S3 = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])/([^\x00-\x1f\x7f]{1,1000})")


def read_source(settings: GatewaySettings, registry: AdapterRegistry, path: str) -> dict[str, bytes]:
    """Files of the adapter that a path names: a directory below TEMPER_ADAPTERS_DIR, s3://bucket/prefix below
    TEMPER_ADAPTERS_S3, or "name@version". Blocking.

    Raises:
        InvalidRequest: the path is not allowed.
        ModelNotFound: nothing is there.
        AdapterRejected: a file is missing, too large, or no plain file.
    """
    if path.startswith("s3://"):
        return _from_s3(settings, path)
    if "/" not in path and "@" in path:
        name, number = parse_adapter_ref(path)
        if number is not None:
            return registry.files(AdapterVersion(name, number))
    if settings.adapters_dir is None:
        raise InvalidRequest(
            f"lora_path {path[:200]!r} is a path, and no directory of adapters is allowed here (TEMPER_ADAPTERS_DIR): "
            "name s3://bucket/prefix or name@version",
            param="lora_path",
        )
    return read_directory(settings.adapters_dir, path, settings.max_upload_bytes)


def read_directory(root: Path, path: str, limit: int) -> dict[str, bytes]:
    """Files of the adapter in a directory, of which nothing lies outside of the root. Blocking.

    Args:
        path: absolute, or below the root.
        limit: bytes of the weights.

    Raises:
        InvalidRequest, ModelNotFound, AdapterRejected: see read_source.
    """
    if "\0" in path:
        raise InvalidRequest("lora_path has a NUL in it", param="lora_path")
    real_root = root.resolve()
    directory = (real_root / path).resolve()
    if not directory.is_relative_to(real_root):
        raise InvalidRequest(
            f"lora_path {path[:200]!r} is outside of {root} (TEMPER_ADAPTERS_DIR), or a link leads out of it: adapters "
            "are read from there only",
            param="lora_path",
        )
    if not directory.is_dir():
        raise ModelNotFound(f"No adapter found for {path[:200]}: it is no directory", param="lora_path")
    limits = {CONFIG: MAX_CONFIG_BYTES, WEIGHTS: limit}
    return {name: _read(real_root, directory / name, limits[name]) for name in FILES["adapter"]}


def _read(root: Path, file: Path, limit: int) -> bytes:
    """A plain file whose links, as those of the Hugging Face cache, stay below the root."""
    real = file.resolve()
    if not real.is_relative_to(root):
        raise InvalidRequest(f"{file.name} of {file.parent.name} is a link out of {root}", param="lora_path")
    try:
        # Not waiting for who writes to a pipe, nor following a link that was put there since.
        descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        reason = instead_of(file) if missing else None
        raise AdapterRejected(reason or f"{file} cannot be read: {error.strerror}", param="lora_path") from error
    with open(descriptor, "rb") as opened:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise AdapterRejected(f"{file.name} is no plain file", param="lora_path")
        if status.st_size > limit:
            raise _too_large(file.name, status.st_size, limit)
        return opened.read(limit)


def _from_s3(settings: GatewaySettings, path: str) -> dict[str, bytes]:
    found = _S3.fullmatch(path.rstrip("/"))
    segments = [] if found is None else found.group(2).split("/")
    if found is None or any(segment in ("", ".", "..") for segment in segments):
        raise InvalidRequest(f"lora_path {path[:200]!r} is not of the form s3://bucket/prefix", param="lora_path")
    if not any(f"{path.rstrip('/')}/".startswith(f"{prefix}/") for prefix in settings.s3_sources):
        raise InvalidRequest(
            f"lora_path {path[:200]!r} is below none of the prefixes that adapters may be loaded from "
            "(TEMPER_ADAPTERS_S3)",
            param="lora_path",
        )
    store = ObjectStore(settings.model_copy(update={"s3_bucket": found.group(1)}))
    limits = {CONFIG: MAX_CONFIG_BYTES, WEIGHTS: settings.max_upload_bytes}
    sizes = {one.key: one.size for one in store.list_objects(f"{found.group(2)}/")}
    files = {}
    for name, limit in limits.items():
        key = f"{found.group(2)}/{name}"
        if key not in sizes:
            raise ModelNotFound(f"No adapter found for {path[:200]}: {name} is not there", param="lora_path")
        if sizes[key] > limit:
            raise _too_large(name, sizes[key], limit)
        try:
            files[name] = store.get(key).data
        except ObjectNotFound as error:
            raise ModelNotFound(f"No adapter found for {path[:200]}", param="lora_path") from error
    return files


def _too_large(name: str, size: int, limit: int) -> AdapterRejected:
    return AdapterRejected(
        f"{name} has {size} bytes, over the limit of {limit} (TEMPER_MAX_UPLOAD_BYTES)", param="lora_path"
    )
