"""Files of adapters: reading an uploaded one, and writing a published version as an archive.

The engine checks what the files of an upload mean; here they only have to be whole."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic_core import from_json
from safetensors import SafetensorError, deserialize
from starlette.datastructures import FormData, UploadFile

from services.common.adapters.manifest import (
    DRAFTER_CONFIG,
    DRAFTER_WEIGHTS,
    FILES,
    PICKLED,
    SAFE_ONLY,
    drafter_base,
    is_pickled,
    kind_of,
)
from services.common.adapters.names import check_adapter_name
from services.common.adapters.registry import CONFIG, WEIGHTS
from services.common.errors import AdapterRejected, InvalidRequest

MAX_CONFIG_BYTES = 2**20
MAX_TENSORS = 100_000


async def read_form(form: FormData) -> tuple[str, dict[str, bytes]]:
    """Name and files of an upload.

    Raises:
        InvalidRequest: a part is missing, unknown or given twice.
        AdapterRejected: a file is empty, far too large, or by its name weights of torch.save.
    """
    drafter = any(part in form for part in FILES["drafter"]) and not any(part in form for part in FILES["adapter"])
    parts = FILES["drafter" if drafter else "adapter"]
    known = ("name", *parts)
    for key in form:
        if key.endswith(PICKLED):
            raise AdapterRejected(f"{key[:80]}: {SAFE_ONLY}", param=key)
        if key not in known:
            raise InvalidRequest(f"Unknown part: {key[:80]!r}. An upload has the parts {', '.join(known)}.", param=key)
        if len(form.getlist(key)) > 1:
            raise InvalidRequest(f"the part {key!r} is given twice", param=key)
    for key in known:
        if key not in form:
            raise InvalidRequest(f"Missing part: {key!r}. An upload has the parts {', '.join(known)}.", param=key)
    name = form["name"]
    if not isinstance(name, str):
        raise InvalidRequest("the part 'name' must be a plain form field, not a file", param="name")
    files = {filename: await _read_file(form[filename], filename) for filename in parts}
    return check_adapter_name(name), files


async def _read_file(part: UploadFile | str, filename: str) -> bytes:
    if isinstance(part, str):
        raise InvalidRequest(f"the part {filename!r} must be a file", param=filename)
    if filename in (CONFIG, DRAFTER_CONFIG) and (part.size or 0) > MAX_CONFIG_BYTES:
        raise AdapterRejected(f"{filename} is over {MAX_CONFIG_BYTES} bytes", param=filename)
    data = await part.read()
    if not data:
        raise AdapterRejected(f"{filename} is empty", param=filename)
    return data


def check_files(files: dict[str, bytes]) -> None:
    """Parses both files. Blocking: copies the tensors once.

    Raises:
        AdapterRejected: the config is not a PEFT LoRA config or a drafter's, or the weights are not whole safetensors.
    """
    if kind_of(files) == "drafter":
        drafter_base(files[DRAFTER_CONFIG])
        _check_weights(files[DRAFTER_WEIGHTS], DRAFTER_WEIGHTS)
        return
    try:
        config: Any = from_json(files[CONFIG], allow_inf_nan=False)
    except ValueError as error:
        raise AdapterRejected(f"{CONFIG} is not valid JSON: {error}", param=CONFIG) from error
    if not isinstance(config, dict):
        raise AdapterRejected(f"{CONFIG} must be a JSON object", param=CONFIG)
    if config.get("peft_type") != "LORA":
        raise AdapterRejected(
            f"{CONFIG}: peft_type must be 'LORA', got {str(config.get('peft_type'))[:40]!r}", param=CONFIG
        )
    _check_weights(files[WEIGHTS], WEIGHTS)


def _check_weights(data: bytes, name: str) -> None:
    try:
        tensors = deserialize(data)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        if is_pickled(data):
            raise AdapterRejected(f"{name} is a file of torch.save: {SAFE_ONLY}", param=name) from error
        raise AdapterRejected(f"{name} is corrupt: {error}", param=name) from error
    if not 0 < len(tensors) <= MAX_TENSORS:
        raise AdapterRejected(f"{name} has {len(tensors)} tensors", param=name)


_PIECE = 2**20


class _Pipe(io.RawIOBase):
    """Write-only file, whose content is taken out in pieces while it is still being written."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        part = bytes(memoryview(data))  # type: ignore[arg-type]
        self._parts.append(part)
        return len(part)

    def take(self) -> bytes:
        """Bytes written since the last call."""
        parts, self._parts = self._parts, []
        return b"".join(parts)


def tar_gz(directory: str, files: Mapping[str, bytes], *, modified: float) -> Iterator[bytes]:
    """Yields the archive in pieces. Equal files give equal bytes.

    Args:
        directory: that the files are in, inside the archive.
        files: content by name.
        modified: Unix seconds, of every file.
    """
    pipe = _Pipe()
    with gzip.GzipFile(fileobj=pipe, mode="wb", compresslevel=1, mtime=0) as packed:
        for name, data in sorted(files.items()):
            info = tarfile.TarInfo(f"{directory}/{name}")
            info.size, info.mtime, info.mode = len(data), int(modified), 0o644
            packed.write(info.tobuf(tarfile.PAX_FORMAT))
            for start in range(0, len(data), _PIECE):
                packed.write(data[start : start + _PIECE])
                yield pipe.take()
            packed.write(b"\0" * (-len(data) % tarfile.BLOCKSIZE))
        packed.write(b"\0" * (2 * tarfile.BLOCKSIZE))
    yield pipe.take()
