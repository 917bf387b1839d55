"""Adapter versions on one engine: found, verified, loaded and swapped without stopping a step.

One I/O thread talks to the object store. It downloads, verifies digests, binds strictly and copies into a spare slot;
nothing reads that slot yet. Then the aliases (attached version, current versions of names) are flipped on the loop
thread between two steps. A request pins the version it got at admission, so an answer never mixes versions. When the
store or Redis is away, what is loaded goes on serving.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass

import structlog

from services.common.errors import AdapterRejected, ModelNotFound, NotFound, Overloaded, TemperError, Unavailable
from services.common.names import AdapterVersion
from services.common.registry import AdapterRegistry
from services.engine.adapter_loader import AdapterLoader
from services.engine.adapter_ports import AdapterLimits, AdapterSnapshot, LoadedAdapter, Loop, Nudges
from services.engine.adapter_slots import Resident, SlotTable
from services.engine.ports import AdapterObserver, LoadFailure, NoObserver
from services.engine.private_versions import PrivateVersion, PrivateVersions
from services.engine.request import BASE_PIN, AdapterPin
from services.engine.wire import AdapterChoice

_FAILURE_SECONDS = 2.0
"""How long a failed choice is answered with its error before the store is asked again."""
_AWAITED_SECONDS = 5.0
"""How long a version that was loaded for waiting requests is kept for them."""
_REMEMBERED = 1024
"""Failures and refused versions remembered at most."""
_FLIP_SECONDS = 60.0
"""Longest wait for the loop to reach a boundary."""

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Sync:
    version: AdapterVersion | None
    future: Future[None]
    lacks_slot: bool = False
    """Whether it has been tried, and nothing but a slot was missing."""


class _NoFreeSlot(Exception):
    """Every slot is pinned; try again when a request ends."""


class AdapterManager:
    """Resolves and pins adapter versions; thread-safe. Implements services.engine.ports.AdapterResolver.

    Args:
        nudges: None: only polling.
        loader: its slots 1 to ``limits.num_slots`` are this manager's.
        observer: gets the metrics.
    """

    def __init__(
        self,
        registry: AdapterRegistry,
        nudges: Nudges | None,
        loader: AdapterLoader,
        limits: AdapterLimits,
        observer: AdapterObserver | None = None,
    ) -> None:
        self._registry = registry
        self._nudges = nudges
        self._loader = loader
        self._limits = limits
        self._observer = observer if observer is not None else NoObserver()
        self._loop: Loop | None = None
        self._stopping = threading.Event()
        # Guarded by the condition's lock.
        self._changed = threading.Condition()
        self._table = SlotTable(limits.num_slots)
        self.private = PrivateVersions(
            self._changed,
            self._table,
            loader,
            keep=self._kept,
            freed=self._slot_freed,
            wait_seconds=limits.wait_seconds,
        )
        """Policies of training jobs, in the same slots."""
        self._attached: AdapterVersion | None = None
        self._current: dict[str, int] = {}
        self._wanted: dict[AdapterChoice, float] = {}
        self._awaited: dict[AdapterVersion, float] = {}
        self._failures: dict[AdapterChoice, tuple[float, TemperError]] = {}
        self._rejected: dict[AdapterVersion, AdapterRejected] = {}
        self._syncs: list[_Sync] = []
        self._signalled = False
        self._look_now = False
        # Used by the I/O thread only.
        self._applied: str | None = None
        self._store_away = False
        self._unreachable: tuple[float, Unavailable] | None = None
        self._threads = [threading.Thread(target=self._run, name="adapters", daemon=True)]
        if nudges is not None:
            self._threads.append(threading.Thread(target=self._listen, args=(nudges,), name="nudges", daemon=True))

    # Any thread.

    def start(self, loop: Loop) -> None:
        """Starts the threads and waits until the attached version serves. The loop must be running.

        Raises:
            Unavailable: the object store does not answer.
        """
        self._loop = loop
        for thread in self._threads:
            thread.start()
        self.sync(None, timeout=_FLIP_SECONDS)

    def stop(self) -> None:
        """Ends the threads; what waits for them gets Unavailable."""
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
        """The version that answers a request, held until `release`; never blocks.

        Returns:
            None while it is being loaded; `Loop.retry_adapters` follows.

        Raises:
            ModelNotFound: there is no such adapter.
            AdapterRejected: that version does not bind.
            Overloaded: every slot stayed in use for too long.
            Unavailable: it is not loaded and the store does not answer.
        """
        with self._changed:
            if isinstance(choice, PrivateVersion):
                return self._pin_private(choice)
            version = self._version_of(choice)
            if version is None and choice.name is None:
                return BASE_PIN
            resident = None if version is None else self._table.get(version)
            if version is not None and resident is not None:
                self._awaited.pop(version, None)
                return self._table.acquire(resident)
            failure = self._failures.get(choice)
            if failure is not None:
                if failure[0] > time.monotonic():
                    raise failure[1]
                del self._failures[choice]
            self._wanted.setdefault(choice, time.monotonic())
            self._signal(look=False)
            return None

    def release(self, pin: AdapterPin) -> None:
        """Ends one request's pin."""
        if pin.slot == 0:
            return
        with self._changed:
            if self._table.release(pin):
                self._slot_freed()

    def sync(self, version: AdapterVersion | None, timeout: float) -> None:
        """Reads the pointers now and returns once they are served and ``version``, if given, is loaded.

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
                raise self._slots_busy() from None
            raise Unavailable(
                f"{version or 'what is attached'} was not loaded within {timeout:g} s, although no slot was missing: "
                "the object store is slow or away, or steps take long; try again"
            ) from None

    def files(self, version: AdapterVersion) -> Mapping[str, bytes]:
        """A version's files, straight from the object store.

        Raises:
            ModelNotFound: there is no such version.
            AdapterRejected: its files are corrupt or belong to another base model.
            Unavailable: the object store does not answer.
        """
        return self._loader.files(version)[1]

    @property
    def alive(self) -> bool:
        """Whether adapters can be loaded, once started; what liveness asks."""
        return self._stopping.is_set() or self._threads[0].is_alive()

    def snapshot(self) -> AdapterSnapshot:
        with self._changed:
            published = list(self._table.published)
            return AdapterSnapshot(
                str(self._attached or ""),
                tuple(LoadedAdapter(resident.pin, resident.requests) for _, resident in published),
                tuple(v.name if self._current.get(v.name) == v.version else str(v) for v, _ in published),
                tuple(sorted({_asked_for(choice) for choice in self._wanted if choice.name is not None})),
            )

    def _pin_private(self, version: PrivateVersion) -> AdapterPin:
        resident = self._table.get(version)
        if resident is None:
            raise ModelNotFound("the job's policy has been taken out of its slot")
        return self._table.acquire(resident)

    def _slot_freed(self) -> None:
        """Whoever waits for a slot tries again."""
        if self._wanted or self._syncs or self._applied is None:
            self._signal(look=True)

    def _kept(self) -> set[AdapterVersion]:
        """Versions that stay in their slots although no request is pinned to them."""
        now = time.monotonic()
        self._awaited = {v: until for v, until in self._awaited.items() if until > now}
        return set(self._awaited) if self._attached is None else {*self._awaited, self._attached}

    def _signal(self, *, look: bool) -> None:
        self._signalled = True
        self._look_now = self._look_now or look
        self._changed.notify_all()

    def _version_of(self, choice: AdapterChoice) -> AdapterVersion | None:
        if choice.attached:
            return self._attached
        if choice.name is None:
            return None
        number = choice.version or self._current.get(choice.name)
        return None if number is None else AdapterVersion(choice.name, number)

    def _slots_busy(self) -> Overloaded:
        return Overloaded(
            f"all {self._limits.num_slots} adapter slots are in use by running requests; try again, or raise "
            "TEMPER_ADAPTER_SLOTS"
        )

    # The event thread.

    def _listen(self, nudges: Nudges) -> None:
        while not self._stopping.is_set():
            try:
                happened = nudges.wait(self._limits.poll_seconds)
            except TemperError:
                # Redis is away; polling still finds everything.
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
                look = self._look_now or time.monotonic() >= due
                self._look_now = False
                wanted = dict(self._wanted)
                syncs, self._syncs = self._syncs, []
            for sync in syncs:
                sync.lacks_slot = False  # from here on it is the store that it waits for
            if self._stopping.is_set():
                with self._changed:
                    self._syncs.extend(syncs)
                return
            settled = [choice for choice, since in wanted.items() if self._serve(choice, since)]
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
            if settled and self._loop is not None:
                self._loop.retry_adapters()

    def _look(self) -> tuple[bool, TemperError | None]:
        """Reads and applies the pointers: whether all of them are live now, and why not if that failed."""
        try:
            finished = self._refresh()
        except TemperError as error:
            if not self._store_away:
                log.warning("adapter store away, serving what is loaded", reason=error.message)
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
        """Answers a sync if that is possible now."""
        if error is not None:
            return _settle(sync.future, error)
        if sync.future.cancelled():
            return True
        if not finished:
            return False
        try:
            if sync.version is not None:
                self._ensure(sync.version)
        except _NoFreeSlot:
            return False
        except TemperError as problem:
            return _settle(sync.future, problem)
        except Exception as problem:  # a bug must not end the thread that every later swap needs
            log.exception("adapter load failed", version=str(sync.version))
            return _settle(sync.future, TemperError(f"loading the adapter failed: {type(problem).__name__}"))
        return _settle(sync.future, None)

    def _serve(self, choice: AdapterChoice, since: float) -> bool:
        """Loads what requests wait for; False if no slot is free for it yet."""
        try:
            if self._unreachable is not None and time.monotonic() < self._unreachable[0]:
                raise self._unreachable[1]  # one timeout a while is enough, however many choices wait
            with self._changed:
                version = self._version_of(choice)
            if version is None and choice.name is not None:
                version = self._registry.current(choice.name)
                with self._changed:
                    self._current.setdefault(version.name, version.version)
                # The pointers that were applied did not have it: compare again, also if they look as before.
                self._applied = None
            if version is not None:
                self._ensure(version)
                with self._changed:
                    self._awaited[version] = time.monotonic() + _AWAITED_SECONDS
            return True
        except _NoFreeSlot:
            if time.monotonic() - since < self._limits.wait_seconds:
                return False
            failure: TemperError = self._slots_busy()
            self._observer.adapter_failed("no_slot")
        except NotFound:
            failure = _not_found(choice)
        except TemperError as error:
            failure = error
            if isinstance(error, Unavailable) and (self._unreachable is None or error is not self._unreachable[1]):
                self._unreachable = (time.monotonic() + _FAILURE_SECONDS, error)
        except Exception as error:  # a bug must not end the thread that every later swap needs
            log.exception("adapter load failed", adapter=choice.name, version=choice.version)
            failure = TemperError(f"loading the adapter failed: {type(error).__name__}")
        with self._changed:
            if len(self._failures) >= _REMEMBERED:
                self._failures.clear()
            self._failures[choice] = (time.monotonic() + _FAILURE_SECONDS, failure)
        return True

    def _ensure(self, version: AdapterVersion) -> None:
        """Loads a version into a spare slot, unless it is in one.

        Raises:
            AdapterRejected, ModelNotFound, Unavailable, _NoFreeSlot
        """
        with self._changed:
            if self._table.get(version) is not None:
                return
            if version in self._rejected:
                raise self._rejected[version]
            slot = self._table.take(self._kept())
        if slot is None:
            raise _NoFreeSlot
        started = time.monotonic()
        try:
            digest = self._loader.load(version, slot)
        except BaseException as error:
            self._observer.adapter_failed(_reason(error))
            with self._changed:
                self._table.give_back(slot)
                if isinstance(error, AdapterRejected):
                    if len(self._rejected) >= _REMEMBERED:
                        self._rejected.clear()
                    self._rejected[version] = error
            raise
        with self._changed:
            self._table.put(version, digest, slot)
        log.info("adapter loaded", version=str(version), slot=slot, seconds=round(time.monotonic() - started, 3))

    def _refresh(self) -> bool:
        """Applies the pointers; False if a version that should be live has no slot yet."""
        pointers = self._registry.pointers()
        if pointers.fingerprint == self._applied:
            return True
        self._applied = None
        self._forget_replaced(pointers.current)
        finished = True
        current = dict(pointers.current)
        for name, number in pointers.current.items():
            before = self._current.get(name)
            if before is not None and before != number and self._is_resident(AdapterVersion(name, before)):
                # In use: the new version is loaded before the name means it, and never if it does not bind.
                live = self._go_live(AdapterVersion(name, number))
                finished = finished and live is not None
                current[name] = number if live else before
        attached = pointers.attached
        if attached is not None and attached != self._attached:
            live = self._go_live(attached)
            finished = finished and live is not None
            attached = attached if live else self._attached
        self._flip(attached, current)
        if finished:
            self._applied = pointers.fingerprint
        return finished

    def _go_live(self, version: AdapterVersion) -> bool | None:
        """Loads a version that an alias will point to: True, False if it is refused, None if no slot is free."""
        try:
            self._ensure(version)
        except _NoFreeSlot:
            return None
        except (AdapterRejected, NotFound) as error:
            log.error("adapter refused, what served before stays live", version=str(version), reason=error.message)
            return False
        return True

    def _is_resident(self, version: AdapterVersion) -> bool:
        with self._changed:
            return self._table.get(version) is not None

    def _forget_replaced(self, current: Mapping[str, int]) -> None:
        """Forgets versions whose adapter was deleted, or deleted and made again with other content."""
        with self._changed:
            loaded = [entry for entry in self._table.published if entry[0] != self._attached]
        for version, resident in loaded:
            if not self._still_exists(version, resident, current):
                with self._changed:
                    self._table.forget(version)

    def _still_exists(self, version: AdapterVersion, resident: Resident, current: Mapping[str, int]) -> bool:
        if version.name not in current:
            return False
        try:
            return self._registry.manifest(version).digest == resident.pin.digest
        except NotFound:
            return False

    def _flip(self, attached: AdapterVersion | None, current: dict[str, int]) -> None:
        """Makes aliases mean new versions, on the loop thread between two steps."""

        def flip() -> None:
            with self._changed:
                if attached != self._attached:
                    log.info("attached", version=str(attached or "base"), before=str(self._attached or "base"))
                self._attached = attached
                self._current = current
                self._failures.clear()

        if self._loop is None:
            raise RuntimeError("start() was not called")
        began = time.monotonic()
        try:
            self._loop.call_at_boundary(flip).result(_FLIP_SECONDS)
        except TimeoutError as error:
            raise Unavailable("the engine loop did not reach a step boundary") from error
        self._observer.adapter_phase("flip", time.monotonic() - began)


def _asked_for(choice: AdapterChoice) -> str:
    return f"{choice.name}" if choice.version is None else f"{choice.name}@{choice.version}"


def _reason(error: BaseException) -> LoadFailure:
    if isinstance(error, AdapterRejected):
        return "rejected"
    if isinstance(error, NotFound):
        return "missing"
    return "unavailable" if isinstance(error, Unavailable) else "error"


def _not_found(choice: AdapterChoice) -> ModelNotFound:
    return ModelNotFound(
        f"there is no model or adapter {_asked_for(choice)!r}; GET /v1/models and /v1/adapters list them", param="model"
    )


def _settle(future: Future[None], error: TemperError | None) -> bool:
    """Answers a sync unless its caller gave up; always True, for the callers' convenience."""
    try:
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
    except InvalidStateError:
        log.debug("a sync was answered after its caller gave up")
    return True
