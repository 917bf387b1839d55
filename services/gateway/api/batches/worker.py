"""Claims batches and runs them beside the gateway's own requests, until the gateway stops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import redis
import structlog
from fastapi import FastAPI
from pydantic import BaseModel

from services.common.errors import TemperError, Unavailable, nothing_left
from services.common.queue.delivery import JobLost
from services.common.shutdown import cancel_and_wait
from services.gateway.api.batches.internal_client import Caller
from services.gateway.api.batches.results import ROOT
from services.gateway.api.batches.runner import BatchHost, BatchRun, End
from services.gateway.api.batches.stores import BatchStores
from services.gateway.core.admission import Lifecycle
from services.gateway.core.batch_queue import ClaimedBatch
from services.gateway.core.file_store import StoreThreads
from services.gateway.inference.context import InferenceContext

_CLAIM_SECONDS = 0.5
"""Longest time that one look for a batch takes, and so the longest that a stop waits for it."""
_AWAY_SECONDS = 2.0
_SCARCE_SECONDS = 5.0
"""Time without a look for batches behind one that got no memory, threads or file handles."""
_SETTLE_SECONDS = 5.0
"""Longest time that a stopping gateway tries to hand a batch back; after that the batch is reclaimed."""

log = structlog.get_logger("batches")


class BatchWorker:
    """Worker of one gateway, which claims batches and runs them.

    Args:
        app: answers their requests.
        inference: settings, metrics, and how busy the gateway is.
        stores: of files and batches.
        threads: for calls that block on the object store.
        lifecycle: says when the gateway stops.
        endpoints: the models of the bodies that batches may hold, by path.
    """

    def __init__(
        self,
        app: FastAPI,
        inference: InferenceContext,
        stores: BatchStores,
        threads: StoreThreads,
        lifecycle: Lifecycle,
        *,
        endpoints: Mapping[str, type[BaseModel]],
    ) -> None:
        settings = inference.settings
        self._settings = settings
        self._stopping = lifecycle.stopping
        # One thread claims batches, the others send the heartbeats of claimed ones: neither waits for the other.
        self._threads = ThreadPoolExecutor(2 + settings.batch_workers, "batches")

        def has_room() -> bool:
            """True while less than half of the places are taken: the other half is for users alone."""
            return 2 * inference.admission.in_flight < settings.max_in_flight

        caller = Caller(app, priority=settings.batch_priority, endpoints=endpoints, has_room=has_room)
        self._host = BatchHost(settings, inference.metrics, threads, stores, caller, self._threads)
        self._consumer = stores.consumer
        self._running: set[asyncio.Task[None]] = set()
        self._away = False
        self._scarce = False
        """An attempt ended as the system gives this gateway no more memory, threads or file handles."""
        self._claiming: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to look for batches, unless the settings say that others do."""
        if self._settings.batch_workers > 0:
            self._claiming = asyncio.create_task(self._claim_all())

    async def stop(self) -> None:
        """Waits until all batches are handed back. They begin to be when the gateway's `stopping` is set."""
        if self._claiming is not None:
            await self._claiming
        await asyncio.get_running_loop().run_in_executor(self._threads, self._consumer.close)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _claim_all(self) -> None:
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            while not self._stopping.is_set():
                if len(self._running) >= self._settings.batch_workers:
                    await asyncio.wait({*self._running, stopping}, return_when=asyncio.FIRST_COMPLETED)
                    continue
                claimed = await self._claim()
                if claimed is not None:
                    task = asyncio.create_task(self._work(claimed))
                    self._running.add(task)
                    task.add_done_callback(self._running.discard)
            if self._running:
                await asyncio.wait(self._running)
        finally:
            stopping.cancel()

    async def _claim(self) -> ClaimedBatch | None:
        if self._scarce:  # other gateways may have what this one's machine lacks
            self._scarce = False
            await self._pause(_SCARCE_SECONDS)
        try:
            claimed = await self._host.redis(self._consumer.claim, _CLAIM_SECONDS)
            self._away = False
            return claimed
        except (Unavailable, redis.exceptions.RedisError) as error:  # RedisError: the server is still loading
            if not self._away:
                log.warning("queue.away", error=str(error))
            self._away = True
        except Exception:  # a bug must not end the batches of this gateway
            log.exception("claim.failed")
        await self._pause(_AWAY_SECONDS)
        return None

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    # One batch.

    async def _work(self, claimed: ClaimedBatch) -> None:
        note = log.bind(batch=claimed.id, attempt=claimed.attempt)
        note.info("batch.claimed")
        metrics = self._host.metrics
        metrics.batches_running.inc()
        outcome = "unsettled"
        try:
            outcome = await self._run(claimed)
            note.info("batch.done", outcome=outcome)
        except JobLost as error:
            outcome = "lost"
            note.warning("batch.lost", error=error.message)
        except Unavailable as error:
            note.warning("batch.unsettled", error=error.message)
        except Exception:  # only a bug in settling itself comes here; the batch stays pending and is reclaimed
            note.exception("batch.unsettled")
        finally:
            metrics.batches_running.dec()
            metrics.batches.labels(outcome).inc()

    async def _run(self, claimed: ClaimedBatch) -> str:
        cancelled = asyncio.Event()
        run = BatchRun(self._host, claimed, cancelled)
        work = asyncio.ensure_future(run.run())
        beating = asyncio.ensure_future(self._beat(claimed, cancelled))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((work, beating, stopping), return_when=asyncio.FIRST_COMPLETED)
            if run.settling:
                await asyncio.wait([work], timeout=_SETTLE_SECONDS)
            if work.done():
                return await self._ended(claimed, run, work)
            if beating.done():
                beating.result()  # raises JobLost: another gateway has the batch
            await cancel_and_wait(work)
            return await self._hand_back(claimed, run)
        finally:
            for task in (work, beating, stopping):
                await cancel_and_wait(task)

    async def _ended(self, claimed: ClaimedBatch, run: BatchRun, work: asyncio.Future[End]) -> str:
        try:
            return work.result()
        except JobLost:
            raise
        except Exception as error:
            log.error("batch.crashed", batch=claimed.id, exc_info=error)
            # The text of a bug is for the log, not for the client.
            reason = error.message if isinstance(error, TemperError) else "internal error; the log has the details"
            self._scarce |= nothing_left(error)
            if run.progressed or nothing_left(error):  # an attempt that stored results does not count, nor does this
                await self._settle(lambda: self._consumer.requeue(claimed, reason))
            else:
                await self._settle(lambda: self._consumer.retry(claimed, reason))
            return "crashed"

    async def _hand_back(self, claimed: ClaimedBatch, run: BatchRun) -> str:
        """Hands a batch back: stores the results that are there, and lets another gateway go on at once."""
        with contextlib.suppress(TimeoutError, Unavailable):
            await asyncio.wait_for(run.flush(), _SETTLE_SECONDS)
        await self._settle(lambda: self._consumer.requeue(claimed, "its gateway is shutting down"))
        return "handed_back"

    async def _settle(self, write: Callable[[], object]) -> None:
        """Writes how an attempt ended. Raises Unavailable: Redis is away, and the batch will be reclaimed."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _SETTLE_SECONDS
        while True:
            try:
                await self._host.redis(write)
                return
            except Unavailable:
                if loop.time() > until:
                    raise
            await asyncio.sleep(0.25)

    async def _beat(self, claimed: ClaimedBatch, cancelled: asyncio.Event) -> None:
        """Sends the heartbeats of a batch, whose answers tell of a cancellation. Ends only by raising JobLost."""
        away = False
        while True:
            try:
                if await self._host.redis(self._consumer.heartbeat, claimed):
                    cancelled.set()
                away = False
            except JobLost:
                raise
            except (Unavailable, redis.exceptions.RedisError) as error:
                if not away:
                    log.warning("queue.away", batch=claimed.id, error=str(error))
                away = True
            except Exception:  # a bug must not end the heartbeats: the batch would be given to another gateway
                log.exception("heartbeat.failed", batch=claimed.id)
            await asyncio.sleep(self._settings.batch_heartbeat_seconds)

    async def tidy(self) -> int:
        """Removes expired files, and parts of batches that have ended; returns how many. See Chore."""
        removed = await self._host.store(self._host.files.sweep)
        objects = self._host.files.objects
        for batch_id in await self._host.store(objects.list_dirs, ROOT):
            if await self._host.queue.over(batch_id):
                await self._host.store(objects.delete_prefix, f"{ROOT}{batch_id}/")
                removed += 1
        return removed
