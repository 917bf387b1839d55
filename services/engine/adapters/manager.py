"""Adapter manager: finds, verifies, loads and swaps adapter versions without stopping a step.

One I/O thread talks to the object store. It downloads a version, verifies its digests, binds it strictly and copies it
into a free slot, which nothing reads yet. Then the loop thread flips the aliases (attached version, current versions of
names) between two steps. A request pins its version at admission, so an answer never mixes versions. Versions without a
slot wait in a queue; see docs/decisions/adapter-slots-in-turn.md. When the store or Redis is away, loaded versions
continue to serve.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass

import structlog

from services.common.adapters.composition import Published
from services.common.adapters.events import AdapterEvents
from services.common.adapters.names import AdapterVersion
from services.common.adapters.registry import AdapterRegistry
from services.common.errors import ModelNotFound, NotFound, Overloaded, TemperError, Unavailable
from services.engine.adapters.aliases import Aliases, Loop
from services.engine.adapters.drafter import FollowedDrafter
from services.engine.adapters.loader import AdapterLoader
from services.engine.adapters.placement import NoFreeSlot, Placement
from services.engine.adapters.private_versions import PrivateVersions
from services.engine.adapters.slot_table import AdapterConfig, Resident, SlotTable
from services.engine.observability.events import AdapterLoadFailed, EventStream
from services.engine.observability.status import AdapterSnapshot, LoadedAdapter
from services.engine.requests.adapter import BASE_PIN, AdapterChoice, AdapterPin, PrivateVersion

_FAILURE_SECONDS = 2.0
"""Time for which a failed choice gets its error again before the store is asked."""
_AWAITED_SECONDS = 5.0
"""Time for which a version that was loaded for waiting requests keeps its slot."""
_REMEMBERED = 1024
"""Most failures that are remembered."""
_START_SECONDS = 60.0
"""Longest wait for the attached version at the start, seconds."""

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Sync:
    version: AdapterVersion | None
    future: Future[None]
    lacks_slot: bool = False
    """True if it was tried and only a slot was missing."""


class AdapterManager:
    """Resolves and pins adapter versions; thread-safe. Implements services.engine.loop.request_tracker.AdapterResolver.

    Args:
        adapter_events: events of publications and attachments; None: the store is only polled.
        loader: its slots 1 to ``limits.num_slots`` are this manager's.
        events: stream for swaps and failures.
        drafter: what drafts, if it follows a name; None: it stays as it was loaded.
    """

    def __init__(
        self,
        registry: AdapterRegistry,
        adapter_events: AdapterEvents | None,
        loader: AdapterLoader,
        limits: AdapterConfig,
        events: EventStream | None = None,
        drafter: FollowedDrafter | None = None,
    ) -> None:
        self.drafter = drafter
        self._loader = loader
        self._limits = limits
        self.num_slots = limits.num_slots
        """Versions that may be loaded at once, the base not counted."""
        self._events = events or EventStream()
        self._loop: Loop | None = None
        self._stopping = threading.Event()
        # Guarded by the lock of the condition.
        self._changed = threading.Condition()
        self._table = SlotTable(
            limits.num_slots,
            # Before half of the wait is over, every version that may give up its slot has been asked to.
            drain_seconds=limits.wait_seconds / (2 * limits.num_slots),
            turn_seconds=limits.turn_seconds,
        )
        self.private = PrivateVersions(
            self._changed,
            self._table,
            loader,
            keep=self._kept,
            freed=self._slot_freed,
            wait_seconds=limits.wait_seconds,
        )
        """Private versions of training jobs, in the same slots."""
        self._placement = Placement(self._changed, self._table, loader, self._kept, self._events)
        self._aliases = Aliases(
            registry,
            self._changed,
            self._table,
            ensure=self._placement.ensure_loaded,
            flipped=lambda: self._failures.clear(),
            events=self._events,
            drafter=drafter,
        )
        self._wanted: dict[AdapterChoice, None] = {}
        """Choices that requests wait for, oldest first."""
        self._awaited: dict[Published, float] = {}
        self._failures: dict[AdapterChoice, tuple[float, TemperError]] = {}
        self._syncs: list[_Sync] = []
        self._signalled = False
        self._look_now = False
        # Used by the I/O thread only.
        self._store_away = False
        self._unreachable: tuple[float, Unavailable] | None = None
        self._threads = [threading.Thread(target=self._run, name="adapters", daemon=True)]
        if adapter_events is not None:
            listening = threading.Thread(
                target=self._listen, args=(adapter_events,), name="adapter-events", daemon=True
            )
            self._threads.append(listening)

    # Any thread.

    def start(self, loop: Loop) -> None:
        """Starts the threads and waits until the attached version serves. The loop must be running.

        Raises:
            Unavailable: the object store does not answer.
        """
        self._loop = loop
        for thread in self._threads:
            thread.start()
        self.sync(None, timeout=_START_SECONDS)

    def stop(self) -> None:
        """Ends the threads; callers that wait for them get Unavailable."""
        self._stopping.set()
        with self._changed:
            self._signal(look=False)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=10.0)
        with self._changed:
            syncs, self._syncs = self._syncs, []
        for sync in syncs:
            _settle(sync.future, Unavailable("the engine is shutting down"))

    def pin(self, choice: AdapterChoice | PrivateVersion) -> AdapterPin | None:
        """Pins the version that answers a request, until `release`; never blocks.

        Returns:
            None while it is being loaded or waits for a slot; `Loop.retry_adapters` follows.

        Raises:
            ModelNotFound: there is no such adapter.
            AdapterRejected: the version does not bind.
            Unavailable: it is not loaded and the store does not answer.
        """
        with self._changed:
            if isinstance(choice, PrivateVersion):
                return self._pin_private(choice)
            version = self._aliases.version_of(choice)
            if version is None and not choice.named:
                return BASE_PIN
            resident = None if version is None else self._table.get(version)
            if version is not None and resident is not None and self._takes_requests(resident):
                self._awaited.pop(version, None)
                return self._table.acquire(resident)
            failure = self._failures.get(choice)
            if failure is not None:
                if failure[0] > time.monotonic():
                    raise failure[1]
                del self._failures[choice]
            self._wanted.setdefault(choice)
            self._signal(look=False)
            return None

    def give_up(self, choice: AdapterChoice | PrivateVersion) -> None:
        """Gives up a choice that no request waits for any more; others may get the slot that it waited for."""
        with self._changed:
            if isinstance(choice, AdapterChoice) and choice in self._wanted:
                del self._wanted[choice]
                self._table.leave(choice)
                if self._wanted:
                    self._signal(look=False)

    def overdue(self, choice: AdapterChoice | PrivateVersion) -> TemperError:
        """Error for a request that has waited for its pin as long as it may."""
        wait = self._limits.wait_seconds
        with self._changed:
            version = self._aliases.version_of(choice) if isinstance(choice, AdapterChoice) else choice
            resident = None if version is None else self._table.get(version)
            gives_way = resident is not None and not self._takes_requests(resident)
            lacks_slot = gives_way or choice in self._table.queue
        if lacks_slot:
            self._events.emit(AdapterLoadFailed("no_slot"))
            return self._slots_busy(wait)
        return Unavailable(f"the adapter was not loaded within {wait:g} s, although no slot was missing: retry later")

    def release(self, pin: AdapterPin) -> None:
        """Ends one request's pin."""
        if pin.slot == 0:
            return
        with self._changed:
            if self._table.release(pin):
                self._slot_freed()

    def sync(self, version: AdapterVersion | None, timeout: float) -> None:
        """Reads the pointers now; returns once they are live and ``version``, if given, is loaded.

        Raises:
            AdapterRejected: ``version`` does not bind.
            ModelNotFound: there is no such version.
            Unavailable: the object store does not answer, or not within ``timeout`` seconds.
            Overloaded: every slot stayed in use for ``timeout`` seconds.
        """
        sync = _Sync(version, Future())
        with self._changed:
            if self._stopping.is_set():
                raise Unavailable("the engine is shutting down")
            self._syncs.append(sync)
            self._signal(look=True)
        try:
            sync.future.result(timeout)
        except TimeoutError:
            sync.future.cancel()
            if sync.lacks_slot:
                raise self._slots_busy(timeout) from None
            raise Unavailable(
                f"{version or 'the attached adapter'} was not loaded in {timeout:g} s, although no slot was missing: "
                "the object store is slow or away, or steps take long; try again"
            ) from None

    def files(self, version: AdapterVersion) -> Mapping[str, bytes]:
        """Files of a version, read from the object store.

        Raises:
            ModelNotFound: there is no such version.
            AdapterRejected: its files are corrupt or belong to another base model.
            Unavailable: the object store does not answer.
        """
        return self._loader.files(version)[1]

    @property
    def alive(self) -> bool:
        """True while adapters can be loaded, once started; part of liveness."""
        return self._stopping.is_set() or self._threads[0].is_alive()

    def snapshot(self) -> AdapterSnapshot:
        with self._changed:
            published = list(self._table.published)
            return AdapterSnapshot(
                str(self._aliases.attached or ""),
                tuple(LoadedAdapter(resident.pin, resident.requests) for _, resident in published),
                tuple(self._aliases.name_of(version) for version, _ in published),
                tuple(sorted({str(choice) for choice in self._wanted if choice.named})),
                "" if self.drafter is None else str(self.drafter.version or ""),
            )

    def _pin_private(self, version: PrivateVersion) -> AdapterPin:
        resident = self._table.get(version)
        if resident is None:
            raise ModelNotFound("the job's policy was removed from its slot")
        return self._table.acquire(resident)

    def _slot_freed(self) -> None:
        """Wakes the I/O thread if something waits for a slot."""
        if self._wanted or self._syncs or not self._aliases.settled:
            self._signal(look=True)

    def _kept(self) -> set[Published]:
        """Versions that keep their slots although no request is pinned to them."""
        now = time.monotonic()
        self._awaited = {v: until for v, until in self._awaited.items() if until > now}
        attached = self._aliases.attached
        return set(self._awaited) if attached is None else {*self._awaited, attached}

    def _takes_requests(self, resident: Resident) -> bool:
        return not self._table.queue or self._table.takes_requests(resident, self._kept())

    def _signal(self, *, look: bool) -> None:
        self._signalled = True
        self._look_now = self._look_now or look
        self._changed.notify_all()

    def _slots_busy(self, waited: float) -> Overloaded:
        return Overloaded(
            f"all {self._limits.num_slots} adapter slots are in use, and none became free in {waited:g} s: the "
            "attached adapter and the policies of jobs keep theirs, others keep theirs until their requests end; "
            "try again, or raise TEMPER_ADAPTER_SLOTS"
        )

    # The event thread.

    def _listen(self, events: AdapterEvents) -> None:
        while not self._stopping.is_set():
            try:
                happened = events.wait(self._limits.poll_seconds)
            except Exception as error:
                if not isinstance(error, TemperError):
                    log.exception("waiting for adapter events failed")
                # Usually Redis is away; polling still finds everything.
                self._stopping.wait(self._limits.poll_seconds)
                continue
            if happened:
                with self._changed:
                    self._signal(look=True)

    # The I/O thread.

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            with self._changed:
                while not self._signalled and not self._stopping.is_set() and time.monotonic() < due:
                    self._changed.wait(due - time.monotonic())
                self._signalled = False
                wanted = list(self._wanted)
                queued = len(self._table.queue)
                syncs, self._syncs = self._syncs, []
                # Syncs wait for the pointers: those that were not applied at the last look may be applicable now.
                unsettled = bool(syncs) and not self._aliases.settled
                look = self._look_now or unsettled or time.monotonic() >= due
                self._look_now = False
            for sync in syncs:
                sync.lacks_slot = False  # from here on it waits for the store
            if self._stopping.is_set():
                with self._changed:
                    self._syncs.extend(syncs)
                return
            settled = [choice for choice in wanted if self._serve(choice)]
            finished, error = True, None
            if look:
                finished, error = self._look()
                due = time.monotonic() + self._limits.poll_seconds
            unfinished = [sync for sync in syncs if not self._finish(sync, finished, error)]
            for sync in unfinished:
                sync.lacks_slot = True
            with self._changed:
                self._syncs.extend(unfinished)
                for choice in settled:
                    self._wanted.pop(choice, None)
                asked = {AdapterChoice.of(sync.version) for sync in unfinished if sync.version is not None}
                self._table.retain({*self._wanted, *asked, *self._aliases.waiting})
                if self._wanted and len(self._table.queue) < queued:
                    self._signal(look=False)  # versions that gave way to those that now have a slot take requests again
            if settled and self._loop is not None:
                self._loop.retry_adapters()

    def _look(self) -> tuple[bool, TemperError | None]:
        """Reads and applies the pointers. Returns whether all are live now, and the error if that failed."""
        try:
            if self._loop is None:
                raise RuntimeError("start() was not called")
            finished = self._aliases.refresh(self._loop)
        except TemperError as error:
            if not self._store_away:
                log.warning("adapter store is away, loaded versions serve on", reason=error.message)
            self._store_away = True
            return False, error
        except Exception as error:  # a bug must not end the thread that every later swap needs
            log.exception("reading the adapter pointers failed")
            return False, TemperError(f"reading the adapter pointers failed: {type(error).__name__}")
        if self._store_away:
            log.info("adapter store is back")
        self._store_away = False
        self._unreachable = None
        return finished, None

    def _finish(self, sync: _Sync, finished: bool, error: TemperError | None) -> bool:
        """Answers a sync if that is possible now; False: it waits on."""
        if error is not None:
            return _settle(sync.future, error)
        if sync.future.cancelled():
            return True
        if not finished:
            return False
        try:
            if sync.version is not None:
                self._placement.ensure_loaded(AdapterChoice.of(sync.version), sync.version)
        except NoFreeSlot:
            return False
        except TemperError as problem:
            return _settle(sync.future, problem)
        except Exception as problem:  # a bug must not end the thread that every later swap needs
            log.exception("adapter load failed", version=str(sync.version))
            return _settle(sync.future, TemperError(f"loading the adapter failed: {type(problem).__name__}"))
        return _settle(sync.future, None)

    def _serve(self, choice: AdapterChoice) -> bool:
        """Loads a version that requests wait for; False: it waits for a slot, or gives way to others that do."""
        try:
            if self._unreachable is not None and time.monotonic() < self._unreachable[0]:
                raise self._unreachable[1]  # one timeout is enough, however many choices wait
            version = self._aliases.find(choice)
            if version is not None:
                loaded = self._placement.ensure_loaded(choice, version)
                with self._changed:
                    resident = self._table.get(version)
                    self._aliases.loaded(choice)
                    if not loaded and resident is not None and not self._takes_requests(resident):
                        return False
                    self._awaited[version] = time.monotonic() + _AWAITED_SECONDS
            return True
        except NoFreeSlot:
            return False
        except NotFound as error:
            failure: TemperError = _not_found(choice, error)
        except TemperError as error:
            failure = error
            if isinstance(error, Unavailable) and (self._unreachable is None or error is not self._unreachable[1]):
                self._unreachable = (time.monotonic() + _FAILURE_SECONDS, error)
        except Exception as error:  # a bug must not end the thread that every later swap needs
            log.exception("adapter load failed", adapter=str(choice))
            failure = TemperError(f"loading the adapter failed: {type(error).__name__}")
        with self._changed:
            if len(self._failures) >= _REMEMBERED:
                self._failures.clear()
            self._failures[choice] = (time.monotonic() + _FAILURE_SECONDS, failure)
        return True


def _not_found(choice: AdapterChoice, error: NotFound) -> ModelNotFound:
    what = f"there is no model or adapter {str(choice)!r}" if choice.composition is None else error.message
    return ModelNotFound(f"{what}; GET /v1/models and /v1/adapters list them", param="model")


def _settle(future: Future[None], error: TemperError | None) -> bool:
    """Answers a sync unless its caller gave up; always returns True, for the callers' convenience."""
    try:
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
    except InvalidStateError:
        log.debug("a sync was answered after its caller gave up")
    return True
