"""One batch, from its input file to its output files.

validating → in_progress → finalizing → completed, or failed, expired or cancelled. A gateway can die anywhere: the next
one reads from the parts what is done, runs the rest, and writes the same files.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from concurrent.futures import Executor
from contextlib import aclosing
from typing import Literal, ParamSpec, TypeVar

import structlog

from services.common.errors import NotFound, Unavailable
from services.common.shutdown import cancel_and_wait
from services.common.storage.ids import ulid_of
from services.common.storage.object_store import PreconditionFailed
from services.gateway.api.batches.input_file import InputCheck, Line, LineSplitter, parse_line
from services.gateway.api.batches.internal_client import Caller
from services.gateway.api.batches.results import Buffer, Done, Parts, Result, ResultFile, Unrun, form_of
from services.gateway.api.batches.stores import BatchStores
from services.gateway.core.batch_queue import NOW, ClaimedBatch, LineError, Stage
from services.gateway.core.file_store import FileInfo, NewFile, StoreThreads
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.settings import GatewaySettings

P = ParamSpec("P")
T = TypeVar("T")


class BatchHost:
    """Resources that the batches of one gateway share.

    Args:
        settings: how many requests run at a time.
        metrics: counts batches.
        threads: for calls that block on the object store.
        stores: of files and batches.
        caller: sends the requests.
        redis_threads: for calls that block on Redis.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
        threads: StoreThreads,
        stores: BatchStores,
        caller: Caller,
        redis_threads: Executor,
    ) -> None:
        self.settings = settings
        self.files = stores.files
        self.consumer = stores.consumer
        self.queue = stores.queue
        self.caller = caller
        self.slots = asyncio.Semaphore(settings.batch_concurrency)
        """Semaphore of the requests that run in this gateway at a time, of all batches."""
        self.metrics = metrics
        self._threads = threads
        self._redis_threads = redis_threads

    async def store(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a blocking call to the object store in a thread. Raises Unavailable."""
        return await self._threads.run(function, *args, **kwargs)

    async def redis(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a blocking call to Redis in a thread. Raises Unavailable."""
        return await asyncio.get_running_loop().run_in_executor(self._redis_threads, lambda: function(*args, **kwargs))


End = Literal["completed", "failed", "expired", "cancelled"]
_BACKOFF_SECONDS = (0.25, 5.0)
"""First and longest pause between attempts to reach a store that is away."""
_TICK_SECONDS = 0.25
_LINE_SLACK = 4096
"""Bytes that a line may have besides its body."""


class InputGone(Exception):
    """The input file was deleted, or has expired."""


class BatchRun:
    """Run of one claimed batch, which computes the results that are missing and writes the files.

    Args:
        host: resources of this gateway's batches.
        cancelled: set when the owner of the batch wants it to stop.
    """

    def __init__(self, host: BatchHost, claimed: ClaimedBatch, cancelled: asyncio.Event) -> None:
        self._host = host
        self._claimed = claimed
        self._cancelled = cancelled
        self._form = form_of(claimed)
        self._parts = Parts(host.files.objects, claimed.id)
        self._done = Done()
        self._buffer = Buffer()
        self._total = claimed.job.total
        self._stored = False
        self.settling = False
        """True once the batch's end is being written. A heartbeat that finds the batch ended is then no loss."""
        self._log = structlog.get_logger("batches").bind(batch=claimed.id, attempt=claimed.attempt)

    @property
    def progressed(self) -> bool:
        """True if this attempt has stored results, which another one need not compute again."""
        return self._stored

    async def run(self) -> End:
        """Runs the batch to its end. Raises JobLost. If the run is cancelled, call `flush`: another attempt does the
        rest."""
        try:
            if self._claimed.job.in_progress_at is None:
                errors = await self._validate()
                if errors:
                    return await self._refuse(errors)
            await self._until_back(lambda: self._host.store(self._parts.read, self._done))
            await self._stage("in_progress", {"in_progress_at": NOW})
            unrun = await self._execute()
            end: End = unrun or "completed"
            if unrun is not None:
                await self._close(unrun)
            elif not await self._until_back(lambda: self._host.redis(self._host.consumer.publishing, self._claimed)):
                end = "cancelled"  # by a client that did not know that everything had run
        except InputGone:
            await self.flush()
            error = LineError(
                code="input_file_gone",
                message=f"the input file {self._claimed.spec.input_file_id} was deleted or has expired; what had run "
                "by then is in the output file",
                param="input_file_id",
            )
            await self._stage("finalizing", {"errors": _errors([error])})
            end = "failed"
        return await self._finish(end)

    async def flush(self) -> None:
        """Stores the results that are there. Raises JobLost."""
        results = self._buffer.take()
        try:
            await self._keep(results)
        except asyncio.CancelledError:  # what is not stored yet is for the flush behind the end of the run
            for result in results:
                self._buffer.add(result)
            raise

    async def _keep(self, results: list[Result]) -> None:
        while results := [result for result in results if result.number not in self._done.lines]:
            try:
                await self._write_part(results)
            except PreconditionFailed:
                # Another gateway wrote this part: it owned the batch before, or owns it now. If it does now, heartbeat
                # raises JobLost.
                await self._until_back(lambda: self._host.redis(self._host.consumer.heartbeat, self._claimed))
                await self._until_back(lambda: self._host.store(self._parts.read, self._done))
                continue
            self._stored = True
            self._done.parts += 1
            for result in results:
                self._done.add(result.number, result.kind)
            await self._stage("in_progress", {}, progressed=True)
            return

    async def _write_part(self, results: list[Result]) -> None:
        data = b"".join(result.encode() for result in results)
        await self._until_back(lambda: self._host.store(self._parts.write, self._done.parts, data))

    # Steps.

    async def _validate(self) -> list[LineError]:
        check = InputCheck(self._claimed.spec.endpoint, self._host.settings.batch_max_requests)
        splitter = self._splitter()
        try:
            info = await self._input()
        except InputGone:
            message = "the input file does not exist any more"
            return [LineError(code="input_file_gone", message=message, param="input_file_id")]
        for number in range(info.pieces):
            piece = await self._piece(info, number)
            lines = splitter.feed(piece, last=number + 1 == info.pieces)
            await asyncio.to_thread(check.take, lines)  # megabytes of them
            if check.stopped:
                break
        else:
            check.finish()
        self._total = check.total
        return check.errors

    async def _refuse(self, errors: list[LineError]) -> End:
        await self._stage("validating", {"errors": _errors(errors)})
        self.settling = True
        reason = f"{len(errors)} error(s) in the input file"
        await self._until_back(lambda: self._host.redis(self._host.consumer.fail, self._claimed, reason))
        return "failed"

    async def _execute(self) -> Unrun | None:
        """Runs the lines that have no result yet, until all have one (None), or until the batch must end."""
        failures: list[BaseException] = []
        # By the clock of the queue, of which the batch's beginning is, and then by one that does not jump.
        now = await self._until_back(lambda: self._host.redis(self._host.consumer.now))
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._claimed.job.expires_at - now
        feeding = asyncio.ensure_future(self._feed(failures))
        try:
            while True:
                await asyncio.wait([feeding], timeout=_TICK_SECONDS)
                if feeding.done():
                    feeding.result()
                    break
                if self._cancelled.is_set() or clock() >= deadline or failures:
                    break
                if self._buffer.due:
                    await self.flush()
        finally:
            await cancel_and_wait(feeding)
        if failures:
            raise failures[0]
        await self.flush()
        if len(self._done.lines) >= self._total:
            return None
        return "cancelled" if self._cancelled.is_set() else "expired"

    async def _feed(self, failures: list[BaseException]) -> None:
        """Starts a task a line, as many at a time as this gateway may run; ends when all have ended."""
        slots = self._host.slots
        running: set[asyncio.Task[None]] = set()

        def ended(task: asyncio.Task[None]) -> None:
            slots.release()
            running.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                failures.append(error)

        try:
            async with aclosing(self._todo()) as todo:
                async for line in todo:
                    await self._buffer.room.wait()
                    await slots.acquire()
                    task = asyncio.create_task(self._line(line))
                    running.add(task)
                    task.add_done_callback(ended)
            while running:
                await asyncio.wait(running)
        finally:
            # All are cancelled before any is awaited, because each has to tell an engine.
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running)

    async def _line(self, line: Line) -> None:
        spec = self._claimed.spec
        request_id = f"{self._claimed.id}-{line.number}"
        answer = await self._host.caller.call(spec.endpoint, line.body, owner=spec.owner, request_id=request_id)
        self._host.metrics.batch_requests.labels(str(answer.status)).inc()
        self._buffer.add(self._form.answered(line.number, line.custom_id, answer))

    async def _close(self, why: Unrun) -> None:
        """Gives every request that did not run a line that says so."""
        async with aclosing(self._todo()) as todo:
            async for line in todo:
                self._buffer.add(self._form.not_run(line.number, line.custom_id, why))
                if self._buffer.full:
                    await self.flush()
        await self.flush()

    async def _finish(self, end: End) -> End:
        began = float((await self._stage("finalizing", {"finalizing_at": NOW}))["finalizing_at"])
        written = {file.field: await self._write(file, began) for file in self._form.files}
        await self._stage("finalizing", {name: file_id for name, file_id in written.items() if file_id is not None})
        consumer = self._host.consumer
        claimed = self._claimed
        write: dict[End, Callable[[], Awaitable[None]]] = {
            "completed": lambda: self._host.redis(consumer.complete, claimed),
            "failed": lambda: self._host.redis(consumer.fail, claimed, "the input file is gone"),
            "expired": lambda: self._host.redis(consumer.expire, claimed),
            "cancelled": lambda: self._host.redis(consumer.cancelled, claimed),
        }
        self.settling = True
        await self._until_back(write[end])
        try:
            await self._host.store(self._parts.discard)
            await self._discard_input(written)
        except Unavailable as error:  # the worker's tidying removes them later
            self._log.info("batch.parts_left", error=error.message)
        return end

    async def _discard_input(self, written: Mapping[str, str | None]) -> None:
        """Removes an input file that nobody uploaded, once every request of it is in a file of results."""
        spec = self._claimed.spec
        if spec.digest is not None and any(written.values()):
            with contextlib.suppress(NotFound):  # it has expired
                await self._host.store(self._host.files.delete, spec.file_owner, spec.input_file_id)

    async def _write(self, file: ResultFile, began: float) -> str | None:
        """Writes a file of results, with the same id at every attempt; None if it would be empty."""
        if not any(self._done.kinds[kind] for kind in file.kinds):
            return None
        spec = self._claimed.spec
        new = NewFile(
            owner=spec.file_owner,
            id="file-" + ulid_of(f"{self._claimed.id} {file.name}", int(began * 1000)),
            filename=f"{self._claimed.id}_{file.name}.jsonl",
            purpose="batch_output",
            created_at=int(began),
            seconds=spec.output_seconds,
        )
        content = self._parts.content
        parts = self._done.parts
        await self._until_back(
            lambda: self._host.store(lambda: self._host.files.create(new, content(file.kinds, parts)))
        )
        return new.id

    # Parts.

    async def _todo(self) -> AsyncGenerator[Line, None]:
        """The lines without a result, in order."""
        info = await self._input()
        splitter = self._splitter()
        endpoint = self._claimed.spec.endpoint
        for number in range(info.pieces):
            piece = await self._piece(info, number)
            for line, text in splitter.feed(piece, last=number + 1 == info.pieces):
                if line not in self._done.lines:
                    yield parse_line(line, text, endpoint)

    async def _input(self) -> FileInfo:
        spec = self._claimed.spec
        try:
            return await self._until_back(
                lambda: self._host.store(self._host.files.get, spec.file_owner, spec.input_file_id)
            )
        except NotFound as error:
            raise InputGone from error

    async def _piece(self, info: FileInfo, number: int) -> bytes:
        owner = self._claimed.spec.file_owner
        try:
            return await self._until_back(lambda: self._host.store(self._host.files.piece, owner, info, number))
        except NotFound as error:
            raise InputGone from error

    def _splitter(self) -> LineSplitter:
        return LineSplitter(self._host.settings.max_body_bytes + _LINE_SLACK)

    async def _stage(self, stage: Stage, fields: dict[str, str], *, progressed: bool = False) -> dict[str, str]:
        counts = {name: str(self._done.kinds[kind]) for name, kind in self._form.counted.items()}
        every = {"total": str(self._total), **counts, **fields}
        consumer = self._host.consumer
        return await self._until_back(
            lambda: self._host.redis(lambda: consumer.stage(self._claimed, stage, every, progressed=progressed))
        )

    async def _until_back(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Repeats an operation while a store is away."""
        pause, longest = _BACKOFF_SECONDS
        while True:
            try:
                return await operation()
            except Unavailable as error:
                if pause == _BACKOFF_SECONDS[0]:
                    self._log.warning("store.away", error=error.message)
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)


def _errors(errors: list[LineError]) -> str:
    return json.dumps([error.model_dump() for error in errors])
