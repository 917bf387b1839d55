"""The files of message batches: the one that is written from a request, and the results that are read."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import AsyncGenerator, Sequence

from services.common.errors import NotFound
from services.common.queue.lua import JOB_TTL
from services.gateway.api.batches.dependencies import BatchServices
from services.gateway.api.batches.forms import Unrun, unrun_message
from services.gateway.api.batches.input_file import LineSplitter, parse_line
from services.gateway.core.batch_queue import MESSAGES, Batch, LineError
from services.gateway.core.file_store import FileInfo, NewFile

KEPT_SECONDS = JOB_TTL
"""Results: as long as the batch can be looked at."""


def digest_of(lines: Sequence[bytes]) -> str:
    """SHA-256 of an input file."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line)
    return digest.hexdigest()


async def write_input(stores: BatchServices, owner: str, file_id: str, lines: Sequence[bytes]) -> None:
    """Writes the input file of a batch. One that no batch comes to own goes when it expires."""
    new = NewFile(owner, file_id, "requests.jsonl", "batch", int(time.time()), KEPT_SECONDS)
    async with stores.file_uploads:
        await stores.threads.run(stores.files.create, new, lines)


async def results_without_file(stores: BatchServices, batch: Batch) -> AsyncGenerator[bytes, None]:
    """The results of a batch that ended before any were written: those of all requests say why.

    Raises:
        NotFound: its requests are gone as well.
    """
    owner, file_id = batch.spec.file_owner, batch.spec.input_file_id
    info = await stores.threads.run(stores.files.get, owner, file_id)
    first = await stores.threads.run(stores.files.piece, owner, info, 0)
    return _unrun(stores, batch, info, first)


async def _unrun(stores: BatchServices, batch: Batch, info: FileInfo, piece: bytes) -> AsyncGenerator[bytes, None]:
    why = _why(batch)
    splitter = LineSplitter(info.bytes)
    for number in range(info.pieces):
        if number > 0:
            piece = await stores.threads.run(stores.files.piece, batch.spec.file_owner, info, number)
        lines = splitter.feed(piece, last=number + 1 == info.pieces)
        told = [unrun_message(parse_line(line, text, MESSAGES).custom_id, why) for line, text in lines]
        yield b"".join(line + b"\n" for line in told)


def _why(batch: Batch) -> Unrun | LineError:
    match batch.status:
        case "expired" | "cancelled" as why:
            return why
    return batch.errors[0] if batch.errors else LineError(code="batch_failed", message="the batch failed")


async def delete_files(stores: BatchServices, batch: Batch) -> None:
    """Removes what is left of a batch's files."""
    for file_id in (batch.spec.input_file_id, batch.output_file_id):
        if file_id is not None:
            with contextlib.suppress(NotFound):
                await stores.threads.run(stores.files.delete, batch.spec.file_owner, file_id)
